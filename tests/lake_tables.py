"""Writes a lake's tables without Spark, for tests of code that reads them.

There are two ways. `write_state` and `write_closed` append rows whose columns a test names; other columns are null. A
`LakeWriter` appends the rows that a compaction derives from changelogs. Both write the columns that compactions write
(`services.spark.table_columns`). Rows have times in ms, even for timestamp columns.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from deltalake import CommitProperties, DeltaTable, write_deltalake

from penstock.services.spark.table_columns import (
    CLOSED,
    LATE,
    MICROSECONDS,
    STATE,
    TIMESTAMP,
    TIMESTAMP_MS_MAX,
    rows_schema,
    state_schema,
)
from penstock.shared.streams.aggregations.aggregation import Aggregation, Count
from penstock.shared.streams.aggregations.latest import LATEST
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ConfirmedChanges
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

TOPIC_ID = "topic"
Entries = Sequence[tuple[bytes | None, bytes]]
Row = Mapping[str, Any]


def store_of(
    name: str, aggregations: Mapping[str, Aggregation[Any]], key: Literal["string", "bytes"] = "string"
) -> StoreSchema:
    """The schema of a store of sessions."""
    of = tuple(AggregationSchema.of(*named) for named in aggregations.items())
    return StoreSchema(name, "session", key, 10, 5, "on_close", "in", None, None, None, of)


def table_of(rows: Iterable[Row], schema: pa.Schema) -> pa.Table:
    """Rows as an Arrow table of this schema."""
    own = list(rows)
    return pa.table([_array([row.get(of.name) for row in own], of.type) for of in schema], schema=schema)


def _array(values: list[Any], type_: pa.DataType) -> pa.Array:
    if type_ == TIMESTAMP:
        return pa.array([None if ms is None else ms * MICROSECONDS for ms in values], pa.int64()).cast(type_)
    if type_ == pa.list_(TIMESTAMP):
        lists = [None if times is None else [ms * MICROSECONDS for ms in times] for times in values]
        return pa.array(lists, pa.list_(pa.int64())).cast(type_)
    return pa.array(values, type_)


# --- rows with named columns ---


def live(partition: int, store: str, key: bytes, start: int, end: int, offset: int, state: Row) -> Row:
    """A row of `state`: a window as of the changelog entry at `offset`; `state` is given by column."""
    bounds = {"key": key, "start_ms": start, "end_ms": end, "live": True, "changelog_offset": offset}
    return {"row": "window", "partition": partition, "store": store, **bounds, store: state}


def tombstone(partition: int, store: str, key: bytes, start: int, offset: int) -> Row:
    """A row of `state`: a tombstone."""
    at = {"key": key, "start_ms": start, "live": False, "changelog_offset": offset}
    return {"row": "window", "partition": partition, "store": store, **at}


def progress(
    partition: int,
    covered: int,
    body: str | bytes = "{}",
    *,
    epoch: int = 2,
    topic_id: str | None = TOPIC_ID,
    appended: Mapping[str, int] | None = None,
) -> Row:
    """A row of `state`: the progress of a compaction; `body` is the progress record's JSON."""
    text = body if isinstance(body, str) else body.decode()
    return {
        "row": "progress",
        "partition": partition,
        "changelog_offset": covered,
        "epoch": epoch,
        "progress": text,
        "topic_id": topic_id,
        "appended": json.dumps(dict(appended or {})),
        "rewritten_rows": 0,
        "added_rows": 0,
        "added_files": 0,
        "expired_ms": -1,
    }


def write_state(
    lake: Path | str,
    application: str,
    stores: Iterable[StoreSchema],
    rows: Iterable[Row],
    *,
    kind: Literal["compaction", "rewrite"] = "compaction",
    job: str = "ab12",
    statistics: Row | None = None,
    partition: int | None = None,
    **options: Any,
) -> DeltaTable:
    """Append the rows of a compaction to `state`, or replace a `partition`'s rows; `statistics` is
    added to the commit's metadata.
    """
    uri = f"{lake}/{application}/{STATE}"
    more: dict[str, Any] = {"mode": "append", "schema_mode": "merge"}
    if partition is not None:
        more = {"mode": "overwrite", "predicate": f"partition = {partition}"}
    metadata = json.dumps({"job": job, "kind": kind, **(statistics or {})})
    write_deltalake(
        uri,
        table_of(rows, state_schema(stores)),
        partition_by=["partition"],
        commit_properties=CommitProperties(custom_metadata={"userMetadata": metadata}),
        **(more | options),
    )
    return DeltaTable(uri)


def write_closed(lake: Path | str, application: str, store: StoreSchema, rows: Iterable[Row]) -> DeltaTable:
    """Append rows to `closed/<store>`; each row has its key as `key`."""
    uri, defaults = f"{lake}/{application}/{CLOSED}/{store.name}", {"partition": 0, "changelog_offset": 0}
    made = [{**defaults, "topic_id": TOPIC_ID, **row, _key_column(store): row["key"]} for row in rows]
    write_deltalake(uri, table_of(made, rows_schema(CLOSED, store)), mode="append", schema_mode="merge")
    return DeltaTable(uri)


# --- rows from changelogs ---


class Late(NamedTuple):
    """A late record in the changelog; `state` is None if an aggregation rejected the value."""

    store: StoreSchema
    key: bytes
    time_ms: int
    missed: tuple[int, ...]
    state: dict[str, Any] | None
    source_offset: int
    changelog_offset: int


@dataclass
class LakeWriter:
    """An application's tables in `folder`; each `run` appends the new entries of the changelogs.

    `forge` is called with each table's name and rows, and may change the rows.
    """

    folder: Path
    topic_id: str = TOPIC_ID
    forge: Callable[[str, list[dict[str, Any]]], None] | None = None
    _next: dict[int, int] = field(default_factory=dict)

    def run(self, changelogs: Mapping[int, Entries], *, crash: bool = False) -> None:
        """Append the rows of one compaction; with `crash` only those of `closed` and `late`."""
        closed: dict[StoreSchema, list[dict[str, Any]]] = {}
        missed: dict[StoreSchema, list[dict[str, Any]]] = {}
        state: list[dict[str, Any]] = []
        stores: tuple[StoreSchema, ...] = ()
        for partition, entries in sorted(changelogs.items()):
            parts, reader = _read(entries)
            first, covered = self._next.get(partition, 0), _covered(parts)
            assert reader.progress is not None
            stores = reader.progress.stores
            for late in _late(parts):
                if late.changelog_offset >= first:
                    row = _late_row(late) | self._coordinates(partition, late.changelog_offset)
                    missed.setdefault(late.store, []).append(row)
            for store, offset, operation, key, start, end, at, columns in _changes(parts):
                if offset < first:
                    continue
                if operation == log.FINAL:
                    times = {"window_start": _time(start), "window_end": _time(end), "closed_at": _time(at)}
                    row = {**_key(store, key), **times, **results(store, columns), "state": columns}
                    closed.setdefault(store, []).append(row | self._coordinates(partition, offset))
                if operation == log.LIVE:
                    state.append(dict(live(partition, store.name, key, start, end, offset, columns)))
                else:
                    state.append(dict(tombstone(partition, store.name, key, start, offset)))
            body = msgspec.json.encode(reader.progress)
            done = progress(partition, covered, body, epoch=reader.epoch, topic_id=self.topic_id)
            state.append(dict(done))
            if not crash:
                self._next[partition] = covered
        for store, rows in closed.items():
            self._write(f"{CLOSED}/{store.name}", rows, rows_schema(CLOSED, store))
        for store, rows in missed.items():
            self._write(f"{LATE}/{store.name}", rows, rows_schema(LATE, store))
        if not crash:
            self._write(STATE, state, state_schema(stores), ["partition"])

    def _coordinates(self, partition: int, offset: int) -> dict[str, Any]:
        return {"partition": partition, "changelog_offset": offset, "topic_id": self.topic_id}

    def _write(
        self, table: str, rows: list[dict[str, Any]], schema: pa.Schema, partitions: list[str] | None = None
    ) -> None:
        if self.forge is not None:
            self.forge(table, rows)
        if rows:
            folder = self.folder / table
            folder.parent.mkdir(parents=True, exist_ok=True)
            data = table_of(rows, schema)
            write_deltalake(str(folder), data, mode="append", partition_by=partitions, schema_mode="merge")


def windows(entries: Entries) -> dict[tuple[str, bytes, int], tuple[int, dict[str, Any]]]:
    """All windows of a changelog, closed and live: (store, key, start) to end and results."""
    found: dict[tuple[str, bytes, int], tuple[int, dict[str, Any]]] = {}
    closed: dict[tuple[str, bytes, int], tuple[int, dict[str, Any]]] = {}
    for store, _, operation, key, start, end, _, columns in _changes(_read(entries)[0]):
        at = (store.name, key, start)
        if operation == log.DELETED:
            found.pop(at, None)
        elif operation == log.FINAL:
            found.pop(at, None)
            assert at not in closed
            closed[at] = (end, results(store, columns))
        else:
            found[at] = (end, results(store, columns))
    assert not closed.keys() & found.keys()
    return closed | found


def late_records(entries: Entries) -> list[Late]:
    """The late records of a changelog."""
    return _late(_read(entries)[0])


def results(store: StoreSchema, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """The results that a state's aggregations forward, by name; all None if there is no state."""
    return {a.name: None if state is None else _result(a, state) for a in store.aggregations if a.name != LATEST}


def _result(aggregation: AggregationSchema, state: Mapping[str, Any]) -> Any:
    def of(name: str) -> Any:
        return state[f"{aggregation.name}_{name}"]

    match aggregation.function:
        case "count":
            return of("n")
        case "sum" | "min" | "max" as function:
            return of(function) if of("n") else None
        case "mean":
            return of("sum") / of("n") if of("n") else None
        case "count_distinct":
            import datasketches

            return round(datasketches.hll_sketch.deserialize(of("hll")).get_estimate())
        case "first" | "last":
            if aggregation.result != "json":
                return of("value") if of("at_ms") >= 0 else None
            return of("json").decode() or None
        case _:
            return of("json").decode()


def _key_column(store: StoreSchema) -> str:
    return "key" if store.key == "string" else "key_bytes"


def _key(store: StoreSchema, key: bytes) -> dict[str, Any]:
    return {_key_column(store): key.decode() if store.key == "string" else key}


def _late_row(late: Late) -> dict[str, Any]:
    times = {"event_time": _time(late.time_ms), "missed": [_time(at) for at in late.missed]}
    own = {**results(late.store, late.state), "state": late.state, "source_offset": late.source_offset}
    return {**_key(late.store, late.key), **times, **own}


def _time(ms: int) -> int | None:
    return ms if ms <= TIMESTAMP_MS_MAX else None


def _read(entries: Entries) -> tuple[list[ConfirmedChanges], ChangelogReader]:
    parts: list[ConfirmedChanges] = []
    reader = ChangelogReader(parts.append)
    reader.feed(np.arange(len(entries)), [key for key, _ in entries], [value for _, value in entries])
    return parts, reader


def _covered(parts: Sequence[ConfirmedChanges]) -> int:
    return max(commit.offset for part in parts for commit in part.commits) + 1


def _late(parts: Sequence[ConfirmedChanges]) -> list[Late]:
    found = []
    for part in parts:
        own = part.at(part.operations == log.LATE[0])
        rows = zip(own.numbers.tolist(), own.keys, own.starts.tolist(), own.missed, own.states, strict=True)
        coordinates = zip(own.ends.tolist(), own.offsets.tolist(), strict=True)
        for (number, key, time, missed, state), end_and_offset in zip(rows, coordinates, strict=True):
            store = part.stores[number]
            names = [c.name for c in store.state_columns()]
            codec = StateCodec(store.state_columns())
            columns = None if state is None else dict(zip(names, codec.unpack(state), strict=True))
            starts = struct.unpack(f">{len(missed or b'') // 8}q", missed or b"")
            found.append(Late(store, key or b"", time, starts, columns, *end_and_offset))
    return found


def _changes(parts: Sequence[ConfirmedChanges]) -> Any:
    """Store, offset, operation, key, start, end, closing time, and the state's columns (None if there are none)."""
    for part in (part.of_windows() for part in parts):
        codecs = [StateCodec(store.state_columns()) for store in part.stores]
        rows = zip(part.operations.tolist(), part.numbers.tolist(), part.offsets.tolist(), part.keys, strict=True)
        times = zip(part.starts.tolist(), part.ends.tolist(), part.closed_at.tolist(), part.states, strict=True)
        for (code, number, offset, key), (start, end, at, state) in zip(rows, times, strict=True):
            store, operation, columns = part.stores[number], bytes((code,)), None
            if operation in (log.LIVE, log.FINAL):
                names = [c.name for c in store.state_columns()]
                columns = dict(zip(names, codecs[number].unpack(state or b""), strict=True))
            yield store, offset, operation, key or b"", start, end, at, columns


def small_lake(root: Path, *, closes: bool = True) -> str:
    """The folder of an application with sessions `s` with bytes keys: three closed and two
    open, or one open if none `closes`.

    The open ones were written twice, with a third one closed in between.
    """
    builder = StreamsBuilder()
    sessions = builder.stream("in", key="bytes").group_by_key().session_window(gap=100)
    sessions.aggregate("s", n=Count()).on_close().to("out")
    driver, writer, day = TopologyTestDriver(builder.build()), LakeWriter(root / "app"), 86_400_000

    def at(key: bytes, *times: int) -> None:
        for time in times:
            driver.pipe("in", key=key, value=b"{}", timestamp=time)
        writer.run({0: driver.changelog})

    at(b"a", 0, 50)
    if closes:
        at(b"c", 60)
        at(b"b", day, day + 10)
        at(b"b", day + 200)
        at(b"\xff", day + 210, day + 290)
        at(b"b", day + 230)
    return str(root / "app")


def sliding_lake(root: Path) -> str:
    """The folder of an application with sliding windows `s`, in which `state` still has closed windows of `a`."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().sliding_window(100).aggregate("s", n=Count()).on_close().to("out")
    driver, writer = TopologyTestDriver(builder.build()), LakeWriter(root / "app")
    for key, time in ((b"a", 1_000), (b"b", 1_150)):
        driver.pipe("in", key=key, value=b"{}", timestamp=time)
    writer.run({0: driver.changelog})
    return str(root / "app")
