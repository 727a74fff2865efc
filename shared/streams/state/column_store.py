"""Live sessions as columns: for aggregations whose states are numbers, one session at a time or a batch at once.

A session is a row of numpy columns: bounds, key number, states, and the bounds it had when last committed. A key is
known by a number too, for as long as it has a session or came by of late. Most keys have one live session, the key's
`head`; a key's sessions hang together from its latest to its earliest by `next`, and `older_end` is the end of the
second, so that one comparison shows whether an earlier session is in anybody's reach.

What the next commit writes is not kept beside the rows but read off them: a row that is DIRTY has changed since, one
that is PERSISTED was in the commit before, under `was_start` and `was_end` if it is dirty. Those bounds are also what
an operator that emits on update had shown. Of rows that went, finals, deletions and retractions are kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from shared.common.records import Int64Array
from shared.streams.columnar import StateColumns
from shared.streams.state.close_wheel import CloseWheel
from shared.streams.state.growing import GrowingColumns
from shared.streams.state.session_changes import ColumnChanges, Windows, distinct
from shared.streams.state.session_store import ClosedSession, Session, SessionChanges

LIVE, DIRTY, PERSISTED = 1, 2, 4
NONE = -1
NEVER = -(2**63)
WHEEL_BUCKETS_PER_GAP = 8
IDLE_KEYS_MIN = 4_096
"""So many keys without a session are remembered at least; more are forgotten once they outnumber those with one."""


class RowSession(Session):
    """A session as handed out: a copy of its row, good until the store is changed."""

    __slots__ = ("row",)

    def __init__(self, key: Any, start: int, end: int, states: list[Any], row: int) -> None:
        super().__init__(key, start, end, states, persisted=True)
        self.row = row


class ColumnSessionStore:
    """Session store in columns; `touched` is set by every change, for its owner to see and take back.

    `codes` has the number of each known key, and -1 for no key.
    """

    def __init__(self, name: str, columns: StateColumns, *, gap_ms: int, text_keys: bool) -> None:
        self.name, self.columns, self._text_keys = name, columns, text_keys
        self.state_names = tuple(f"s{i}" for i in range(len(columns.types)))
        bounds = dict.fromkeys(("start", "end", "was_start", "was_end"), "int64")
        numbers = {"key": "int32", "next": "int32", "flags": "uint8"}
        self.table = GrowingColumns(bounds | numbers | dict(zip(self.state_names, columns.types, strict=True)))
        self.key_table = GrowingColumns({"head": "int32", "older_end": "int64"})
        self.codes: dict[bytes | None, int] = {None: NONE}
        self.names: list[bytes] = []
        """Keys by their numbers."""
        self.wheel = CloseWheel(max(1, gap_ms // WHEEL_BUCKETS_PER_GAP), lambda rows: self.table.arrays["end"][rows])
        self.changed = ColumnChanges(columns)
        self.count = 0
        self.sum_max = 0.0
        """No int64 sum in a row is larger, signs aside."""
        self.touched = False

    def __len__(self) -> int:
        return self.count

    def __repr__(self) -> str:
        return f"ColumnSessionStore({self.name!r}, {self.count} live, {len(self.codes) - 1} keys)"

    # --- keys ---

    def code_of(self, raw: bytes) -> int:
        """The number of a key, a new one if need be."""
        code = self.codes.get(raw)
        if code is None:
            code = self.codes[raw] = self.key_table.allocate()
            self.key_table.views["head"][code], self.key_table.views["older_end"][code] = NONE, NEVER
            if code == len(self.names):
                self.names.append(raw)
            else:
                self.names[code] = raw
        return code

    def raw_keys(self, codes: Int64Array) -> list[bytes]:
        """Keys by number, as bytes."""
        return list(map(self.names.__getitem__, codes.tolist()))

    def key_of(self, raw: bytes) -> str | bytes:
        """A key as records have it."""
        if not self._text_keys:
            return raw
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def _known(self, key: Any) -> int:
        if isinstance(key, str):
            try:
                key = key.encode()
            except UnicodeEncodeError:
                return NONE
        return self.codes.get(key, NONE) if isinstance(key, bytes) else NONE

    # --- one session at a time ---

    def find(self, key: Any, earliest_end: int, latest_start: int) -> list[Session]:
        """The key's live sessions with end >= `earliest_end` and start <= `latest_start`, in order of start."""
        code = self._known(key)
        if code < 0:
            return []
        found: list[Session] = []
        views, row = self.table.views, self.key_table.views["head"][code]
        starts, ends, after = views["start"], views["end"], views["next"]
        while row >= 0 and ends[row] >= earliest_end:  # from the latest end to the earliest
            if starts[row] <= latest_start:
                found.append(self._session(row, key))
            row = after[row]
        if len(found) > 1:
            found.sort(key=lambda session: session.start)
        return found

    def put(self, session: Session) -> None:
        """Add a session; no live one of its key may lie within the gap."""
        key = session.key
        row = self._add(key if isinstance(key, bytes) else key.encode(), session.start, session.end, session.states)
        self.table.views["flags"][row] = LIVE | DIRTY
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
        if views["next"][self.key_table.views["head"][code]] >= 0:
            self.relink(code, self._chain(code))
        self.touched = True

    def remove(self, session: Session) -> None:
        """Take a session out, since it was merged away."""
        assert isinstance(session, RowSession)
        self.removed(np.array([session.row]))
        code = self.table.views["key"][session.row]
        self.relink(code, self._chain(code))

    def close_before(self, close_time: int, stream_time: int) -> list[ClosedSession]:
        """Take out and return all sessions whose end is below `close_time`, in order of (end, start, key)."""
        return self.close(self.wheel.due(close_time), close_time, stream_time)

    def close(self, due: list[int], close_time: int, stream_time: int) -> list[ClosedSession]:
        """As `close_before`, of the rows that the wheel gave out."""
        if not due:
            return []
        views, gone = self.table.views, []
        for row in due:
            if not views["flags"][row] & LIVE:
                self.table.free(row)
            elif (end := views["end"][row]) >= close_time:
                self.wheel.add(row, end)
            else:
                gone.append(row)
        gone.sort(key=lambda row: (views["end"][row], views["start"][row], self.names[views["key"][row]]))
        closed = []
        for row in gone:
            own = self._session(row)
            closed.append(ClosedSession(own.key, own.start, own.end, stream_time, own.states))
        if gone:
            rows = np.array(gone, np.int64)
            self.take_out(rows, np.full(len(rows), stream_time, np.int64))
        return closed

    def sessions(self) -> Iterator[Session]:
        """All live sessions."""
        flags = self.table.arrays["flags"][: self.table.used]
        for row in np.flatnonzero(flags & LIVE).tolist():
            yield self._session(row)

    def sessions_of(self, key: Any) -> list[Session]:
        """The key's live sessions in order of start."""
        return self.find(key, NEVER, 2**63 - 1)

    rows, rows_of = sessions, sessions_of

    def keys(self) -> Iterator[str | bytes]:
        """The keys that there are at the first look, and some that have nothing any more."""
        return (self.key_of(raw) for raw in list(self.codes) if raw is not None)

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live session; one with the same key and start is replaced."""
        self.unload(key, start)
        row = self._add(key if isinstance(key, bytes) else key.encode(), start, end, states)
        self.table.views["flags"][row] = LIVE | PERSISTED

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a session that is not there is no error, since a snapshot may be ahead of the log."""
        code, starts = self._known(key), self.table.views["start"]
        gone = [] if code < 0 else [row for row in self._chain(code) if starts[row] == start]
        if gone:
            self._die(np.array(gone))
            self.relink(code, self._chain(code))

    # --- what a commit writes ---

    def changes(self) -> SessionChanges:
        """All changes since the last `committed()`, as objects."""
        key = self.key_of
        finals = [
            ClosedSession(key(raw), start, end, at, self.columns.states(states))
            for raw, start, end, at, *states in self.finals().tuples(closed=True)
        ]
        deleted = [(key(raw), start) for raw, start in zip(*self.deleted(), strict=True)]
        live: list[Session] = [self._session(row) for row in self.dirty_rows().tolist()]
        return SessionChanges(finals, deleted, live)

    def finals(self) -> Windows:
        """The windows that were closed."""
        return self.changed.finals(self.raw_keys)

    def live(self) -> Windows:
        """The live windows that changed."""
        rows = self.dirty_rows()
        arrays = self.table.arrays
        own = [arrays[name][rows] for name in self.state_names]
        return Windows(self.raw_keys(arrays["key"][rows]), arrays["start"][rows], arrays["end"][rows], own)

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

    def updated(self) -> Windows:
        """The windows that changed, those that were closed after it among them."""
        return self.live().followed_by(self.changed.finals(self.raw_keys, changed_only=True))

    def committed(self) -> None:
        """The changes are in the changelog, or on their way there: a commit that fails ends with a restored store."""
        rows = self.dirty_rows()
        self.table.arrays["flags"][rows] = LIVE | PERSISTED
        self.changed = ColumnChanges(self.columns)
        self._forget_idle_keys()

    def dirty_rows(self) -> Int64Array:
        """The live rows that changed."""
        rows = self.changed.dirty_rows()
        is_dirty = self.table.arrays["flags"][rows] & (LIVE | DIRTY) == LIVE | DIRTY
        return np.asarray(rows[is_dirty])

    # --- rows ---

    def take_out(self, rows: Int64Array, closed_at: Int64Array) -> Windows:
        """Rows that were given out by the wheel and are closed; gives them as windows in the same order."""
        arrays = self.table.arrays
        columns = [arrays[name][rows] for name in self.state_names]
        codes, starts, ends = arrays["key"][rows].astype(np.int64), arrays["start"][rows], arrays["end"][rows]
        flags = arrays["flags"][rows]
        dirty = flags & DIRTY != 0
        was = dirty & (flags & PERSISTED != 0)
        self.changed.closed(codes, starts, ends, closed_at, columns, dirty)
        if was.any():
            self.changed.moved(
                codes[was], arrays["was_start"][rows[was]], arrays["was_end"][rows[was]], starts[was], ends[was]
            )
        arrays["flags"][rows] = 0
        self.count -= len(rows)
        self.touched = True
        self._unlink(distinct(codes))
        self.table.free_many(rows)
        return Windows(self.raw_keys(codes), starts, ends, columns, closed_at)

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

    def relink(self, code: int, rows: list[int]) -> None:
        """Hang a key's live rows together anew."""
        ends, after = self.table.views["end"], self.table.views["next"]
        rows.sort(key=lambda row: -ends[row])
        for row, older in zip(rows, [*rows[1:], NONE], strict=False):
            after[row] = older
        self.key_table.views["head"][code] = rows[0] if rows else NONE
        self.key_table.views["older_end"][code] = ends[rows[1]] if len(rows) > 1 else NEVER

    def chain_of(self, code: int) -> list[int]:
        """A key's live rows from the latest end to the earliest."""
        return self._chain(code)

    def _chain(self, code: int) -> list[int]:
        flags, after = self.table.views["flags"], self.table.views["next"]
        row, found = self.key_table.views["head"][code], []
        while row >= 0:
            if flags[row] & LIVE:
                found.append(row)
            row = after[row]
        return found

    def _session(self, row: int, key: Any = None) -> RowSession:
        views = self.table.views
        if key is None:
            key = self.key_of(self.names[views["key"][row]])
        states = self.columns.states([views[name][row] for name in self.state_names])
        return RowSession(key, views["start"][row], views["end"][row], states, row)

    def _add(self, raw: bytes, start: int, end: int, states: list[Any]) -> int:
        code, row = self.code_of(raw), self.table.allocate()
        views = self.table.views
        views["key"][row], views["start"][row], views["end"][row] = code, start, end
        self._set_states(row, states)
        head = self.key_table.views["head"]
        views["next"][row] = head[code]
        if head[code] < 0:
            head[code] = row
        else:
            views["flags"][row] = LIVE
            head[code] = row
            self.relink(code, self._chain(code))
        self.wheel.add(row, end)
        self.count += 1
        return row

    def _set_states(self, row: int, states: list[Any]) -> None:
        views, values = self.table.views, self.columns.values(states)
        for name, value in zip(self.state_names, values, strict=True):
            views[name][row] = value  # type: ignore[assignment]  # a view of float64 takes floats
        for i in self.columns.sums:
            self.sum_max = max(self.sum_max, abs(float(values[i])))

    def _die(self, rows: Int64Array) -> None:
        """Live rows end; the wheel will give them out and so make them free."""
        self.table.arrays["flags"][rows] = 0
        self.count -= len(rows)
        self.touched = True

    def _unlink(self, codes: Int64Array) -> None:
        """Of these keys, rows were closed: always those that end first, so that what is left is the chain's front."""
        heads, older = self.key_table.arrays["head"], self.key_table.arrays["older_end"]
        flags, after = self.table.arrays["flags"], self.table.arrays["next"]
        dead = flags[heads[codes]] & LIVE == 0
        heads[codes[dead]], older[codes[dead]] = NONE, NEVER
        codes = codes[~dead]
        second = after[heads[codes]]
        cut = (second >= 0) & (flags[second] & LIVE == 0)
        after[heads[codes[cut]]], older[codes[cut]] = NONE, NEVER
        for code in codes[~cut & (second >= 0)].tolist():
            self.relink(code, self._chain(code))

    def _forget_idle_keys(self) -> None:
        known = len(self.codes) - 1
        if known < IDLE_KEYS_MIN:
            return
        heads = self.key_table.arrays["head"][: self.key_table.used]
        live = int(np.count_nonzero(heads >= 0))
        if known - live > max(IDLE_KEYS_MIN, live):
            codes, names = self.codes, self.names
            for code in np.flatnonzero(heads < 0).tolist():
                if codes.pop(names[code], None) is not None:
                    names[code] = b""
                    self.key_table.free(code)
