"""Chooses the offsets to commit next, also when commits fail, are delayed, or get no response.

Each offset that is registered for a partition gets the next number. Only the newest offset of a partition is sent.
After a failed commit the newest offset is sent, not the failed one, so an old offset never follows a new one. One
commit is in flight at a time. Offsets registered meanwhile go with the next commit.

A commit without a response may still reach the coordinator and overwrite a later one. So for `LATE_MS` its partitions'
offsets are read back after every successful commit, and once more after that time. If they differ from the newest
successful commit, that one is sent again.

>>> tp = TopicPartition("clicks", 0)
>>> sequence = CommitSequence()
>>> _ = sequence.register({tp: OffsetAndMetadata(5)})
>>> first = sequence.next_commit(generation=1)
>>> _ = sequence.register({tp: OffsetAndMetadata(9)})
>>> sequence.next_commit(generation=1) is None  # one at a time
True
>>> sequence.on_failure(first)
>>> sequence.next_commit(generation=1).offsets  # 9 has made 5 superfluous
{TopicPartition(topic='clicks', partition=0): OffsetAndMetadata(offset=9, metadata='')}
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from penstock.shared.common.records import OffsetAndMetadata, TopicPartition

LATE_MS = 30_000
"""How long the coordinator may take to apply a commit without a response: it may be in a queue, or the broker may be
stalled."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One request's offsets, their numbers, and the generation it belongs to."""

    offsets: dict[TopicPartition, OffsetAndMetadata]
    numbers: dict[TopicPartition, int]
    generation: int

    def of(self, partitions: Collection[TopicPartition]) -> Commit:
        """Return the part of the commit for these partitions."""
        return Commit(
            {tp: offset for tp, offset in self.offsets.items() if tp in partitions},
            {tp: number for tp, number in self.numbers.items() if tp in partitions},
            self.generation,
        )


@dataclass(slots=True)
class _Partition:
    number: int = 0
    wanted: OffsetAndMetadata | None = None
    done: int = 0
    committed: OffsetAndMetadata | None = None


@dataclass(slots=True)
class CommitSequence:
    """Each partition's newest offset to commit and newest committed offset, with their numbers."""

    _partitions: dict[TopicPartition, _Partition] = field(default_factory=dict)
    _numbers: int = 0
    _out: Commit | None = None
    _unknown_until_ms: dict[TopicPartition, float] = field(default_factory=dict)
    """The time in ms until which a commit of unknown fate may still be applied."""

    def register(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> dict[TopicPartition, int]:
        """Register offsets to commit. Returns a number for each offset, by partition; each number is used once."""
        numbers = {}
        for tp, offset in offsets.items():
            partition = self._partitions.setdefault(tp, _Partition())
            self._numbers += 1
            partition.number = self._numbers
            partition.wanted = offset
            numbers[tp] = partition.number
        return numbers

    @property
    def is_drained(self) -> bool:
        """Whether no offset is wanted and no commit is in flight."""
        return self._out is None and not any(p.wanted for p in self._partitions.values())

    def is_done(self, numbers: Mapping[TopicPartition, int]) -> bool:
        """Whether these numbers, or newer ones, were committed."""
        return all(tp in self._partitions and self._partitions[tp].done >= n for tp, n in numbers.items())

    def is_dropped(self, numbers: Mapping[TopicPartition, int]) -> bool:
        """Whether a partition was forgotten after it got its number in `numbers`: that number will never be done."""
        return any(tp not in self._partitions or self._partitions[tp].number < n for tp, n in numbers.items())

    def next_commit(self, generation: int) -> Commit | None:
        """Return the next commit to send: the newest offset of every partition with an offset to commit.

        Returns None if there is none, or while another commit is in flight.
        """
        if self._out is not None:
            return None
        wanted = {tp: p for tp, p in self._partitions.items() if p.wanted is not None}
        if not wanted:
            return None
        self._out = Commit(
            {tp: p.wanted for tp, p in wanted.items() if p.wanted is not None},
            {tp: p.number for tp, p in wanted.items()},
            generation,
        )
        return self._out

    def on_success(self, commit: Commit, rejected: Collection[TopicPartition] = ()) -> frozenset[TopicPartition]:
        """Note that the coordinator has stored the commit. The `rejected` partitions still have an offset to commit.

        Returns the partitions to read back: an earlier commit without a response may still overwrite them.
        """
        self._close_open_commit(commit)
        for tp, number in commit.numbers.items():
            if tp in rejected or (partition := self._partitions.get(tp)) is None:
                continue
            partition.done = max(partition.done, number)
            partition.committed = commit.offsets[tp]
            if partition.number == number:
                partition.wanted = None
        return frozenset((self._unknown_until_ms.keys() & commit.offsets.keys()).difference(rejected))

    def on_failure(self, commit: Commit, *, unknown_at_ms: float | None = None) -> None:
        """Note that the commit failed. `unknown_at_ms` is the time at which it was left without a response, None if it
        was rejected.

        The partitions still have an offset to commit.
        """
        self._close_open_commit(commit)
        if unknown_at_ms is not None:
            self._unknown_until_ms.update(
                dict.fromkeys(commit.offsets.keys() & self._partitions.keys(), unknown_at_ms + LATE_MS)
            )

    def on_read_back(
        self,
        found: Mapping[TopicPartition, OffsetAndMetadata],
        partitions: Collection[TopicPartition],
        requested_ms: float,
    ) -> None:
        """Compare `found`, the coordinator's offsets, with those of the newest successful commit.

        If a partition's offsets differ, that of the commit is to be sent again, unless a newer one is to be sent.
        `partitions` are the result of `on_success` or `to_read_back`. `found` was requested at `requested_ms`.
        """
        for tp in partitions:
            if self._unknown_until_ms.get(tp, requested_ms) <= requested_ms:
                self._unknown_until_ms.pop(tp, None)
            partition = self._partitions.get(tp)
            if partition is None or partition.committed is None or partition.wanted is not None:
                continue
            if found.get(tp) != partition.committed:
                partition.wanted = partition.committed

    def read_back_at_ms(self) -> float | None:
        """Return the earliest time at which to read committed offsets from the coordinator once more.

        From then on a commit without a response can no longer be applied. Returns None if no commit is in doubt.
        """
        return min(self._unknown_until_ms.values(), default=None)

    def to_read_back(self, now_ms: float) -> frozenset[TopicPartition]:
        """Return the partitions to read back by now, since no late commit can be applied any more."""
        return frozenset(tp for tp, until_ms in self._unknown_until_ms.items() if until_ms <= now_ms)

    def give_up(self, commit: Commit) -> None:
        """Do not retry this commit's offsets that are still the newest."""
        for tp, number in commit.numbers.items():
            if (partition := self._partitions.get(tp)) is not None and partition.number == number:
                partition.wanted = None

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the offsets of these partitions in the newest successful commits."""
        known = {tp: self._partitions[tp].committed for tp in partitions if tp in self._partitions}
        return {tp: at.offset for tp, at in known.items() if at is not None}

    def retain(self, partitions: Collection[TopicPartition]) -> frozenset[TopicPartition]:
        """Forget all partitions but these. Returns the forgotten ones that still had an offset to commit."""
        dropped = frozenset(tp for tp, p in self._partitions.items() if tp not in partitions and p.wanted is not None)
        self._partitions = {tp: p for tp, p in self._partitions.items() if tp in partitions}
        self._unknown_until_ms = {tp: until_ms for tp, until_ms in self._unknown_until_ms.items() if tp in partitions}
        return dropped

    def _close_open_commit(self, commit: Commit) -> None:
        assert self._out is commit, "a response to a commit that is not out"
        self._out = None
