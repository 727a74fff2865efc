"""Records as a sink's task read them, until their offsets are committed: what a dead letter is made of, however late.

A sink that keeps records until it flushes finds out there which it cannot write; what `put` was given of them may have
gone through transforms. They are kept as they came, in columns, up to a limit.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition

KEPT_BYTES_MAX = 64 << 20
"""Keys and values kept beside those being delivered; the oldest go first. What is gone is made anew of the record."""


@dataclass(frozen=True)
class _Kept:
    columns: Columns
    poll: int
    bytes: int

    @property
    def last(self) -> int:
        return self.columns.offsets.item(-1)


class RawRecords:
    """Of one sink task."""

    def __init__(self, bytes_max: int = KEPT_BYTES_MAX) -> None:
        self._bytes_max, self._bytes, self._polls = bytes_max, 0, 0
        self._kept: dict[TopicPartition, deque[_Kept]] = {}

    def __repr__(self) -> str:
        return f"<RawRecords of {len(self._kept)} partitions, {self._bytes} bytes>"

    def add(self, polled: Mapping[TopicPartition, Columns]) -> None:
        """What one poll gave, to be delivered now; earlier ones go where there are too many."""
        self._polls += 1
        for tp, columns in polled.items():
            own, first = self._kept.setdefault(tp, deque()), columns.offsets.item(0)
            while own and own[-1].last >= first:  # read again
                self._bytes -= own.pop().bytes
            size = sum(map(len, filter(None, columns.keys))) + sum(map(len, filter(None, columns.values)))
            own.append(_Kept(columns, self._polls, size))
            self._bytes += size
        while self._bytes > self._bytes_max:
            oldest = min((own for own in self._kept.values() if own), key=lambda own: own[0].poll)
            if oldest[0].poll == self._polls:
                return
            self._bytes -= oldest.popleft().bytes

    def find(self, topic: str, partition: int, offset: int) -> ConsumerRecord | None:
        """A record as it was read; None where it is not kept."""
        own = self._kept.get(TopicPartition(topic, partition), deque())
        at = bisect_left(own, offset, key=lambda kept: kept.last)
        if at == len(own):
            return None
        columns = own[at].columns
        index = int(columns.offsets.searchsorted(offset))
        return columns.record(index) if columns.offsets.item(index) == offset else None

    def committed(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        """These are the group's offsets: what lies before them is not reported any more."""
        for tp, at in offsets.items():
            own = self._kept.get(tp, deque())
            while own and own[0].last < at.offset:
                self._bytes -= own.popleft().bytes

    def forget(self, partitions: Iterable[TopicPartition]) -> None:
        """These are another's."""
        for tp in partitions:
            self._bytes -= sum(kept.bytes for kept in self._kept.pop(tp, ()))
