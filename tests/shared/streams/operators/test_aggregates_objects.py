"""Aggregations whose states are objects, in batches: against the same records one by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.streams.aggregations.aggregation import Aggregation, Count, CountDistinct, Sum
from penstock.shared.streams.aggregations.collect import CollectList, CollectSet
from penstock.shared.streams.aggregations.first_last import First, Last
from penstock.shared.streams.aggregations.quantiles import Quantiles
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples

RECORDS_ONLY = 1 << 30

FUNCTIONS: dict[str, Aggregation[Any]] = {
    "count": Count(),
    "total": Sum("n"),
    "first": First("page"),
    "last": Last("page"),
    "distinct": CountDistinct("page"),
    "numbers": CountDistinct("n"),
    "ranks": Quantiles("n", (0.0, 0.5, 1.0)),
    "pages": CollectList("page", limit=4),
    "all": CollectList("n"),
    "each": CollectSet("page", limit=3),
}


class Value(msgspec.Struct):
    """A value with text that may be missing, and a number."""

    n: int
    page: str | None = None


class Piped(NamedTuple):
    """One record as it is piped."""

    key: bytes | None
    value: bytes | None
    timestamp: int


def topology(names: list[str], gap: int, grace: int, emit: Emit, value: Any = Value, kind: str = "session") -> Topology:
    builder = StreamsBuilder()
    grouped = builder.stream("in", value=value).group_by_key()
    windows: Any = {
        "session": lambda: grouped.session_window(gap, grace),
        "tumbling": lambda: grouped.tumbling_window(gap, grace),
        "hopping": lambda: grouped.hopping_window(3 * gap, gap, grace),
        "overlapping": lambda: grouped.hopping_window(5 * gap, 2 * gap, grace),
        "sliding": lambda: grouped.sliding_window(gap, grace),
    }[kind]()
    table = windows.aggregate("s", **{name: FUNCTIONS[name] for name in names})
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return builder.build()


def driver_of(made: Topology, columns_min: int) -> TopologyTestDriver:
    driver = TopologyTestDriver(
        made, commit_each=False, deduplicate_updates=True, columns_min=columns_min, errors=ErrorHandlers()
    )
    assert "in" in driver.task.vectorized_executors
    return driver


def results(driver: TopologyTestDriver, topic: str) -> list[Any]:
    """The outputs since the last call; outputs of one commit are sorted."""
    read = [(r.key, r.value, r.timestamp) for r in driver.read(topic)]
    return sorted(read, key=repr) if topic == "out" else read


def live(driver: TopologyTestDriver, rows: Any = None) -> list[Any]:
    """Live sessions, with their results: sketches are compared by these, which are exact for so few values."""
    aggregations = driver.topology.stores["s"].aggregations
    return sorted(
        (s.key, s.start, s.end, [a.result(state) for a, state in zip(aggregations, s.states, strict=True)])
        for s in rows or driver.task.stores["s"].rows()
    )


def replayed(driver: TopologyTestDriver) -> list[Any]:
    """The state that a new owner restores from the changelog."""
    again = TopologyTestDriver(driver.topology, commit_each=False, deduplicate_updates=True, errors=ErrorHandlers())
    again.changelog = list(driver.changelog)
    again.restore()
    return live(again)


keys = st.sampled_from([b"a", b"a", b"b", b"c", None])
steps = st.one_of(st.integers(-40, 30), st.integers(0, 3), st.integers(0, 3), st.sampled_from([-10, 10, 11, 100, -70]))
gaps, graces = st.sampled_from([1, 5, 10, 20]), st.sampled_from([0, 1, 7, 30])
kinds = st.sampled_from(["session", "session", "tumbling", "hopping", "overlapping", "sliding"])
emits = st.sampled_from(["on_close", "on_update"])
names = st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=4, unique=True)
odd = st.sampled_from([None, b"{", b"{}", b'{"n":"x"}', b'{"n":1.5}', b'{"n":2,"page":7}'])


@st.composite
def inputs(draw: st.DrawFn) -> list[Piped]:
    """Records around a mostly rising time, some with equal times, some that are rejected."""
    now = draw(st.integers(0, 50))
    out: list[Piped] = []
    for key, step in draw(st.lists(st.tuples(keys, steps), max_size=90)):
        number = len(out)
        page = b"null" if number % 5 == 0 else b'"p%d"' % (number * 7 % 13)
        value: bytes | None = b'{"n":%d,"page":%s}' % (number * 7 % 11 - 5, page)
        if draw(st.integers(0, 25)) == 0:
            value = draw(odd)
        out.append(Piped(key, value, max(0, now + step)))
        now = max(now, now + step // 2)
    return out


@settings(max_examples=examples(250))
@given(names, kinds, gaps, graces, inputs(), st.sampled_from([1, 7, 20, 1000]), emits)
def test_batches_equal_single_records(
    own: list[str], kind: str, gap: int, grace: int, records: list[Piped], size: int, emit: Emit
) -> None:
    """After every commit results, late records, dead letters, live sessions and changelog are the same."""
    made = topology(own, gap, grace, emit, kind=kind)
    batches, singly = driver_of(made, 1), driver_of(made, RECORDS_ONLY)
    for start in range(0, len(records), size):
        for driver in (batches, singly):
            driver.pipe_columns("in", records[start : start + size])
            driver.commit()
        for topic in ("out", "in-late"):
            assert results(batches, topic) == results(singly, topic)
        assert [r.value for r in batches.read("in-dlq")] == [r.value for r in singly.read("in-dlq")]
        assert batches.task.metrics.skipped_total == singly.task.metrics.skipped_total
        assert live(batches) == live(singly)
    expected = live(singly)
    for driver in (batches, singly):
        assert replayed(driver) == expected
    if not set(own) & {"distinct", "numbers", "ranks"}:
        entries = [sorted(d.changelog, key=repr) for d in (batches, singly)]
        assert [e for e in entries[0] if e[0] is not None] == [e for e in entries[1] if e[0] is not None]


close_by = st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 90), st.sampled_from(["null", '"x"', '"y"', '"z"']))


@settings(max_examples=examples(250))
@given(
    st.lists(close_by, min_size=4, max_size=14),
    st.integers(2, 9),
    st.sampled_from([["all", "pages", "each"], ["distinct", "ranks", "first", "last"]]),
    kinds,
    st.sampled_from([0, 30, 90]),
)
def test_windows_that_come_together(records: list[Any], size: int, own: list[str], kind: str, grace: int) -> None:
    """However windows of the store and of a batch are merged, they equal those of single records."""
    made = topology(own, 10, grace, "on_update", kind=kind)
    batches, singly = driver_of(made, 1), driver_of(made, RECORDS_ONLY)
    piped = [Piped(k, b'{"n":%d,"page":%s}' % (i, p.encode()), at) for i, (k, at, p) in enumerate(records)]
    for start in range(0, len(piped), size):
        for driver in (batches, singly):
            driver.pipe_columns("in", piped[start : start + size])
            driver.commit()
        assert results(batches, "out") == results(singly, "out")
        assert live(batches) == live(singly)


@settings(max_examples=examples(60))
@given(names, inputs(), st.data())
def test_crashes_in_the_midst(own: list[str], records: list[Piped], data: st.DataObject) -> None:
    """Changes that a batch made to states in place are lost with the task, and are not counted twice."""
    made = topology(own, 10, 7, "on_close")
    batches, singly = driver_of(made, 1), driver_of(made, RECORDS_ONLY)
    for start in range(0, len(records), 15):
        crash = data.draw(st.booleans())
        for driver in (batches, singly):
            driver.pipe_columns("in", records[start : start + 15])
            if crash:
                driver.crash(torn_entries=2)
                driver.restore()
            driver.commit()
        assert results(batches, "out") == results(singly, "out")
        assert live(batches) == live(singly)


def of_pages(arrivals: list[tuple[bytes, int]], names: list[str], grace: int) -> list[Any]:
    """Results of hopping windows after a batch of records with the pages 0, 1, 2..., as columns and as singly."""
    made = topology(names, 10, grace, "on_update", kind="hopping")
    found = []
    for driver in (driver_of(made, 1), driver_of(made, RECORDS_ONLY)):
        driver.pipe_columns(
            "in", [Piped(key, b'{"n":%d,"page":"%d"}' % (i, i), at) for i, (key, at) in enumerate(arrivals)]
        )
        driver.commit()
        found.append(results(driver, "out"))
    return found


def test_of_one_moment_what_came_first_is_first() -> None:
    """This also holds if time advanced between two records, and the second is too late for some windows of the
    first."""
    in_batches, one_by_one = of_pages([(b"a", 25), (b"b", 31), (b"a", 25)], ["first", "last", "pages"], 0)
    assert in_batches == one_by_one
    window = next(msgspec.json.decode(value) for key, value, _ in in_batches if b'"a","start":10' in key)
    assert (window["first"], window["last"], window["pages"]) == ("0", "2", ["0", "2"])


def made_of(topic: str, data: bytes | None) -> Any:
    """Values without a JSON form, as a user's deserializer may return them."""
    return {"page": object if data == b"object" else str(data)}


@pytest.mark.parametrize("columns_min", [1, RECORDS_ONLY])
@pytest.mark.parametrize("name", ["first", "pages", "each"])
def test_what_has_no_json_is_a_dead_letter(name: str, columns_min: int) -> None:
    """A value with which the state could not be written makes its record a dead letter, in columns too. Its window
    continues."""
    driver = driver_of(topology(["count", name], 10, 0, "on_close", value=made_of), columns_min)
    times = {b"text": 1, b"object": 0}  # the first value, though it came second
    pipe_and_commit(driver, [Piped(b"a", v, times[v]) for v in (b"text", b"object", b"text")])
    pipe_and_commit(driver, [Piped(b"b", b"text", 30)])
    (dead_letter,) = driver.read("in-dlq")
    assert dict(dead_letter.headers)["penstock.dlq.offset"] == b"1"
    (result,) = results(driver, "out")
    assert msgspec.json.decode(result[1])["count"] == 2


def test_numbers_of_other_types_are_taken_as_one_by_one() -> None:
    """If an aggregation accepts a number that fits no column, its batch is processed record by record."""
    made = topology(["total", "ranks"], 10, 0, "on_close", value=lambda topic, data: {"n": np.float64(data or b"0")})
    drivers = [driver_of(made, 1), driver_of(made, RECORDS_ONLY)]
    for driver in drivers:
        pipe_and_commit(driver, [Piped(b"a", b"1.5", 1), Piped(b"a", b"2", 2), Piped(b"a", b"3", 90)])
    in_batches, one_by_one = (results(driver, "out") for driver in drivers)
    assert in_batches == one_by_one
    assert [msgspec.json.decode(value)["total"] for _, value, _ in in_batches] == [3.5]


def pipe_and_commit(driver: TopologyTestDriver, records: list[Piped]) -> None:
    driver.pipe_columns("in", records)
    driver.commit()


def test_rows_that_are_gone_hold_nothing() -> None:
    """A session that was closed or merged away leaves no state behind in its row, whenever that is used again."""
    driver = driver_of(topology(["distinct", "first"], 10, 0, "on_close"), 1)
    batches = [[Piped(b"a", b'{"n":1,"page":"x"}', at) for at in part] for part in ((0, 15), (8,), (100,))]
    for batch in batches:
        driver.pipe_columns("in", batch)
        driver.commit()
    store: Any = driver.task.stores["s"]
    left = [[type(state).__name__ for state in own.rows if state is not None] for own in store.columns.objects]
    assert left == [["hll_sketch"], ["tuple"]]
