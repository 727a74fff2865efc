"""Detects steps that take longer than the group waits for a heartbeat, and rejects the records that cause them.

A worker's event loop also sends its heartbeats. If a record blocks it for a session timeout, the instance loses its
partitions before it can commit. The instance that restores them meets the same record again, without end. So each loss
counts against the longest step of each partition since its last commit, if that step was long enough to cause it. After
`attempts_max` losses the record is rejected. If the step was a batch of columns, the slow record is unknown. Then the
loss counts against none, but from then on the partition's records are processed one by one.

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
    """One step: the record at `offset` of `topic`, or a WALL_CLOCK_TIME punctuation, which has neither.

    If `is_batch`, the step was a whole batch of columns that ended with this record.
    """

    topic: str
    offset: int
    ms: int
    is_batch: bool = False

    def of(self, partition: int) -> str:
        """Describe the step for a message."""
        if self.topic == PUNCTUATION:
            return f"a WALL_CLOCK_TIME punctuation of partition {partition}"
        return f"{'a batch up to ' if self.is_batch else ''}{self.topic}-{partition}@{self.offset}"


class Suspect:
    """A step that has cost the instance its partitions `losses` times in a row."""

    def __init__(self, partition: int, step: Step) -> None:
        self.partition = partition
        self.step = step
        self.losses = 0

    def __repr__(self) -> str:
        times = f"{self.losses} loss{'' if self.losses == 1 else 'es'}"
        return f"Suspect({self.step.of(self.partition)} took {self.step.ms} ms, {times})"


class SlowSteps:
    """The longest step of each partition of one worker, and the steps that have cost it a partition."""

    def __init__(self, *, session_timeout_ms: int, heartbeat_interval_ms: int, attempts_max: int) -> None:
        self._session_timeout_ms = session_timeout_ms
        self._attempts_max = attempts_max
        self._enough_ms = session_timeout_ms - heartbeat_interval_ms  # the last heartbeat may be one interval old
        self._longest: dict[int, Step] = {}
        self._suspects: dict[int, Suspect] = {}

    @classmethod
    def of(cls, settings: StreamsSettings) -> SlowSteps:
        """Create it from a worker's settings."""
        return cls(
            session_timeout_ms=settings.session_timeout_ms,
            heartbeat_interval_ms=settings.heartbeat_interval_ms,
            attempts_max=settings.slow_record_attempts_max,
        )

    def __repr__(self) -> str:
        return f"SlowSteps(longest {self._longest}, {list(self._suspects.values())})"

    def took(self, partition: int, step: Step | None) -> None:
        """Record a finished step of a partition."""
        if step is not None and (partition not in self._longest or step.ms > self._longest[partition].ms):
            self._longest[partition] = step

    def committed(self, partition: int, sources: Mapping[str, int]) -> None:
        """Drop the steps before the positions of a successful commit: they need no other attempt."""
        step, suspect = self._longest.get(partition), self._suspects.get(partition)
        if step is not None and _is_done(step, sources):
            del self._longest[partition]
        if suspect is not None and _is_done(suspect.step, sources):
            del self._suspects[partition]

    def lost(self) -> None:
        """Count a loss of the group membership against the steps that may have caused it."""
        longest, self._longest = self._longest, {}
        for partition, step in longest.items():
            if step.ms * len(longest) < self._enough_ms:  # within a turn each partition may take a step
                continue
            suspect = self._suspects.get(partition)
            if suspect is None or suspect.step[:2] != step[:2]:
                suspect = self._suspects[partition] = Suspect(partition, step)
            suspect.losses, suspect.step = suspect.losses + (not step.is_batch), step
            log.error(
                "a step delayed the heartbeats for so long that the group removed this instance",
                step=step.of(partition),
                ms=step.ms,
                session_timeout_ms=self._session_timeout_ms,
                attempt=suspect.losses,
                slow_record_attempts_max=self._attempts_max,
            )

    def suspects(self, partition: int) -> bool:
        """Return whether some record of the partition is too slow."""
        return partition in self._suspects

    def columns_min(self, partition: int) -> int:
        """Return the smallest batch that the task may take as columns: none while a record is too slow, to find it."""
        return sys.maxsize if self.suspects(partition) else COLUMNS_MIN

    def refused(self, partition: int) -> Suspect | None:
        """Return the partition's record that has used up its attempts, or None. ProcessingFailed for a punctuation."""
        suspect = self._suspects.get(partition)
        if suspect is None or suspect.losses < self._attempts_max:
            return None
        if suspect.step.topic == PUNCTUATION:
            raise ProcessingFailed(self._said(suspect))
        return suspect

    def error(self, suspect: Suspect) -> RecordTooSlow:
        """Return the error with which the record is rejected."""
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
