"""The order in which windows close, however many there are, and the numbers of windows that are merged."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shared.streams.aggregations.aggregation import Count, Max, Min, Sum
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.windows.kernels import DIGITS, RUN
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

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


BIG = 2**62


@pytest.mark.parametrize(
    ("left", "right", "middle", "expected"),
    [
        (BIG, BIG, None, None),
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
