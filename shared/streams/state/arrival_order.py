"""Of which keys a batch merges sessions: what was collected in each of them is then not in the order of arrival.

Record by record, a list has the values of the earlier session, then those of the later one, then what joined them.
Where a record finds one session at most, however, a session's values are in the order in which they came, and a batch
can put them there at once. With a gap of 10, records at 0, 15 and 8 of one key: 8 joins two sessions, which a batch by
itself never sees.
"""

from __future__ import annotations

import numpy as np

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.state.column_merge import cuts
from penstock.shared.streams.state.column_session_store import ColumnSessionStore


def merging_keys(
    store: ColumnSessionStore, codes: Int64Array, times: Int64Array, order: Int64Array, gap_ms: int
) -> Int64Array:
    """The keys of which a record finds two sessions; all is in order of key and time, `order` are places of arrival.

    A key whose sessions are out of a record's reach at its moment must not be among these.
    """
    if not len(codes):
        return codes
    first = np.flatnonzero(cuts(codes, times, times, gap_ms))
    last = np.append(first[1:], len(codes)) - 1
    heads, older = (store.key_table.arrays[name][codes[first]] for name in ("head", "older_end"))
    starts, ends = times[first], times[last]
    out_of_turn = np.flatnonzero(order[1:] < order[:-1]) + 1
    runs_of = np.searchsorted(first, out_of_turn, side="right") - 1
    unclear = older >= starts - gap_ms
    unclear[runs_of[out_of_turn != first[runs_of]]] = True
    rows = store.table.arrays
    has = heads >= 0
    in_reach = has & (rows["end"][heads] >= starts - gap_ms) & (rows["start"][heads] <= ends + gap_ms)
    unclear |= in_reach & (rows["start"][heads] > starts + gap_ms)  # it begins apart from what it comes to later
    keys = np.unique(codes[first][unclear])
    bounds = zip(np.searchsorted(codes, keys), np.searchsorted(codes, keys, side="right"), strict=True)
    is_merging = [
        _merges(_stored(store, code), times[a:b][np.argsort(order[a:b])].tolist(), gap_ms)
        for code, (a, b) in zip(keys.tolist(), bounds, strict=True)
    ]
    return np.asarray(keys[np.array(is_merging, np.bool_)])


def _stored(store: ColumnSessionStore, code: int) -> list[list[int]]:
    views = store.table.views
    return [[views["start"][row], views["end"][row]] for row in store.chain_of(code)]


def _merges(sessions: list[list[int]], times: list[int], gap_ms: int) -> bool:
    """Whether one of these records, in order of arrival, comes within the gap of two sessions."""
    for time in times:
        found = [session for session in sessions if session[0] - gap_ms <= time <= session[1] + gap_ms]
        if len(found) > 1:
            return True
        if found:
            own = found[0]
            own[0], own[1] = min(own[0], time), max(own[1], time)
        else:
            sessions.append([time, time])
    return False
