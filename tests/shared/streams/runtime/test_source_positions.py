"""The offset at which a task continues in a source partition."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import SchemaMismatch, SourceOffsetsMissing, SourceTopicChanged
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.streams.runtime.source_positions import (
    AheadPartition,
    GroupAhead,
    OnMissing,
    PartitionExtent,
    StartPosition,
    ahead_of,
    committed_position,
    position_of,
    raise_unread,
    start_position_of,
    unread_repartition_topics,
)

AT = TopicPartition("flights", 3)
ID, OTHER = "2ia3basOR-KblWWPsTuLbw", "AAAAAAAAAAAAAAAAAAAAAA"
offsets = st.integers(0, 1_000)


@pytest.mark.parametrize(
    ("known", "committed", "from_group", "position"),
    [
        (None, None, False, None),
        (None, 0, False, None),
        (None, 0, True, 0),
        (None, 7, True, 7),
        (5, None, False, 5),
        (5, 5, False, 5),
        (5, 3, False, 5),
        (5, 3, True, 5),
    ],
)
def test_the_position_in_the_changelog_counts(
    known: int | None, committed: int | None, from_group: bool, position: int | None
) -> None:
    """The position in the changelog counts. The group's committed offset counts only if there is none, and only if
    requested."""
    offset = None if committed is None else OffsetAndMetadata(committed)
    assert ahead_of(AT, known, offset, from_group=from_group) is None
    assert position_of(known, offset, from_group=from_group) == position


@pytest.mark.parametrize(("known", "from_group"), [(None, False), (5, False), (5, True), (0, False)])
@pytest.mark.parametrize("offset", [committed_position(7), OffsetAndMetadata(7), OffsetAndMetadata(7, "x")])
def test_a_group_that_is_ahead(known: int | None, from_group: bool, offset: OffsetAndMetadata) -> None:
    """The group's offset is above the changelog's position. The offset's metadata tells whether the application
    committed it."""
    by_application = offset.metadata == committed_position(0).metadata
    assert ahead_of(AT, known, offset, from_group=from_group) == AheadPartition(AT, 7, known, by_application)


FOREIGN, LOST = (
    AheadPartition(TopicPartition("flights", 0), 7, 5, False),
    AheadPartition(TopicPartition("flights", 1), 8, 6, True),
)
GONE = AheadPartition(TopicPartition("banks", 0), 9, None, True)
UNKNOWN = AheadPartition(TopicPartition("banks", 2), 9, None, False)
COMMAND = "run `penstock streams restore-offsets --application-id app --execute"


@pytest.mark.parametrize(
    ("ahead", "named", "not_named"),
    [
        ([FOREIGN], ["flights-0 (committed 7, changelog 5)", "not lost state", f"{COMMAND}`"], ["lost the", "empty"]),
        ([LOST], ["flights-1 (committed 8, changelog 6)", "has lost the commits", f"{COMMAND}`"], ["not lost"]),
        ([GONE], ["banks-0 (committed 9, changelog none)", "was lost", "--start-over banks`"], ["not lost", "or its"]),
        ([UNKNOWN], ["banks-2 (committed 9, changelog none)", f"{COMMAND} --start-over banks`"], ["not lost state"]),
        (
            [UNKNOWN, LOST, FOREIGN],
            ["flights-0", "flights-1", "banks-2", f"{COMMAND} --start-over banks`"],
            [],
        ),
    ],
    ids=["another client's", "the application's own", "the changelog's loss", "nothing known", "all"],
)
def test_the_error_names_partitions_cause_and_command(
    ahead: list[AheadPartition], named: list[str], not_named: list[str]
) -> None:
    """The error lists all partitions, mentions lost state only if it is possible, and has one command that is
    sufficient."""
    message = str(GroupAhead("app", ahead))
    assert [part for part in named if part not in message] == []
    assert [part for part in not_named if part in message] == []
    assert message.count("penstock streams") == 1


@pytest.mark.parametrize("known_id", [None, ID])
@pytest.mark.parametrize("on_missing", ["fail", "skip"])
@given(first=offsets, length=offsets, into=offsets)
def test_a_position_within_is_kept(
    known_id: str | None, on_missing: OnMissing, first: int, length: int, into: int
) -> None:
    """A position between the first offset and the end is kept, whatever the policy for missing offsets."""
    position = first + min(into, length)
    held = PartitionExtent(ID, first, first + length)
    assert start_position_of(AT, position, known_id, held, on_missing) == StartPosition(position)


@given(first=offsets)
def test_a_partition_that_was_never_read_starts_at_its_first_offset(first: int) -> None:
    """Records that were deleted before the application first read the partition are not missing."""
    assert start_position_of(AT, None, None, PartitionExtent(ID, first, first), "fail") == StartPosition(first)


def test_deleted_records_stop_or_are_counted() -> None:
    """If records after the position were deleted, `fail` raises an error with their offsets, and `skip` counts them."""
    held = PartitionExtent(ID, 40, 90)
    with pytest.raises(SourceOffsetsMissing, match=r"flights-3.*25 to 39.*streams.on_missing_source_off"):
        start_position_of(AT, 25, ID, held, "fail")
    assert start_position_of(AT, 25, ID, held, "skip") == StartPosition(40, skipped=15)


@pytest.mark.parametrize("on_missing", ["fail", "skip"])
def test_another_topic_of_the_same_name_is_refused(on_missing: OnMissing) -> None:
    """A recreated topic is rejected with both ids, even if the position fits. No setting allows it."""
    with pytest.raises(SourceTopicChanged, match=rf"{OTHER}.*{ID}.*application_id"):
        start_position_of(AT, 5, ID, PartitionExtent(OTHER, 0, 90), on_missing)


@pytest.mark.parametrize("on_missing", ["fail", "skip"])
def test_a_position_past_the_end_is_refused(on_missing: OnMissing) -> None:
    """A topic that ends before the position has lost records, or is another topic whose id was not recorded."""
    with pytest.raises(SourceTopicChanged, match=r"flights-3.*91.*90"):
        start_position_of(AT, 91, None, PartitionExtent(ID, 0, 90), on_missing)


def test_own_topics_that_the_topology_left() -> None:
    """Positions in internal topics that no node reads any more are returned. Source topics may be removed."""
    sources = {"app-key_by-2-repartition": 5, "app-by-user-repartition": 7, "clicks": 1, "other-x-repartition": 9}
    assert unread_repartition_topics(sources, ["app-by-user-repartition"], "app") == ["app-key_by-2-repartition"]


def test_unread_records_of_a_topic_with_another_name_are_refused() -> None:
    """The message has the coordinates, the topics that the topology reads now, and the name that keeps the topic."""
    at = TopicPartition("app-key_by-2-repartition", 3)
    with pytest.raises(SchemaMismatch) as raised:
        raise_unread(at, 5, ["clicks", "app-key_by-3-repartition"], "app")
    message = str(raised.value)
    assert "app-key_by-2-repartition-3 holds records" in message
    assert "its own topics are app-key_by-3-repartition." in message
    assert "name='key_by-2'" in message
    assert "until everything is read" in message
    assert "penstock streams reset" in message
