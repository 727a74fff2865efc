"""What a compaction refuses before it reads anything."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.spark.compact import bounded, require_no_hole
from penstock.services.spark.kafka import TopicOffsets
from penstock.shared.common.errors import ChangelogHole


class Covered(NamedTuple):
    topic_id: str


def offsets(earliest: int, latest: int) -> TopicOffsets:
    return TopicOffsets("log", "id-1", {0: earliest}, {0: latest})


def test_a_changelog_that_goes_on_where_the_tables_end_is_taken() -> None:
    """Covered offsets anywhere within what the topic holds, its end included, are no hole."""
    for covered in (5, 7, 9):
        require_no_hole(offsets(5, 9), {0: Covered("id-1")}, {0: covered})  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("earliest", "latest", "start", "topic_id", "said"),
    [
        (6, 9, 5, "id-1", "log-0: offsets 5 to 5 are gone"),
        (0, 4, 5, "id-1", "log-0 ends at 4, before the covered offset 5: offsets 4 to 4 are missing"),
        (5, 9, 5, "id-0", "its id is id-1, that of the snapshot is id-0"),
    ],
)
def test_a_hole_is_refused_by_its_offsets(earliest: int, latest: int, start: int, topic_id: str, said: str) -> None:
    """A changelog that starts too late, ends too early or is another one is refused, with what is missing."""
    with pytest.raises(ChangelogHole, match=said):
        require_no_hole(offsets(earliest, latest), {0: Covered(topic_id)}, {0: start})  # type: ignore[dict-item]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 100))
def test_a_run_is_bounded_and_leaves_nothing_it_has_room_for(ranges: list[tuple[int, int]], most: int) -> None:
    """A run reads no more than it may, all of what is short, as much of one long partition as of the other."""
    start = {p: first for p, (first, _) in enumerate(ranges)}
    latest = {p: first + length for p, (first, length) in enumerate(ranges)}
    ends = bounded(start, latest, most)
    taken = {p: ends[p] - start[p] for p in start}
    assert all(start[p] <= ends[p] <= latest[p] for p in start)
    assert sum(taken.values()) <= max(most, len(ranges))
    cut = [taken[p] for p in start if ends[p] < latest[p]]
    if cut:
        assert min(cut) >= 1
        assert sum(taken.values()) >= most
        assert max(cut) - min(cut) <= 1
        assert max(taken.values()) <= max(cut) + 1


def test_a_partition_that_is_gone_is_refused() -> None:
    """A covered partition that the topic does not have is a hole too."""
    with pytest.raises(ChangelogHole, match="no partition 1"):
        require_no_hole(offsets(0, 9), {1: Covered("id-1")}, {0: 0})  # type: ignore[dict-item]
