"""The conditions under which a changelog continues from a checkpoint."""

from __future__ import annotations

from penstock.shared.streams.state.checkpoint import Checkpoint

FOUND = Checkpoint("id", epoch=3, covered_offset=50, verified_offset=40, progress=None)


def test_a_changelog_that_does_not_go_on_from_there() -> None:
    """Another topic, a log that begins too late and a log that lost its end are each reported with their numbers."""
    assert FOUND.mismatch("id", 40, 50) is None
    assert "now has id other" in (FOUND.mismatch("other", 0, 90) or "")
    assert FOUND.mismatch("id", 41, 90) == "the changelog goes on at 41, it ends at 40"
    assert FOUND.mismatch("id", 0, 49) == "the changelog ends at 49, it is of offset 50"
