"""The live windows of one store: a table of numbers that kernels change, and the changes for the next commit.

`take` applies the window rule to a batch of records. `take_one` applies it to one record. If a user's aggregation or
the check of the state's size rejects that record after windows were changed, `take_one` undoes all changes. Closed
windows are kept until the commit.

>>> from penstock.shared.streams.aggregations.aggregation import Count
>>> store = WindowStore("s", WindowRule("session", span_ms=10), StateColumns([Count()]), text_keys=True)
>>> codes = store.index.codes_of([b"ann", b"ann", b"bob"])
>>> outcome = store.take(np.array([0, 8, 40]), codes, store.columns.no_values(3), [])
>>> closed = outcome.closed
>>> outcome.count, list(closed.keys), closed.starts.tolist(), closed.ends.tolist(), outcome.closed_by.tolist()
(3, [b'ann'], [0], [8], [2])
>>> [(row.key, row.start, row.states) for row in store.rows()]
[('bob', 40, [1])]
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows.key_index import Int32Array
from penstock.shared.streams.windows.object_states import Done
from penstock.shared.streams.windows.state_columns import RecordNumbers, StateColumns
from penstock.shared.streams.windows.state_size_bounds import StateSizeBounds
from penstock.shared.streams.windows.window_columns import EMPTY, WindowColumns, newest_of_each_window
from penstock.shared.streams.windows.window_rule import WindowRule
from penstock.shared.streams.windows.window_table import NO_CLOSE_TIME, WindowTable

ROWS_AT_ONCE = 100
"""`rows` turns this many windows into objects at a time, even if its caller reads only one."""


class LiveWindow(NamedTuple):
    """One live window, with its bounds in ms. Only tumbling and hopping windows exclude `end`.

    A sliding window may be `closed`, but retained because later windows may begin with a copy of its states.
    """

    key: Any
    start: int
    end: int
    states: list[Any]
    closed: bool = False


@dataclass(frozen=True, slots=True)
class BatchOutcome:
    """The outcome of a batch."""

    count: int
    """The number of records that are done."""
    rejected_by: int | None
    """The index of the aggregation that rejects the next record, or None."""
    late: Int64Array
    """A row for each late record, and for each record that missed only some of its hopping windows: the record's index
    in the batch, the store's close time and stream time (ms) when the record came, and 1 if other windows accepted it,
    or 0 if it is late."""
    missed: int
    """The number of windows that all records together missed; always 0 for sessions."""
    closed: WindowColumns
    closed_by: Int64Array
    """The index of the record that closed each window of `closed`; NONE if `advance` without a record did."""
    updates: WindowColumns
    updates_by: Int64Array
    """The index of the record that caused each update."""
    is_retracted: NDArray[np.bool_]
    """Marks the updates that retract a window."""


class WindowStore:
    """A window store in memory. It sets `touched` if it takes a record or closes a window; its owner resets that."""

    def __init__(self, name: str, rule: WindowRule, columns: StateColumns, *, text_keys: bool) -> None:
        self.name = name
        self.rule = rule
        self.columns = columns
        self.table = WindowTable(rule, columns.program, columns.cells)
        self.index = self.table.keys
        self.sizes = StateSizeBounds(self.table, columns)
        self.touched = False
        self.fetch: Callable[[Iterable[bytes], int], None] | None = None
        """The function that `prepare` calls if windows are on disk."""
        self._text_keys = text_keys
        self._finals: list[WindowColumns] = []
        self._final_changed: list[WindowColumns] = []
        # Made once, because an outcome without closed or updated windows has it, as most of single records do.
        self._no_windows = WindowColumns.joined((), columns.types)

    def __len__(self) -> int:
        return len(self.table)

    def __repr__(self) -> str:
        return f"<WindowStore {self.name!r} of {len(self)} {self.rule.kind} windows>"

    @property
    def windows(self) -> WindowStore:
        """The windows that are in memory: all of them."""
        return self

    # --- time ---

    @property
    def stream_time_ms(self) -> int:
        """The highest timestamp of a record that the store took, or time set by `advance` or `begin`; -1 at first."""
        return int(self.table.meta[k.STREAM_TIME])

    @property
    def close_time_ms(self) -> int | None:
        """The close time: windows whose last moment is below it are closed. It never goes back.

        It is None until a record, `advance` or `begin` sets it. A store without windows never has one.
        """
        time_ms = int(self.table.meta[k.CLOSE_TIME])
        return None if time_ms == NO_CLOSE_TIME else time_ms

    def begin(self, stream_time_ms: int, close_time_ms: int | None) -> None:
        """Continue at these times, after windows were loaded."""
        self.table.begin(stream_time_ms, NO_CLOSE_TIME if close_time_ms is None else close_time_ms)

    def prepare(self, keys: Iterable[bytes | None], time_ms: int) -> None:
        """Fetch the windows that records with these keys, at times up to `time_ms`, can reach or close."""
        if self.fetch is not None:
            self.fetch({key for key in keys if key is not None}, time_ms)

    # --- records ---

    def take(
        self,
        times: Int64Array,
        codes: Int32Array,
        values: RecordNumbers,
        inputs: Sequence[Sequence[Any]],
        *,
        updates: bool = False,
    ) -> BatchOutcome:
        """Take records until all are taken or one is rejected.

        `inputs` has what the records add to each of `columns.objects`. With `updates`, the outcome contains every
        change of a result.
        """
        table = self.table
        table.logs_updates = updates
        changes = int(table.meta[k.CHANGED])
        count, rejected_by = table.take(times, codes, values)
        done = self._execute_steps(inputs, times)
        return self._make_batch_outcome(count, rejected_by, done, changes)

    def take_one(
        self,
        times: Int64Array,
        codes: Int32Array,
        values: RecordNumbers,
        inputs: Sequence[Sequence[Any]],
        check: Callable[[list[Any]], object],
        *,
        updates: bool = False,
    ) -> BatchOutcome:
        """As `take`, for one record. If an aggregation or `check` raises, all changes are undone.

        `check` is called with the states of each window that took the record.
        """
        table = self.table
        table.logs_updates = updates
        # 1. Mark, so that everything can be undone.
        mark = table.mark(int(codes[0]))
        changes = int(table.meta[k.CHANGED])
        undo: list[list[tuple[int, Any]]] = [[] for _ in self.columns.objects]
        try:
            # 2. Take the record without closing anything: a closed window could not be undone, and its result would be
            # forwarded.
            count, rejected_by = table.take(times, codes, values, closes=False)
            done = self._execute_steps(inputs, times, undo)
            # 3. Measure the states of the windows that took it.
            if not self._late_records():
                for row in {row for step, row, _ in table.steps[: table.meta[k.STEPS]].tolist() if step == k.ADD}:
                    check(self._states_of_window(row))
        except Exception:
            # 4. Undo. Numbers are copied back, and states are replaced by those of before.
            table.roll_back(mark)
            table.clear()
            for states, changed in zip(self.columns.objects, undo, strict=True):
                for row, state in reversed(changed):
                    states.rows[row] = state
            raise
        # 5. Now that the record counts, advance time and close what is due.
        steps = int(table.meta[k.STEPS])
        if rejected_by is None:
            table.advance(int(times[0]), 0)
        for own, more in zip(done, self._execute_steps(inputs, times, first=steps), strict=True):
            own.closed.extend(more.closed)
        return self._make_batch_outcome(count, rejected_by, done, changes)

    def advance(self, stream_time_ms: int) -> BatchOutcome:
        """Advance time without a record, and close the due windows."""
        changes = int(self.table.meta[k.CHANGED])
        self.table.advance(stream_time_ms)
        return self._make_batch_outcome(0, None, self._execute_steps([()] * len(self.columns.objects), ()), changes)

    def _execute_steps(
        self,
        inputs: Sequence[Sequence[Any]],
        times: Any,
        undo: list[list[tuple[int, Any]]] | None = None,
        first: int = 0,
    ) -> list[Done]:
        objects = self.columns.objects
        if not objects:
            return []
        steps = self.table.steps[first : self.table.meta[k.STEPS]].tolist()
        at = times if isinstance(times, tuple) else times.tolist()
        done = []
        for i, states in enumerate(objects):
            states.resize(len(self.table.flags))
            done.append(states.execute(steps, inputs[i], at, None if undo is None else undo[i]))
        return done

    def _late_record_rows(self) -> Int64Array:
        return self.table.late[: self.table.meta[k.LATE]]

    def _late_records(self) -> int:
        """Return how many of the records no window took."""
        late = self._late_record_rows()
        return int(len(late) - late[:, k.LATE_ACCEPTED].sum())

    def _make_batch_outcome(
        self, count: int, rejected_by: int | None, done: Sequence[Done], changes: int
    ) -> BatchOutcome:
        table = self.table
        meta = self.table.meta
        # If all records were late, nothing has changed, and the current record can still be rejected.
        if meta[k.CHANGED] > changes or meta[k.CLOSED] or count > self._late_records():
            self.touched = True
        late = self._late_record_rows().copy()
        closed, closed_by = self._closed_windows([own.closed for own in done])
        updates, updates_by, retracted = self._updated_windows([own.updated for own in done])
        missed = int(meta[k.MISSED])
        table.clear()
        return BatchOutcome(
            count=count,
            rejected_by=rejected_by,
            late=late,
            missed=missed,
            closed=closed,
            closed_by=closed_by,
            updates=updates,
            updates_by=updates_by,
            is_retracted=retracted,
        )

    def _closed_windows(self, states: Sequence[Sequence[Any]]) -> tuple[WindowColumns, Int64Array]:
        count = int(self.table.meta[k.CLOSED])
        if not count:
            return self._no_windows, EMPTY
        rows = self.table.closed[:count].copy()
        columns = self.columns.of_rows(rows[:, k.CLOSED_COLUMNS :], states)
        ends = rows[:, k.TO] + self.rule.last_ms
        starts = rows[:, k.FROM].copy()
        closed_at = rows[:, k.CLOSED_AT].copy()
        windows = WindowColumns(self.index.keys(rows[:, k.CODE]), starts, ends, columns, closed_at)
        # Their rows may be used again before the commit encodes the finals.
        self._finals.append(windows)
        if (is_new := rows[:, k.WAS_DIRTY] != 0).any():
            # On update, a window is forwarded again only if it changed since the last commit.
            self._final_changed.append(windows if is_new.all() else windows.chosen(is_new))
        return windows, rows[:, k.INDEX]

    def _updated_windows(self, states: Sequence[dict[int, Any]]) -> tuple[WindowColumns, Int64Array, NDArray[np.bool_]]:
        count = int(self.table.meta[k.UPDATES])
        if not count:
            return self._no_windows, EMPTY, EMPTY != 0
        rows = self.table.updates[:count].copy()
        retracted = rows[:, 4] == 0
        whole = [list(map(own.get, range(count))) for own in states]
        columns = self.columns.of_rows(rows[:, k.UPDATE_COLUMNS :], whole)
        ends = rows[:, k.TO] + self.rule.last_ms
        windows = WindowColumns(self.index.keys(rows[:, k.CODE]), rows[:, k.FROM].copy(), ends, columns)
        return windows, rows[:, k.INDEX], retracted

    # --- windows as objects ---

    def key_of(self, raw: bytes) -> str | bytes:
        """Return a key as text if the store's keys are text. Bytes that are not UTF-8 remain bytes."""
        if not self._text_keys:
            return raw
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return raw

    def keys_of(self, raw: PackedBytes) -> list[Any]:
        """As `key_of`, for many keys."""
        return list(map(self.key_of, raw.tolist())) if self._text_keys else raw.tolist()

    def keys_between(self, low: int, high: int) -> list[Any]:
        """Return the keys that have a window, and whose `key_hash` is from `low` to `high`, in no order."""
        return self.keys_of(self.index.keys(self.table.codes_between(low, high)))

    def rows(self) -> Iterator[LiveWindow]:
        """Yield all windows that are live when this method is called; none may be removed meanwhile."""
        rows = self.table.live_rows()
        starts = range(0, len(rows), ROWS_AT_ONCE)
        return chain.from_iterable(self._live_windows(rows[at : at + ROWS_AT_ONCE]) for at in starts)

    def rows_of(self, key: Any) -> list[LiveWindow]:
        """Return the key's live windows in order of start."""
        return self._live_windows(self._table_rows_of(key))

    def rows_after(self, key: Any, after: int | None, limit: int) -> list[LiveWindow]:
        """Return the key's first live windows in order of start: at most `limit`, and only starts after `after`."""
        rows = self._table_rows_of(key)
        first = 0 if after is None else int(np.searchsorted(self.table.cells[rows, k.START], after, "right"))
        return self._live_windows(rows[first : first + limit])

    def latest_rows(self, key: Any, end_max: int, limit: int) -> list[LiveWindow]:
        """Return the key's last live windows in order of start: at most `limit`, which end at `end_max` or earlier."""
        rows = self._table_rows_of(key)
        # No window of a key starts before another and ends after it.
        last = int(np.searchsorted(self.table.cells[rows, k.END], end_max - self.rule.last_ms, "right"))
        return self._live_windows(rows[max(0, last - limit) : last])

    def _table_rows_of(self, key: Any) -> Int64Array:
        code = self._find_key_code(key)
        return EMPTY if code == k.NONE else self.table.rows_of(code)

    def _live_windows(self, rows: Int64Array) -> list[LiveWindow]:
        retained = self.table.flags[rows] & k.RETAINED != 0
        columns = self._window_columns(rows)
        return [
            LiveWindow(self.key_of(key), start, end, self.columns.states(values), bool(is_retained))
            for (key, start, end, *values), is_retained in zip(columns.tuples(), retained.tolist(), strict=True)
        ]

    def _window_columns(self, rows: Int64Array) -> WindowColumns:
        table = self.table
        cells = table.cells[rows]
        keys = self.index.keys(table.links[rows, k.KEY])
        own = [[states.rows[row] for row in rows.tolist()] for states in self.columns.objects]
        columns = self.columns.of_rows(cells[:, table.base :], own)
        return WindowColumns(keys, cells[:, k.START].copy(), cells[:, k.END] + self.rule.last_ms, columns)

    def _states_of_window(self, row: int) -> list[Any]:
        cells = self.table.cells[row : row + 1, self.table.base :]
        own = self.columns.objects
        columns = self.columns.of_rows(cells, [states.rows[row : row + 1] for states in own])
        return self.columns.states([column.tolist()[0] for column in columns])

    def _find_key_code(self, key: Any) -> int:
        if isinstance(key, str):
            try:
                key = key.encode()
            except UnicodeEncodeError:
                return k.NONE
        return self.index.code(key) if isinstance(key, bytes) else k.NONE

    # --- changes for a commit ---

    def finals(self) -> WindowColumns:
        """Return the windows that were closed since the last commit."""
        return WindowColumns.joined(self._finals, self.columns.types)

    def live(self) -> WindowColumns:
        """Return the live windows that have changed since the last commit."""
        return self._window_columns(self.table.changed_rows())

    def deleted(self) -> tuple[PackedBytes, Int64Array]:
        """Return keys and starts that windows had at the last commit and no window has now.

        The start of a window that closed is left out, unless the window was retained.
        """
        keys, starts, _ = self._removed_windows(k.REMOVED)
        return keys, starts

    def _removed_windows(self, kind: int) -> tuple[PackedBytes, Int64Array, Int64Array]:
        table = self.table
        removed = table.deleted[: table.meta[k.DELETED]]
        removed = removed[removed[:, 3] & kind != 0]
        moved = table.moved_rows()
        if kind == k.REMOVED:
            # A session that only got a later end keeps its entry, which L replaces.
            moved = moved[table.cells[moved, k.START] != table.cells[moved, k.SHOWN_START]]
        codes = removed[:, 0]
        starts = removed[:, 1]
        ends = removed[:, 2]
        if len(moved):
            shown = table.cells[moved]
            codes = np.concatenate((codes, table.links[moved, k.KEY]))
            starts = np.concatenate((starts, shown[:, k.SHOWN_START]))
            ends = np.concatenate((ends, shown[:, k.SHOWN_END]))
        return self.index.keys(codes), starts, ends

    def updated(self) -> tuple[WindowColumns, NDArray[np.bool_]]:
        """Return the windows whose results have changed since the last commit, and a mask of the retracted ones.

        Changed windows that were closed since then are included.
        """
        live = self.live()
        # A window that was only closed and retained also counts as changed, for the changelog, but its result is the
        # same.
        if self.rule.retains:
            retained = self.table.flags[self.table.changed_rows()] & k.RETAINED != 0
            live = live.chosen(~retained) if retained.any() else live
        others, is_retracted = self.updated_not_live()
        windows = WindowColumns.joined((others, live), self.columns.types)
        return windows, np.append(is_retracted, np.zeros(len(live), np.bool_))

    def updated_not_live(self) -> tuple[WindowColumns, NDArray[np.bool_]]:
        """As `updated`, but only the retracted and the closed windows."""
        keys, starts, ends = self._removed_windows(k.RETRACTED)
        none = self.columns.of_rows(
            np.zeros((len(keys), self.columns.cells), np.int64), [[None] * len(keys) for _ in self.columns.objects]
        )
        retracted = WindowColumns(keys, starts, ends, none)
        parts = [replace(part, closed_at=EMPTY) for part in (retracted, *self._final_changed)]
        windows = WindowColumns.joined(parts, self.columns.types)
        return windows, np.arange(len(windows)) < len(retracted)

    def committed(self) -> None:
        """Drop the changes, which are in the changelog or will be; after a failed commit the store is restored."""
        self._finals = []
        self._final_changed = []
        self.table.committed()

    def dirty_keys(self) -> set[Any]:
        """Return the keys whose windows differ from the last commit."""
        changed = self.table.links[self.table.changed_rows(), k.KEY]
        deleted = self.table.deleted[: self.table.meta[k.DELETED], 0]
        parts = [self.index.keys(changed), self.index.keys(deleted), *(part.keys for part in self._finals)]
        return {key for part in parts for key in self.keys_of(part)}

    # --- restoring ---

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live window; it replaces one with the same key and start."""
        self.unload(key, start)
        columns = self.columns.as_columns([self.columns.values(states)])
        raw = key if isinstance(key, bytes) else key.encode()
        self._load_windows(WindowColumns(PackedBytes.of([raw]), np.array([start]), np.array([end]), columns))

    def replay(
        self,
        keys: PackedBytes,
        starts: Int64Array,
        ends: Int64Array,
        is_live: NDArray[np.bool_],
        read: Callable[[Int64Array], Sequence[Any]],
    ) -> None:
        """Apply changes of windows, in the order of the changelog, during a restore.

        `is_live` tells whether a change sets a window or removes it. `read` returns the `state_columns` of the changes
        at the given indexes. Errors of `read` and decoding errors are raised before anything is changed.
        """
        codes = self.index.codes_of(keys)
        newest = newest_of_each_window(codes, starts)
        live = newest[is_live[newest]]
        columns = self.columns.from_changelog(read(live))
        # All errors have been raised by now, so a batch of entries is applied as a whole or not at all.
        self._drop_windows(self.table.rows_at(codes[newest], starts[newest]))
        if len(live):
            self._load_windows(WindowColumns(keys.at(live), starts[live], ends[live], columns), codes[live])
        # A restore and a standby do not commit. Without this they would keep the key of each closed window.
        self.table.release_keys()

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a missing window is no error, since a snapshot may be ahead of the log."""
        code = self._find_key_code(key)
        if code != k.NONE:
            self._drop_windows(self.table.rows_at(np.array([code], np.int32), np.array([start], np.int64)))

    def evict(self, key: Any) -> int:
        """Drop a key's windows from memory, because they are kept elsewhere; return their number."""
        rows = self._table_rows_of(key)
        self._drop_windows(rows)
        return len(rows)

    def _load_windows(self, windows: WindowColumns, codes: Int32Array | None = None) -> None:
        cells, states = self.columns.to_rows(windows.columns)
        if codes is None:
            codes = self.index.codes_of(windows.keys)
        # States were replaced, so the bounds of their sizes are unknown.
        if self.columns.objects:
            self.sizes.forget(codes)
        ends = np.asarray(windows.ends, np.int64) - self.rule.last_ms
        rows = self.table.load(codes, np.asarray(windows.starts, np.int64), ends, cells)
        for objects, own in zip(self.columns.objects, states, strict=True):
            objects.resize(len(self.table.flags))
            for row, state in zip(rows.tolist(), own, strict=True):
                objects.rows[row] = state

    def _drop_windows(self, rows: Int64Array) -> None:
        self.table.drop(rows)
        for states in self.columns.objects:
            for row in rows.tolist():
                states.rows[row] = None
