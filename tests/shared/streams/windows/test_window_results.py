"""Results of windows: the order in which they close, the numbers of windows that are merged, and their encoding."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.aggregations.aggregation import Aggregate, Aggregation, Count, Max, Mean, Min, Sum
from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.aggregations.latest import LATEST, Latest
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_json, encode_updates
from penstock.shared.streams.window_result import WindowKey
from penstock.shared.streams.windows import kernels as k
from penstock.shared.streams.windows.json_rows import json_objects, json_texts
from penstock.shared.streams.windows.kernels import DIGITS, RUN
from penstock.shared.streams.windows.result_batch import ResultBatch
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_columns import WindowColumns
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples

Keys = Callable[[random.Random, int], list[str]]

ROOT = Path(__file__).resolve().parents[4]
GAP = 10


class Value(msgspec.Struct):
    """Numbers, either of which may be missing."""

    n: int | None = None
    x: float | None = None


def sessions(grace: int, **aggregations: Any) -> TopologyTestDriver:
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Value).group_by_key().session_window(GAP, grace)
    windows.aggregate("s", **aggregations).on_close().to("out")
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers())


def results(driver: TopologyTestDriver) -> list[dict[str, Any]]:
    return [msgspec.json.decode(record.value or b"") for record in driver.read("out")]


def mixed_keys(chance: random.Random, count: int) -> list[str]:
    """Keys of which many have the first bytes in common, or are the beginning of another."""
    found = {"user-"}
    while len(found) < count:
        found.add("user-" + "".join(chance.choice("aé\x00") for _ in range(chance.randint(0, 12))))
    return sorted(found)


def numbered_keys(chance: random.Random, count: int) -> list[str]:
    """Keys that differ only in their last bytes, and one without these bytes."""
    return ["z", *(f"user-{number:03}" for number in range(count - 1))]


@pytest.mark.parametrize("keys", [mixed_keys, numbered_keys])
@pytest.mark.parametrize("count", [2, RUN, RUN + 1, 5 * RUN + 1, DIGITS + 1, 2 * DIGITS])
@pytest.mark.parametrize(
    ("starts", "lengths"),
    [([0], [0, 0, 3]), ([0, 100, 255], [0]), ([0, 1, 255, 256], [0, 3]), ([2**n for n in range(0, 42, 3)], [0, 0, 3])],
)
def test_windows_close_by_end_start_and_key(keys: Keys, count: int, starts: list[int], lengths: list[int]) -> None:
    """Few are sorted by merging and many by their digits: the order is the same."""
    chance = random.Random(count)
    driver = sessions(grace=2**44, n=Count())
    expected, records = [], []
    for key in sorted(keys(chance, count), key=lambda _: chance.random()):
        start = chance.choice(starts)
        end = start + chance.choice(lengths)
        records += [(key.encode(), b"{}", timestamp) for timestamp in sorted({start, end})]
        expected.append((end, start, key.encode()))
    driver.pipe_columns("in", records)
    assert results(driver) == []
    driver.pipe("in", key=b"end", value=b"{}", timestamp=2**46)
    assert [(one["end"], one["start"], one["key"].encode()) for one in results(driver)] == sorted(expected)


def test_the_order_is_the_same_without_a_compiler() -> None:
    """With NUMBA_DISABLE_JIT=1 arrays of bytes are not widened implicitly."""
    call = "of.test_windows_close_by_end_start_and_key(of.mixed_keys, n, [0], [0])"
    code = f"import {__name__} as of; [{call} for n in (41, 257)]"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], cwd=ROOT, env=environment, check=True)


MADE: dict[str, Any] = {"min": Min, "max": Max, "sum": Sum, "first": First, "last": Last}
OF: dict[str, Any] = {"min": min, "max": max, "sum": sum, "first": lambda of: of[0], "last": lambda of: of[-1]}


@pytest.mark.parametrize("seed", range(12))
def test_merged_sessions_have_the_numbers_of_all_their_records(seed: int) -> None:
    """Merged sessions have the aggregates of all their records, in any order of arrival and with missing values."""
    chance = random.Random(seed)
    names = {
        "count": Count(),
        **{f"{name}_{field}": made(field) for name, made in MADE.items() for field in ("n", "x")},
    }
    driver = sessions(grace=10_000, **names)
    records = []
    for _ in range(60):
        n = chance.choice([None, chance.randint(-(2**40), 2**40)])
        x = chance.choice([None, chance.randint(-99, 99) / 4])
        records.append((chance.randrange(600), n, x))
        driver.pipe("in", key=b"k", value=msgspec.json.encode({"n": n, "x": x}), timestamp=records[-1][0])
    driver.pipe("in", key=b"end", value=b"{}", timestamp=10**6)
    groups: list[list[tuple[int, int | None, float | None]]] = []
    for record in sorted(records, key=lambda record: record[0]):
        if not groups or record[0] - groups[-1][-1][0] > GAP:
            groups.append([])
        groups[-1].append(record)
    found = results(driver)
    assert [(one["start"], one["end"], one["count"]) for one in found] == [
        (group[0][0], group[-1][0], len(group)) for group in groups
    ]
    for one, group in zip(found, groups, strict=True):
        for name, index in (("n", 1), ("x", 2)):
            values = [record[index] for record in group if record[index] is not None]
            for what, of in OF.items():
                assert one[f"{what}_{name}"] == (of(values) if values else None)


@pytest.mark.parametrize("last", [900_000, 985_000, 999_500, 999_999])
@pytest.mark.parametrize("kind", ["tumbling", "session", "sliding"])
def test_a_window_closes_at_its_end_however_late_it_began(kind: str, last: int) -> None:
    """A window closes at its end, even if its first record arrives just before that."""
    builder = StreamsBuilder()
    grouped = builder.stream("in", value=Value).group_by_key()
    made = {"tumbling": grouped.tumbling_window, "session": grouped.session_window, "sliding": grouped.sliding_window}
    made[kind](1_000_000, 0).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    closes_at = {"tumbling": 1_000_000, "session": last + 1_000_001, "sliding": 1_000_001}[kind]
    for key, timestamp in ((b"a", last), (b"b", closes_at - 1)):
        driver.pipe("in", key=key, value=b"{}", timestamp=timestamp)
    assert results(driver) == []
    driver.pipe("in", key=b"c", value=b"{}", timestamp=closes_at)
    assert [one["key"] for one in results(driver)] == ["a"] + ["b"] * (kind != "session")


def test_a_window_at_time_0_closes_in_time() -> None:
    """The wheel's buckets are wider than its time, and the close time was below 0 before."""
    driver = sessions(grace=5_110, n=Count())
    for timestamp, closed in ((0, []), (5_119, []), (5_121, ["0"])):
        driver.pipe("in", key=b"%d" % timestamp, value=b"{}", timestamp=timestamp)
        assert [one["key"] for one in results(driver)] == closed


@pytest.mark.parametrize("count", [2, 3, 7, 40])
def test_windows_close_in_time_in_whatever_order_they_began(count: int) -> None:
    """Those whose ends are near wait in a heap: each closes as soon as it is due."""
    chance = random.Random(count)
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Value).group_by_key().sliding_window(1_000_000, 1_000)
    windows.aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    ends = list(range(0, 10 * count, 10))
    for end in sorted(ends, key=lambda _: chance.random()):
        driver.pipe("in", key=b"k%d" % end, value=b"{}", timestamp=2_000_000 + end)
    for end in ends:
        driver.pipe("in", key=b"end", value=b"{}", timestamp=2_001_001 + end)
        assert [one["key"] for one in results(driver)] == [f"k{end}"]


@pytest.mark.parametrize("seed", range(3))
def test_windows_close_in_time_while_others_begin(seed: int) -> None:
    """Each record closes the windows before its time, and begins one whose end is near."""
    chance = random.Random(seed)
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Value).group_by_key().sliding_window(1_000_000, 100)
    windows.aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    open_: list[int] = []
    now = 2_000_000
    for number in range(200):
        now += chance.randrange(6)
        at = chance.randrange(now - 100, now + 1)
        driver.pipe("in", key=b"k%d" % number, value=b"{}", timestamp=now)
        driver.pipe("in", key=b"k%d" % (1_000 + number), value=b"{}", timestamp=at)
        open_ += [now, at]
        assert [one["end"] for one in results(driver)] == sorted(end for end in open_ if end < now - 100)
        open_ = [end for end in open_ if end >= now - 100]


BIG = 2**62


@pytest.mark.parametrize(
    ("left", "right", "middle", "expected"),
    [
        (BIG, BIG, None, None),
        (2**64 // 3, 2**64 // 3, None, None),  # their sum has the opposite of each of their bits
        (BIG, None, BIG, None),
        (None, BIG, BIG, None),
        (BIG, BIG - 1, 1, None),
        (-BIG, -BIG, -1, None),
        (BIG, BIG - 1, None, 2**63 - 1),
        (-BIG, -BIG, None, -(2**63)),
        (None, None, 2**63 - 1, 2**63 - 1),
        (None, 2**63 - 1, None, 2**63 - 1),
        (2**63 - 1, None, None, 2**63 - 1),
        (2**63 - 1, -5, 5, 2**63 - 1),
        (-(2**63), 5, -5, -(2**63)),
    ],
)
def test_a_sum_that_would_leave_64_bits_merges_nothing(
    left: int | None, right: int | None, middle: int | None, expected: int | None
) -> None:
    """The record between two sessions is then a dead letter, and both sessions stay unchanged."""
    driver = sessions(grace=1_000, n=Count(), sum=Sum("n"))
    for timestamp, n in ((0, left), (2 * GAP, right), (GAP, middle)):
        driver.pipe("in", key=b"k", value=msgspec.json.encode({"n": n}), timestamp=timestamp)
    rows = [(row.start, row.end, row.states[0]) for row in driver.task.stores["s"].rows()]
    if expected is None:
        assert rows == [(0, 0, 1), (2 * GAP, 2 * GAP, 1)]
        assert len(driver.read("in-dlq")) == 1
        return
    assert rows == [(0, 2 * GAP, 3)]
    driver.pipe("in", key=b"end", value=b"{}", timestamp=10**6)
    (result,) = results(driver)
    assert result["sum"] == expected


def test_only_a_sum_rejects_a_record() -> None:
    """A number may be so large that its sum with a count, a time, a minimum or a maximum would overflow."""
    builder = StreamsBuilder()
    names = {name: made("n") for name, made in MADE.items()}
    windows = builder.stream("in", value=Value).group_by_key().tumbling_window(10, 0)
    windows.aggregate("s", before=Count(), **names, after=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for key, numbers in ((b"a", (-100, 50, 2**63 - 1)), (b"b", (100, -50, -(2**63)))):
        for n in numbers:
            driver.pipe("in", key=key, value=msgspec.json.encode({"n": n}), timestamp=5)
    assert driver.read("in-dlq") == []
    driver.pipe("in", key=b"end", value=b"{}", timestamp=10)
    assert [one["sum"] for one in results(driver)] == [2**63 - 51, 50 - 2**63]


def test_a_sum_has_the_windows_of_its_record_only() -> None:
    """A record whose windows are all new does not add to an earlier window of the key."""
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Value).group_by_key().hopping_window(10, 5, 100)
    windows.aggregate("s", sum=Sum("n")).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for timestamp in (2, 32, 12):
        driver.pipe("in", key=b"k", value=b'{"n":%d}' % BIG, timestamp=timestamp)
    assert driver.read("in-dlq") == []
    assert [row.start for row in driver.task.stores["s"].rows_of("k")] == [0, 5, 10, 25, 30]
    driver.pipe("in", key=b"k", value=b'{"n":%d}' % BIG, timestamp=9)
    assert len(driver.read("in-dlq")) == 1


def sliding(emit: str = "on_close") -> TopologyTestDriver:
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Value).group_by_key().sliding_window(GAP, 1_000)
    table = windows.aggregate("s", n=Count(), sum=Sum("n"))
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers())


@pytest.mark.parametrize("seed", range(6))
def test_sliding_windows_have_the_sum_of_their_records(seed: int) -> None:
    """The order of the records has no effect, also near time 0."""
    chance, driver = random.Random(seed), sliding()
    records = [(chance.randrange(60), chance.randint(-9, 9)) for _ in range(25)]
    for timestamp, n in records:
        driver.pipe("in", key=b"k", value=msgspec.json.encode({"n": n}), timestamp=timestamp)
    driver.pipe("in", key=b"end", value=b"{}", timestamp=10**6)
    found = results(driver)
    assert {one["end"] for one in found} >= {timestamp for timestamp, _ in records if timestamp >= GAP}
    for one in found:
        own = [n for timestamp, n in records if one["start"] <= timestamp <= one["end"]]
        assert (one["n"], one["sum"]) == (len(own), sum(own))


@pytest.mark.parametrize(
    ("first", "second", "is_rejected"),
    [(100, 105, True), (100, 95, True), (100, 110, True), (100, 111, False), (100, 89, False), (3, 5, True)],
)
def test_a_sum_of_a_sliding_window_that_would_leave_64_bits(first: int, second: int, is_rejected: bool) -> None:
    """The record is a dead letter if it shares a window with the other one."""
    driver = sliding()
    for timestamp in (first, second):
        driver.pipe("in", key=b"k", value=msgspec.json.encode({"n": BIG}), timestamp=timestamp)
    assert len(driver.read("in-dlq")) == is_rejected
    assert (len(list(driver.task.stores["s"].rows())) == 1) == is_rejected


def test_updates_of_sliding_windows_have_their_bounds() -> None:
    """An out-of-order record changes a window, and creates one that ends at it and one that starts after it."""
    driver = sliding("on_update")
    for timestamp, n in ((25, 1), (20, 2), (3, 4), (1, 8)):
        driver.pipe("in", key=b"k", value=msgspec.json.encode({"n": n}), timestamp=timestamp)
    found = []
    for record in driver.read("out"):
        key, value = msgspec.json.decode(record.key or b""), msgspec.json.decode(record.value or b"")
        found.append((key["start"], key["end"], value["sum"]))
    assert found == [
        (15, 25, 1),
        *((15, 25, 3), (10, 20, 2), (21, 31, 1)),
        (0, 10, 4),
        *((2, 12, 4), (0, 10, 12)),
    ]


KINDS: dict[str, Any] = {
    "session": lambda grouped, grace: grouped.session_window(10, grace),
    "tumbling": lambda grouped, grace: grouped.tumbling_window(10, grace),
    "hopping": lambda grouped, grace: grouped.hopping_window(25, 10, grace),
    "sliding": lambda grouped, grace: grouped.sliding_window(10, grace),
}
RESULTS: dict[str, Aggregation[Any]] = {"n0": First("n"), "n1": Last("n"), "ms0": First("ms"), "ms1": Last("ms")}

Piped = tuple[bytes, bytes, int]


class Numbers(msgspec.Struct):
    """Numbers, either of which may be missing."""

    n: int | None = None
    ms: float | None = None


def first_and_last(kind: str, grace: int, emit: Emit, value: Any, *, deduplicates: bool = True) -> TopologyTestDriver:
    builder = StreamsBuilder()
    windows = KINDS[kind](builder.stream("in", value=value).group_by_key(), grace)
    table = windows.aggregate("s", **RESULTS)
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return TopologyTestDriver(builder.build(), commit_each=False, deduplicate_updates=deduplicates, columns_min=4)


def sorted_results(driver: TopologyTestDriver) -> list[Any]:
    """Results since the last look, in an order of their own."""
    return sorted(((r.key, r.value, r.timestamp) for r in driver.read("out")), key=repr)


def live_windows(driver: TopologyTestDriver) -> list[Any]:
    return sorted((w.key, w.start, w.end, w.states) for w in driver.task.stores["s"].rows())


numbers = st.tuples(
    st.none() | st.integers(-(2**63), 2**63 - 1),
    st.none() | st.sampled_from([0.0, -0.0, 1.5, -2.25, 1e300]),
)
records = st.lists(
    st.tuples(
        st.sampled_from([b"a", b"b"]),
        numbers.map(lambda pair: msgspec.json.encode({"n": pair[0], "ms": pair[1]})),
        st.integers(0, 120),
    ),
    max_size=60,
)


@settings(max_examples=examples(200))
@given(
    st.sampled_from(sorted(KINDS)),
    st.sampled_from([0, 7, 200]),
    st.sampled_from(["on_close", "on_update"]),
    records,
    st.integers(1, 20),
    st.sampled_from([0, 1, 2]),
    st.booleans(),
)
def test_numbers_equal_values_of_any_kind(
    kind: str, grace: int, emit: Emit, piped: list[Piped], size: int, crash_at: int, deduplicates: bool
) -> None:
    """Results and states are those of a stream whose fields have no type, over a restore in the middle too."""
    typed = first_and_last(kind, grace, emit, Numbers, deduplicates=deduplicates)
    plain = first_and_last(kind, grace, emit, dict, deduplicates=deduplicates)
    assert (typed.task.stores["s"].windows.columns.objects, typed.task.vectorized_executors != {}) == (
        [],
        deduplicates or emit == "on_close",
    )
    for number, start in enumerate(range(0, len(piped), size)):
        for driver in (typed, plain):
            driver.pipe_columns("in", piped[start : start + size])
            driver.commit()
            if number == crash_at:
                driver.crash()
                driver.restore()
        assert sorted_results(typed) == sorted_results(plain)
        assert live_windows(typed) == live_windows(plain)


@pytest.mark.parametrize(
    ("hint", "types"),
    [(int, "int64"), (int | None, "int64"), (float, "float64"), (bool, None), (int | float, None), (str, None)],
)
def test_only_fields_of_one_type_of_number_are_columns(hint: Any, types: str | None) -> None:
    """True is not 1, and 3 is not 3.0: a field that may be either keeps its values as objects."""
    value = msgspec.defstruct("Value", [("x", hint)])
    for unbound, op in ((First("x"), k.FIRST), (Last("x"), k.LAST)):
        bound = unbound.bind(value)
        columns = StateColumns([bound])
        assert bound.type == types
        assert bound.result_type == (types or "json")
        assert columns.program[0][0] == (k.OBJECT if types is None else op)
        assert columns.types == (("object",) if types is None else ("int64", types))


@pytest.mark.parametrize("value", [{"n": 2**63}, {"n": 1.5}, {"n": "1"}, {}])
def test_a_value_that_the_column_cannot_represent_is_rejected(value: dict[str, Any]) -> None:
    """A value that its column cannot represent is rejected before a window has it, as with Sum."""
    values = StateColumns([First("n").bind(Numbers)]).no_values(1)
    first = First("n").bind(Numbers)
    first._get = lambda value: value["n"]
    with pytest.raises(DataError):
        StateColumns([first]).take_one(value, values)
    with pytest.raises(DataError):
        first.add(first.initial(), value)


texts = st.lists(st.text(st.characters(exclude_categories=["Cs"]), max_size=6), max_size=8)


def texts_of(raw: PackedBytes) -> list[str]:
    return list(map(bytes.decode, raw.tolist()))


def retracted(windows: WindowColumns, gone: list[tuple[bytes, int, int]]) -> tuple[WindowColumns, Any]:
    """Return the windows behind retracted ones with these keys and bounds, and a mask of the retracted ones."""
    columns = [np.concatenate((np.zeros(len(gone), c.dtype), c)) for c in windows.columns]
    starts, ends = (np.array([one[i] for one in gone], np.int64) for i in (1, 2))
    starts, ends = np.concatenate((starts, windows.starts)), np.concatenate((ends, windows.ends))
    keys = PackedBytes.of([one[0] for one in gone] + list(windows.keys))
    return WindowColumns(keys, starts, ends, columns), np.arange(len(starts)) < len(gone)


def results_of(keys: list[bytes], gone: list[bytes], names: tuple[str, ...], *, text: bool) -> ResultBatch:
    columns = StateColumns([Count(), Mean("ms").bind(dict)])
    starts = np.arange(len(keys))
    states = [starts + 1, starts / 3, np.where(starts % 2 == 0, 0, starts)]
    windows = WindowColumns(PackedBytes.of(keys), starts, starts + 5, states)
    all_ = retracted(windows, [(key, i, 9 + i) for i, key in enumerate(gone)])
    return ResultBatch("s", names, columns, texts_of if text else list, *all_, by_time=True)


def keys_of(results: ResultBatch) -> list[WindowKey]:
    return [record.key for record, _ in results.records()]


def records_of(results: ResultBatch) -> list[Record]:
    return [record for record, error in results.records() if error is None]


@pytest.mark.parametrize("names", [("n", "ms"), ("n", "mean of ms")])
@given(texts, texts, st.booleans())
def test_encoded_as_one_by_one(names: tuple[str, ...], keys: list[str], gone: list[str], text: bool) -> None:
    """Keys and values are byte for byte those of the encoders of single records, whatever a key contains."""
    raw = [[key.encode() for key in own] for own in (keys, gone)]
    results = results_of(*raw, names, text=text)
    records = records_of(results)
    for encode in (encode_json, encode_updates):
        expected: Any = [encode(record) for record in records]
        encoded = results.encoded(whole_window_keys=encode is encode_updates)
        assert list(zip(*encoded, strict=True)) == expected
    assert results.timestamps().tolist() == [record.timestamp for record in records]


def test_the_time_of_the_latest_record_is_the_results_time_and_no_result() -> None:
    """If a window keeps that time, it is the timestamp of each result, and is neither in the JSON nor among the
    results."""
    columns = StateColumns([Latest(), Count()])
    keys = PackedBytes.of([b"k", b"m"])
    windows = WindowColumns(keys, np.array([0, 0]), np.array([10, 10]), [np.array([7, 3]), np.array([2, 1])])
    results = ResultBatch("s", (LATEST, "n"), columns, texts_of, windows)
    assert results.timestamps().tolist() == [r.timestamp for r in records_of(results)] == [7, 3]
    assert [r.value.results for r in records_of(results)] == [{"n": 2}, {"n": 1}]
    assert results.encoded(whole_window_keys=False)[1][0] == b'{"key":"k","start":0,"end":10,"n":2}'


def test_a_commits_results_go_in_order_of_time() -> None:
    """Retracted windows are ordered by their end among the others, with no value. The mean of no records is None."""
    results = results_of([b"k", b"m", b"n", b"o", b"p"], [b"old"], ("n", "ms"), text=True)
    in_order = [("k", 0, 5), ("m", 1, 6), ("n", 2, 7), ("o", 3, 8), ("old", 0, 9), ("p", 4, 9)]
    assert keys_of(results) == [WindowKey(*at) for at in in_order]
    keys, values = results.encoded(whole_window_keys=False)
    assert keys == [b"k", b"m", b"n", b"o", b"old", b"p"]
    assert (values[0], values[4]) == (b'{"key":"k","start":0,"end":5,"n":1,"ms":null}', None)


def test_a_retraction_comes_before_what_replaces_it() -> None:
    """Of two results of one time, the retraction of a merged session comes first, so that the other one remains under a
    shared key."""
    windows = WindowColumns(PackedBytes.of([b"k"]), np.array([1]), np.array([9]), [np.array([2])])
    all_ = retracted(windows, [(b"k", 5, 9), (b"k", 3, 4)])
    results = ResultBatch("s", ("n",), StateColumns([Count()]), texts_of, *all_, by_time=True)
    assert keys_of(results) == [WindowKey("k", 3, 4), WindowKey("k", 5, 9), WindowKey("k", 1, 9)]


def test_by_time_is_by_the_latest_record_where_it_is_kept() -> None:
    """A tumbling window's result has the time of its latest record. Results are ordered by it, then by start."""
    columns = StateColumns([Latest(), Count()])
    starts, latest = np.array([10, 5, 0, 0]), np.array([12, 12, 3, 9])
    windows = WindowColumns(
        PackedBytes.of([b"a", b"a", b"b", b"c"]), starts, starts + 10, [latest, np.ones(4, np.int64)]
    )
    results = ResultBatch("s", (LATEST, "n"), columns, texts_of, windows, by_time=True)
    assert [(at.key, at.start) for at in keys_of(results)] == [("b", 0), ("c", 0), ("a", 5), ("a", 10)]
    assert results.timestamps().tolist() == [3, 9, 12, 12]


def spoiled(results: dict[str, Any]) -> dict[str, Any]:
    """Change each result in place, and return them."""
    for value in (results["first"], results["last"], results["own"], results["list"][0], results["set"][0]):
        value["n"] += 100
    return results


@pytest.mark.parametrize("kind", ["session", "tumbling", "sliding", "no"])
@pytest.mark.parametrize("deduplicates", [False, True])
@pytest.mark.parametrize("emit", ["on_close", "on_update"])
def test_a_mapper_that_changes_results_changes_no_state(emit: Emit, deduplicates: bool, kind: str) -> None:
    """Functions behind an aggregation get copies of its results: changelog and later results stay unchanged."""
    own = Aggregate(dict, lambda state, value: value["x"], lambda a, b: b)
    named = {"first": First("x"), "last": Last("x"), "list": CollectList("x"), "set": CollectSet("x"), "own": own}
    changelogs, outputs = [], []
    for mapper in (dict, spoiled):
        builder = StreamsBuilder()
        grouped = builder.stream("in").group_by_key()
        if kind == "no":
            results = grouped.aggregate("s", **named).to_stream()
        else:
            windows = getattr(grouped, f"{kind}_window")(10).aggregate("s", **named)
            updates = getattr(windows, emit)().filter(lambda record: record.value is not None)
            results = updates.map_values(lambda result: result.results)
        results.map_values(mapper).to("out")
        driver = TopologyTestDriver(builder.build(), deduplicate_updates=deduplicates)
        for at in (10, 12, 15, 100):
            driver.pipe("in", key=b"k", value=b'{"x":{"n":%d}}' % at, timestamp=at)
        changelogs.append(driver.changelog)
        outputs.append([msgspec.json.decode(record.value or b"") for record in driver.read("out")])
    assert changelogs[0] == changelogs[1]
    assert outputs[1] == list(map(spoiled, outputs[0])) != []


int64s = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.one_of(int64s, st.integers(-11, 11))))
def test_json_of_integers(numbers: list[int]) -> None:
    """Each integer is its decimal text, including the smallest and repeated ones."""
    assert list(json_texts(np.array(numbers, np.int64))) == [b"%d" % number for number in numbers]


@given(st.lists(st.one_of(st.none(), st.booleans(), st.text(), st.floats(allow_nan=False), st.lists(int64s))))
def test_json_of_values(values: list[Any]) -> None:
    """Each value's JSON equals msgspec's, in order."""
    assert list(json_texts(values)) == [msgspec.json.encode(value) for value in values]


def test_json_of_an_array_of_floats() -> None:
    """The JSON of a float array equals that of a list of the same floats."""
    assert list(json_texts(np.array([0.5, -0.0, 1e300]))) == [b"0.5", b"-0.0", b"1e300"]


@pytest.mark.parametrize("raw", [b'{\n"a":1\n}', b"\n\n7", b"1\n"])
def test_json_of_the_users_own_may_have_line_breaks(raw: bytes) -> None:
    """Raw JSON with line breaks is kept unchanged and does not shift the values beside it."""
    values = [1, msgspec.Raw(raw), "b"]
    assert list(json_texts(values)) == [b"1", raw, b'"b"']
    assert list(json_objects(["v"], [json_texts(values)])) == [b'{"v":1}', b'{"v":' + raw + b"}", b'{"v":"b"}']
