"""Records that a consumer took from its fetcher and has not handed out yet: the rest of a batch that is read one by
one.

The position of a partition is that of the next record to hand out. So a change of the position (a seek, another
assignment) drops the unread records. A pause keeps them.

>>> from penstock.shared.common.records import ConsumerRecord
>>> clicks = TopicPartition("clicks", 0)
>>> unread = UnreadRecords()
>>> columns = Columns.of([ConsumerRecord("clicks", 0, offset, 0, None, None) for offset in (3, 5)])
>>> unread.add({clicks: PolledRecords(columns, 9)})  # offsets 6 to 8 hold nothing that is handed out
>>> [(record.offset, position) for record, position, _ in (unread.next(()), unread.next(()))], unread.next(())
([(3, 5), (5, 9)], None)
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.records import Columns, ConsumerRecord, TopicPartition


@dataclass(frozen=True, slots=True)
class PolledRecords:
    """Records of one partition from the fetcher, and the position after them."""

    columns: Columns[Any, Any]
    position: int


@dataclass(slots=True)
class _UnreadRest:
    """The records of a batch from an index on."""

    polled: PolledRecords
    index: int = 0

    @property
    def position(self) -> int:
        """The offset of the next unread record; after the last one, the position after the records."""
        columns = self.polled.columns
        return columns.offsets.item(self.index) if self.index < len(columns) else self.polled.position


class UnreadRecords:
    """The unread records by partition, in the order in which they were taken."""

    def __init__(self) -> None:
        self._rests: dict[TopicPartition, deque[_UnreadRest]] = {}

    def __repr__(self) -> str:
        return f"<UnreadRecords {self._rests}>"

    def add(self, polled: Mapping[TopicPartition, PolledRecords]) -> None:
        """Add records of a partition before its other unread records. They are new ones, or ones that were taken from
        here.

        No new records of a partition are taken from the fetcher while it has unread ones here.
        """
        for tp, each in polled.items():
            self._rests.setdefault(tp, deque()).appendleft(_UnreadRest(each))

    def next(self, held: Collection[TopicPartition]) -> tuple[ConsumerRecord[Any, Any], int, int] | None:
        """Return the next unread record of a partition that is not held, the position after it and its leader epoch."""
        for tp, rests in self._rests.items():
            if tp in held:
                continue
            rest = rests[0]
            columns = rest.polled.columns
            record = columns.record(rest.index)
            rest.index += 1
            position = rest.position
            if rest.index == len(columns):
                self._drop_first_rest(tp)
            return record, position, columns.leader_epoch
        return None

    def take(self, max_records: int | None, held: Collection[TopicPartition]) -> dict[TopicPartition, PolledRecords]:
        """Return the first unread records of each partition that is not held, at most `max_records` in all."""
        polled: dict[TopicPartition, PolledRecords] = {}
        left = max_records
        for tp in [tp for tp in self._rests if tp not in held]:
            rest = self._rests[tp][0]
            columns = rest.polled.columns
            end = len(columns) if left is None else min(len(columns), rest.index + left)
            part = columns[rest.index : end]
            rest.index = end
            polled[tp] = PolledRecords(part, rest.position)
            if end == len(columns):
                self._drop_first_rest(tp)
            left = None if left is None else left - len(part)
            if left == 0:
                break
        return polled

    def position(self, tp: TopicPartition) -> int | None:
        """Return the offset of the partition's next unread record. Returns None if there is none."""
        return self._rests[tp][0].position if tp in self._rests else None

    def drop(self, partitions: Iterable[TopicPartition]) -> None:
        for tp in partitions:
            self._rests.pop(tp, None)

    def retain(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the unread records of all partitions except these."""
        self.drop([tp for tp in self._rests if tp not in partitions])

    def _drop_first_rest(self, tp: TopicPartition) -> None:
        self._rests[tp].popleft()
        if not self._rests[tp]:
            del self._rests[tp]
