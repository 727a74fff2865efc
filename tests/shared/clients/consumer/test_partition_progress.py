"""A partition's books: what is committable, and when the first commit of it is due."""

from __future__ import annotations

from penstock.shared.clients.consumer.partition_progress import Lane, PartitionProgress, Work
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata


def work_at(offset: int) -> Work:
    work = Work(Columns.of([ConsumerRecord("t", 0, offset, 0, None, None)]), 0, offset)
    work.lane = Lane(None)
    return work


def test_the_first_commit_is_due_once() -> None:
    """Of a partition without one, as soon as its position is known, whether by a record or by a reset."""
    for committed, is_due in ((None, True), (OffsetAndMetadata(0), False)):
        progress = PartitionProgress(committed, ())
        progress.deliver(work_at(4))
        assert progress.pass_over(5) is is_due
        assert progress.pass_over(5) is False
        assert progress.committable() == OffsetAndMetadata(4)


def test_a_position_never_goes_back_without_records() -> None:
    """One behind it says nothing."""
    progress = PartitionProgress(OffsetAndMetadata(7), ())
    progress.pass_over(5)
    assert progress.committable() == OffsetAndMetadata(7)
