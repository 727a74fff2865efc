"""The progress of a changelog partition in rows that are kept outside a task's memory."""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from penstock.shared.common.errors import ProducerFenced
from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.changelog.store_schema import StoreSchema


class LogReplaced(ProducerFenced):
    """The changelog is not the one that its owner wrote to: a new topic of that name, or one that lost its end."""


class LogPosition:
    """The position at which an owner writes its commits, and whether others write there too.

    Adjacent commits prove that there was no other owner. A commit at a lower offset than the previous one's end proves
    that the log is another. `marks` are the offsets between two commits that hold no record. A negative offset means
    that the broker did not return one.

    >>> position = LogPosition("id", 10, marks=1)
    >>> position.between(entries=4, offset=14), position.between(entries=4, offset=16)
    (range(10, 10), range(10, 16))
    >>> position.written(entries=4, offset=14)
    CommitPosition(topic_id='id', covered_offset=15, verified_offset=15)
    >>> position.written(entries=4, offset=21)  # where 20 was to be: the record of another
    CommitPosition(topic_id='id', covered_offset=22, verified_offset=15)
    """

    def __init__(self, topic_id: str | None, next_offset: int, marks: int) -> None:
        self.topic_id = topic_id
        self._next = next_offset
        self._marks = marks
        self._verified = next_offset
        self._is_only_writer = True

    def between(self, entries: int, offset: int) -> range:
        """Return the offsets of others' records, if a commit of `entries` has its progress record at `offset`.

        Raises LogReplaced if the commit cannot be there in the log of the previous commit.
        """
        least = self._next + entries
        if 0 <= offset < least:
            raise LogReplaced(
                f"a commit is at offset {offset}, but the log ended at {least} before it: the topic (id "
                f"{self.topic_id} before) was recreated, or has lost its end"
            )
        return range(self._next, offset if offset > least else self._next)

    def written(self, entries: int, offset: int) -> CommitPosition:
        """Record a commit of `entries` whose progress record is at `offset`, and return its position."""
        # Once something else lies between two commits, it may be another owner's takeover. Only a restore can find out.
        self._is_only_writer &= offset == self._next + entries
        if self._is_only_writer:
            self._verified = offset + 1
        if offset >= 0:
            self._next = offset + 1 + self._marks
        return CommitPosition(self.topic_id, offset + 1, self._verified)


class CommitPosition(NamedTuple):
    """The position of a commit in the changelog; see `Checkpoint`."""

    topic_id: str | None
    covered_offset: int
    verified_offset: int


class Checkpoint(msgspec.Struct, frozen=True):
    """The rows are the partition's state before `covered_offset`, as written by owners up to `epoch`.

    `topic_id` is the changelog's. Up to `verified_offset` it is certain that no other owner wrote. Beyond that, a
    commit that the broker accepted does not count if another owner had taken over the partition before it.
    """

    topic_id: str | None
    epoch: int
    covered_offset: int
    verified_offset: int
    progress: Progress | None


def row_layout(stores: tuple[StoreSchema, ...]) -> tuple[object, ...]:
    """Return what determines the bytes of the rows; if it differs, stored rows cannot be decoded."""
    return tuple(
        (s.name, s.kind, s.key, tuple((a.name, a.function, a.field, a.state) for a in s.aggregations)) for s in stores
    )
