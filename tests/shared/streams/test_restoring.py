"""Where a restore reads from."""

from __future__ import annotations

import pytest

from shared.common.errors import ChangelogHole
from shared.common.records import TopicPartition
from shared.streams.restoring import checked_start

AT = TopicPartition("app-changelog", 2)


def test_a_log_that_is_whole() -> None:
    """From its beginning without a snapshot, from the covered offset with one."""
    assert [checked_start(AT, None, 0, 9), checked_start(AT, 5, 0, 9), checked_start(AT, 9, 9, 9)] == [0, 5, 9]


@pytest.mark.parametrize(
    ("covered", "first", "end", "says"),
    [
        (None, 3, 9, "app-changelog-2: offsets 0 to 2 were deleted, and there is no snapshot"),
        (4, 6, 9, "app-changelog-2: offsets 4 to 5 are missing: the snapshot ends before them"),
        (12, 6, 9, "app-changelog-2: the log ends at 9, but the snapshot covers it up to 12"),
    ],
)
def test_a_hole_is_named(covered: int | None, first: int, end: int, says: str) -> None:
    """What is missing between a snapshot and the log is said with its offsets."""
    with pytest.raises(ChangelogHole, match=says):
        checked_start(AT, covered, first, end)
