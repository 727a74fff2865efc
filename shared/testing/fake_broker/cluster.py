"""The fake cluster's interface for tests: nodes on local ports, topics, faults, and the written records.

The cluster runs on the event loop that started it. The cluster's time is the loop's, set to the wall clock when the
cluster starts.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Mapping
from typing import Self

from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import ConsumerRecord, OffsetAndMetadata, TopicPartition
from penstock.shared.common.topic_names import is_topic_name
from penstock.shared.testing.fake_broker.broker_batches import records
from penstock.shared.testing.fake_broker.cluster_state import ClusterState, Node
from penstock.shared.testing.fake_broker.configs import wrong_topic_config
from penstock.shared.testing.fake_broker.faults import Action, Control, Hook
from penstock.shared.testing.fake_broker.node_server import NodeServer
from penstock.shared.testing.fake_broker.protocol import Api
from penstock.shared.testing.fake_broker.topics import NO_LEADER, Partition

NODES_MAX = 100


class FakeCluster:
    """`async with FakeCluster(nodes=3) as cluster:` is a Kafka cluster at `cluster.bootstrap_servers`.

    - `nodes`: the number of nodes. Their ids are 1, 2, ...
    - `configs`: broker configs by name. `configs.BROKER_CONFIGS` has all that are allowed, with their defaults.
    - `users`: passwords by user name. If it is given, every connection must authenticate with SASL PLAIN.
    - `ssl_context`: if it is given, the ports speak TLS.
    - `transaction_completion_ms`: the time from the response to EndTxn until the transaction's markers are written.
      Until then the producer's next transaction fails with CONCURRENT_TRANSACTIONS, as with a real broker.

    The first error of a hook, or of the broker while it handles a request, is raised at the end of the `async with`
    block, unless the block itself raises. A ConnectionError of a hook only closes the connection.
    """

    def __init__(
        self,
        nodes: int = 1,
        *,
        configs: Mapping[str, str] | None = None,
        users: Mapping[str, str] | None = None,
        ssl_context: ssl.SSLContext | None = None,
        host: str = "127.0.0.1",
        transaction_completion_ms: int = 0,
    ) -> None:
        if not 1 <= nodes <= NODES_MAX:
            raise ValueError(f"nodes: {nodes}; between 1 and {NODES_MAX}")
        self._state = ClusterState(configs, transaction_completion_ms)
        self._controls: list[Control] = []
        self._servers: dict[int, NodeServer] = {}
        self._failures: list[BaseException] = []
        self._offset_ms = 0
        self._alarm: asyncio.TimerHandle | None = None
        for node_id in range(1, nodes + 1):
            node = Node(node_id, host, 0)
            self._state.nodes[node_id] = node
            self._servers[node_id] = NodeServer(
                node=node,
                state=self._state,
                controls=self._controls,
                clock=self.now_ms,
                after=self._after_request,
                users=users,
                ssl_context=ssl_context,
            )

    def __repr__(self) -> str:
        return f"<FakeCluster {list(self._servers.values())}, topics {list(self._state.topics)}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await self.stop()
        if self._failures and error is None:
            raise self._failures[0]

    async def start(self) -> None:
        """Listen on free ports."""
        self._offset_ms = SYSTEM_CLOCK.now_ms() - int(asyncio.get_running_loop().time() * 1000)
        for server in self._servers.values():
            await server.start()

    async def stop(self) -> None:
        """Close the ports and every connection."""
        for server in self._servers.values():
            await server.stop()
        if self._alarm is not None:
            self._alarm.cancel()

    @property
    def bootstrap_servers(self) -> str:
        """The addresses of all nodes, in the form that clients take."""
        addresses = ((f"[{n.host}]" if ":" in n.host else n.host, n.port) for n in self._state.nodes.values())
        return ",".join(f"{host}:{port}" for host, port in addresses)

    @property
    def nodes(self) -> list[int]:
        """The ids of all nodes, stopped ones included."""
        return list(self._state.nodes)

    def now_ms(self) -> int:
        """The cluster's time, in ms since the epoch."""
        return self._offset_ms + int(asyncio.get_running_loop().time() * 1000)

    def create_topic(
        self, name: str, partitions: int = 1, *, replication_factor: int = -1, configs: Mapping[str, str] | None = None
    ) -> None:
        """Create a topic. Its leaders are spread over the nodes; by default all nodes are replicas.

        Raises ValueError if an argument is invalid, or if the topic exists.
        """
        if not is_topic_name(name) or name in self._state.topics or partitions < 1:
            raise ValueError(f"topic {name}: not a name, exists already, or has {partitions} partitions")
        for key, value in (configs or {}).items():
            if (why := wrong_topic_config(key, value)) is not None:
                raise ValueError(f"topic {name}: {why}")
        factor = len(self._state.nodes) if replication_factor == -1 else replication_factor
        if not 1 <= factor <= len(self._state.nodes):
            raise ValueError(f"topic {name}: {factor} replicas, with {len(self._state.nodes)} nodes")
        self._state.create_topic(name, partitions, factor, configs or {})

    def delete_topic(self, name: str) -> None:
        """Delete a topic. Raises KeyError if there is none."""
        self._state.delete_topic(name)

    def control(
        self, api: Api | None, hook: Hook | Action, *, times: int | None = None, node: int | None = None
    ) -> Control:
        """Pass the requests of an API, or of all APIs if `api` is None, to a hook.

        A request on which an earlier hook acts is not passed on. Instead of a hook, pass an action for these requests.
        The hook is removed after `times` actions. With `node`, only requests to that node are passed to the hook.
        """
        return Control(self._controls, api, hook, times, node)

    def leader(self, topic: str, partition: int = 0) -> int | None:
        """The node that leads a partition; None if there is none."""
        leader = self._existing_partition(TopicPartition(topic, partition)).leader
        return None if leader == NO_LEADER else leader

    def move_leader(self, tp: TopicPartition, node: int) -> None:
        """Make a node lead a partition, under the next leader epoch.

        If the node is stopped, the partition has no leader then.

        Raises KeyError if the partition or the node does not exist.
        """
        self._state.move_leader(tp, node)

    def lose_records(self, tp: TopicPartition, end: int) -> None:
        """Remove each batch whose last offset is `end` or later, as an unclean leader election does.

        The leader epoch increases. Raises KeyError if there is no such partition.
        """
        partition = self._existing_partition(tp)
        partition.log.truncate(end)
        partition.lead(partition.leader)

    def coordinator(self, key: str) -> int:
        """The node that coordinates a group or a transactional id."""
        return self._state.coordinator(key)

    def pause_node(self, node: int) -> None:
        """Make a node accept connections and requests, but answer none. It stays the leader of its partitions."""
        self._servers[node].pause()

    def resume_node(self, node: int) -> None:
        """Make a paused node answer the requests that have arrived meanwhile."""
        self._servers[node].resume()

    async def stop_node(self, node: int) -> None:
        """Close a node's port and connections.

        Each partition that the node led gets its first running replica as leader, or no leader if none is running.
        """
        self._state.node_stopped(node)
        await self._servers[node].stop()

    async def start_node(self, node: int) -> None:
        """Make a stopped node listen again, on the same port."""
        await self._servers[node].start()
        self._state.node_started(node)

    async def close_connections(self, node: int | None = None) -> None:
        """Close the connections to one node, or to all. Clients may connect again at once."""
        for server in self._servers.values() if node is None else [self._servers[node]]:
            await server.close_connections()

    def records(self, topic: str, partition: int | None = None, *, committed: bool = True) -> list[ConsumerRecord]:
        """The records of a topic, by partition and offset; with `committed`, those that `read_committed` returns."""
        topics = self._state.topics[topic].partitions
        found: list[ConsumerRecord] = []
        for one in topics if partition is None else [topics[partition]]:
            for batch in one.log.readable(committed=committed):
                rows = records(batch, *one.topic_partition)
                found += (record for record in rows if record.offset >= one.log.start_offset)
        return found

    def end_offset(self, topic: str, partition: int = 0) -> int:
        """The offset of the next record of a partition."""
        return self._existing_partition(TopicPartition(topic, partition)).log.end_offset

    def committed(self, group_id: str) -> dict[TopicPartition, OffsetAndMetadata]:
        """The offsets that a group has committed."""
        offsets = self._state.groups.offsets.get(group_id)
        rows = offsets.committed.items() if offsets is not None else ()
        return {tp: OffsetAndMetadata(one.offset, one.metadata, one.leader_epoch) for tp, one in rows}

    def _existing_partition(self, tp: TopicPartition) -> Partition:
        partition = self._state.partition(tp)
        if partition is None:
            raise KeyError(f"{tp}: no such partition")
        return partition

    def _after_request(self, failure: BaseException | None) -> None:
        """After each handled request: keep an error, and wake up when the next timer is due."""
        if failure is not None:
            self._failures.append(failure)
        due_ms = self._state.timers.next_ms
        loop = asyncio.get_running_loop()
        if due_ms is None:
            return
        at = (due_ms - self._offset_ms) / 1000
        if (
            self._alarm is None
            or self._alarm.cancelled()
            or self._alarm.when() > at
            or self._alarm.when() < loop.time()
        ):
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm = loop.call_at(at, self._run_due_timers)

    def _run_due_timers(self) -> None:
        self._alarm = None
        self._state.timers.run(self.now_ms())
        self._after_request(None)
