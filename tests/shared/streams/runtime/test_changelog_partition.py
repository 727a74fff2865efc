"""The position at which an owner writes to its changelog partition."""

from __future__ import annotations

import pytest

from penstock.shared.streams.runtime.changelog_partition import ChangelogPosition, LogReplaced
from penstock.shared.streams.state.checkpoint import CommitPosition


def test_commits_end_to_end_prove_one_owner() -> None:
    """While each commit begins where the previous one ended, all of it is verified. After a gap nothing more is."""
    position = ChangelogPosition("id", 5, marks=0)
    assert position.written(0, 5) == CommitPosition("id", 6, 6)
    assert position.written(2, 8) == CommitPosition("id", 9, 9)
    assert position.written(2, 12) == CommitPosition("id", 13, 9)
    assert position.written(2, 15) == CommitPosition("id", 16, 9)


def test_a_commit_before_the_end_of_the_one_before_is_in_another_log() -> None:
    """A log with the earlier commit has no room for it there. An unknown offset proves nothing."""
    position = ChangelogPosition("id", 5, marks=1)
    position.written(2, 7)
    assert position.between(2, -1) == range(9, 9)
    assert position.written(2, -1) == CommitPosition("id", 0, 8)
    assert position.between(2, 14) == range(9, 14)
    with pytest.raises(LogReplaced, match=r"offset 10.*11.*before"):
        position.between(2, 10)
