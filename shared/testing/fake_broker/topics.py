"""Topics and partitions: leader, replicas, log and configs."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.configs import TOPIC_CONFIGS
from penstock.shared.testing.fake_broker.partition_log import PartitionLog

NO_LEADER = -1
INTERNAL_TOPICS = frozenset({"__consumer_offsets", "__transaction_state"})


@dataclass
class Partition:
    """One partition. All replicas share one log, so a new leader has the same records."""

    topic_partition: TopicPartition
    replicas: list[int]
    leader: int
    isr: list[int]
    leader_epoch: int = 0
    log: PartitionLog = field(default_factory=PartitionLog)
    _waiting: set[Callable[[], None]] = field(default_factory=set)

    def lead(self, node: int) -> None:
        """Make `node` the leader (NO_LEADER: none). The leader epoch increases even if the leader stays the same."""
        self.leader = node
        self.leader_epoch += 1
        self.wake_fetches()

    def wake_fetches(self) -> None:
        """Wake the fetches that wait for this partition."""
        for call in tuple(self._waiting):
            call()

    def watch(self, call: Callable[[], None]) -> None:
        """Call `call` at each `wake_fetches`."""
        self._waiting.add(call)

    def unwatch(self, call: Callable[[], None]) -> None:
        self._waiting.discard(call)


@dataclass
class BrokerTopic:
    """A topic. If it is deleted and created again it has another id."""

    name: str
    configs: dict[str, str]
    partitions: list[Partition] = field(default_factory=list)
    topic_id: uuid.UUID = field(default_factory=uuid.uuid4)

    def config(self, name: str) -> str:
        """A config's value, or its default if it is not set."""
        return self.configs.get(name, TOPIC_CONFIGS[name])

    @property
    def is_internal(self) -> bool:
        return self.name in INTERNAL_TOPICS

    def add_partitions(self, count: int, nodes: Sequence[int], alive: Sequence[int], replication_factor: int) -> None:
        """Grow to `count` partitions. Replicas are spread over all nodes; the first replica that runs is the leader."""
        for index in range(len(self.partitions), count):
            replicas = [nodes[(index + step) % len(nodes)] for step in range(replication_factor)]
            isr = [node for node in replicas if node in alive]
            leader = isr[0] if isr else NO_LEADER
            self.partitions.append(Partition(TopicPartition(self.name, index), replicas, leader, isr))

    def assign(self, assignments: Mapping[int, Sequence[int]], alive: Sequence[int]) -> None:
        """Add partitions with the given replicas."""
        for index in sorted(assignments):
            replicas = list(assignments[index])
            isr = [node for node in replicas if node in alive]
            leader = isr[0] if isr else NO_LEADER
            self.partitions.append(Partition(TopicPartition(self.name, index), replicas, leader, isr))
