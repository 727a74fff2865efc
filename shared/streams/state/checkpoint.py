"""Describes which records of a changelog partition are in the rows on disk."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.shared.streams.changelog.format import Progress


class CommitPosition(NamedTuple):
    """Where a commit ends in the changelog. The fields are those of `Checkpoint`."""

    topic_id: str | None
    covered_offset: int
    verified_offset: int


class Checkpoint(msgspec.Struct, frozen=True):
    """Says which changelog records are in the rows: all before `covered_offset`."""

    topic_id: str | None
    """The topic id of the changelog."""
    epoch: int
    """The owner epoch of the last owner."""
    covered_offset: int
    """The offset after the last changelog record in the rows."""
    verified_offset: int
    """Up to here it is certain that no later owner had taken over the partition. If the log has a takeover record of a
    later owner from here to `covered_offset`, the commits after it do not count, and the rows are invalid."""
    progress: Progress | None

    def mismatch(self, topic_id: str | None, first: int, end: int) -> str | None:
        """Return why a changelog with this id and these offsets does not continue from the checkpoint, or None."""
        if self.topic_id != topic_id:
            return f"it belongs to the changelog with id {self.topic_id}; the topic now has id {topic_id}"
        # A takeover may be among the records after the verified offset, and the log no longer has all of them.
        if self.verified_offset < first:
            return f"the changelog begins at {first}, the state is verified up to {self.verified_offset}"
        if self.covered_offset > end:
            return f"the changelog ends at {end}, the state is of offset {self.covered_offset}"
        return None
