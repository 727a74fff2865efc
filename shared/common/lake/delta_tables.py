"""Reads the lake's Delta tables as Arrow, without Spark.

`<lake>/<application>/state` is a log-structured snapshot. It has one row a change of a live window, and one row a
compaction and changelog partition (its covered offset). Among the rows with the same (partition, store, key, start) the
one with the highest changelog offset counts. If that row is a tombstone, the window is no longer live.
`<lake>/<application>/closed/<store>` has one row for each closed window. A snapshot is one version of `state`. To read
a consistent snapshot, read the covered offsets first, then the windows at exactly that version.

Everything here blocks: call it with `asyncio.to_thread`. `storage_options` are deltalake's, such as AWS_REGION.
"""

# ruff: noqa: S608 - SQL is the only interface, and every name and text in it is quoted
from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.schema import StructType

from penstock.shared.common.errors import LakeUnavailable, NotASnapshot
from penstock.shared.common.key_range import KeyRange, raw_key
from penstock.shared.common.lake.column_names import CLOSED_COLUMNS, STATE_COLUMNS
from penstock.shared.common.lake.location import lake_root
from penstock.shared.common.row_positions import WindowPosition

PROGRESS_COLUMNS = ("partition", "changelog_offset", "epoch", "progress", "topic_id")
WINDOW_COLUMNS = ("key", "start_ms", "end_ms", "live")
WINDOWS = "row = 'window'"
DELTA_ERRORS = (DeltaError, OSError, ValueError, RuntimeError, pa.ArrowException)
"""The errors that deltalake raises: its own class, or Python's class for an error of Arrow, JSON or the storage."""
TIMESTAMP_MS_MAX = 8_000_000_000_000_000
"""More than 250,000 years; in microseconds it just fits 64 bits. A time at or beyond it, either way, is no bound."""
COMPACTION, APPEND = "compaction", "WRITE"
"""The kind of a compaction's commit of `state`, and its operation."""
HISTORY_VERSIONS = (20, 400, 8_000)
"""The newest versions that are searched for compactions; more if all of those are rewrites and table maintenance."""
SLICE_ROWS = 250_000
"""Rows of `state` that are read and sorted at once. A restore holds two slices: it reads one and applies the other."""
_FRAME = re.compile(r"0: \S+$")  # the first line of a Rust stack trace
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


class PartitionSnapshot(NamedTuple):
    """How far the snapshot covers one changelog partition. `covered_offset` is the NEXT offset to read."""

    partition: int
    covered_offset: int
    epoch: int
    progress: bytes
    topic_id: str | None


class Snapshot(NamedTuple):
    """One version of an application's `state`, and the progress of the requested partitions that it covers."""

    version: int
    partitions: dict[int, PartitionSnapshot]


class ClosedWindow(NamedTuple):
    """A row of `closed`: the key with the store's type, times in ms, results by name with the table's types."""

    partition: int
    start_ms: int
    end_ms: int
    key: str | bytes
    changelog_offset: int
    topic_id: str | None
    results: dict[str, Any]


class Compaction(NamedTuple):
    """A compaction as its commit describes it. None is a value that the commit lacks."""

    version: int
    ended_at_ms: int
    job: str | None
    started_at_ms: int | None
    seconds: float | None
    rows: int | None
    entries: int | None


class _CompactionMetadata(msgspec.Struct):
    """The metadata that a job writes into the commits of `state`."""

    kind: str
    job: str | None = None
    started_at_ms: int | None = None
    seconds: float | None = None
    rows: int | None = None
    entries: int | None = None


def table_uri(lake: str, application: str, *table: str) -> str:
    """The location of an application's table: an absolute path of a folder, or a URI. Raises ConfigError if invalid."""
    return "/".join((lake_root(lake), application, *table))


def one_line(error: BaseException) -> str:
    """The message of deltalake, without its colours, line breaks, the arrows before each cause and the stack trace.

    >>> one_line(OSError("Generic S3 error\\n  \\x1b[31m↳\\x1b[0m client error\\n   0: <unknown>\\n   1: main"))
    'Generic S3 error: client error'
    """
    lines = (line.strip() for line in _COLOUR.sub("", str(error)).splitlines())
    text = " ".join(itertools.takewhile(lambda line: not _FRAME.match(line), filter(None, lines)))
    return text.replace(" ↳ ", ": ")


# --- snapshots ---


def read_snapshot(
    lake: str, application: str, partitions: Collection[int], storage_options: Mapping[str, str] | None = None
) -> Snapshot | None:
    """The newest snapshot; None if there is no table yet. Raises LakeUnavailable or NotASnapshot."""
    table = open_table(table_uri(lake, application, "state"), storage_options)
    if table is None:
        return None
    _require_columns(table, ("row", *PROGRESS_COLUMNS))
    covered: dict[int, PartitionSnapshot] = {}
    if chosen := [int(p) for p in partitions]:
        where = f"row = 'progress' AND partition IN ({', '.join(map(str, chosen))})"
        order = "PARTITION BY partition ORDER BY changelog_offset DESC NULLS FIRST"
        columns = ", ".join(map(_quote_column_name, PROGRESS_COLUMNS))
        numbered = f"SELECT {columns}, row_number() OVER ({order}) AS nth FROM t WHERE {where}"
        newest = rows(table, f"SELECT {columns} FROM ({numbered}) WHERE nth = 1")
        covered = {row["partition"]: _parse_partition_snapshot(table, row) for row in newest}
    return Snapshot(int(table.version()), dict(sorted(covered.items())))


def read_windows(
    lake: str,
    application: str,
    partition: int,
    store: str,
    version: int,
    columns: Sequence[str],
    storage_options: Mapping[str, str] | None = None,
) -> Iterator[pa.RecordBatch]:
    """One partition's changes of a store's windows at exactly that version of `state`, in order of changelog offset.

    Each batch is one slice of about SLICE_ROWS rows. Replay them in that order: the last change of each window is its
    live state. Columns: key (binary), start_ms, end_ms
    (int64), live (bool), then the state's fields `columns`, in that order (int64, float64 or binary). A field is null
    if the row is a tombstone, or was written before the store had that aggregation. A store that the snapshot does not
    know yet has no windows. Raises LakeUnavailable or NotASnapshot.

    Rows can stand in any order in the files, because other programs may rewrite the files. The steps are:

    1. Read the offsets alone.
    2. Cut them into slices that fit in memory.
    3. Read slice by slice, and sort each. Files and row groups without rows of a slice are skipped by their statistics,
       if they have any.
    """
    table = open_table(table_uri(lake, application, "state"), storage_options, version)
    if table is None:
        raise LakeUnavailable(f"there is no table {table_uri(lake, application, 'state')} (any more)")
    fields = _fields_of_table(table)
    if store not in fields:
        return
    if not isinstance(fields[store].type, StructType):
        raise NotASnapshot(f"{table.table_uri}: the column {store!r} holds no states")
    known = {f.name for f in fields[store].type.fields}
    if missing := [c for c in columns if c not in known]:
        raise NotASnapshot(f"{table.table_uri}: store {store!r} has no column {', '.join(missing)}")
    state = [f"{_quote_column_name(store)}[{_text_literal(c)}] AS {_quote_column_name(f'state {c}')}" for c in columns]
    where = f"{WINDOWS} AND partition = {int(partition)} AND store = {_text_literal(store)}"
    for low, high in _offset_slices(table, where):
        within = f"{where} AND changelog_offset >= {low} AND changelog_offset <= {high}"
        sql = f"SELECT {', '.join((*WINDOW_COLUMNS, *state, 'changelog_offset'))} FROM t WHERE {within}"
        yield from _sort_by_offset(query(table, sql), (*WINDOW_COLUMNS, *columns))


def _offset_slices(table: DeltaTable, where: str) -> list[tuple[int, int]]:
    """Ranges of offsets, both ends inclusive, that together cover all rows and have about SLICE_ROWS rows each."""
    column = query(table, f"SELECT changelog_offset FROM t WHERE {where}").column(0)
    if column.null_count:
        raise NotASnapshot(f"{table.table_uri} is not a snapshot: there are windows without a changelog offset")
    if not len(column):
        return []
    offsets = np.sort(column.to_numpy())
    lows = np.unique(offsets[::SLICE_ROWS])
    return list(zip(lows.tolist(), [*(lows[1:] - 1).tolist(), int(offsets[-1])], strict=True))


def _sort_by_offset(found: pa.Table, names: Sequence[str]) -> list[pa.RecordBatch]:
    """The rows sorted by their last column, which is dropped."""
    found = found.combine_chunks()
    offsets = found.column(found.num_columns - 1).to_numpy()
    if (offsets[1:] < offsets[:-1]).any():
        found = found.take(pa.array(np.argsort(offsets, kind="stable")))
    chosen = found.remove_column(found.num_columns - 1).rename_columns(list(names))
    return list(chosen.combine_chunks().to_batches())


def find_windows(
    lake: str,
    application: str,
    store: str,
    version: int,
    keys: KeyRange,
    reach: tuple[int, int],
    rows_max: int,
    storage_options: Mapping[str, str] | None = None,
    after: WindowPosition | None = None,
) -> list[dict[str, Any]]:
    """The live windows of the keys that touch `reach` (ms, both inclusive) at that version of `state`.

    They are in the order of positions; with `after`, only those after that position. Each has partition, key (bytes),
    start_ms, end_ms and `state`, a dict. Raises LakeUnavailable or NotASnapshot.
    """
    table = open_table(table_uri(lake, application, "state"), storage_options, version)
    if table is None or store not in _fields_of_table(table):
        return []
    # All rows of a window have the same start. Only the end may differ in the newest row.
    first = "" if after is None else f" AND start_ms >= {after.start_ms}"
    where = f"{WINDOWS} AND store = {_text_literal(store)} AND {_sql_key_range('key', *keys)}"
    where += f" AND start_ms <= {int(reach[1])}{first}"
    wanted = f"live AND end_ms >= {int(reach[0])}{_sql_after_position(after, _STATE_POSITION)}"
    position = ", ".join(_STATE_POSITION)
    sql = f"SELECT {position}, {_quote_column_name(store)} AS state FROM {_newest_rows_query(where)} AND {wanted}"
    sql += f" ORDER BY {position} LIMIT {int(rows_max)}"
    return rows(table, sql)


def _newest_rows_query(where: str) -> str:
    """The source of a query for the newest row of each matching window in `state`, tombstones included.

    An offset belongs to one row of a partition. A join by offset takes a quarter of the time of numbering the rows.
    """
    of_each = f"SELECT partition AS p, max(changelog_offset) AS newest FROM t WHERE {where}"
    of_each += " GROUP BY partition, store, key, start_ms"
    return f"t LEFT SEMI JOIN ({of_each}) ON partition = p AND changelog_offset = newest WHERE {where}"


# --- closed windows ---


def find_closed(
    lake: str,
    application: str,
    store: str,
    keys: tuple[str | bytes | None, str | bytes | None],
    reach: tuple[int, int],
    rows_max: int | None = None,
    storage_options: Mapping[str, str] | None = None,
    after: WindowPosition | None = None,
) -> list[ClosedWindow]:
    """Closed windows of keys between two bounds (inclusive, in the store's form) that touch `reach` (ms, inclusive).

    They are in the order of positions, at most `rows_max`; with `after`, only those after that position. Times are in
    ms, since Python's own times end with the year 9999.
    """
    table = open_table(table_uri(lake, application, "closed", store), storage_options)
    if table is None:
        return []
    fields = _fields_of_table(table)
    names = _CLOSED_POSITION if "key" in fields else _CLOSED_POSITION._replace(key="key_bytes")
    results = [name for name in fields if name not in CLOSED_COLUMNS]
    wanted = f"{_sql_key_range(names.key, *keys)}{_sql_time_range(reach)}{_sql_after_position(after, names)}"
    columns = [*names, "changelog_offset", "topic_id", *map(_quote_column_name, results)]
    limit = "" if rows_max is None else f" LIMIT {int(rows_max)}"
    sql = f"SELECT {', '.join(columns)} FROM t WHERE {wanted} ORDER BY {', '.join(names)}{limit}"
    answer = query(table, sql)
    starts, ends = (_timestamps_in_ms(answer.column(at)) for at in (0, 1))
    rest = (column.to_pylist() for column in answer.columns[2:])
    return [
        ClosedWindow(partition, start, end, key, offset, topic_id, dict(zip(results, values, strict=True)))
        for start, end, partition, key, offset, topic_id, *values in zip(starts, ends, *rest, strict=True)
    ]


def window_position(row: Mapping[str, Any] | ClosedWindow) -> WindowPosition:
    """The window's position in the order of all windows."""
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


def _sql_key_range(column: str, first: str | bytes | None, last: str | bytes | None) -> str:
    bounds = [(">=", first), ("<=", last)] if first != last else [("=", first)]
    conditions = [f"{column} {sign} {_key_literal(bound)}" for sign, bound in bounds if bound is not None]
    return " AND ".join(conditions) or f"{column} IS NOT NULL"


def _key_literal(key: str | bytes) -> str:
    return f"X'{key.hex()}'" if isinstance(key, bytes) else _text_literal(key)


def _sql_time_range(reach: tuple[int, int]) -> str:
    low, high = reach
    ends = "" if low <= -TIMESTAMP_MS_MAX else f" AND window_end >= {_timestamp_literal(low)}"
    return ends if high >= TIMESTAMP_MS_MAX else f"{ends} AND window_start <= {_timestamp_literal(high)}"


def _timestamp_literal(ms: int) -> str:
    at = min(max(int(ms), -TIMESTAMP_MS_MAX), TIMESTAMP_MS_MAX)
    return f"arrow_cast({at * 1_000}, 'Timestamp(Microsecond, Some(\"UTC\"))')"


def _timestamps_in_ms(column: pa.Array) -> list[int]:
    return [int(ms) for ms in (column.cast(pa.int64()).to_numpy() // 1_000).tolist()]


# --- figures and compactions ---


def describe_tables(lake: str, application: str, storage_options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Return the figures of an application's lake tables.

    They are live rows, closed rows by store, table versions, and the end of the newest compaction.

    `compacted_at_ms` is None and `state_version` is -1 if nothing was compacted yet.
    """
    state = open_table(table_uri(lake, application, "state"), storage_options)
    fields: dict[str, Any] = {"live_rows": 0, "closed_rows": {}, "state_version": -1, "closed_versions": {}}
    fields["compacted_at_ms"] = None
    if state is None:
        return fields
    fields["state_version"] = int(state.version())
    fields["live_rows"] = _count_rows(state, f"{_newest_rows_query(WINDOWS)} AND live")
    fields["compacted_at_ms"] = next((one.ended_at_ms for one in _read_compactions(state, 1)), None)
    for store in sorted(_fields_of_table(state).keys() - {*STATE_COLUMNS}):
        closed = open_table(table_uri(lake, application, "closed", store), storage_options)
        fields["closed_rows"][store] = 0 if closed is None else _count_rows(closed, "t")
        fields["closed_versions"][store] = -1 if closed is None else int(closed.version())
    return fields


def compactions(
    lake: str, application: str, limit: int, storage_options: Mapping[str, str] | None = None
) -> list[Compaction]:
    """The last compactions, newest first, as far as the table's history goes back. Raises LakeUnavailable.

    At most `limit` are returned. There may be fewer if many other versions lie between them.
    """
    state = open_table(table_uri(lake, application, "state"), storage_options)
    return [] if state is None else _read_compactions(state, limit)


def _read_compactions(state: DeltaTable, limit: int) -> list[Compaction]:
    found: list[Compaction] = []
    for versions in HISTORY_VERSIONS:
        try:
            history = state.history(limit=max(versions, limit))
        except DELTA_ERRORS as e:
            raise LakeUnavailable(f"{state.table_uri} cannot be read: {one_line(e)}") from e
        found = [one for entry in history if (one := _parse_compaction(entry)) is not None]
        if found or len(history) < versions:
            break
    return found[:limit]


def _parse_compaction(entry: Mapping[str, Any]) -> Compaction | None:
    """A commit of `state` as a compaction; None if it is a rewrite, table maintenance or another program's commit."""
    if entry.get("operation") != APPEND:
        return None
    try:
        metadata = msgspec.json.decode(entry.get("userMetadata") or "", type=_CompactionMetadata)
    except msgspec.MsgspecError:
        return None
    if metadata.kind != COMPACTION:
        return None
    return Compaction(
        version=int(entry["version"]),
        ended_at_ms=int(entry["timestamp"]),
        job=metadata.job,
        started_at_ms=metadata.started_at_ms,
        seconds=metadata.seconds,
        rows=metadata.rows,
        entries=metadata.entries,
    )


# --- inside ---


def _parse_partition_snapshot(table: DeltaTable, row: Mapping[str, Any]) -> PartitionSnapshot:
    offset = row["changelog_offset"]
    epoch = row["epoch"]
    progress = row["progress"]
    topic_id = row["topic_id"]
    numbers = isinstance(offset, int) and isinstance(epoch, int)
    if not numbers or not isinstance(progress, str) or not isinstance(topic_id, str | None):
        raise NotASnapshot(
            f"{table.table_uri} is not a snapshot: the progress of partition {row['partition']} is not readable"
        )
    return PartitionSnapshot(row["partition"], offset, epoch, progress.encode(), topic_id)


def open_table(
    uri: str, storage_options: Mapping[str, str] | None = None, version: int | None = None
) -> DeltaTable | None:
    """A table, at its newest version or at `version`; None if there is none. Raises LakeUnavailable."""
    try:
        return DeltaTable(uri, version=version, storage_options=dict(storage_options) if storage_options else None)
    except TableNotFoundError:
        return None
    except DELTA_ERRORS as e:
        at = "" if version is None else f" at version {version}"
        raise LakeUnavailable(f"{uri}{at} cannot be read: {one_line(e)}") from e


def query(table: DeltaTable, sql: str) -> pa.Table:
    """The rows that a query over the table `t` returns. Raises LakeUnavailable."""
    try:
        answer = pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(sql)).read_all()
        # The engine returns views of strings and bytes, which the other code (and older pyarrow) cannot compute with.
        return answer.cast(pa.schema([pa.field(f.name, _plain_arrow_type(f.type)) for f in answer.schema]))
    except DELTA_ERRORS as e:
        raise LakeUnavailable(f"{table.table_uri} at version {table.version()} cannot be read: {one_line(e)}") from e


def rows(table: DeltaTable, sql: str) -> list[dict[str, Any]]:
    """The rows that a query over the table `t` returns. Raises LakeUnavailable."""
    return list(query(table, sql).to_pylist())


def _plain_arrow_type(type_: pa.DataType) -> pa.DataType:
    if type_ == pa.binary_view() or pa.types.is_large_binary(type_):
        return pa.binary()
    if type_ == pa.string_view() or pa.types.is_large_string(type_):
        return pa.string()
    return type_


def _count_rows(table: DeltaTable, of: str) -> int:
    return int(rows(table, f"SELECT count(*) AS n FROM {of}")[0]["n"])


def _fields_of_table(table: DeltaTable) -> dict[str, Any]:
    return {field.name: field for field in table.schema().fields}


def _require_columns(table: DeltaTable, wanted: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in _fields_of_table(table)]:
        raise NotASnapshot(f"{table.table_uri} is not a snapshot: it has no column {', '.join(missing)}")


def _quote_column_name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text_literal(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
