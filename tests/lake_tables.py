"""Writes a lake's tables from changelogs, as the layout says and without Spark, for tests of what reads them."""

from __future__ import annotations

import datetime
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
from deltalake import write_deltalake

from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.changelog.reader import ChangelogReader, Confirmed
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.latest import LATEST
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

TIMESTAMP = pa.timestamp("us", "UTC")
TYPES = {"int64": pa.int64(), "float64": pa.float64(), "binary": pa.binary()}
TOPIC_ID = "dGhlIGNoYW5nZWxvZw"
Entries = Sequence[tuple[bytes | None, bytes]]


class Late(NamedTuple):
    """A late record as the changelog has it: its state's columns are None if an aggregation refused the value."""

    store: log.StoreSchema
    key: bytes
    time_ms: int
    missed: tuple[int, ...]
    state: dict[str, Any] | None
    source_offset: int
    changelog_offset: int


@dataclass
class LakeWriter:
    """An application's tables in `folder`; each `run` appends what is new in the changelogs.

    `forge` is called with each table's name and rows, and may change them.
    """

    folder: Path
    topic_id: str = TOPIC_ID
    forge: Callable[[str, list[dict[str, Any]]], None] | None = None
    _next: dict[int, int] = field(default_factory=dict)

    def run(self, changelogs: Mapping[int, Entries], *, crash: bool = False) -> None:
        """Append the rows of one compaction; with `crash` only those of `closed` and `late`."""
        closed: dict[log.StoreSchema, list[dict[str, Any]]] = {}
        missed: dict[log.StoreSchema, list[dict[str, Any]]] = {}
        state: list[dict[str, Any]] = []
        stores: tuple[log.StoreSchema, ...] = ()
        for partition, entries in sorted(changelogs.items()):
            parts, reader = _read(entries)
            first, covered = self._next.get(partition, 0), _covered(parts)
            assert reader.progress is not None
            stores = reader.progress.stores
            for late in _late(parts):
                if late.changelog_offset >= first:
                    row = _late_row(late) | self._place(partition, late.changelog_offset)
                    missed.setdefault(late.store, []).append(row)
            for store, offset, operation, key, start, end, at, columns in _changes(parts):
                if offset < first:
                    continue
                if operation == log.FINAL:
                    bounds = {"window_start": _time(start), "window_end": _time(end), "closed_at": _time(at)}
                    row = {**_key(store, key), **bounds, **results(store, columns), "state": columns}
                    closed.setdefault(store, []).append(row | self._place(partition, offset))
                one = {"row": "window", "partition": partition, "store": store.name, "key": key, "start_ms": start}
                if operation == log.LIVE:
                    one |= {"end_ms": end, store.name: columns}
                state.append(one | {"live": operation == log.LIVE, "changelog_offset": offset})
            progress = msgspec.json.encode(reader.progress).decode()
            one = {"row": "progress", "partition": partition, "epoch": reader.epoch, "progress": progress}
            one |= {"topic_id": self.topic_id, "previous_offset": first, "appended": "{}", "live": True}
            state.append(one | {"changelog_offset": covered})
            if not crash:
                self._next[partition] = covered
        for store, rows in closed.items():
            self._write(f"closed/{store.name}", rows, closed_schema(store))
        for store, rows in missed.items():
            self._write(f"late/{store.name}", rows, late_schema(store))
        if not crash:
            self._write("state", state, state_schema(stores), ["partition"])

    def _place(self, partition: int, offset: int) -> dict[str, Any]:
        return {"partition": partition, "changelog_offset": offset, "topic_id": self.topic_id}

    def _write(self, table: str, rows: list[dict[str, Any]], schema: Any, partitions: list[str] | None = None) -> None:
        if self.forge is not None:
            self.forge(table, rows)
        if rows:
            folder = self.folder / table
            folder.parent.mkdir(parents=True, exist_ok=True)
            data = pa.Table.from_pylist(rows, schema)
            write_deltalake(str(folder), data, mode="append", partition_by=partitions, schema_mode="merge")


def windows(entries: Entries) -> dict[tuple[str, bytes, int], tuple[int, dict[str, Any]]]:
    """All windows that a changelog has, closed and live: (store, key, start) to end and results."""
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
    """The late records that a changelog has."""
    return _late(_read(entries)[0])


def results(store: log.StoreSchema, state: Mapping[str, Any] | None) -> dict[str, Any]:
    """What is forwarded of a state, by aggregation; None for each if there is no state."""
    return {a.name: None if state is None else _result(a, state) for a in store.aggregations if a.name != LATEST}


def _result(aggregation: log.AggregationSchema, state: Mapping[str, Any]) -> Any:
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


def closed_schema(store: log.StoreSchema) -> Any:
    head = [_key_field(store), ("window_start", TIMESTAMP), ("window_end", TIMESTAMP)]
    return pa.schema([*head, *_results_of(store), ("closed_at", TIMESTAMP), *_tail(store)])


def late_schema(store: log.StoreSchema) -> Any:
    head = [_key_field(store), ("event_time", TIMESTAMP), ("missed", pa.list_(TIMESTAMP))]
    return pa.schema([*head, *_results_of(store), ("source_offset", pa.int64()), *_tail(store)])


def state_schema(stores: Sequence[log.StoreSchema]) -> Any:
    head = [("row", pa.string()), ("partition", pa.int32()), ("store", pa.string()), ("key", pa.binary())]
    bounds = [("start_ms", pa.int64()), ("end_ms", pa.int64())]
    tail = [("live", pa.bool_()), ("changelog_offset", pa.int64()), ("epoch", pa.int32()), ("commit", pa.int64())]
    tail += [("progress", pa.string()), ("topic_id", pa.string()), ("previous_offset", pa.int64())]
    own = [(store.name, _struct(store)) for store in stores]
    return pa.schema([*head, *bounds, *own, *tail, ("appended", pa.string())])


def _tail(store: log.StoreSchema) -> list[Any]:
    places = [("partition", pa.int32()), ("changelog_offset", pa.int64()), ("topic_id", pa.string())]
    return [("state", _struct(store)), *places]


def _struct(store: log.StoreSchema) -> Any:
    return pa.struct([(c.name, TYPES[c.type]) for c in store.state_columns()])


def _results_of(store: log.StoreSchema) -> list[Any]:
    types = {"int64": pa.int64(), "float64": pa.float64(), "json": pa.string()}
    return [(a.name, types[a.result]) for a in store.aggregations if a.name != LATEST]


def _key_field(store: log.StoreSchema) -> tuple[str, Any]:
    return ("key", pa.string()) if store.key == "string" else ("key_bytes", pa.binary())


def _key(store: log.StoreSchema, key: bytes) -> dict[str, Any]:
    return {"key": key.decode()} if store.key == "string" else {"key_bytes": key}


def _late_row(late: Late) -> dict[str, Any]:
    times = {"event_time": _time(late.time_ms), "missed": [_time(at) for at in late.missed]}
    own = {**results(late.store, late.state), "state": late.state, "source_offset": late.source_offset}
    return {**_key(late.store, late.key), **times, **own}


def _time(ms: int) -> datetime.datetime | None:
    if ms > 253_402_300_799_999:
        return None
    return datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(milliseconds=ms)


def _read(entries: Entries) -> tuple[list[Confirmed], ChangelogReader]:
    parts: list[Confirmed] = []
    reader = ChangelogReader(parts.append)
    reader.feed(np.arange(len(entries)), [key for key, _ in entries], [value for _, value in entries])
    return parts, reader


def _covered(parts: Sequence[Confirmed]) -> int:
    return max(commit.offset for part in parts for commit in part.commits) + 1


def _late(parts: Sequence[Confirmed]) -> list[Late]:
    found = []
    for part in parts:
        own = part.at(part.operations == log.LATE[0])
        rows = zip(own.numbers.tolist(), own.keys, own.starts.tolist(), own.missed, own.states, strict=True)
        places = zip(own.ends.tolist(), own.offsets.tolist(), strict=True)
        for (number, key, time, missed, state), place in zip(rows, places, strict=True):
            store = part.stores[number]
            names = [c.name for c in store.state_columns()]
            codec = log.StateCodec(store.state_columns())
            columns = None if state is None else dict(zip(names, codec.unpack(state), strict=True))
            starts = struct.unpack(f">{len(missed or b'') // 8}q", missed or b"")
            found.append(Late(store, key or b"", time, starts, columns, *place))
    return found


def _changes(parts: Sequence[Confirmed]) -> Any:
    """Store, offset, operation, key, start, end, closing time, and the state's columns (None if there are none)."""
    for part in (part.of_windows() for part in parts):
        codecs = [log.StateCodec(store.state_columns()) for store in part.stores]
        rows = zip(part.operations.tolist(), part.numbers.tolist(), part.offsets.tolist(), part.keys, strict=True)
        times = zip(part.starts.tolist(), part.ends.tolist(), part.closed_at.tolist(), part.states, strict=True)
        for (code, number, offset, key), (start, end, at, state) in zip(rows, times, strict=True):
            store, operation, columns = part.stores[number], bytes((code,)), None
            if operation in (log.LIVE, log.FINAL):
                names = [c.name for c in store.state_columns()]
                columns = dict(zip(names, codecs[number].unpack(state or b""), strict=True))
            yield store, offset, operation, key or b"", start, end, at, columns


def small_lake(root: Path, *, closes: bool = True) -> str:
    """The folder of an application with sessions `s` by bytes: three closed, two open; or one open, if none `closes`.

    The open ones were written twice, and a third one was closed in between.
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
