"""Writes the tables of a lake as the Spark jobs do, with deltalake: for tests that need tables and no Spark.

A test names what stands in a row; all other columns are null. Stores are what their state is made of: the columns of a
`StoreSchema`, or pairs of name and type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

Columns = Sequence[tuple[str, str]]
"""Names and types of columns: int64, float64, binary; string and timestamp where results are."""
Row = Mapping[str, Any]

TIMESTAMP = pa.timestamp("us", tz="UTC")
TYPES = {
    "int64": pa.int64(),
    "float64": pa.float64(),
    "binary": pa.binary(),
    "string": pa.string(),
    "bool": pa.bool_(),
    "json": pa.string(),
}
TOPIC_ID = "topic"


def state_schema(stores: Mapping[str, Columns]) -> pa.Schema:
    """The columns of `state` with these stores' columns."""
    return pa.schema(
        [
            *(("row", pa.string()), ("partition", pa.int32()), ("store", pa.string())),
            *(("key", pa.binary()), ("start_ms", pa.int64()), ("end_ms", pa.int64())),
            *((store, _struct(columns)) for store, columns in stores.items()),
            *(("live", pa.bool_()), ("changelog_offset", pa.int64()), ("epoch", pa.int32())),
            *(("progress", pa.string()), ("topic_id", pa.string()), ("previous_offset", pa.int64())),
            *(("appended", pa.string()), ("rewritten_rows", pa.int64()), ("added_rows", pa.int64())),
            ("added_files", pa.int32()),
        ]
    )


def closed_schema(columns: Columns, results: Columns, key: Literal["string", "bytes"] = "string") -> pa.Schema:
    """The columns of `closed/<store>`, for a store with these results and these columns of its state."""
    return pa.schema(
        [
            ("key", pa.string()) if key == "string" else ("key_bytes", pa.binary()),
            *(("window_start", TIMESTAMP), ("window_end", TIMESTAMP)),
            *((name, TYPES[type_]) for name, type_ in results),
            *(("closed_at", TIMESTAMP), ("state", _struct(columns)), ("partition", pa.int32())),
            *(("changelog_offset", pa.int64()), ("topic_id", pa.string())),
        ]
    )


def live(partition: int, store: str, key: bytes, start: int, end: int, offset: int, state: Row) -> Row:
    """A row of `state`: a window as the changelog entry at `offset` has it; `state` by column."""
    bounds = {"key": key, "start_ms": start, "end_ms": end, "live": True, "changelog_offset": offset}
    return {"row": "window", "partition": partition, "store": store, **bounds, store: state}


def gone(partition: int, store: str, key: bytes, start: int, offset: int) -> Row:
    """A row of `state`: a tombstone."""
    at = {"key": key, "start_ms": start, "live": False, "changelog_offset": offset}
    return {"row": "window", "partition": partition, "store": store, **at}


def progress(
    partition: int,
    covered: int,
    said: str | bytes = "{}",
    *,
    epoch: int = 2,
    previous: int | None = None,
    topic_id: str | None = TOPIC_ID,
    appended: Mapping[str, int] | None = None,
) -> Row:
    """A row of `state`: how far a run came; `said` is the progress record's JSON."""
    text = said if isinstance(said, str) else said.decode()
    return {
        "row": "progress",
        "partition": partition,
        "changelog_offset": covered,
        "epoch": epoch,
        "progress": text,
        "topic_id": topic_id,
        "previous_offset": previous,
        "appended": json.dumps(dict(appended or {})),
        "rewritten_rows": 0,
        "added_rows": 0,
        "added_files": 0,
    }


def write_state(
    lake: Path | str,
    application: str,
    stores: Mapping[str, Columns],
    rows: Iterable[Row],
    *,
    kind: Literal["compaction", "rewrite"] = "compaction",
    job: str = "ab12",
    told: Row | None = None,
    partition: int | None = None,
    **options: Any,
) -> DeltaTable:
    """Append a run's rows to `state`, or put them in place of a `partition`'s; `told` goes into the commit."""
    uri = f"{lake}/{application}/state"
    more: dict[str, Any] = {"mode": "append", "schema_mode": "merge"}
    if partition is not None:
        more = {"mode": "overwrite", "predicate": f"partition = {partition}"}
    said = json.dumps({"job": job, "kind": kind, **(told or {})})
    write_deltalake(
        uri,
        pa.Table.from_pylist(list(rows), state_schema(stores)),
        partition_by=["partition"],
        commit_properties=CommitProperties(custom_metadata={"userMetadata": said}),
        **(more | options),
    )
    return DeltaTable(uri)


def write_closed(
    lake: Path | str,
    application: str,
    store: str,
    columns: Columns,
    results: Columns,
    rows: Iterable[Row],
    *,
    key: Literal["string", "bytes"] = "string",
    **options: Any,
) -> DeltaTable:
    """Append rows to `closed/<store>`; times in ms, the key as `key`, the state of `columns` as `state`."""
    uri, name = f"{lake}/{application}/closed/{store}", "key" if key == "string" else "key_bytes"
    schema = closed_schema(columns, results, key)
    made = [_closed(row, name) for row in rows]
    arrays = [_array([row.get(field.name) for row in made], field.type) for field in schema]
    write_deltalake(uri, pa.table(arrays, schema=schema), mode="append", schema_mode="merge", **options)
    return DeltaTable(uri)


def _closed(row: Row, key: str) -> dict[str, Any]:
    made = {"partition": 0, "changelog_offset": 0, "topic_id": TOPIC_ID, **row}
    made[key] = made.pop("key")
    return made


def _array(values: list[Any], type_: pa.DataType) -> pa.Array:
    if type_ != TIMESTAMP:
        return pa.array(values, type_)
    return pa.array([None if ms is None else ms * 1_000 for ms in values], pa.int64()).cast(type_)


def _struct(columns: Columns) -> pa.StructType:
    return pa.struct([(name, TYPES[type_]) for name, type_ in columns])
