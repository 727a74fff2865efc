"""Changelog bodies to columns."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.services.spark import bodies
from penstock.shared.streams.aggregations import Column, ColumnType
from penstock.shared.streams.changelog import format as log

INT64 = st.integers(-(2**63), 2**63 - 1)
VALUES = {"int64": INT64, "float64": st.floats(allow_nan=False), "binary": st.binary(max_size=20)}


@st.composite
def stores(draw: st.DrawFn) -> tuple[tuple[Column, ...], list[list[int | float | bytes]]]:
    types: list[ColumnType] = draw(st.lists(st.sampled_from(["int64", "float64", "binary"]), max_size=5))
    columns = tuple(Column(f"c{i}", type_) for i, type_ in enumerate(types))
    rows = draw(st.lists(st.tuples(*(VALUES[type_] for type_ in types)), min_size=1, max_size=8))
    return columns, [list(row) for row in rows]


def batch(operation: bytes, values: list[bytes], stores: list[int] | None = None) -> pa.RecordBatch:
    """As Spark hands it over, cut out of a longer one: a slice has an offset into its buffers."""
    padded = [b"xx", *values]
    columns = {
        "partition": pa.array([3] * len(padded), pa.int32()),
        "offset": pa.array(range(9, 9 + len(padded)), pa.int64()),
        "operation": pa.array([operation] * len(padded), pa.binary()),
        "store": pa.array([0, *(stores or [0] * len(values))], pa.int32()),
        "generation": pa.array([0] * len(padded), pa.int32()),
        "identity": pa.array([(7).to_bytes(4, "big") + (8).to_bytes(8, "big")] * len(padded), pa.binary()),
        "key": pa.array([b"k"] * len(padded), pa.binary()),
        "value": pa.array(padded, pa.binary()),
        "written_ms": pa.array([5] * len(padded), pa.int64()),
    }
    return pa.record_batch(columns).slice(1)


@settings(deadline=None)  # the first batch loads pyarrow
@given(stores())
def test_states_read_as_they_were_packed(case: tuple[tuple[Column, ...], list[list[int | float | bytes]]]) -> None:
    """Whatever a store's columns are, a batch decodes to the values that the changelog's own codec packed."""
    columns, rows = case
    codec = log.StateCodec(columns)
    values = [log.encode_live(0, 1, 1, 2, 3, codec.pack(row)) for row in rows]
    layout = bodies.StoreLayout(0, "s", tuple((c.name, c.type) for c in columns))
    at = bodies.ENVELOPE_BYTES + bodies.START_END_BYTES
    decoded = bodies.decode_states(batch(b"L", values).column("value"), at, layout.columns)
    assert [list(row) for row in zip(*(c.to_pylist() for c in decoded.values()), strict=True)] == (
        rows if columns else []
    )


@settings(deadline=None)
@given(st.integers(1, 60))
def test_a_state_of_another_length_is_refused(cut: int) -> None:
    """A body that is cut off or has bytes left over names its topic, partition and offset."""
    columns = (Column("n", "int64"), Column("blob", "binary"))
    whole = log.encode_live(0, 1, 1, 2, 3, log.StateCodec(columns).pack([1, b"12345678901234567890"]))
    layout = bodies.StoreLayout(0, "s", (("n", "int64"), ("blob", "binary")))
    run = bodies.live_rows("log", (layout,), ((layout,),))
    end = max(len(whole) - cut, bodies.ENVELOPE_BYTES + bodies.START_END_BYTES)
    for bad in (whole[:end], whole + b"!" * cut):
        with pytest.raises(ValueError, match="corrupt changelog record: log-3 at offset 11: "):
            list(run(iter([batch(b"L", [whole, bad])])))


@settings(deadline=None)
@given(st.lists(st.tuples(st.binary(max_size=9), st.binary(max_size=9)), max_size=9))
def test_runs_of_bytes(parts: list[tuple[bytes, bytes]]) -> None:
    """Runs are what lies at their places, however short they and what is between them are."""
    text = b"".join(between + b"|" + run for between, run in parts)
    lengths = np.array([len(run) for _, run in parts], np.int64)
    ends = np.cumsum([len(between) + 1 + len(run) for between, run in parts], dtype=np.int64)
    found = bodies.runs(np.frombuffer(text, np.uint8), ends - lengths, lengths)
    assert found.to_pylist() == [run for _, run in parts]


def test_decoding_takes_a_few_times_its_batch() -> None:
    """Big states are decoded without a number for each of their bytes."""
    blob = log.StateCodec([Column("blob", "binary")]).pack([bytes(4_000)])
    values = batch(b"L", [log.encode_live(0, 1, 1, 2, 3, blob)] * 1_000).column("value")
    at = bodies.ENVELOPE_BYTES + bodies.START_END_BYTES
    tracemalloc.start()
    try:
        decoded = bodies.decode_states(values, at, (("blob", "binary"),))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert decoded["blob"].nbytes > 4_000_000
    assert peak < 4 * 4_000_000


def test_live_rows_keep_stores_apart() -> None:
    """A row has the struct of its own store and null for the others; deletes have none."""
    first, second = bodies.StoreLayout(0, "one", (("n", "int64"),)), bodies.StoreLayout(1, "two", (("x", "float64"),))
    one = log.StateCodec([Column("n", "int64")]).pack([4])
    two = log.StateCodec([Column("x", "float64")]).pack([0.5])
    values = [log.encode_live(0, 7, 8, 10, 20, one), log.encode_live(1, 7, 8, 30, 40, two)]
    run = bodies.live_rows("log", (first, second), ((first, second),))
    (live,) = run(iter([batch(b"L", values, [0, 1])]))
    assert live.select(["store", "start_ms", "end_ms", "one", "two", "epoch", "commit", "live"]).to_pylist() == [
        {
            "store": "one",
            "start_ms": 10,
            "end_ms": 20,
            "one": {"n": 4},
            "two": None,
            "epoch": 7,
            "commit": 8,
            "live": True,
        },
        {
            "store": "two",
            "start_ms": 30,
            "end_ms": 40,
            "one": None,
            "two": {"x": 0.5},
            "epoch": 7,
            "commit": 8,
            "live": True,
        },
    ]
    (gone,) = run(iter([batch(b"D", [log.encode_deleted(1, 7, 8, 30)], [1])]))
    assert gone.select(["store", "start_ms", "end_ms", "two", "live"]).to_pylist() == [
        {"store": "two", "start_ms": 30, "end_ms": None, "two": None, "live": False}
    ]


def test_final_rows_have_bounds_and_closing_time() -> None:
    """A final's numbers come out as they went in, with the place it was read from."""
    layout = bodies.StoreLayout(0, "s", (("n", "int64"),))
    value = log.encode_final(0, 7, 8, 10, 20, 99, log.StateCodec([Column("n", "int64")]).pack([-4]))
    (rows,) = bodies.final_rows("log", layout, ((layout,),))(iter([batch(b"F", [value])]))
    assert rows.to_pylist() == [
        {
            "key": b"k",
            "start_ms": 10,
            "end_ms": 20,
            "closed_ms": 99,
            "state": {"n": -4},
            "written_ms": 5,
            "partition": 3,
            "changelog_offset": 10,
        }
    ]


@pytest.mark.parametrize("bounds", [(1_700_000_000 * 10**9, 1_700_000_001 * 10**9), (10, 2**53), (-1, 10)])
def test_windows_that_no_timestamp_can_say_are_refused(bounds: tuple[int, int]) -> None:
    """Bounds in nanoseconds are named with their place and a way out; a closing time like that is nobody's fault."""
    layout = bodies.StoreLayout(0, "s", (("n", "int64"),))
    state = log.StateCodec([Column("n", "int64")]).pack([-4])
    run = bodies.final_rows("log", layout, ((layout,),))
    closed_ms = 1_700_000_000 * 10**9
    good = log.encode_final(0, 7, 8, 0, bodies.TIME_MS_MAX, closed_ms, state)
    (rows,) = run(iter([batch(b"F", [good])]))
    assert (rows.column("end_ms")[0].as_py(), rows.column("closed_ms")[0].as_py()) == (bodies.TIME_MS_MAX, closed_ms)
    said = f"log-3 at offset 11: a closed window from {bounds[0]} to {bounds[1]} ms.*max_future_ms"
    with pytest.raises(ValueError, match=said):
        list(run(iter([batch(b"F", [good, log.encode_final(0, 7, 8, *bounds, closed_ms, state)])])))


OLD = bodies.StoreLayout(0, "s", (("n", "int64"), ("last", "binary")))
NEW = bodies.StoreLayout(0, "s", (("n", "int64"), ("most", "float64"), ("last", "binary")))


def two_generations(operation: bytes, values: list[bytes]) -> pa.RecordBatch:
    """The first value of the old generation, the others of the new one."""
    whole = batch(operation, values)
    place = whole.schema.get_field_index("generation")
    return whole.set_column(place, "generation", pa.array([0] + [1] * (len(values) - 1), pa.int32()))


def packed(layout: bodies.StoreLayout, *values: int | float | bytes) -> bytes:
    return log.StateCodec([Column(name, type_) for name, type_ in layout.columns]).pack(values)  # type: ignore[arg-type]


def test_each_generation_is_read_by_its_own_layout() -> None:
    """What an older commit has no column for is null, in live rows as in finals; the rest is where it belongs."""
    states = [packed(OLD, 4, b"x"), packed(NEW, 5, 0.5, b"y")]
    live = [log.encode_live(0, 1, 1, 2, 3, state) for state in states]
    final = [log.encode_final(0, 1, 1, 2, 3, 9, state) for state in states]
    wanted = [{"n": 4, "most": None, "last": b"x"}, {"n": 5, "most": 0.5, "last": b"y"}]
    generations = ((OLD,), (NEW,))
    (rows,) = bodies.live_rows("log", (NEW,), generations)(iter([two_generations(b"L", live)]))
    assert rows.column("s").to_pylist() == wanted
    (rows,) = bodies.final_rows("log", NEW, generations)(iter([two_generations(b"F", final)]))
    assert rows.column("state").to_pylist() == wanted


def test_an_unknown_store_is_named_by_place() -> None:
    """An entry of a store that its commit does not have is refused."""
    values = [log.encode_live(7, 1, 1, 2, 3, b"")]
    with pytest.raises(ValueError, match="log-3 at offset 10: an entry for store 7"):
        list(bodies.live_rows("log", (OLD,), ((OLD,),))(iter([batch(b"L", values[-1:], [7])])))
