"""The groups of a cluster, and their committed offsets. Groups and offsets never expire."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.group import BrokerGroup
from penstock.shared.testing.fake_broker.timers import Timers


class Committed(NamedTuple):
    """A committed offset with the values of the request."""

    offset: int
    leader_epoch: int
    metadata: str


class GroupOffsets:
    """The committed offsets of one group, and the pending ones of producers' open transactions."""

    def __init__(self) -> None:
        self.committed: dict[TopicPartition, Committed] = {}
        self.pending: dict[int, dict[TopicPartition, Committed]] = {}

    def __repr__(self) -> str:
        return f"GroupOffsets({self.committed}, pending={self.pending})"

    def is_stable(self, tp: TopicPartition) -> bool:
        """Whether no open transaction has a pending offset for a partition."""
        return not any(tp in offsets for offsets in self.pending.values())


class Groups:
    """The groups of a cluster by id."""

    def __init__(self, configs: Mapping[str, str], timers: Timers) -> None:
        self._configs = configs
        self._timers = timers
        self.known: dict[str, BrokerGroup] = {}
        self.offsets: defaultdict[str, GroupOffsets] = defaultdict(GroupOffsets)

    def __repr__(self) -> str:
        return f"Groups({list(self.known.values())})"

    def get(self, group_id: str) -> BrokerGroup:
        """The group, created if there is none."""
        if group_id not in self.known:
            delay_ms = int(self._configs["group.initial.rebalance.delay.ms"])
            self.known[group_id] = BrokerGroup(group_id, self._timers, delay_ms)
        return self.known[group_id]

    def delete(self, group_id: str) -> None:
        """Delete a group and its committed offsets."""
        self.known.pop(group_id, None)
        self.offsets.pop(group_id, None)

    def end_transaction(self, group_id: str, producer_id: int, *, committed: bool) -> None:
        """Commit the pending offsets of a producer's transaction, or drop them."""
        offsets = self.offsets[group_id]
        pending = offsets.pending.pop(producer_id, {})
        if committed:
            offsets.committed.update(pending)

    def forget_topic(self, topic: str) -> None:
        """Drop the committed offsets of a deleted topic."""
        for offsets in self.offsets.values():
            for kept in (offsets.committed, *offsets.pending.values()):
                for tp in [tp for tp in kept if tp.topic == topic]:
                    del kept[tp]
