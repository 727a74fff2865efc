"""Batches into a store of columns: sort, cut where the gap is exceeded, merge with what is stored.

Everything here is about keys by number and sessions by row. Runs and stored sessions are both intervals: sorted by key
and start, cut where one begins more than the gap after all before it have ended, each group is one session from then
on. So a stored session that lies between two runs joins them, and nothing has to be merged twice. Two stored sessions
that are no more than the gap apart, which was shorter when they were stored, are not joined for that alone: it takes a
record, as in Kafka Streams.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.columnar import NumberArray
from penstock.shared.streams.state.column_session_store import ColumnSessionStore
from penstock.shared.streams.state.column_store import DIRTY, LIVE, NEVER, NONE

PACKED_BITS = 63


def sorted_order(*columns: Int64Array, in_runs: bool = False) -> Int64Array:
    """The order by the first column, then the next, and so on, equal ones as they came.

    Columns and place are packed into one integer where they fit: sorting those is ten times as fast; and as much again
    where they are known to be `in_runs`, long stretches that are in order already.
    """
    count = len(columns[0])
    place_bits = (count - 1).bit_length()
    lows = [int(column.min()) for column in columns]
    bits = [(int(column.max()) - low).bit_length() for column, low in zip(columns, lows, strict=True)]
    if sum(bits) + place_bits > PACKED_BITS:
        return np.lexsort(columns[::-1])
    packed = columns[0] - lows[0]
    for column, low, own_bits in zip(columns[1:], lows[1:], bits[1:], strict=True):
        packed = (packed << own_bits) | (column - low)
    packed = (packed << place_bits) | np.arange(count)
    packed.sort(kind="stable" if in_runs else "quicksort")
    return packed & ((1 << place_bits) - 1)


def cuts(codes: Int64Array, starts: Int64Array, ends: Int64Array, gap_ms: int) -> NDArray[np.bool_]:
    """Where groups begin among intervals in order of code and start: another code, or the gap exceeded."""
    new = np.empty(len(codes), np.bool_)
    new[0] = True
    np.not_equal(codes[1:], codes[:-1], out=new[1:])
    if ends is not starts:
        ends = _highest_so_far(new, ends)
    new[1:] |= starts[1:] - ends[:-1] > gap_ms
    return new


def _highest_so_far(new_code: NDArray[np.bool_], ends: Int64Array) -> Int64Array:
    """The running maximum within each code."""
    low = int(ends.min())
    place = np.cumsum(new_code)
    bits = (int(ends.max()) - low).bit_length()
    if int(place[-1]).bit_length() + bits <= PACKED_BITS:
        highest: Int64Array = np.maximum.accumulate((place << bits) | (ends - low))
        return (highest & ((1 << bits) - 1)) + low
    values, ranks = np.unique(ends, return_inverse=True)
    highest = np.maximum.accumulate(place * len(values) + ranks)
    return np.asarray(values[highest % len(values)])


def joined_by_runs(
    new: NDArray[np.bool_], starts: Int64Array, ends: Int64Array, is_stored: NDArray[np.bool_], gap_ms: int
) -> Int64Array:
    """Where groups begin, once those of `cuts` are cut before each stored session that no run joins to those before.

    Neither a run before it reaches it, nor one after it reaches what is before it. Runs are more than the gap apart.
    """
    first = np.flatnonzero(new)
    is_several = np.add.reduceat(is_stored.astype(np.int64), first) > 1
    if not is_several.any():
        return first
    at = np.flatnonzero(np.repeat(is_several, np.diff(np.append(first, len(new)))))
    begins, starts, ends, stored = new[at], starts[at], ends[at], is_stored[at]
    count, place = len(at), np.arange(len(at))
    group = np.maximum.accumulate(np.where(begins, place, 0))
    run_before = np.append(NONE, np.maximum.accumulate(np.where(stored, NONE, place))[:-1])
    run_after = np.minimum.accumulate(np.where(stored, count, place)[::-1])[::-1]
    end_before = np.append(NEVER, _highest_so_far(begins, ends)[:-1])
    reached = (run_before >= group) & (starts - ends[run_before] <= gap_ms)
    after = np.minimum(run_after, count - 1)
    joined = (run_after < count) & (group[after] == group) & (starts[after] - gap_ms <= end_before)
    new[at] |= stored & ~reached & ~joined
    return np.flatnonzero(new)


def merge_runs(
    store: ColumnSessionStore,
    codes: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    columns: list[NumberArray],
    gap_ms: int,
) -> None:
    """Take runs (in order of code and start, those of a code more than the gap apart) into a store."""
    of_key = np.flatnonzero(np.concatenate(([True], codes[1:] != codes[:-1])))
    keys = _Keys(store, codes[of_key], starts[of_key] - gap_ms)
    rows = np.full(len(codes), NONE, np.int64)
    stored = keys.stored_rows()
    if len(stored):
        arrays = store.table.arrays
        own = store.columns.opened([arrays[name][stored] for name in store.state_names])
        codes = np.concatenate((codes, arrays["key"][stored]))
        starts, ends = np.concatenate((starts, arrays["start"][stored])), np.concatenate((ends, arrays["end"][stored]))
        rows = np.concatenate((rows, stored))
        order = sorted_order(codes, starts)
        codes, starts, ends, rows = codes[order], starts[order], ends[order], rows[order]
        columns = [np.concatenate(pair)[order] for pair in zip(columns, own, strict=True)]
        is_stored = rows >= 0
        first = joined_by_runs(cuts(codes, starts, ends, gap_ms), starts, ends, is_stored, gap_ms)
        sizes = np.diff(np.append(first, len(codes)))
        # Of the stored sessions of a group the first goes on as the whole; it has the key's row of that start.
        chosen = np.minimum.reduceat(np.where(is_stored, np.arange(len(rows)), len(rows)), first)
        numbers = np.add.reduceat(is_stored.astype(np.int64), first)
        others = is_stored.copy()
        others[chosen[numbers > 0]] = False
        gone = rows[others]
        rows = np.where(numbers > 0, rows[np.minimum(chosen, len(rows) - 1)], NONE)
        changed = sizes > numbers
        codes, starts, ends = codes[first], starts[first], np.maximum.reduceat(ends, first)
        columns = store.columns.merge(columns, first, is_stored)
        if len(gone):
            store.removed(gone)
    else:
        changed = np.ones(len(codes), np.bool_)
    _write(store, codes, starts, ends, store.columns.closed(columns), rows, changed)
    keys.link(codes, ends, rows)


def _write(
    store: ColumnSessionStore,
    codes: Int64Array,
    starts: Int64Array,
    ends: Int64Array,
    columns: list[NumberArray],
    rows: Int64Array,
    changed: NDArray[np.bool_],
) -> None:
    """Put groups into their rows, and into new ones (written into `rows`) where they have none."""
    fresh = np.flatnonzero(rows < 0)
    known = np.flatnonzero(changed & (rows >= 0))
    new = store.table.allocate_many(len(fresh))
    rows[fresh] = new
    arrays = store.table.arrays
    old = rows[known]
    clean = old[arrays["flags"][old] & DIRTY == 0]
    arrays["was_start"][clean], arrays["was_end"][clean] = arrays["start"][clean], arrays["end"][clean]
    arrays["flags"][clean] |= DIRTY
    arrays["flags"][new] = LIVE | DIRTY
    arrays["key"][new] = codes[fresh]
    store.changed.dirty_many += [clean, new]
    at = np.concatenate((known, fresh))
    into = rows[at]
    arrays["start"][into], arrays["end"][into] = starts[at], ends[at]
    for name, column in zip(store.state_names, columns, strict=True):
        arrays[name][into] = column[at]
    store.wheel.add_many(new, ends[fresh])
    store.count += len(new)
    store.touched = True


class _Keys:
    """The keys of a batch, which of their stored sessions are within reach of it, and how all of them hang together."""

    def __init__(self, store: ColumnSessionStore, codes: Int64Array, reach: Int64Array) -> None:
        """`reach` is how far back from its first run a key's sessions may be extended."""
        self._store, self._codes, self._reach = store, codes, reach
        keys, rows = store.key_table.arrays, store.table.arrays
        self._heads = keys["head"][codes].astype(np.int64)
        has = self._heads >= 0
        self._head_ends = np.where(has, rows["end"][self._heads], NEVER)
        self._linked = has & (self._head_ends >= reach)
        self._rest = np.where(self._linked, rows["next"][self._heads], np.where(has, self._heads, NONE))
        self._older_ends = keys["older_end"][codes]
        self._chained = self._older_ends >= reach

    def stored_rows(self) -> Int64Array:
        """The stored sessions that a run may reach."""
        rows = self._heads[self._linked]
        if not self._chained.any():
            return rows
        views, more = self._store.table.views, list[int]()
        ends, after = views["end"], views["next"]
        for at in np.flatnonzero(self._chained).tolist():
            row, reach = after[self._heads[at]], self._reach[at]
            while row >= 0 and ends[row] >= reach:
                more.append(row)
                row = after[row]
            self._rest[at], self._older_ends[at] = row, ends[row] if row >= 0 else NEVER
        return np.concatenate((rows, np.array(more, np.int64)))

    def link(self, codes: Int64Array, ends: Int64Array, rows: Int64Array) -> None:
        """Hang the keys' sessions together: these, in order of code and start, before those out of reach."""
        new = np.concatenate(([True], codes[1:] != codes[:-1]))
        first = np.flatnonzero(new)
        last = np.append(first[1:], len(codes)) - 1
        after, newer = (self._store.table.arrays[name] for name in ("next", "newer"))
        following = np.flatnonzero(~new)
        after[rows[following]], newer[rows[following - 1]] = rows[following - 1], rows[following]
        has_rest = self._rest >= 0
        after[rows[first]], newer[self._rest[has_rest]] = self._rest, rows[first][has_rest]
        newer[rows[last]] = NONE
        keys = self._store.key_table.arrays
        keys["head"][self._codes] = rows[last]
        # The second latest: the group before, or what was the latest and is out of reach, or what follows.
        beyond = np.where(self._linked, self._older_ends, self._head_ends)
        keys["older_end"][self._codes] = np.where(last > first, ends[last - 1], beyond)
