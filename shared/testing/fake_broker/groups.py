"""The groups of a cluster, and the offsets they have committed; nothing of them expires."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import NamedTuple

from penstock.shared.common.records import TopicPartition
from penstock.shared.testing.fake_broker.group import Group, GroupState
from penstock.shared.testing.fake_broker.timers import Timers


class Committed(NamedTuple):
    """A committed offset as it came."""

    offset: int
    leader_epoch: int
    metadata: str


class GroupOffsets:
    """What one group has committed, and what transactions of producers are about to commit for it."""

    def __init__(self) -> None:
        self.committed: dict[TopicPartition, Committed] = {}
        self.pending: dict[int, dict[TopicPartition, Committed]] = {}

    def __repr__(self) -> str:
        return f"GroupOffsets({self.committed}, pending={self.pending})"

    def is_stable(self, tp: TopicPartition) -> bool:
        """Whether no open transaction is about to commit for a partition."""
        return not any(tp in offsets for offsets in self.pending.values())


class Groups:
    """The groups of a cluster by id."""

    def __init__(self, configs: Mapping[str, str], timers: Timers) -> None:
        self._configs = configs
        self._timers = timers
        self.known: dict[str, Group] = {}
        self.offsets: defaultdict[str, GroupOffsets] = defaultdict(GroupOffsets)

    def __repr__(self) -> str:
        return f"Groups({list(self.known.values())})"

    def get(self, group_id: str) -> Group:
        """The group, made where there is none."""
        if group_id not in self.known:
            delay_ms = int(self._configs["group.initial.rebalance.delay.ms"])
            self.known[group_id] = Group(group_id, self._timers, delay_ms)
        return self.known[group_id]

    def delete(self, group_id: str) -> None:
        """Forget a group and what it has committed."""
        self.known.pop(group_id, None)
        self.offsets.pop(group_id, None)

    def state_of(self, group_id: str) -> GroupState:
        """A group's state, Dead where there is none."""
        return self.known[group_id].state if group_id in self.known else GroupState.DEAD

    def end_transaction(self, group_id: str, producer_id: int, *, committed: bool) -> None:
        """Commit what a producer's transaction was about to, or drop it."""
        offsets = self.offsets[group_id]
        pending = offsets.pending.pop(producer_id, {})
        if committed:
            offsets.committed.update(pending)

    def forget_topic(self, topic: str) -> None:
        """Drop what was committed for a topic that is gone."""
        for offsets in self.offsets.values():
            for kept in (offsets.committed, *offsets.pending.values()):
                for tp in [tp for tp in kept if tp.topic == topic]:
                    del kept[tp]
