"""Positions: what auto-commit and explicit commits may use, what is not handed out yet, and reset policies."""

from __future__ import annotations

import pytest

from penstock.shared.clients.consumer.subscription_state import (
    ConsumedPositions,
    Move,
    PolledRecords,
    ResetPolicy,
    UnreadRecords,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def records(tp: TopicPartition, *offsets: int) -> PolledRecords:
    columns = Columns.of([ConsumerRecord(tp.topic, tp.partition, offset, 0, None, None) for offset in offsets])
    return PolledRecords(columns, offsets[-1] + 1)


def test_records_of_the_current_poll_are_not_yet_processed() -> None:
    """Auto-commit includes a position only after the next poll. An explicit commit includes it at once."""
    positions = ConsumedPositions()
    positions.returned({A: 5})
    assert positions.uncommitted() == {}
    assert positions.all_consumed() == {A: OffsetAndMetadata(5)}
    positions.processed()
    positions.returned({A: 9})
    assert positions.uncommitted() == {A: OffsetAndMetadata(5)}


def test_a_position_is_passed_to_the_committer_once() -> None:
    """A position is not passed to the committer again until it changes."""
    positions = ConsumedPositions()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.registered(positions.uncommitted())
    assert positions.uncommitted() == {}
    positions.returned({B: 4})
    positions.processed()
    assert positions.uncommitted() == {B: OffsetAndMetadata(4)}


def test_a_seek_replaces_what_was_read() -> None:
    """After a seek its target is the position, even below a processed one."""
    positions = ConsumedPositions()
    positions.returned({A: 5})
    positions.sought(A, 1)
    assert positions.uncommitted() == {A: OffsetAndMetadata(1)}
    assert positions.all_consumed() == {A: OffsetAndMetadata(1)}


def test_unassigned_partitions_are_forgotten() -> None:
    """Positions of partitions that are no longer read are not committed."""
    positions = ConsumedPositions()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.retain([B])
    assert positions.uncommitted() == {B: OffsetAndMetadata(2)}


def test_a_reported_loss_does_not_hide_a_later_one() -> None:
    """A partition that is assigned again, or read again after a seek, can lose its records again."""
    positions = ConsumedPositions()
    positions.returned({A: 9, B: 9})
    positions.retain([B])
    positions.reported({A: 9, B: 9})
    positions.sought(B, 0)
    positions.returned({A: 3, B: 3})
    positions.forfeit({A, B}, {})
    assert positions.take_forfeited() == {A: 3, B: 3}


def test_leader_epochs_go_with_the_positions() -> None:
    """A position has a leader epoch until a seek, after which the epoch is unknown."""
    positions = ConsumedPositions()
    positions.returned({A: 5, B: 2}, {A: 7})
    assert {tp: at.leader_epoch for tp, at in positions.all_consumed().items()} == {A: 7, B: -1}
    positions.processed()
    assert positions.uncommitted()[A].leader_epoch == 7
    positions.sought(A, 1)
    assert positions.uncommitted()[A].leader_epoch == -1


def test_auto_commit_never_goes_below_a_user_commit() -> None:
    """Records processed before a user's higher commit are not auto-committed. Later positions are."""
    positions = ConsumedPositions()
    positions.returned({A: 3})
    positions.processed()
    positions.returned({A: 6})
    positions.registered(positions.all_consumed())
    assert positions.uncommitted() == {}
    positions.processed()
    assert positions.uncommitted() == {}
    positions.returned({A: 9})
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(9)}


def test_a_seek_back_is_committed_also_below_a_commit() -> None:
    """An explicit seek back is committed even below an earlier commit."""
    positions = ConsumedPositions()
    positions.returned({A: 6})
    positions.processed()
    positions.registered(positions.uncommitted())
    positions.sought(A, 2)
    assert positions.uncommitted() == {A: OffsetAndMetadata(2)}


def test_a_reset_position_counts_as_processed() -> None:
    """A reset position is committed soon, even below the committed offset, which is no longer in the log."""
    positions = ConsumedPositions()
    positions.moved(A, Move(7, drifts=True))
    assert positions.uncommitted() == positions.all_consumed() == {A: OffsetAndMetadata(7)}
    assert positions.drifting == {A}
    positions.registered(positions.uncommitted())
    assert positions.drifting == set()
    positions.moved(A, Move(4, replaced=7, reason="out of range"))
    assert positions.uncommitted() == {A: OffsetAndMetadata(4)}


def test_a_drifting_position_drifts_until_its_own_commit() -> None:
    """A position that drifts does so until an offset of its own partition is committed, or its partition is lost."""
    positions = ConsumedPositions()
    positions.moved(A, Move(7, drifts=True))
    positions.registered({B: OffsetAndMetadata(5)})
    assert positions.drifting == {A}
    positions.registered({A: OffsetAndMetadata(7)})
    assert positions.drifting == set()
    positions.moved(A, Move(7, drifts=True))
    positions.retain([B])
    assert positions.drifting == set()


def test_a_move_after_returned_records_counts_with_them() -> None:
    """A position after returned records is processed when they are. A position after unread records is not used."""
    positions = ConsumedPositions()
    positions.returned({A: 3})
    positions.moved(A, Move(5))
    assert positions.uncommitted() == {}
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(5)}
    positions.unread.add({B: records(B, 0, 1)})
    positions.moved(B, Move(9))
    assert B not in positions.all_consumed()


def test_a_move_below_a_commit_counts_only_if_it_replaces_a_position() -> None:
    """A reset counts if the old offset is not in the log. Otherwise the user's commit stays."""
    for replaced, expected in ((None, {}), (9, {A: OffsetAndMetadata(0)})):
        positions = ConsumedPositions()
        positions.registered({A: OffsetAndMetadata(9)})
        positions.moved(A, Move(0, replaced=replaced))
        assert positions.uncommitted() == expected


def test_the_log_start_is_a_position_to_commit() -> None:
    """Offset 0 is committed if there is no commit, whether the position drifts or not."""
    positions = ConsumedPositions()
    for tp, drifts in ((A, True), (A, True), (B, False)):
        positions.moved(tp, Move(0, drifts=drifts))
    assert positions.uncommitted() == {A: OffsetAndMetadata(0), B: OffsetAndMetadata(0)}
    assert positions.drifting == {A}


def test_records_one_by_one() -> None:
    """A single record counts as processed once the next is requested. A batch ends the one-by-one mode."""
    positions = ConsumedPositions()
    assert not positions.is_one_by_one
    positions.add_unread({A: records(A, 3, 4)})
    assert positions.all_consumed() == {}
    positions.returned_one(A, 4, 7)
    assert (positions.is_one_by_one, positions.uncommitted()) == (True, {})
    positions.processed()
    assert positions.uncommitted() == positions.all_consumed() == {A: OffsetAndMetadata(4, "", 7)}
    assert positions.handed_out({A}, {}) == {A: 4}
    positions.returned({A: 5})
    assert not positions.is_one_by_one
    assert (
        repr(positions) == f"<ConsumedPositions returned { {A: (5, -1)} }, processed { {A: (4, 7)} }, registered {{}}>"
    )


def test_a_batch_of_lower_offsets_in_one_by_one_mode() -> None:
    """The first record of a batch decides whether the log was truncated below the committed offset."""
    for offset, expected in ((9, {}), (8, {A: OffsetAndMetadata(9, "", 0)})):
        positions = ConsumedPositions()
        positions.returned({A: 10})
        positions.processed()
        positions.registered(positions.uncommitted())
        positions.add_unread({A: records(A, offset, 20)})
        positions.returned_one(A, offset + 1, 0)
        positions.processed()
        assert positions.uncommitted() == expected


def test_records_that_may_be_unprocessed_are_not_committed() -> None:
    """Only processed positions that were not passed to the committer remain, also for an explicit commit."""
    positions = ConsumedPositions()
    positions.returned({A: 5, B: 2})
    positions.processed()
    positions.registered({A: OffsetAndMetadata(5)})
    positions.returned({A: 9, B: 4})
    positions.unprocessed()
    assert positions.all_consumed() == positions.uncommitted() == {B: OffsetAndMetadata(2)}
    positions.processed()
    assert positions.all_consumed() == {B: OffsetAndMetadata(2)}


def test_records_of_some_partitions_are_processed() -> None:
    """The records of the partitions that are left count as processed, those of the other partitions do not."""
    positions = ConsumedPositions()
    positions.returned({A: 5, B: 2})
    positions.processed([A])
    assert positions.uncommitted() == {A: OffsetAndMetadata(5)}
    positions.returned({A: 9})
    assert positions.uncommitted() == {A: OffsetAndMetadata(5)}
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(9), B: OffsetAndMetadata(2)}


def test_returned_records_above_the_commit() -> None:
    """The result contains the given partitions whose returned records are above their commit."""
    positions = ConsumedPositions()
    positions.returned({A: 1, B: 9})
    assert positions.handed_out({A}, {}) == {A: 1}
    assert positions.handed_out({A, B}, {A: 1, B: 8}) == {B: 9}
    assert positions.handed_out({A, B}, {A: 2, B: 10}) == {}


def test_a_forfeited_position_is_reported_until_it_is_committed() -> None:
    """A forfeited position stays until a commit reaches it. A lower commit does not end it. Taking it reports it."""
    positions = ConsumedPositions()
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
    """A partition that was assigned again and read from a lower offset still forfeits its highest position."""
    positions = ConsumedPositions()
    positions.returned({A: 9})
    positions.forfeit({A}, {})
    positions.sought(A, 0)
    positions.returned({A: 3})
    positions.forfeit({A}, {})
    assert positions.take_forfeited() == {A: 9}


def test_records_are_reported_once() -> None:
    """A later report of a lower position takes nothing back. Records returned after it can be forfeited again."""
    positions = ConsumedPositions()
    positions.returned({A: 9, B: 1})
    positions.reported({A: 9, B: 0})
    positions.reported({A: 5})
    positions.forfeit({A, B}, {})
    assert positions.take_forfeited() == {B: 1}
    positions.returned({A: 10})
    positions.forfeit({A}, {})
    positions.reported({A: 10})
    assert positions.take_forfeited() == {}


def test_a_report_or_a_commit_beyond_a_position_covers_it() -> None:
    """If a partition was assigned again and read from a lower offset, what was reported or committed lies above."""
    positions = ConsumedPositions()
    positions.returned({A: 5, B: 5})
    positions.reported({A: 9})
    positions.forfeit({A, B}, {})
    assert positions.forfeited({}) == {B: 5}
    positions.recovered({B: 9})
    assert positions.take_forfeited() == {}


def test_a_partition_assigned_again_starts_fresh() -> None:
    """Neither earlier commits nor earlier records of the partition count, read or unread."""
    positions = ConsumedPositions()
    positions.returned({A: 9, B: 9})
    positions.registered(positions.all_consumed())
    positions.add_unread({A: records(A, 9), B: records(B, 9)})
    positions.retain([B])
    assert positions.handed_out({A, B}, {}) == {B: 9}
    assert (positions.unread.position(A), positions.unread.position(B)) == (None, 9)
    assert positions.all_consumed() == {B: OffsetAndMetadata(9)}
    positions.moved(A, Move(4))
    assert positions.uncommitted() == {A: OffsetAndMetadata(4)}


def test_a_seek_drops_the_unread_records() -> None:
    """A seek drops the unread records. It does not forfeit records that were returned before."""
    positions = ConsumedPositions()
    positions.returned({A: 3})
    positions.add_unread({A: records(A, 3, 4)})
    positions.sought(A, 1)
    assert positions.unread.position(A) is None
    assert positions.handed_out({A}, {}) == {}


def test_a_truncated_log_is_committed_from_lower_offsets() -> None:
    """Records with lower offsets than before are new ones, so their positions count."""
    positions = ConsumedPositions()
    positions.returned({A: 9})
    positions.processed()
    positions.registered(positions.uncommitted())
    positions.returned({A: 4})
    positions.processed()
    assert positions.uncommitted() == {A: OffsetAndMetadata(4)}


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
    assert (unread.has_next({A}), unread.has_next(())) == (False, True)
    assert drained(unread) == [(0, 2, 3)]
    assert not unread.has_next(())


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


@pytest.mark.parametrize(
    ("text", "ms"),
    [
        ("P7D", 604_800_000),
        ("PT1H30M", 5_400_000),
        ("P1DT2H3M4.5S", 93_784_500),
        ("pt0.25s", 250),
        ("90m", 5_400_000),
        ("250ms", 250),
    ],
)
def test_durations(text: str, ms: int) -> None:
    """A duration is ISO 8601, as in Java, or in the settings' own notation. It is subtracted from the current time."""
    policy = ResetPolicy.parse(f"by_duration:{text}")
    assert (policy.duration_ms, policy.spec(100_000_000_000), policy.is_none) == (ms, 100_000_000_000 - ms, False)


def test_names() -> None:
    """The other policies are found by name. `none` means no policy."""
    assert [ResetPolicy.parse(name).spec(5) for name in ("earliest", "latest")] == ["earliest", "latest"]
    assert [ResetPolicy.parse(name).is_none for name in ("none", "latest")] == [True, False]


def test_longer_than_time() -> None:
    """A duration that reaches before 1970 leads to timestamp 0."""
    assert ResetPolicy.parse("by_duration:P100D").spec(5) == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Earliest",
        "by_duration:",
        "by_duration:P",
        "by_duration:PT",
        "by_duration:P1Y",
        "by_duration:-PT1S",
        "by_duration:P" + "9" * 400 + "D",
        "7d",
    ],
)
def test_invalid_policies_are_rejected(text: str) -> None:
    """Any other text is rejected with its value."""
    with pytest.raises(ConfigError):
        ResetPolicy.parse(text)
