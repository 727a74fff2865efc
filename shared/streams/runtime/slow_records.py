"""Steps that take longer than the group waits for a heartbeat, and what becomes of the record that takes one.

A worker's loop sends its heartbeats, too. A record that holds it up for a session's length costs the instance its
partitions before anything is committed, and whoever restores them comes to the same record again, for ever. So a loss
counts against the longest step of each partition since its last commit, where that was long enough to bring it about;
after `attempts_max` losses the record is refused. Where the step was a batch taken as columns, nobody knows which of
its records it was: that loss counts against none, but from then on the partition's records are taken one by one.

>>> slow = SlowSteps(session_timeout_ms=6_000, heartbeat_interval_ms=1_000, attempts_max=2)
>>> for _ in range(2):
...     slow.took(0, Step("clicks", 7, 12_000)); slow.lost()
>>> slow.refused(0)
Suspect(clicks-0@7 took 12000 ms, 2 losses)
>>> slow.committed(0, {"clicks": 8}); slow.refused(0)
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import NamedTuple

from penstock.shared.common.errors import ProcessingFailed, RecordTooSlow
from penstock.shared.common.log import get_logger
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.vectorized_executor import COLUMNS_MIN

log = get_logger(__name__)

PUNCTUATION = ""


class Step(NamedTuple):
    """What was done at once: the record at `offset` of `topic`, or a WALL_CLOCK_TIME punctuation, which has neither.

    `is_batch`: it was a whole batch, taken as columns, that ended with this record.
    """

    topic: str
    offset: int
    ms: int
    is_batch: bool = False

    def of(self, partition: int) -> str:
        """What it was, for messages."""
        if self.topic == PUNCTUATION:
            return f"a WALL_CLOCK_TIME punctuation of partition {partition}"
        return f"{'a batch up to ' if self.is_batch else ''}{self.topic}-{partition}@{self.offset}"


class Suspect:
    """A step that has cost the instance its partitions `losses` times in a row."""

    def __init__(self, partition: int, step: Step) -> None:
        self.partition, self.step, self.losses = partition, step, 0

    def __repr__(self) -> str:
        times = f"{self.losses} loss{'' if self.losses == 1 else 'es'}"
        return f"Suspect({self.step.of(self.partition)} took {self.step.ms} ms, {times})"


class SlowSteps:
    """One worker's: which step of each partition was the longest, and which of them cost it the partition."""

    def __init__(self, *, session_timeout_ms: int, heartbeat_interval_ms: int, attempts_max: int) -> None:
        self._session_timeout_ms, self._attempts_max = session_timeout_ms, attempts_max
        self._enough_ms = session_timeout_ms - heartbeat_interval_ms  # the last heartbeat may be as old as that
        self._longest: dict[int, Step] = {}
        self._suspects: dict[int, Suspect] = {}

    @classmethod
    def of(cls, settings: StreamsSettings) -> SlowSteps:
        """By a worker's settings."""
        return cls(
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            attempts_max=settings.slow_record_attempts_max,
        )

    def __repr__(self) -> str:
        return f"SlowSteps(longest {self._longest}, {list(self._suspects.values())})"

    def took(self, partition: int, step: Step | None) -> None:
        """A partition's step is done."""
        if step is not None and (partition not in self._longest or step.ms > self._longest[partition].ms):
            self._longest[partition] = step

    def committed(self, partition: int, sources: Mapping[str, int]) -> None:
        """A commit holds, with these positions: what lies before them needs no other attempt."""
        step, suspect = self._longest.get(partition), self._suspects.get(partition)
        if step is not None and _is_done(step, sources):
            del self._longest[partition]
        if suspect is not None and _is_done(suspect.step, sources):
            del self._suspects[partition]

    def lost(self) -> None:
        """The group has given the instance up: count that against the steps that may have brought it about."""
        longest, self._longest = self._longest, {}
        for partition, step in longest.items():
            if step.ms * len(longest) < self._enough_ms:  # within a turn each partition may take a step
                continue
            suspect = self._suspects.get(partition)
            if suspect is None or suspect.step[:2] != step[:2]:
                suspect = self._suspects[partition] = Suspect(partition, step)
            suspect.losses, suspect.step = suspect.losses + (not step.is_batch), step
            log.error(
                "a step held up the heartbeats for so long that the group gave this instance up",
                step=step.of(partition),
                ms=step.ms,
                session_timeout_ms=self._session_timeout_ms,
                attempt=suspect.losses,
                slow_record_attempts_max=self._attempts_max,
            )

    def suspects(self, partition: int) -> bool:
        """Whether some record of the partition is too slow."""
        return partition in self._suspects

    def columns_min(self, partition: int) -> int:
        """How many records the task may take as columns: none while one of them is too slow, to know which it is."""
        return sys.maxsize if self.suspects(partition) else COLUMNS_MIN

    def refused(self, partition: int) -> Suspect | None:
        """The partition's record that has had its attempts, if there is one; ProcessingFailed for a punctuation."""
        suspect = self._suspects.get(partition)
        if suspect is None or suspect.losses < self._attempts_max:
            return None
        if suspect.step.topic == PUNCTUATION:
            raise ProcessingFailed(self._said(suspect))
        return suspect

    def error(self, suspect: Suspect) -> RecordTooSlow:
        """Why it is refused."""
        return RecordTooSlow(self._said(suspect))

    def _said(self, suspect: Suspect) -> str:
        return (
            f"{suspect.step.of(suspect.partition)} took {suspect.step.ms} ms at once, in which no heartbeat is sent "
            f"(session_timeout_ms={self._session_timeout_ms}), and {suspect.losses} times in a row the group gave the "
            f"instance up before a commit (slow_record_attempts_max={self._attempts_max}): make the step shorter, or "
            "session_timeout_ms longer"
        )


def _is_done(step: Step, sources: Mapping[str, int]) -> bool:
    return step.topic == PUNCTUATION or sources.get(step.topic, 0) > step.offset
