"""Describes which records of a changelog partition are in the rows on disk."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.changelog.store_schema import StoreSchema


class CommitPosition(NamedTuple):
    """Where a commit ends in the changelog. The fields are those of `Checkpoint`."""

    topic_id: str | None
    covered_offset: int


class Checkpoint(msgspec.Struct, frozen=True):
    """Says which changelog records are in the rows: all before `covered_offset`."""

    topic_id: str | None
    """The topic id of the changelog."""
    epoch: int
    """The owner epoch of the last owner."""
    covered_offset: int
    """The offset after the last changelog record in the rows. No owner above `epoch` has taken over before it: each
    commit makes sure of that."""
    progress: Progress | None
    """The newest commit in the rows, with the schemas under which the changelog was written."""
    rows: tuple[StoreSchema, ...] = ()
    """The schemas of the rows, if a restore wrote them; otherwise those of `progress`."""

    def mismatch(self, topic_id: str | None, first: int, end: int) -> str | None:
        """Return why a changelog with this id and these offsets does not continue from the checkpoint, or None."""
        if self.topic_id != topic_id:
            return f"it belongs to the changelog with id {self.topic_id}; the topic now has id {topic_id}"
        if self.covered_offset < first:
            return f"the changelog begins at {first}, the state is of offset {self.covered_offset}"
        if self.covered_offset > end:
            return f"the changelog ends at {end}, the state is of offset {self.covered_offset}"
        return None
