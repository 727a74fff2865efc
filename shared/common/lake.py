"""Snapshots: what the compactor's Delta tables say, as Arrow.

`<lake>/<application>/state` holds one row a live window and one row a changelog partition, changed together by one
commit; `<lake>/<application>/closed/<store>` holds closed windows. A snapshot is one version of `state`: read the
covered offsets first, then the windows at exactly that version, and they belong together.

Reads go through deltalake's query engine, which honours deletion vectors; its pyarrow path would bring deleted rows
back. Everything here blocks: call it by `asyncio.to_thread`. `storage_options` are deltalake's, such as AWS_REGION.
"""

# ruff: noqa: S608 - SQL is the only way in, and every name and text in it is quoted
from __future__ import annotations

import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError
from deltalake.schema import PrimitiveType, StructType

from penstock.shared.common.continuation import WindowPlace
from penstock.shared.common.errors import LakeUnavailable, NotASnapshot
from penstock.shared.common.key_range import KeyRange, raw_key
from penstock.shared.common.lake_place import lake_root

PROGRESS_COLUMNS = ("partition", "changelog_offset", "epoch", "commit", "progress", "topic_id")
WINDOW_KEY = ("key", "start_ms", "end_ms")
READ_ERRORS = (DeltaError, OSError, ValueError, RuntimeError, pa.ArrowException)
"""What deltalake raises: its own class, or whatever stands in Python for an error of Arrow, JSON or the storage."""
DATED_MS_MAX = 8_000_000_000_000_000
"""More than 250,000 years, which the query engine's calendar just has: a day from there on, or before, is no date."""
TEMPORAL = ("date", "timestamp", "timestamp_ntz")
HISTORY_VERSIONS_MAX = 20  # how far back the newest MERGE is looked for; only upkeep can lie between
REVISIONS_MORE = 8  # times as many rows are read where all of them were revisions of one window
_FRAME = re.compile(r"0: \S+$")  # the first line of a stack of Rust's
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


class PartitionSnapshot(NamedTuple):
    """How far the snapshot covers one changelog partition; `covered_offset` is the NEXT offset to read."""

    partition: int
    covered_offset: int
    epoch: int
    commit: int
    progress: bytes
    topic_id: str | None


class Snapshot(NamedTuple):
    """One version of an application's `state`, and the progress of the partitions asked for (those it covers)."""

    version: int
    partitions: dict[int, PartitionSnapshot]


def table_uri(lake: str, application: str, *table: str) -> str:
    """Where a table of an application is: a folder as an absolute path, or a URI. ConfigError for no place."""
    return "/".join((lake_root(lake), application, *table))


def one_line(error: BaseException) -> str:
    """What deltalake says, without its colours, line breaks, the arrows before each cause and the stack behind it.

    >>> one_line(OSError("Generic S3 error\\n  \\x1b[31m↳\\x1b[0m client error\\n   0: <unknown>\\n   1: main"))
    'Generic S3 error: client error'
    """
    lines = (line.strip() for line in _COLOUR.sub("", str(error)).splitlines())
    text = " ".join(itertools.takewhile(lambda line: not _FRAME.match(line), filter(None, lines)))
    return text.replace(" ↳ ", ": ")


def read_snapshot(
    lake: str, application: str, partitions: Collection[int], storage_options: Mapping[str, str] | None = None
) -> Snapshot | None:
    """The newest snapshot; None where there is no table yet. Raises LakeUnavailable or NotASnapshot."""
    table = _open(table_uri(lake, application, "state"), None, storage_options)
    if table is None:
        return None
    _require_columns(table, ("row", *PROGRESS_COLUMNS))
    chosen = [int(p) for p in partitions]
    rows: list[dict[str, Any]] = []
    if chosen:
        where = f"row = 'progress' AND partition IN ({', '.join(map(str, chosen))})"
        batches = _query(table, f"SELECT {', '.join(map(_name, PROGRESS_COLUMNS))} FROM t WHERE {where}")
        rows = [row for batch in batches for row in batch.to_pylist()]
    covered = {row["partition"]: _covered(table, row) for row in rows}
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
    """One partition's live windows of a store at exactly that version of `state`, in no order.

    Columns: key (binary), start_ms, end_ms (int64), then the state's fields `columns`, in that order (int64, float64 or
    binary). A store that the snapshot does not know yet has no windows. Raises LakeUnavailable or NotASnapshot.
    """
    table = _open(table_uri(lake, application, "state"), version, storage_options)
    if table is None:
        raise LakeUnavailable(f"there is no table {table_uri(lake, application, 'state')} (any more)")
    fields = _fields(table)
    if store not in fields:
        return
    if not isinstance(fields[store].type, StructType):
        raise NotASnapshot(f"{table.table_uri}: the column {store!r} holds no states")
    known = {f.name for f in fields[store].type.fields}
    if missing := [c for c in columns if c not in known]:
        raise NotASnapshot(f"{table.table_uri}: store {store!r} has no column {', '.join(missing)}")
    state = [f"{_name(store)}[{_text(c)}] AS {_name(c)}" for c in columns]
    query = (
        f"SELECT {', '.join((*WINDOW_KEY, *state))} FROM t "
        f"WHERE row = 'window' AND partition = {int(partition)} AND store = {_text(store)}"
    )
    yield from _query(table, query)


def find_windows(
    lake: str,
    application: str,
    store: str,
    version: int,
    keys: KeyRange,
    reach: tuple[int, int],
    rows_max: int,
    storage_options: Mapping[str, str] | None = None,
    after: WindowPlace | None = None,
) -> list[dict[str, Any]]:
    """The keys' live windows that touch `reach` (ms, both inclusive) at that version of `state`, the first by place.

    Only those after a place, where one is given. Each has partition, key (bytes), start_ms, end_ms and `state`, a dict.
    Raises LakeUnavailable or NotASnapshot.
    """
    table = _open(table_uri(lake, application, "state"), version, storage_options)
    if table is None or store not in _fields(table):
        return []
    wanted = f"{_within(*keys)} AND {_touches(reach)}{_after(after, False)}"
    where = f"row = 'window' AND store = {_text(store)} AND {wanted}"
    query = f"SELECT partition, key, start_ms, end_ms, {_name(store)} AS state FROM t WHERE {where} {_first(rows_max)}"
    return [row for batch in _query(table, query) for row in batch.to_pylist()]


def find_closed(
    lake: str,
    application: str,
    store: str,
    key: str | bytes,
    reach: tuple[int, int],
    storage_options: Mapping[str, str] | None = None,
) -> list[dict[str, Any]]:
    """A key's closed windows, as the store has keys, that touch `reach`; as `find_closed_of`, those that still are."""
    rows = find_closed_of(lake, application, store, (key, key), reach, None, storage_options)[0]
    return [row for row in rows if row["state"] is not None]


def find_closed_of(
    lake: str,
    application: str,
    store: str,
    keys: tuple[str | bytes | None, str | bytes | None],
    reach: tuple[int, int],
    rows_max: int | None,
    storage_options: Mapping[str, str] | None = None,
    after: WindowPlace | None = None,
) -> tuple[list[dict[str, Any]], WindowPlace | None]:
    """Closed windows of keys between two bounds, as the store has them; the first by place, of `rows_max` rows or more.

    Only those after a place, where one is given. The second value is the place up to which these are all; None where
    there are no more. All columns but dates and timestamps: what they say is in ms too, and Python's own types end with
    the year 9999. Of a window that was corrected the row with the highest revision: where that has no `state`, it went
    into a wider one.
    """
    table = _open(table_uri(lake, application, "closed", store), None, storage_options)
    if table is None:
        return [], None
    fields = _fields(table)
    # The window's end is on its day, or on a later one than `reach` begins, or than the window before it.
    first_ms = reach[0] if after is None else max(reach[0], after.start_ms)
    first_ms = min(max(first_ms, -DATED_MS_MAX), DATED_MS_MAX)
    wanted = f"{_within(*keys)} AND {_touches(reach)}{_after(after, _type(fields['key']) == 'string')}"
    where = f"day >= to_timestamp_millis({first_ms})::date AND {wanted}"
    columns = ", ".join(_name(name) for name, field in fields.items() if _type(field) not in TEMPORAL)
    while True:
        query = f"SELECT {columns} FROM t WHERE {where} {_first(rows_max)}"
        rows = [row for batch in _query(table, query) for row in batch.to_pylist()]
        newest: dict[WindowPlace, dict[str, Any]] = {}
        for row in rows:
            window = window_place(row)
            if window not in newest or newest[window]["revision"] < row["revision"]:
                newest[window] = row
        all_to = None
        if rows_max is not None and len(rows) == rows_max:
            # The last one may have more revisions than were read.
            del newest[window_place(rows[-1])]
            if not newest:
                rows_max *= REVISIONS_MORE
                continue
            all_to = max(newest)
        return list(newest.values()), all_to


def window_place(row: Mapping[str, Any]) -> WindowPlace:
    """Where a window is among all others."""
    return WindowPlace(row["start_ms"], row["end_ms"], row["partition"], raw_key(row["key"]))


def _after(place: WindowPlace | None, keys_are_text: bool) -> str:
    if place is None:
        return ""
    start, end, partition, raw = place
    key = _key(raw.decode(errors="replace") if keys_are_text else raw)
    behind = f"partition > {partition} OR (partition = {partition} AND key > {key})"
    behind = f"end_ms > {end} OR (end_ms = {end} AND ({behind}))"
    return f" AND start_ms >= {start} AND (start_ms > {start} OR {behind})"


def _within(first: str | bytes | None, last: str | bytes | None) -> str:
    bounds = [(">=", first), ("<=", last)] if first != last else [("=", first)]
    said = [f"key {sign} {_key(bound)}" for sign, bound in bounds if bound is not None]
    return " AND ".join(said) or "key IS NOT NULL"


def _key(key: str | bytes) -> str:
    return f"X'{key.hex()}'" if isinstance(key, bytes) else _text(key)


def _first(rows_max: int | None) -> str:
    return "" if rows_max is None else f"ORDER BY start_ms, end_ms, partition, key LIMIT {int(rows_max)}"


def _touches(reach: tuple[int, int]) -> str:
    return f"end_ms >= {int(reach[0])} AND start_ms <= {int(reach[1])}"


def describe(lake: str, application: str, storage_options: Mapping[str, str] | None = None) -> dict[str, Any]:
    """What a dashboard shows: live rows, closed rows by store, table versions, when the newest compaction ended.

    `compacted_at_ms` is None, and `state_version` -1, where nothing was compacted yet.
    """
    state = _open(table_uri(lake, application, "state"), None, storage_options)
    told: dict[str, Any] = {"live_rows": 0, "closed_rows": {}, "state_version": -1, "closed_versions": {}}
    told["compacted_at_ms"] = None
    if state is None:
        return told
    told["state_version"] = int(state.version())
    told["live_rows"] = _count(state, "row = 'window'")
    told["compacted_at_ms"] = _merged_at_ms(state)
    base = {"row", "partition", "store", "key", "start_ms", "end_ms", *PROGRESS_COLUMNS, "run"}
    for store in sorted(_fields(state).keys() - base):
        closed = _open(table_uri(lake, application, "closed", store), None, storage_options)
        told["closed_rows"][store] = 0 if closed is None else _count(closed, "true")
        told["closed_versions"][store] = -1 if closed is None else int(closed.version())
    return told


def compacted_at_ms(lake: str, application: str, storage_options: Mapping[str, str] | None = None) -> int | None:
    """When the newest snapshot was written, ms since the epoch; None where nothing was compacted yet."""
    state = _open(table_uri(lake, application, "state"), None, storage_options)
    return None if state is None else _merged_at_ms(state)


def _covered(table: DeltaTable, row: Mapping[str, Any]) -> PartitionSnapshot:
    partition, offset, epoch, commit, progress, topic_id = (row[name] for name in PROGRESS_COLUMNS)
    numbers = all(isinstance(number, int) for number in (offset, epoch, commit))
    if not numbers or not isinstance(progress, str) or not isinstance(topic_id, str | None):
        raise NotASnapshot(f"{table.table_uri} is no snapshot: the progress of partition {partition} is not readable")
    return PartitionSnapshot(partition, offset, epoch, commit, progress.encode(), topic_id)


def _merged_at_ms(state: DeltaTable) -> int | None:
    try:
        history = state.history(limit=HISTORY_VERSIONS_MAX)
    except READ_ERRORS as e:
        raise LakeUnavailable(f"{state.table_uri} cannot be read: {one_line(e)}") from e
    # Upkeep writes versions too, but no snapshot.
    return max((int(entry["timestamp"]) for entry in history if entry.get("operation") == "MERGE"), default=None)


def _open(uri: str, version: int | None, storage_options: Mapping[str, str] | None) -> DeltaTable | None:
    try:
        return DeltaTable(uri, version=version, storage_options=dict(storage_options) if storage_options else None)
    except TableNotFoundError:
        return None
    except READ_ERRORS as e:
        at = "" if version is None else f" at version {version}"
        raise LakeUnavailable(f"{uri}{at} cannot be read: {one_line(e)}") from e


def _query(table: DeltaTable, query: str) -> Iterator[pa.RecordBatch]:
    try:
        answer = pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(query))
        # The engine's views of strings and bytes are not what the rest of the code (and older pyarrow) computes with.
        schema = pa.schema([pa.field(f.name, _plain(f.type)) for f in answer.schema])
        for batch in answer:
            yield batch.cast(schema)
    except READ_ERRORS as e:
        raise LakeUnavailable(f"{table.table_uri} at version {table.version()} cannot be read: {one_line(e)}") from e


def _plain(type_: pa.DataType) -> pa.DataType:
    if type_ == pa.binary_view() or pa.types.is_large_binary(type_):
        return pa.binary()
    if type_ == pa.string_view() or pa.types.is_large_string(type_):
        return pa.string()
    return type_


def _count(table: DeltaTable, where: str) -> int:
    return sum(
        row["n"] for batch in _query(table, f"SELECT count(*) AS n FROM t WHERE {where}") for row in batch.to_pylist()
    )


def _fields(table: DeltaTable) -> dict[str, Any]:
    return {field.name: field for field in table.schema().fields}


def _type(field: Any) -> str | None:
    return field.type.type if isinstance(field.type, PrimitiveType) else None


def _require_columns(table: DeltaTable, wanted: Sequence[str]) -> None:
    if missing := [name for name in wanted if name not in _fields(table)]:
        raise NotASnapshot(f"{table.table_uri} is no snapshot: it has no column {', '.join(missing)}")


def _name(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _text(value: str) -> str:
    return "'" + value.replace("'", "''") + "'"
