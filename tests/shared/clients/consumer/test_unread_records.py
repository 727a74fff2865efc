"""The records that were taken from the fetcher and are not handed out yet."""

from __future__ import annotations

from penstock.shared.clients.consumer.unread_records import PolledRecords, UnreadRecords
from penstock.shared.common.records import Columns, ConsumerRecord, TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def taken(tp: TopicPartition, *offsets: int, position: int) -> PolledRecords:
    return PolledRecords(Columns.of([ConsumerRecord(*tp, offset, 0, None, b"v") for offset in offsets]), position)


def drained(unread: UnreadRecords, *held: TopicPartition) -> list[tuple[int, int, int]]:
    """Return partition, offset and next position of all remaining records."""
    found = []
    while (each := unread.next(held)) is not None:
        found.append((each[0].partition, each[0].offset, each[1]))
    return found


def test_positions_follow_the_records() -> None:
    """The position skips gaps to the next record. After the last record it is the end of the batch."""
    unread = UnreadRecords()
    unread.add({A: taken(A, 1, 4, position=9), B: taken(B, 0, position=1)})
    assert unread.position(A) == 1
    assert drained(unread) == [(0, 1, 4), (0, 4, 9), (1, 0, 1)]
    assert unread.position(A) is None


def test_held_partitions_keep_their_order() -> None:
    """A held partition keeps its records in order while others continue."""
    unread = UnreadRecords()
    unread.add({A: taken(A, 1, 2, position=3), B: taken(B, 0, position=1)})
    assert unread.next(()) is not None
    assert drained(unread, A) == [(1, 0, 1)]
    assert drained(unread) == [(0, 2, 3)]


def test_records_put_back_come_first() -> None:
    """A poll within an iteration takes up to its limit of records, and puts them back at the front."""
    unread = UnreadRecords()
    unread.add({A: taken(A, 1, 2, 3, position=4)})
    unread.add(unread.take(2, ()))
    assert drained(unread) == [(0, 1, 2), (0, 2, 3), (0, 3, 4)]


def test_the_rest_can_be_taken_as_columns() -> None:
    """The remaining records are taken as columns up to a limit. The position is that of the next record."""
    unread = UnreadRecords()
    unread.add({A: taken(A, 1, 4, 5, position=9), B: taken(B, 0, 1, position=2)})
    unread.next(())
    part = unread.take(1, ())
    assert {tp: (each.columns.offsets.tolist(), each.position) for tp, each in part.items()} == {A: ([4], 5)}
    rest = unread.take(None, ())
    assert {tp: (each.columns.offsets.tolist(), each.position) for tp, each in rest.items()} == {
        A: ([5], 9),
        B: ([0, 1], 2),
    }
    assert unread.take(None, ()) == {}


def test_a_limit_is_for_all_partitions_together() -> None:
    """Whole partitions are taken in their order, then the first records of one. The others keep theirs."""
    unread = UnreadRecords()
    c = TopicPartition("t", 2)
    unread.add({A: taken(A, 1, 4, position=9), B: taken(B, 0, 1, 2, 3, position=4), c: taken(c, 7, position=8)})
    part = unread.take(5, ())
    assert {tp: (each.columns.offsets.tolist(), each.position) for tp, each in part.items()} == {
        A: ([1, 4], 9),
        B: ([0, 1, 2], 3),
    }
    assert drained(unread) == [(1, 3, 4), (2, 7, 8)]


def test_a_large_batch_is_read_to_its_end() -> None:
    """Its last record is followed by nothing, record by record and as columns."""
    unread = UnreadRecords()
    unread.add({A: taken(A, *range(300), position=300)})
    assert len(drained(unread)) == 300
    assert unread.position(A) is None
    unread.add({A: taken(A, *range(300), position=300)})
    assert unread.take(None, ())[A].position == 300
    assert unread.position(A) is None


def test_dropped_partitions_are_not_returned() -> None:
    """Partitions are dropped by name, or all except the kept ones."""
    unread = UnreadRecords()
    unread.add({A: taken(A, 1, position=2), B: taken(B, 0, position=1)})
    unread.drop([A])
    assert drained(unread) == [(1, 0, 1)]
    unread.add({A: taken(A, 1, position=2), B: taken(B, 0, position=1)})
    unread.retain({A})
    assert drained(unread) == [(0, 1, 2)]
