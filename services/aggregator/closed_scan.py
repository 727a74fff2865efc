"""The closed windows that one partition's changelog tells of, page by page, in the order in which they were closed.

A closed window is written once and never changed, so that a part of the log is enough to tell of those in it. Live
windows are not told of: what became of one is known at the log's end alone. A page ends where a row of it does; the
next one begins at the last commit that was read whole before, whose reader's epoch is part of the place.
"""

from __future__ import annotations

from typing import NamedTuple

from penstock.services.aggregator.found_windows import Found, results, told
from penstock.services.aggregator.sessions import feed
from penstock.shared.common.continuation import ChangelogPlace
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.records import Columns
from penstock.shared.streams.changelog_format import FINAL, FORMAT_VERSION, Progress, StoreSchema
from penstock.shared.streams.changelog_reader import Change, ChangelogReader

PASSED_OVER = frozenset(bytes((FORMAT_VERSION,)) + operation for operation in (b"L", b"D"))
"""How records begin that say nothing of closed windows: they are not even decoded."""
CLOSED = bytes((FORMAT_VERSION,)) + FINAL
WINDOWS = ("tumbling", "hopping", "sliding")
"""Kinds whose windows are no longer than their size."""


class Wanted(NamedTuple):
    """Which closed windows of which store; `reach` are the times that they overlap, in ms, inclusive."""

    store: StoreSchema
    keys: KeyRange
    reach: tuple[int, int]


class ClosedScan:
    """Takes a partition's records from `place` on; `place` moves along, and is where the next page begins."""

    def __init__(self, wanted: Wanted, place: ChangelogPlace, rows_max: int) -> None:
        self.place, self._wanted, self._rows_max = place, wanted, rows_max
        self.rows: list[Found] = []
        self.is_full = self.is_past = False
        """Whether the page has all its rows, and whether no later record can have one more."""
        self._reader = ChangelogReader(self._take, epoch=place.epoch)
        self._of_commit, self._given = 0, place.rows
        """Rows of the commit at hand that came by, and how many of them this page or one before has."""

    @property
    def progress(self) -> Progress | None:
        """That of the last commit that was read."""
        return self._reader.progress

    def feed(self, columns: Columns) -> None:
        """Take the next records until the page is full, or past what is asked for; CorruptRecord names what is not to
        be read."""
        keys, values, has = list(columns.keys), columns.values, self._wanted.keys.has
        offsets = columns.offsets.tolist()
        for i, value in enumerate(values):
            mark = None if value is None else value[:2]
            if mark in PASSED_OVER or (mark == CLOSED and not has(keys[i])):
                continue
            self._feed(columns, offsets[i], keys[i], value)
            if self.is_full or self.is_past:
                return
        self._move(offsets[-1] + 1)

    def _feed(self, columns: Columns, offset: int, key: bytes | None, value: bytes | None) -> None:
        reader, before = self._reader, self._reader.progress
        feed(reader, columns.topic_partition, offset, key, value)
        if reader.progress is before:
            self._move(offset + 1)
            return
        if self._given < self._of_commit:  # the rest of the commit is the next page's
            self.place, self.is_full = self.place._replace(rows=self._given), True
            return
        self._of_commit = self._given = 0
        self._move(offset + 1)
        self.is_full, self.is_past = len(self.rows) == self._rows_max, self._has_all_closed()

    def _move(self, offset: int) -> None:
        if self._reader.is_between_commits:
            self.place = self.place._replace(offset=offset, epoch=self._reader.epoch, rows=self._given)

    def _take(self, change: Change) -> None:
        store, (from_ms, to_ms) = self._wanted.store, self._wanted.reach
        if change.operation != FINAL or change.store != store.name or change.end < from_ms or change.start > to_ms:
            return
        self._of_commit += 1
        if self._of_commit > self._given and len(self.rows) < self._rows_max:
            self._given += 1
            key = change.key.decode() if store.key == "string" else change.key
            values = results(store, told(change).state)
            self.rows.append(Found(self.place.partition, change.start, change.end, "closed", 0, values, key))

    def _has_all_closed(self) -> bool:
        """Whether every window that begins in time is closed: not of sessions, which can grow for ever."""
        store = self._wanted.store
        if store.kind not in WINDOWS or self.progress is None:
            return False
        closed_ms = self.progress.close_times_ms.get(store.name)
        return closed_ms is not None and closed_ms > self._wanted.reach[1] + store.size_ms
