"""The records taken from the fetcher and not handed out yet: the rest of a batch that is read record by record.

The position of a partition follows the records handed out. So every change of a position (a seek, another assignment)
drops its records here, and a pause holds them.

>>> from penstock.shared.common.records import ConsumerRecord
>>> clicks = TopicPartition("clicks", 0)
>>> unread = Unread()
>>> columns = Columns.of([ConsumerRecord("clicks", 0, offset, 0, None, None) for offset in (3, 5)])
>>> unread.add({clicks: Polled(columns, 9)})  # offsets 6 to 8 hold nothing that is handed out
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
class Polled:
    """Records of one partition, and the position after them."""

    columns: Columns[Any, Any]
    position: int


@dataclass(slots=True)
class _Rest:
    polled: Polled
    index: int = 0

    @property
    def position(self) -> int:
        """The offset of the next record; after the last one, the position after the records."""
        columns = self.polled.columns
        return columns.offsets.item(self.index) if self.index < len(columns) else self.polled.position


class Unread:
    """The unread records by partition, in the order in which they were taken."""

    def __init__(self) -> None:
        self._rests: dict[TopicPartition, deque[_Rest]] = {}

    def __repr__(self) -> str:
        return f"<Unread {self._rests}>"

    def add(self, polled: Mapping[TopicPartition, Polled]) -> None:
        """Add records that were fetched, or taken from here before. They come before the partition's other unread
        records.

        A partition is not fetched while it has unread records.
        """
        for tp, each in polled.items():
            self._rests.setdefault(tp, deque()).appendleft(_Rest(each))

    def next(self, held: Collection[TopicPartition]) -> tuple[ConsumerRecord[Any, Any], int, int] | None:
        """Return the next record of a partition that is not held, the position after it and its leader epoch."""
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

    def take(self, max_records: int | None, held: Collection[TopicPartition]) -> dict[TopicPartition, Polled]:
        """Return records as `next` does, but as columns: the first ones of each partition, `max_records` in all."""
        polled: dict[TopicPartition, Polled] = {}
        left = max_records
        for tp in [tp for tp in self._rests if tp not in held]:
            rest = self._rests[tp][0]
            columns = rest.polled.columns
            end = len(columns) if left is None else min(len(columns), rest.index + left)
            part = columns[rest.index : end]
            rest.index = end
            polled[tp] = Polled(part, rest.position)
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

    def keep(self, partitions: Collection[TopicPartition]) -> None:
        """Drop the records of all partitions except these."""
        self.drop([tp for tp in self._rests if tp not in partitions])

    def _drop_first_rest(self, tp: TopicPartition) -> None:
        self._rests[tp].popleft()
        if not self._rests[tp]:
            del self._rests[tp]
