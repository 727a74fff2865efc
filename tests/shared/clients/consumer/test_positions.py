"""Which positions may be committed, by themselves and on request."""

from __future__ import annotations

from penstock.shared.clients.consumer.fetch_state import Move
from penstock.shared.clients.consumer.positions import Positions
from penstock.shared.clients.consumer.unread import Polled
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


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
    columns = Columns.of([ConsumerRecord("t", 1, offset, 0, None, None) for offset in (0, 1)])
    positions.unread.add({B: Polled(columns, 2)})
    positions.moved(B, Move(9))
    assert B not in positions.polled()


def test_a_log_that_was_cut_is_committed_from_further_down() -> None:
    """Records of lower offsets than before are others: their positions count."""
    positions = Positions()
    positions.returned({A: 9})
    positions.processed()
    positions.registered(positions.uncommitted())
    positions.returned({A: 4})
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(4)}
