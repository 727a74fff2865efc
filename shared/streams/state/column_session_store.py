"""Live sessions as columns: one session at a time or a batch at once.

Most keys have one live session, the key's `head`; a key's sessions hang together from its latest to its earliest by
`next`, and back by `newer`, and `older_end` is the end of the second, so that one comparison shows whether an earlier
session is in anybody's reach. So what comes in order, grows or goes costs the same however many sessions its key has;
what comes late is looked for from the latest on.

A row that is DIRTY and PERSISTED was in the last commit under `was_start` and `was_end`. Those bounds are also what an
operator that emits on update had shown.
"""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.columnar import FloatArray, StateColumns
from penstock.shared.streams.state.column_store import DIRTY, LIVE, NEVER, NONE, PERSISTED, ColumnStore
from penstock.shared.streams.state.session_changes import distinct
from penstock.shared.streams.state.session_store import ClosedSession, Session, SessionChanges

WHEEL_BUCKETS_PER_GAP = 8


class RowSession(Session):
    """A session as handed out: a copy of its row, good until the store is changed."""

    __slots__ = ("row",)

    def __init__(self, key: Any, start: int, end: int, states: list[Any], row: int) -> None:
        super().__init__(key, start, end, states, persisted=True)
        self.row = row


class ColumnSessionStore(ColumnStore):
    """Session store in columns, used as `InMemorySessionStore` is."""

    ROW_COLUMNS: ClassVar = {"was_start": "int64", "was_end": "int64", "next": "int32", "newer": "int32"}
    KEY_COLUMNS: ClassVar = {"head": ("int32", NONE), "older_end": ("int64", NEVER)}
    FINAL = ClosedSession

    def __init__(self, name: str, columns: StateColumns, *, gap_ms: int, text_keys: bool) -> None:
        super().__init__(name, columns, bucket_ms=max(1, gap_ms // WHEEL_BUCKETS_PER_GAP), text_keys=text_keys)
        self._passed = NONE
        """The earliest session beyond what was looked for last: what is put then has its place not far behind it."""

    # --- one session at a time ---

    def find(self, key: Any, earliest_end: int, latest_start: int) -> list[Session]:
        """The key's live sessions with end >= `earliest_end` and start <= `latest_start`, in order of start."""
        code = self._known(key)
        if code < 0:
            return []
        found: list[Session] = []
        views, row = self.table.views, self.key_table.views["head"][code]
        starts, ends, after = views["start"], views["end"], views["next"]
        beyond, passed = max(earliest_end, latest_start), NONE
        while row >= 0 and starts[row] > beyond:
            passed, row = row, after[row]
        self._passed = passed
        while row >= 0 and ends[row] >= earliest_end:  # from the latest end to the earliest
            if starts[row] <= latest_start:
                found.append(self.row(row, key))
            row = after[row]
        if len(found) > 1:
            found.sort(key=lambda session: session.start)
        return found

    def put(self, session: Session) -> None:
        """Add a session; no live one of its key may lie within the gap."""
        row = self._add(session.key, session.start, session.end, session.states, LIVE | DIRTY)
        self.changed.dirty.append(row)
        self.touched = True

    def extend(self, session: Session, start: int, end: int, states: list[Any]) -> None:
        """Give a live session new bounds and states; it must keep its place among the key's sessions."""
        assert isinstance(session, RowSession)
        row, views = session.row, self.table.views
        if not views["flags"][row] & DIRTY:
            views["flags"][row] |= DIRTY
            views["was_start"][row], views["was_end"][row] = views["start"][row], views["end"][row]
            self.changed.dirty.append(row)
        views["start"][row], views["end"][row] = start, end
        self._set_states(row, states)
        code = views["key"][row]
        if views["newer"][row] == self.key_table.views["head"][code]:
            self.key_table.views["older_end"][code] = end
        self.touched = True

    def remove(self, session: Session) -> None:
        """Take a session out, since it was merged away."""
        assert isinstance(session, RowSession)
        self.removed(np.array([session.row]))
        self._unlink(session.row)

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a session that is not there is no error, since a snapshot may be ahead of the log."""
        code, starts = self._known(key), self.table.views["start"]
        for row in [] if code < 0 else self.chain_of(code):
            if starts[row] == start:
                self._die(np.array([row]))
                self._unlink(row)

    def row(self, row: int, key: Any = None) -> RowSession:
        """One session as an object; `key` is its key, where that is at hand."""
        views = self.table.views
        if key is None:
            key = self.key_of(self.names[views["key"][row]])
        return RowSession(key, views["start"][row], views["end"][row], self._states(row), row)

    def rows_of(self, key: Any) -> list[Session]:
        """The key's live sessions in order of start."""
        return self.find(key, NEVER, 2**63 - 1)

    sessions, sessions_of = ColumnStore.rows, rows_of

    def changes(self) -> SessionChanges:
        """All changes since the last `committed()`, as objects."""
        deleted = [(self.key_of(raw), start) for raw, start in zip(*self.deleted(), strict=True)]
        live: list[Session] = [self.row(row) for row in self.dirty_rows().tolist()]
        return SessionChanges(self._as_finals(self.finals()), deleted, live)

    def is_crowded(self, gap_ms: int) -> bool:
        """Whether sessions of a key are no more than the gap apart: they were stored when it was shorter."""
        arrays, rows = self.table.arrays, self.live_rows()
        older = arrays["next"][rows]
        rows, older = rows[older >= 0], older[older >= 0]
        return bool((arrays["start"][rows] - arrays["end"][older] <= gap_ms).any())

    def magnitudes(self) -> FloatArray:
        """Those of all the key's sessions: a batch may join any of them."""
        return self.columns.magnitudes(*self._live_states())

    # --- what a commit writes ---

    def deleted(self) -> tuple[list[bytes], list[int]]:
        """Keys and starts under which the last commit's windows are no longer."""
        arrays, rows = self.table.arrays, self.dirty_rows()
        moved = (arrays["flags"][rows] & PERSISTED != 0) & (arrays["was_start"][rows] != arrays["start"][rows])
        keys, starts = self.changed.deleted(arrays["key"][rows[moved]], arrays["was_start"][rows[moved]])
        return self.raw_keys(keys), starts.tolist()

    def retracted(self) -> tuple[list[bytes], list[int], list[int]]:
        """Keys, starts and ends of the windows that the last commit had and that are now within others."""
        arrays, rows = self.table.arrays, self.dirty_rows()
        rows = rows[arrays["flags"][rows] & PERSISTED != 0]
        was = arrays["was_start"][rows], arrays["was_end"][rows]
        moved = (was[0] != arrays["start"][rows]) | (was[1] != arrays["end"][rows])
        keys, *bounds = self.changed.retracted(arrays["key"][rows[moved]], was[0][moved], was[1][moved])
        return self.raw_keys(keys), bounds[0].tolist(), bounds[1].tolist()

    def removed(self, rows: Int64Array) -> None:
        """Rows that were merged away; whoever calls links what is left of their keys."""
        arrays = self.table.arrays
        flags = arrays["flags"][rows]
        was = rows[flags & PERSISTED != 0]
        dirty = arrays["flags"][was] & DIRTY != 0
        starts = np.where(dirty, arrays["was_start"][was], arrays["start"][was])
        ends = np.where(dirty, arrays["was_end"][was], arrays["end"][was])
        self.changed.merged_away(arrays["key"][was].astype(np.int64), starts, ends)
        self._die(rows)

    # --- how a key's sessions hang together ---

    def attach(self, codes: Int64Array, rows: Int64Array) -> None:
        """Hang live rows to their keys' others."""
        for link in ("next", "newer"):
            self.table.arrays[link][rows] = NONE
        heads = self.key_table.arrays["head"]
        alone = np.bincount(codes, minlength=self.key_table.used)[codes] == 1
        alone &= heads[codes] == NONE
        heads[codes[alone]] = rows[alone]
        others: dict[int, list[int]] = {}
        for code, row in zip(codes[~alone].tolist(), rows[~alone].tolist(), strict=True):
            others.setdefault(code, []).append(row)
        for code, own in others.items():
            self._relink(code, self.chain_of(code) + own)

    def _attach_one(self, code: int, row: int) -> None:
        views, heads = self.table.views, self.key_table.views["head"]
        ends, after = views["end"], views["next"]
        end, newer, older, passed = ends[row], NONE, heads[code], self._passed
        if passed >= 0 and views["flags"][passed] & LIVE and views["key"][passed] == code and ends[passed] > end:
            newer, older = passed, after[passed]
        while older >= 0 and ends[older] > end:
            newer, older = older, after[older]
        self._join(code, newer, row)
        self._join(code, row, older)
        self._note_second(code)

    def _detach(self, rows: Int64Array, codes: Int64Array, starts: Int64Array, ends: Int64Array, flags: Any) -> None:
        was = (flags & DIRTY != 0) & (flags & PERSISTED != 0)
        if was.any():
            before = self.table.arrays["was_start"][rows[was]], self.table.arrays["was_end"][rows[was]]
            self.changed.moved(codes[was], *before, starts[was], ends[was])
        self._cut(rows, distinct(codes))

    def _have_rows(self) -> NDArray[np.bool_]:
        return np.asarray(self.key_table.arrays["head"][: self.key_table.used] >= 0)

    def _relink(self, code: int, rows: list[int]) -> None:
        """Hang a key's live rows together anew."""
        ends = self.table.views["end"]
        rows.sort(key=lambda row: -ends[row])
        for newer, older in zip([NONE, *rows], [*rows, NONE], strict=True):
            self._join(code, newer, older)
        self._note_second(code)

    def _join(self, code: int, newer: int, older: int) -> None:
        """One follows the other; without a newer one it is the key's head."""
        views = self.table.views
        if newer >= 0:
            views["next"][newer] = older
        else:
            self.key_table.views["head"][code] = older
        if older >= 0:
            views["newer"][older] = newer

    def _unlink(self, row: int) -> None:
        """A row is not live any more, whose sessions on either side are."""
        views = self.table.views
        code = views["key"][row]
        self._join(code, views["newer"][row], views["next"][row])
        self._note_second(code)

    def _note_second(self, code: int) -> None:
        views, keys = self.table.views, self.key_table.views
        head = keys["head"][code]
        second = views["next"][head] if head >= 0 else NONE
        keys["older_end"][code] = views["end"][second] if second >= 0 else NEVER

    def chain_of(self, code: int) -> list[int]:
        """A key's live rows from the latest end to the earliest."""
        flags, after = self.table.views["flags"], self.table.views["next"]
        row, found = self.key_table.views["head"][code], []
        while row >= 0:
            if flags[row] & LIVE:
                found.append(row)
            row = after[row]
        return found

    def _cut(self, rows: Int64Array, codes: Int64Array) -> None:
        """These rows of these keys were closed: always those that end first, so what is left is a chain's front."""
        heads, older = self.key_table.arrays["head"], self.key_table.arrays["older_end"]
        flags, after = self.table.arrays["flags"], self.table.arrays["next"]
        newer = self.table.arrays["newer"][rows]
        after[newer[(newer >= 0) & (flags[newer] & LIVE != 0)]] = NONE
        dead = flags[heads[codes]] & LIVE == 0
        heads[codes[dead]] = NONE
        older[codes[dead | (after[heads[codes]] < 0)]] = NEVER
