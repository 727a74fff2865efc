"""The state of the cluster behind all its nodes, without sockets.

All nodes share one state. Each node leads some partitions and coordinates some groups and transactions. For those of
other nodes it returns Kafka's error, such as NOT_LEADER_OR_FOLLOWER. A handler is a function of the cluster and a
request; `HANDLERS` lists the handlers.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.configs import BROKER_CONFIGS
from penstock.shared.testing.fake_broker.group_coordinator import Groups
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from penstock.shared.testing.fake_broker.timers import Timers
from penstock.shared.testing.fake_broker.topics import NO_LEADER, BrokerTopic, Partition
from penstock.shared.testing.fake_broker.transaction_coordinator import Transactions


@dataclass
class Node:
    """One broker: its address, and whether it listens."""

    node_id: int
    host: str
    port: int
    is_alive: bool = True


class ClusterState:
    """Nodes, topics, groups and transactions of one cluster."""

    def __init__(self, configs: Mapping[str, str] | None = None, transaction_completion_ms: int = 0) -> None:
        unknown = set(configs or ()) - set(BROKER_CONFIGS)
        if unknown:
            raise ValueError(f"not among the configs of the fake broker: {', '.join(sorted(unknown))}")
        self.configs = {**BROKER_CONFIGS, **(configs or {})}
        self.cluster_id = uuid.uuid4().hex[:22]
        self.nodes: dict[int, Node] = {}
        self.topics: dict[str, BrokerTopic] = {}
        self.timers = Timers()
        self.groups = Groups(self.configs, self.timers)
        self.transactions = Transactions(
            self.configs, self.timers, self.groups, self.partition, transaction_completion_ms
        )

    def __repr__(self) -> str:
        return f"ClusterState(nodes={list(self.nodes)}, alive={self.alive}, topics={list(self.topics)})"

    @property
    def alive(self) -> list[int]:
        """The running nodes, ascending."""
        return [node.node_id for node in self.nodes.values() if node.is_alive]

    @property
    def controller(self) -> int:
        """The node that Metadata names as the controller. As in Kafka 4, every node accepts requests to it."""
        return min(self.alive, default=NO_LEADER)

    def coordinator(self, key: str) -> int:
        """The node that coordinates a group or a transactional id: its own node, or the next one that runs."""
        nodes = list(self.nodes.values())
        first = zlib.crc32(key.encode()) % len(nodes)
        return next((node.node_id for node in nodes[first:] + nodes[:first] if node.is_alive), NO_LEADER)

    def coordinator_error(self, node: int, key: str) -> ErrorCode:
        """NONE if the node is the key's coordinator."""
        return ErrorCode.NONE if node == self.coordinator(key) else ErrorCode.NOT_COORDINATOR

    def partition(self, tp: TopicPartition) -> Partition | None:
        """A partition; None if it does not exist."""
        topic = self.topics.get(tp.topic)
        return topic.partitions[tp.partition] if topic and 0 <= tp.partition < len(topic.partitions) else None

    def led(self, node: int, tp: TopicPartition, known_epoch: int = -1) -> Partition | ErrorCode:
        """A partition if the node leads it under the epoch that the client knows (-1: none), otherwise the error code.

        A replica compares the epochs first, as in Kafka, even if it is not the leader.
        """
        partition = self.partition(tp)
        if partition is None:
            return ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
        if node in partition.replicas and known_epoch >= 0 and known_epoch != partition.leader_epoch:
            is_old = known_epoch < partition.leader_epoch
            return ErrorCode.FENCED_LEADER_EPOCH if is_old else ErrorCode.UNKNOWN_LEADER_EPOCH
        return partition if partition.leader == node else ErrorCode.NOT_LEADER_OR_FOLLOWER

    def all_partitions(self) -> Iterator[Partition]:
        """Every partition of every topic."""
        for topic in self.topics.values():
            yield from topic.partitions

    def create_topic(
        self,
        name: str,
        partitions: int,
        replication_factor: int,
        configs: Mapping[str, str],
        assignments: Mapping[int, list[int]] | None = None,
    ) -> BrokerTopic:
        """Create a topic. The caller has checked all values.

        `assignments` are the replicas by partition. Without them, the leaders of different topics begin at different
        nodes.
        """
        topic = BrokerTopic(name, dict(configs))
        if assignments:
            topic.assign(assignments, self.alive)
        else:
            nodes = sorted(self.nodes)
            first = len(self.topics) % len(nodes)
            topic.add_partitions(partitions, nodes[first:] + nodes[:first], self.alive, replication_factor)
        self.topics[name] = topic
        return topic

    def delete_topic(self, name: str) -> None:
        """Delete a topic, with the offsets that groups have committed for it."""
        topic = self.topics.pop(name)
        for partition in topic.partitions:
            partition.wake_fetches()
        self.groups.forget_topic(name)

    def move_leader(self, tp: TopicPartition, node: int) -> None:
        """Make a node lead a partition, as a new replica if necessary.

        If the node is stopped, the partition has no leader then.
        """
        partition = self.partition(tp)
        if partition is None:
            raise KeyError(f"{tp}: no such partition")
        if node not in self.nodes:
            raise KeyError(f"node {node}: the cluster has {sorted(self.nodes)}")
        if node not in partition.replicas:
            partition.replicas.append(node)
        partition.isr = [one for one in partition.replicas if self.nodes[one].is_alive]
        partition.lead(node if self.nodes[node].is_alive else NO_LEADER)

    def node_stopped(self, node: int) -> None:
        """Give each partition that a stopped node led its first running replica as leader, or none."""
        self.nodes[node].is_alive = False
        for partition in self.all_partitions():
            partition.isr = [one for one in partition.isr if one != node] or partition.isr
            if partition.leader == node:
                alive = [one for one in partition.replicas if self.nodes[one].is_alive]
                partition.lead(alive[0] if alive else NO_LEADER)

    def node_started(self, node: int) -> None:
        """Make a started node lead its partitions that have no leader."""
        self.nodes[node].is_alive = True
        for partition in self.all_partitions():
            if node in partition.replicas:
                partition.isr = [one for one in partition.replicas if self.nodes[one].is_alive]
                if partition.leader == NO_LEADER:
                    partition.lead(node)
