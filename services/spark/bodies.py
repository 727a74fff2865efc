"""Changelog bodies to columns, a batch at a time, without a Python object per row.

Runs in Spark's Python workers, so it imports numpy and pyarrow alone. A batch is what the reader's rule left over:
columns `partition`, `offset`, `operation`, `store` (its number), `identity` (epoch and commit, 12 bytes), `key`,
`value` (the whole record) and `written_ms`. Fixed-width columns are one gather of bytes and a big-endian view; a
binary column is a gather of runs whose lengths are read from the bodies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

ENVELOPE_BYTES = 15
START_BYTES, START_END_BYTES, START_END_CLOSED_BYTES = 8, 16, 24
LENGTH_BYTES = 4
LIVE, FINAL = b"L", b"F"
CORRUPT = "corrupt changelog record"
TIME_MS_MAX = 253_402_300_799_999  # the last of year 9999: what timestamps and days of all engines can say

ARROW_TYPES = {"int64": pa.int64(), "float64": pa.float64(), "binary": pa.binary()}
NUMPY_TYPES = {"int64": ">i8", "float64": ">f8"}


class StoreLayout(NamedTuple):
    """A store by its number: its name, and its state's columns as (name, type) in declared order."""

    number: int
    name: str
    columns: tuple[tuple[str, str], ...]

    def struct(self) -> pa.DataType:
        return pa.struct([(name, ARROW_TYPES[type_]) for name, type_ in self.columns])


def beyond_time(start_ms: int, end_ms: int) -> str:
    """Why a closed window of these bounds is not taken."""
    return (
        f"a closed window from {start_ms} to {end_ms} ms, which no timestamp before the year 10000 can say: were "
        "nanoseconds sent as milliseconds? max_future_ms keeps such "
        "records from windows"
    )


class BadBody(ValueError):
    """A body that is not what its store's layout says; `row` is its place in the batch."""

    def __init__(self, row: int, reason: str) -> None:
        super().__init__(reason)
        self.row, self.reason = row, reason


Spans = tuple[Any, Any, Any]
"""A binary column as numpy sees it: all bytes, each value's first byte, and the byte after its last."""


def spans(column: Any) -> Spans:
    """The buffers of a binary array without nulls."""
    offsets = np.frombuffer(column.buffers()[1], np.int32)[column.offset : column.offset + len(column) + 1].astype(
        np.int64
    )
    data = column.buffers()[2]
    return np.frombuffer(data, np.uint8) if data is not None else np.zeros(0, np.uint8), offsets[:-1], offsets[1:]


def gather(data: Any, starts: Any, width: int) -> Any:
    """`width` bytes from each start, as a matrix of bytes."""
    return np.lib.stride_tricks.sliding_window_view(data, width)[starts]


def numbers(data: Any, starts: Any, ends: Any, at: int, dtype: Any) -> Any:
    """One structured row per value, read `at` bytes after its start. BadBody where a value is too short."""
    kind = np.dtype(dtype)
    short = np.flatnonzero(starts + at + kind.itemsize > ends)
    if len(short):
        row = int(short[0])
        raise BadBody(row, f"{ends[row] - starts[row]} bytes where at least {at + kind.itemsize} were expected")
    if len(starts) == 0 or kind.itemsize == 0:
        return np.zeros(len(starts), kind)
    return np.ascontiguousarray(gather(data, starts + at, kind.itemsize)).view(kind)[:, 0]


def runs(data: Any, starts: Any, lengths: Any) -> Any:
    """A pyarrow binary array of `lengths` bytes from each start. Runs ascend and do not overlap.

    They are told by one byte for each byte of `data`: the places themselves would take eight.
    """
    offsets = np.zeros(len(starts) + 1, np.int32)  # enough, as `data` is one Arrow array's
    np.cumsum(lengths, out=offsets[1:])
    some = lengths > 0
    begins, ends = starts[some], (starts + lengths)[some]
    first, last = (int(begins[0]), int(ends[-1])) if len(begins) else (0, 0)
    edges = np.zeros(last - first + 1, np.int8)
    edges[begins - first] += 1
    edges[ends - first] -= 1
    inside = np.cumsum(edges[:-1], dtype=np.int8).view(bool)
    buffers = [None, pa.py_buffer(offsets), pa.py_buffer(data[first:last][inside])]
    return pa.Array.from_buffers(pa.binary(), len(starts), buffers)


def decode_states(values: Any, at: int, columns: tuple[tuple[str, str], ...]) -> dict[str, Any]:
    """State columns of records of one store, whose state starts `at` bytes after each record's first.

    Raises BadBody where a record's state does not end exactly at its last byte.
    """
    data, starts, ends = spans(values)
    fixed = [(name, NUMPY_TYPES[type_]) for name, type_ in columns if type_ != "binary"]
    rows = numbers(data, starts, ends, at, fixed)
    decoded: dict[str, Any] = {}
    for name, kind in fixed:
        native = np.ascontiguousarray(rows[name].astype(kind[1:]))
        decoded[name] = pa.array(native)
    cursor = starts + at + np.dtype(fixed).itemsize
    for name, type_ in columns:
        if type_ == "binary":
            lengths = numbers(data, cursor, ends, 0, [("length", ">u4")])["length"].astype(np.int64)
            cursor = cursor + LENGTH_BYTES
            beyond = np.flatnonzero(cursor + lengths > ends)
            if len(beyond):
                raise BadBody(int(beyond[0]), f"the state column {name!r} is cut off")
            decoded[name] = runs(data, cursor, lengths)
            cursor = cursor + lengths
    wrong = np.flatnonzero(cursor != ends)
    if len(wrong):
        row = int(wrong[0])
        raise BadBody(row, f"{ends[row] - starts[row]} bytes where {cursor[row] - starts[row]} were expected")
    return {name: decoded[name] for name, _ in columns}


def state_struct(values: Any, at: int, layout: StoreLayout) -> Any:
    """The state of each record as one struct array of the store's type."""
    decoded = decode_states(values, at, layout.columns)
    return pa.StructArray.from_arrays(list(decoded.values()), fields=list(layout.struct()))


Generations = tuple[tuple[StoreLayout, ...], ...]
"""The stores as each generation of commits had them, by the number in the column `generation`."""


def live_rows(
    topic: str, layouts: tuple[StoreLayout, ...], generations: Generations
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: surviving L, D and F entries as rows of the `state` table, with their operation."""

    def decode(batch: Any) -> Any:
        values = batch.column("value")
        data, starts, ends = spans(values)
        operations = _is(batch, LIVE)
        stores = np.asarray(batch.column("store"))
        _require_stores(batch, generations)
        identity = identities(batch)
        first = numbers(data, starts, ends, ENVELOPE_BYTES, [("start", ">i8")])["start"].astype(np.int64)
        last = np.zeros(len(first), np.int64)
        live = np.flatnonzero(operations)
        at = ENVELOPE_BYTES + START_BYTES
        last[live] = numbers(data, starts[live], ends[live], at, [("end", ">i8")])["end"].astype(np.int64)
        structs = [_states(batch, operations & (stores == s.number), START_END_BYTES, s, generations) for s in layouts]
        return pa.record_batch(
            [
                pa.repeat("window", len(first)),
                batch.column("partition"),
                _names(stores, (*generations, layouts)),
                batch.column("key"),
                pa.array(first),
                pa.array(last, mask=~operations),
                *structs,
                batch.column("offset"),
                pa.array(identity["epoch"].astype(np.int32)),
                pa.array(identity["commit"].astype(np.int64)),
                pa.array(operations),
            ],
            names=[
                *("row", "partition", "store", "key", "start_ms", "end_ms"),
                *(s.name for s in layouts),
                *("changelog_offset", "epoch", "commit", "live"),
            ],
        )

    return _naming_place(topic, decode)


def final_rows(topic: str, layout: StoreLayout, generations: Generations) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: one store's F entries with bounds, closing time and state.

    Bounds that no timestamp can say are refused.
    """

    def decode(batch: Any) -> Any:
        values = batch.column("value")
        data, starts, ends = spans(values)
        bounds = numbers(data, starts, ends, ENVELOPE_BYTES, [("start", ">i8"), ("end", ">i8"), ("closed", ">i8")])
        first, last, closed = (bounds[name].astype(np.int64) for name in ("start", "end", "closed"))
        for row in np.flatnonzero((first < 0) | (last > TIME_MS_MAX) | (first > TIME_MS_MAX)):
            raise BadBody(int(row), beyond_time(first[row], last[row]))
        return pa.record_batch(
            [
                batch.column("key"),
                pa.array(first),
                pa.array(last),
                pa.array(closed),
                _states(batch, np.ones(len(values), bool), START_END_CLOSED_BYTES, layout, generations),
                batch.column("written_ms"),
                batch.column("partition"),
                batch.column("offset"),
            ],
            names=["key", "start_ms", "end_ms", "closed_ms", "state", "written_ms", "partition", "changelog_offset"],
        )

    return _naming_place(topic, decode)


def identities(batch: Any) -> Any:
    """Owner epoch and commit number of each row."""
    data, starts, ends = spans(batch.column("identity"))
    return numbers(data, starts, ends, 0, [("epoch", ">i4"), ("commit", ">i8")])


def _is(batch: Any, operation: bytes) -> Any:
    """Which rows are of this operation."""
    return np.asarray(pc.equal(batch.column("operation"), operation))


def _names(stores: Any, generations: Generations) -> Any:
    """The stores' names by their numbers, of which every generation has the same ones."""
    names = {layout.number: layout.name for layouts in generations for layout in layouts}
    known = sorted(names)
    return pa.array([names[number] for number in known]).take(pa.array(np.searchsorted(known, stores)))


def _unknown_stores(batch: Any, generations: Generations) -> list[int]:
    """The rows whose store their commit's generation does not have."""
    stores, of = np.asarray(batch.column("store")), np.asarray(batch.column("generation"))
    known = np.array([len(layouts) for layouts in generations] or [0])
    return [int(row) for row in np.flatnonzero(stores >= known[of])]


def _require_stores(batch: Any, generations: Generations) -> None:
    for row in _unknown_stores(batch, generations):
        raise BadBody(row, f"an entry for store {batch.column('store')[row]}, which there is not")


def _states(batch: Any, chosen: Any, head: int, layout: StoreLayout, generations: Generations) -> Any:
    """The store's struct column, where `chosen`, from what the commit's own generation wrote; null elsewhere.

    A state begins `head` bytes after the envelope. A column that a generation does not have is null.
    """
    values, of = batch.column("value"), np.asarray(batch.column("generation"))
    places, found = np.full(len(values), -1, np.int64), []
    done = 0
    for generation, layouts in enumerate(generations):
        written = next((old for old in layouts if old.number == layout.number), None)
        rows = np.flatnonzero(chosen & (of == generation))
        if written is None or not len(rows):
            continue
        try:
            own = state_struct(values.take(pa.array(rows)), ENVELOPE_BYTES + head, written)
        except BadBody as e:
            raise BadBody(int(rows[e.row]), e.reason) from None
        found.append(_widened(own, written, layout))
        places[rows] = np.arange(done, done + len(rows))
        done += len(rows)
    if not found:
        return pa.nulls(len(values), layout.struct())
    return pa.concat_arrays(found).take(pa.array(places, mask=places < 0))


def _widened(states: Any, written: StoreLayout, layout: StoreLayout) -> Any:
    if written.columns == layout.columns:
        return states
    known = {name for name, _ in written.columns}
    columns = [
        states.field(field.name) if field.name in known else pa.nulls(len(states), field.type)
        for field in layout.struct()
    ]
    return pa.StructArray.from_arrays(columns, fields=list(layout.struct()))


def _naming_place(topic: str, decode: Callable[[Any], Any]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """`decode` over an iterator of batches, with an error that says where the record is."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            try:
                yield decode(batch)
            except BadBody as e:
                partition, offset = batch.column("partition")[e.row].as_py(), batch.column("offset")[e.row].as_py()
                raise ValueError(f"{CORRUPT}: {topic}-{partition} at offset {offset}: {e.reason}") from None

    return run
