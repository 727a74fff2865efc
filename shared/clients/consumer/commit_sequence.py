"""Which offsets are to be committed, when commits fail, are delayed, or have an unknown fate.

Every registered offset gets the next number. A partition's newest number is what is wanted; a commit
that fails is repeated only with the newest, so an old offset never follows a new one. One commit is out at a time: what
is registered meanwhile waits for its answer and goes with the next, which failed offsets join. A commit whose fate is
unknown may still land on top of a later one. So the offsets are read back after every success within `LATE_MS`, and
once more when that is over; where they are not the newest that succeeded, they are committed again.

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
"""So long after a commit got no answer the coordinator may still work on it: it lay in a queue, or the broker stood
still."""


@dataclass(frozen=True, slots=True)
class Commit:
    """One request's offsets, their numbers, and the generation it belongs to."""

    offsets: dict[TopicPartition, OffsetAndMetadata]
    numbers: dict[TopicPartition, int]
    generation: int

    def of(self, partitions: Collection[TopicPartition]) -> Commit:
        """The part of these partitions."""
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
    """The numbers and offsets of every partition of a consumer."""

    _partitions: dict[TopicPartition, _Partition] = field(default_factory=dict)
    _numbers: int = 0
    _out: Commit | None = None
    _unsure: dict[TopicPartition, float] = field(default_factory=dict)
    """Until when a commit of unknown fate may land."""

    def register(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> dict[TopicPartition, int]:
        """Want these offsets committed; gives each partition's number."""
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
        """Nothing is wanted and nothing is out."""
        return self._out is None and not any(p.wanted for p in self._partitions.values())

    def is_done(self, numbers: Mapping[TopicPartition, int]) -> bool:
        """Whether these numbers, or newer ones, were committed."""
        return all(tp in self._partitions and self._partitions[tp].done >= n for tp, n in numbers.items())

    def is_dropped(self, numbers: Mapping[TopicPartition, int]) -> bool:
        """Whether a partition was forgotten since it got its number here: that one will never be done."""
        return any(tp not in self._partitions or self._partitions[tp].number < n for tp, n in numbers.items())

    def next_commit(self, generation: int) -> Commit | None:
        """The commit to send now: the newest of every partition that wants one; None while another is out."""
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

    def on_success(self, commit: Commit, refused: Collection[TopicPartition] = ()) -> frozenset[TopicPartition]:
        """The coordinator has it but for the `refused`, which stay wanted; gives the partitions to read back, since an
        earlier commit may land on top."""
        self._answered(commit)
        for tp, number in commit.numbers.items():
            if tp in refused or (partition := self._partitions.get(tp)) is None:
                continue
            partition.done = max(partition.done, number)
            partition.committed = commit.offsets[tp]
            if partition.number == number:
                partition.wanted = None
        return frozenset((self._unsure.keys() & commit.offsets.keys()).difference(refused))

    def on_failure(self, commit: Commit, *, fate_unknown: bool = False, now_ms: float = 0) -> None:
        """It was refused, or got no answer (`fate_unknown`); what is newest stays wanted."""
        self._answered(commit)
        if fate_unknown:
            self._unsure.update(dict.fromkeys(commit.offsets.keys() & self._partitions.keys(), now_ms + LATE_MS))

    def on_read_back(
        self,
        found: Mapping[TopicPartition, OffsetAndMetadata],
        partitions: Collection[TopicPartition],
        asked_ms: float = 0,
    ) -> None:
        """What the coordinator held at `asked_ms` for partitions whose last commit succeeded after one of unknown
        fate."""
        for tp in partitions:
            if self._unsure.get(tp, asked_ms) <= asked_ms:
                self._unsure.pop(tp, None)
            partition = self._partitions.get(tp)
            if partition is None or partition.committed is None or partition.wanted is not None:
                continue
            if found.get(tp) != partition.committed:
                partition.wanted = partition.committed

    def read_back_at_ms(self) -> float | None:
        """When to read back once more, where nothing was committed since; None where all is known."""
        return min(self._unsure.values(), default=None)

    def to_read_back(self, now_ms: float) -> frozenset[TopicPartition]:
        """What is to be read back by now, as nothing more can land."""
        return frozenset(tp for tp, until_ms in self._unsure.items() if until_ms <= now_ms)

    def give_up(self, commit: Commit) -> None:
        """Do not try this commit's offsets again, where they are the newest."""
        for tp, number in commit.numbers.items():
            if (partition := self._partitions.get(tp)) is not None and partition.number == number:
                partition.wanted = None

    def committed(self, partitions: Collection[TopicPartition]) -> dict[TopicPartition, int]:
        """The offsets of these that the coordinator has taken last."""
        known = {tp: self._partitions[tp].committed for tp in partitions if tp in self._partitions}
        return {tp: at.offset for tp, at in known.items() if at is not None}

    def keep(self, partitions: Collection[TopicPartition]) -> frozenset[TopicPartition]:
        """Forget every other partition; gives those of them that still wanted a commit."""
        dropped = frozenset(tp for tp, p in self._partitions.items() if tp not in partitions and p.wanted is not None)
        self._partitions = {tp: p for tp, p in self._partitions.items() if tp in partitions}
        self._unsure = {tp: until_ms for tp, until_ms in self._unsure.items() if tp in partitions}
        return dropped

    def _answered(self, commit: Commit) -> None:
        assert self._out is commit, "an answer to a commit that is not out"
        self._out = None
