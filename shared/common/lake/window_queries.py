"""Finds and counts an application's windows in the lake: open ones in `state`, closed ones in `closed/<store>`.

`<lake>/<application>/closed/<store>` has one row for each closed window. Everything here blocks: call it with
`asyncio.to_thread`.
"""

# ruff: noqa: S608 - SQL is the only interface, and every name and text in it is quoted
from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import pyarrow as pa

from penstock.shared.common.key_range import KeyRange, raw_key
from penstock.shared.common.lake.column_names import CLOSED_COLUMNS, STATE_COLUMNS
from penstock.shared.common.lake.delta_tables import (
    count_rows,
    fields_of_table,
    open_table,
    query,
    quote_column_name,
    require_columns,
    rows,
    text_literal,
)
from penstock.shared.common.lake.location import table_uri
from penstock.shared.common.lake.state_snapshot import QUERIED_COLUMNS, WINDOWS
from penstock.shared.common.records import INT64_MIN
from penstock.shared.common.row_positions import WindowPosition

BOUND_MS_MAX = 8_000_000_000_000_000
"""More than 250,000 years; in microseconds it fits 64 bits.

A lower bound at or below -BOUND_MS_MAX, or an upper bound at or above BOUND_MS_MAX, is no limit.
"""


class ClosedWindow(NamedTuple):
    """A row of `closed`: the key with the store's type, times in ms, results by name with the table's types."""

    partition: int
    start_ms: int
    end_ms: int
    key: str | bytes
    changelog_offset: int
    topic_id: str | None
    results: dict[str, Any]


class WindowCounts(NamedTuple):
    """The number of live rows of all stores, and by store the number of closed windows.

    A live row is the newest row in `state` of its window, if its `live` is true. A closed sliding window has a live row
    for a while.
    """

    live: int
    closed: dict[str, int]


def find_open_windows(
    lake: str,
    application: str,
    store: str,
    version: int,
    keys: KeyRange,
    time_range: tuple[int, int],
    open_from_ms: Mapping[int, int],
    rows_max: int,
    storage_options: Mapping[str, str] | None = None,
    after: WindowPosition | None = None,
) -> list[dict[str, Any]]:
    """Find the open windows in a snapshot (`version` of `state`) that have a key in `keys` and overlap `time_range`.

    Both ends of `time_range` are in ms and inclusive.

    Windows that end before their partition's time in `open_from_ms` are left out. The first `rows_max` windows after
    the position `after` are returned, in the order of their `WindowPosition`: start, end, partition, key. Each has
    partition, key (bytes), start_ms, end_ms and `state`, a dict. Raises LakeUnavailable or NotASnapshot.
    """
    table = open_table(table_uri(lake, application, "state"), storage_options, version)
    if table is None or store not in fields_of_table(table):
        return []
    require_columns(table, QUERIED_COLUMNS)
    # All rows of a window have the same start. Only the end may differ in the newest row.
    first = "" if after is None else f" AND start_ms >= {after.start_ms}"
    where = f"{WINDOWS} AND store = {text_literal(store)} AND {_sql_key_range('key', *keys)}"
    where += f" AND start_ms <= {int(time_range[1])}{first}"
    # A window that ends before its partition's time in `open_from_ms` is closed.
    wanted = (
        f"live AND end_ms >= {int(time_range[0])}{_sql_open(open_from_ms)}{_sql_after_position(after, _STATE_POSITION)}"
    )
    position = ", ".join(_STATE_POSITION)
    sql = f"SELECT {position}, {quote_column_name(store)} AS state FROM {_newest_rows_query(where)} AND {wanted}"
    sql += f" ORDER BY {position} LIMIT {int(rows_max)}"
    return rows(table, sql)


def find_closed_windows(
    lake: str,
    application: str,
    store: str,
    keys: tuple[str | bytes | None, str | bytes | None],
    time_range: tuple[int, int],
    rows_max: int | None = None,
    storage_options: Mapping[str, str] | None = None,
    after: WindowPosition | None = None,
) -> list[ClosedWindow]:
    """Find the closed windows that have a key between two bounds and overlap `time_range` (ms). All ends are inclusive.

    The first `rows_max` windows after the position `after` are returned, in the order of their `WindowPosition`: start,
    end, partition, key. None as a bound, as `rows_max` or as `after` means no limit. Raises LakeUnavailable.
    """
    table = open_table(table_uri(lake, application, "closed", store), storage_options)
    if table is None:
        return []
    fields = fields_of_table(table)
    names = _CLOSED_POSITION if "key" in fields else _CLOSED_POSITION._replace(key="key_bytes")
    results = [name for name in fields if name not in CLOSED_COLUMNS]
    wanted = f"{_sql_key_range(names.key, *keys)}{_sql_time_range(time_range)}{_sql_after_position(after, names)}"
    columns = [*names, "changelog_offset", "topic_id", *map(quote_column_name, results)]
    limit = "" if rows_max is None else f" LIMIT {int(rows_max)}"
    sql = f"SELECT {', '.join(columns)} FROM t WHERE {wanted} ORDER BY {', '.join(names)}{limit}"
    response = query(table, sql)
    # In ms, since Python's datetime ends with the year 9999.
    starts, ends = (_timestamps_in_ms(response.column(at)) for at in (0, 1))
    rest = (column.to_pylist() for column in response.columns[2:])
    return [
        ClosedWindow(
            partition=partition,
            start_ms=start,
            end_ms=end,
            key=key,
            changelog_offset=offset,
            topic_id=topic_id,
            results=dict(zip(results, values, strict=True)),
        )
        for start, end, partition, key, offset, topic_id, *values in zip(starts, ends, *rest, strict=True)
    ]


def count_windows(lake: str, application: str, storage_options: Mapping[str, str] | None = None) -> WindowCounts:
    """Count an application's windows in the lake. Raises LakeUnavailable or NotASnapshot."""
    state = open_table(table_uri(lake, application, "state"), storage_options)
    if state is None:
        return WindowCounts(0, {})
    require_columns(state, QUERIED_COLUMNS)
    closed = {}
    for store in sorted(fields_of_table(state).keys() - {*STATE_COLUMNS}):
        table = open_table(table_uri(lake, application, "closed", store), storage_options)
        closed[store] = 0 if table is None else count_rows(table, "t")
    return WindowCounts(count_rows(state, f"{_newest_rows_query(WINDOWS)} AND live"), closed)


def window_position(row: Mapping[str, Any] | ClosedWindow) -> WindowPosition:
    """The position of a found window in the order of all windows."""
    if isinstance(row, ClosedWindow):
        return WindowPosition(row.start_ms, row.end_ms, row.partition, raw_key(row.key))
    return WindowPosition(row["start_ms"], row["end_ms"], row["partition"], row["key"])


class _PositionColumns(NamedTuple):
    """The columns of a window's position, in its order."""

    start: str
    end: str
    partition: str
    key: str


_STATE_POSITION = _PositionColumns("start_ms", "end_ms", "partition", "key")
_CLOSED_POSITION = _PositionColumns("window_start", "window_end", "partition", "key")


def _newest_rows_query(where: str) -> str:
    """The FROM and WHERE clauses of a query over `state`: the newest row of each matching window, with tombstones.

    A changelog offset identifies a row of a partition. So the newest rows are found by a join on their offsets, which
    takes a quarter of the time of `row_number()`.
    """
    of_each = f"SELECT partition AS p, max(changelog_offset) AS newest FROM t WHERE {where}"
    of_each += " GROUP BY partition, store, key, start_ms"
    return f"t LEFT SEMI JOIN ({of_each}) ON partition = p AND changelog_offset = newest WHERE {where}"


def _sql_after_position(position: WindowPosition | None, names: _PositionColumns) -> str:
    if position is None:
        return ""
    start, end, partition, raw = position
    first, last = (
        (str(start), str(end)) if names is _STATE_POSITION else (_timestamp_literal(start), _timestamp_literal(end))
    )
    key = _key_literal(raw.decode(errors="replace") if names is _CLOSED_POSITION else raw)
    behind = f"partition > {partition} OR (partition = {partition} AND {names.key} > {key})"
    behind = f"{names.end} > {last} OR ({names.end} = {last} AND ({behind}))"
    return f" AND {names.start} >= {first} AND ({names.start} > {first} OR {behind})"


def _sql_open(open_from_ms: Mapping[int, int]) -> str:
    cases = "".join(f" WHEN {int(p)} THEN {int(ms)}" for p, ms in open_from_ms.items() if ms > INT64_MIN)
    return f" AND end_ms >= CASE partition{cases} ELSE end_ms END" if cases else ""


def _sql_key_range(column: str, first: str | bytes | None, last: str | bytes | None) -> str:
    bounds = [(">=", first), ("<=", last)] if first != last else [("=", first)]
    conditions = [f"{column} {sign} {_key_literal(bound)}" for sign, bound in bounds if bound is not None]
    return " AND ".join(conditions) or f"{column} IS NOT NULL"


def _key_literal(key: str | bytes) -> str:
    return f"X'{key.hex()}'" if isinstance(key, bytes) else text_literal(key)


def _sql_time_range(time_range: tuple[int, int]) -> str:
    low, high = time_range
    ends = "" if low <= -BOUND_MS_MAX else f" AND window_end >= {_timestamp_literal(low)}"
    return ends if high >= BOUND_MS_MAX else f"{ends} AND window_start <= {_timestamp_literal(high)}"


def _timestamp_literal(ms: int) -> str:
    at = min(max(int(ms), -BOUND_MS_MAX), BOUND_MS_MAX)
    return f"arrow_cast({at * 1_000}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _timestamps_in_ms(column: pa.Array) -> list[int]:
    return [int(ms) for ms in (column.cast(pa.int64()).to_numpy() // 1_000).tolist()]
