"""Which positions may be committed, by themselves and on request."""

from __future__ import annotations

from penstock.shared.clients.consumer.fetcher import Move
from penstock.shared.clients.consumer.positions import Positions
from penstock.shared.clients.consumer.unread import Polled
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def records(tp: TopicPartition, *offsets: int) -> Polled:
    columns = Columns.of([ConsumerRecord(tp.topic, tp.partition, offset, 0, None, None) for offset in offsets])
    return Polled(columns, offsets[-1] + 1)


def test_what_the_current_poll_returned_is_not_processed_yet() -> None:
    """A position may be committed by itself only after the next poll; a commit on request takes it at once."""
    positions = Positions()
    positions.returned({A: 5})
    assert positions.uncommitted() == {}
    assert positions.polled() == {A: OffsetAndMetadata(5)}
    positions.processed()
    positions.returned({A: 9})
    assert positions.uncommitted() == {A: OffsetAndMetadata(5)}


def test_a_position_is_handed_over_once() -> None:
    """What the committer has is not handed to it again until it changes."""
    positions = Positions()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.registered(positions.uncommitted())
    assert positions.uncommitted() == {}
    positions.returned({B: 4})
    positions.processed()
    assert positions.uncommitted() == {B: OffsetAndMetadata(4)}


def test_a_seek_replaces_what_was_read() -> None:
    """After a seek the position that was asked for counts, even below one that was processed."""
    positions = Positions()
    positions.returned({A: 5})
    positions.sought(A, 1)
    assert positions.uncommitted() == {A: OffsetAndMetadata(1)}
    assert positions.polled() == {A: OffsetAndMetadata(1)}


def test_partitions_that_are_gone_are_forgotten() -> None:
    """Positions of partitions that are not read any more are not committed."""
    positions = Positions()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.forget_except([B])
    assert positions.uncommitted() == {B: OffsetAndMetadata(2)}


def test_a_report_says_nothing_of_a_later_loss() -> None:
    """A partition that comes back, or is read again after a seek, has its records handed out once more."""
    positions = Positions()
    positions.returned({A: 9, B: 9})
    positions.forget_except([B])
    positions.reported({A: 9, B: 9})
    positions.sought(B, 0)
    positions.returned({A: 3, B: 3})
    positions.forfeit({A, B}, {})
    assert positions.take_forfeited() == {A: 3, B: 3}


def test_leader_epochs_go_with_the_positions() -> None:
    """Until a seek, after which it is not known under which leader the record before was written."""
    positions = Positions()
    positions.returned({A: 5, B: 2}, {A: 7})
    assert {tp: at.leader_epoch for tp, at in positions.polled().items()} == {A: 7, B: -1}
    positions.processed()
    assert positions.uncommitted()[A].leader_epoch == 7
    positions.sought(A, 1)
    assert positions.uncommitted()[A].leader_epoch == -1


def test_nothing_goes_by_itself_below_what_the_user_committed() -> None:
    """What was processed before is behind it; what is read after it is committed by itself again."""
    positions = Positions()
    positions.returned({A: 3})
    positions.processed()
    positions.returned({A: 6})
    positions.registered(positions.polled())
    assert positions.uncommitted() == {}
    positions.processed()
    assert positions.uncommitted() == {}
    positions.returned({A: 9})
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(9)}


def test_a_seek_back_is_committed_also_below_a_commit() -> None:
    """The user wants it so."""
    positions = Positions()
    positions.returned({A: 6})
    positions.processed()
    positions.registered(positions.uncommitted())
    positions.sought(A, 2)
    assert positions.uncommitted() == {A: OffsetAndMetadata(2)}


def test_a_position_that_a_reset_found_counts_as_processed() -> None:
    """Also below what was committed: that is not in the log. It is to be committed soon."""
    positions = Positions()
    positions.moved(A, Move(7, drifts=True))
    assert positions.uncommitted() == positions.polled() == {A: OffsetAndMetadata(7)}
    assert positions.has_drifting
    positions.registered(positions.uncommitted())
    assert not positions.has_drifting
    positions.moved(A, Move(4, left=7, reason="out of range"))
    assert positions.uncommitted() == {A: OffsetAndMetadata(4)}


def test_a_move_behind_records_in_hand_counts_with_them() -> None:
    """It is processed when they are; and one behind what is unread is none yet."""
    positions = Positions()
    positions.returned({A: 3})
    positions.moved(A, Move(5))
    assert positions.uncommitted() == {}
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(5)}
    positions.unread.add({B: records(B, 0, 1)})
    positions.moved(B, Move(9))
    assert B not in positions.polled()


def test_a_move_below_a_commit_counts_only_if_it_replaces_a_position() -> None:
    """A reset leaves an offset that is not in the log. Without one, what the user committed still counts."""
    for left, expected in ((None, {}), (9, {A: OffsetAndMetadata(0)})):
        positions = Positions()
        positions.registered({A: OffsetAndMetadata(9)})
        positions.moved(A, Move(0, left=left))
        assert positions.uncommitted() == expected


def test_the_log_start_is_a_position_to_commit() -> None:
    """Offset 0 is above no commit at all. One position that drifts is enough, whatever follows."""
    positions = Positions()
    assert not positions.has_drifting
    for tp, drifts in ((A, True), (A, True), (B, False)):
        positions.moved(tp, Move(0, drifts=drifts))
    assert positions.uncommitted() == {A: OffsetAndMetadata(0), B: OffsetAndMetadata(0)}
    assert positions.has_drifting


def test_records_one_by_one() -> None:
    """Each counts once the next is asked for. A batch after them is no single record."""
    positions = Positions()
    assert not positions.is_one_by_one
    positions.polled_batches({A: records(A, 3, 4)})
    assert positions.polled() == {}
    positions.returned_one(A, 4, 7)
    assert (positions.is_one_by_one, positions.uncommitted()) == (True, {})
    positions.processed()
    assert positions.uncommitted() == positions.polled() == {A: OffsetAndMetadata(4, "", 7)}
    assert positions.handed_out({A}, {}) == {A: 4}
    positions.returned({A: 5})
    assert not positions.is_one_by_one
    assert repr(positions) == f"<Positions returned { {A: (5, -1)} }, processed { {A: (4, 7)} }, registered {{}}>"


def test_a_batch_from_further_down_is_committed_one_by_one() -> None:
    """Its first record decides whether the log was cut below what was committed."""
    for offset, expected in ((9, {}), (8, {A: OffsetAndMetadata(9, "", 0)})):
        positions = Positions()
        positions.returned({A: 10})
        positions.processed()
        positions.registered(positions.uncommitted())
        positions.polled_batches({A: records(A, offset, 20)})
        positions.returned_one(A, offset + 1, 0)
        positions.processed()
        assert positions.uncommitted() == expected


def test_records_that_may_be_unprocessed_are_not_committed() -> None:
    """Only what was processed and not handed over yet remains, also for a commit on request."""
    positions = Positions()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.registered({A: OffsetAndMetadata(5)})
    positions.returned({A: 9, B: 4})
    positions.unprocessed()
    assert positions.polled() == positions.uncommitted() == {B: OffsetAndMetadata(2)}
    positions.processed()
    assert positions.polled() == {B: OffsetAndMetadata(2)}


def test_records_handed_out_are_those_above_the_commit() -> None:
    """Of the given partitions alone."""
    positions = Positions()
    positions.returned({A: 1, B: 9})
    assert positions.handed_out({A}, {}) == {A: 1}
    assert positions.handed_out({A, B}, {A: 1, B: 8}) == {B: 9}
    assert positions.handed_out({A, B}, {A: 2, B: 10}) == {}


def test_a_forfeited_position_is_reported_until_it_is_committed() -> None:
    """A commit up to it ends it, a commit below does not, and taking it reports it."""
    positions = Positions()
    positions.returned({A: 9, B: 1})
    positions.forfeit({A, B}, {A: 8})
    assert positions.forfeited({}) == positions.forfeited({A: 8}) == {A: 9, B: 1}
    assert positions.forfeited({A: 9}) == positions.forfeited({A: 10}) == {B: 1}
    positions.recovered({A: 8})
    assert positions.forfeited({B: 1}) == {A: 9}
    positions.recovered({A: 9})
    positions.recovered({A: 9})
    assert positions.take_forfeited() == {B: 1}
    assert positions.take_forfeited() == {}


def test_the_furthest_forfeited_position_counts() -> None:
    """A partition that came back and was read again from further down forfeits no less than before."""
    positions = Positions()
    positions.returned({A: 9})
    positions.forfeit({A}, {})
    positions.sought(A, 0)
    positions.returned({A: 3})
    positions.forfeit({A}, {})
    assert positions.take_forfeited() == {A: 9}


def test_records_are_reported_once() -> None:
    """A later report of less takes nothing back; records that are handed out after it are forfeited again."""
    positions = Positions()
    positions.returned({A: 9, B: 1})
    positions.reported({A: 9, B: 0})
    positions.reported({A: 5})
    positions.forfeit({A, B}, {})
    assert positions.take_forfeited() == {B: 1}
    positions.returned({A: 10})
    positions.forfeit({A}, {})
    positions.reported({A: 10})
    assert positions.take_forfeited() == {}


def test_a_partition_that_comes_back_begins_anew() -> None:
    """Neither its commits nor its records of before count, read or unread."""
    positions = Positions()
    positions.returned({A: 9, B: 9})
    positions.registered(positions.polled())
    positions.polled_batches({A: records(A, 9), B: records(B, 9)})
    positions.forget_except([B])
    assert positions.handed_out({A, B}, {}) == {B: 9}
    assert (positions.unread.position(A), positions.unread.position(B)) == (None, 9)
    assert positions.polled() == {B: OffsetAndMetadata(9)}
    positions.moved(A, Move(4))
    assert positions.uncommitted() == {A: OffsetAndMetadata(4)}


def test_a_seek_drops_the_unread_records() -> None:
    """They lie at the position of before. Records that were handed out before it are not lost by it."""
    positions = Positions()
    positions.returned({A: 3})
    positions.polled_batches({A: records(A, 3, 4)})
    positions.sought(A, 1)
    assert positions.unread.position(A) is None
    assert positions.handed_out({A}, {}) == {}


def test_a_log_that_was_cut_is_committed_from_further_down() -> None:
    """Records of lower offsets than before are others: their positions count."""
    positions = Positions()
    positions.returned({A: 9})
    positions.processed()
    positions.registered(positions.uncommitted())
    positions.returned({A: 4})
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(4)}
