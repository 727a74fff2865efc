"""The closed windows that one partition's changelog tells of, page by page, in the order in which they were closed.

A closed window is written once and never changed, so that a part of the log is enough to tell of those in it. Live
windows are not told of: what became of one is known at the log's end alone. A page ends where a row of it does; the
next one begins at the last commit that was read whole before, whose reader's epoch is part of the place.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from penstock.services.aggregator.found_windows import Found, results, told
from penstock.services.aggregator.sessions import feed
from penstock.shared.common.continuation import ChangelogPlace
from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.records import Columns
from penstock.shared.streams.changelog.format import FINAL, Progress, StoreSchema
from penstock.shared.streams.changelog.reader import Change, ChangelogReader, Commit, Confirmed, one_by_one

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
        self.progress: Progress | None = None
        """That of the last commit that was read."""
        self._of_commit, self._given = 0, place.rows
        """Rows of the commit at hand that came by, and how many of them this page or one before has."""

    def feed(self, columns: Columns) -> None:
        """Take the next records until the page is full, or past what is asked for; CorruptRecord names what is not to
        be read."""
        try:
            feed(self._reader, columns)
        except CorruptRecord:
            if not (self.is_full or self.is_past):  # else it is the next page's
                raise
        if not (self.is_full or self.is_past) and self._reader.is_between_commits:
            self._move(int(columns.offsets[-1]) + 1, self._reader.epoch)

    def _take(self, confirmed: Confirmed) -> None:
        """Take closed windows, commit by commit; of one that was read in several parts the last has the commit."""
        if self.is_full or self.is_past:
            return
        store, (from_ms, to_ms) = self._wanted.store, self._wanted.reach
        names = [one.name for one in confirmed.stores]
        is_own = (confirmed.operations == FINAL[0]) & (confirmed.ends >= from_ms) & (confirmed.starts <= to_ms)
        is_own &= confirmed.numbers == (names.index(store.name) if store.name in names else -1)
        first = 0
        for commit in confirmed.commits:
            self._take_windows(confirmed.at(np.flatnonzero(is_own[first : commit.changes]) + first))
            self._end(commit)
            if self.is_full or self.is_past:
                return
            first = commit.changes
        self._take_windows(confirmed.at(np.flatnonzero(is_own[first:]) + first))

    def _take_windows(self, own: Confirmed) -> None:
        def take(change: Change) -> None:
            store = self._wanted.store
            if not self._wanted.keys.has(change.key):
                return
            self._of_commit += 1
            if self._of_commit > self._given and len(self.rows) < self._rows_max:
                self._given += 1
                key = change.key.decode() if store.key == "string" else change.key
                values = results(store, told(change).state)
                self.rows.append(Found(self.place.partition, change.start, change.end, "closed", 0, values, key))

        one_by_one(take)(own)

    def _end(self, commit: Commit) -> None:
        self.progress = commit.progress
        if self._given < self._of_commit:  # the rest of the commit is the next page's
            self.place, self.is_full = self.place._replace(rows=self._given), True
            return
        self._of_commit = self._given = 0
        self._move(commit.offset + 1, commit.epoch)
        self.is_full, self.is_past = len(self.rows) == self._rows_max, self._has_all_closed()

    def _move(self, offset: int, epoch: int) -> None:
        self.place = self.place._replace(offset=offset, epoch=epoch, rows=self._given)

    def _has_all_closed(self) -> bool:
        """Whether every window that begins in time is closed: not of sessions, which can grow for ever."""
        store = self._wanted.store
        if store.kind not in WINDOWS or self.progress is None:
            return False
        closed_ms = self.progress.close_times_ms.get(store.name)
        return closed_ms is not None and closed_ms > self._wanted.reach[1] + store.size_ms
