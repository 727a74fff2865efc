"""The order in which windows close, however many there are, and the numbers of windows that are merged."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from penstock.shared.streams.aggregations.aggregation import Count, Max, Min, Sum
from penstock.shared.streams.aggregations.collect import First, Last
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.task.error_handlers import ErrorHandlers
from penstock.shared.streams.windows.kernels import DIGITS, RUN
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

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


def keys_of(chance: random.Random, count: int) -> list[str]:
    """Different keys, of which many have the first bytes in common, or are the beginning of another."""
    found = {"user-"}
    while len(found) < count:
        found.add("user-" + "".join(chance.choice("aé\x00") for _ in range(chance.randint(0, 12))))
    return sorted(found, key=lambda _: chance.random())


@pytest.mark.parametrize("count", [2, RUN, RUN + 1, 5 * RUN + 1, DIGITS + 1, 2 * DIGITS])
@pytest.mark.parametrize("spread", [[0], [0, 1, 255, 256], [2**shift for shift in range(0, 42, 3)]])
def test_windows_close_by_end_start_and_key(count: int, spread: list[int]) -> None:
    """Few are sorted by merging and many by their digits: the order is the same."""
    chance = random.Random(count)
    driver = sessions(grace=2**44, n=Count())
    expected, records = [], []
    for key in keys_of(chance, count):
        start = chance.choice(spread)
        end = start + chance.choice([0, 0, 3])
        records += [(key.encode(), b"{}", timestamp) for timestamp in sorted({start, end})]
        expected.append((end, start, key.encode()))
    driver.pipe_columns("in", records)
    assert results(driver) == []
    driver.pipe("in", key=b"end", value=b"{}", timestamp=2**46)
    assert [(one["end"], one["start"], one["key"].encode()) for one in results(driver)] == sorted(expected)


def test_the_order_is_the_same_without_a_compiler() -> None:
    """With NUMBA_DISABLE_JIT=1 arrays of bytes do not widen by themselves."""
    code = f"import {__name__} as these; [these.test_windows_close_by_end_start_and_key(n, [0]) for n in (41, 257)]"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], cwd=ROOT, env=environment, check=True)


MADE: dict[str, Any] = {"min": Min, "max": Max, "sum": Sum, "first": First, "last": Last}
OF: dict[str, Any] = {"min": min, "max": max, "sum": sum, "first": lambda of: of[0], "last": lambda of: of[-1]}


@pytest.mark.parametrize("seed", range(12))
def test_merged_sessions_have_the_numbers_of_all_their_records(seed: int) -> None:
    """In whatever order the records came, and whichever of them had a value."""
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


@pytest.mark.parametrize("last", [960, 985, 994, 999])
@pytest.mark.parametrize("kind", ["tumbling", "session", "sliding"])
def test_a_window_closes_at_its_end_however_late_it_began(kind: str, last: int) -> None:
    """Its end may be so near that no timer is set for it any more."""
    builder = StreamsBuilder()
    grouped = builder.stream("in", value=Value).group_by_key()
    made = {"tumbling": grouped.tumbling_window, "session": grouped.session_window, "sliding": grouped.sliding_window}
    made[kind](1_000, 0).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    closes_at = {"tumbling": 1_000, "session": last + 1_001, "sliding": 1_001}[kind]
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
    """The record in the middle is a dead letter then, and both sessions stay as they were."""
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
