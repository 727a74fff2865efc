"""Functions between a source and its window: a batch through them, against the records one by one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, ProcessingFailed
from penstock.shared.common.records import Columns
from penstock.shared.streams.aggregations.aggregation import Count, Sum
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples
from tests.shared.streams.batches_beside_records import RECORDS_ONLY, Piped, results

Calls = Counter[Any]


class Value(msgspec.Struct):
    """A value whose number determines how it is handled."""

    n: int


class Mapped(msgspec.Struct):
    """The result of the functions."""

    twice: int | None


def topology(calls: Calls, emit: Emit, kind: str = "session", key: Any = "string") -> Topology:
    """Functions that note each call, drop, replace and raise by the number of the value."""

    def is_wanted(record: Record) -> bool:
        calls["filter", record.value.n, record.timestamp, record.key, record.headers] += 1
        if record.value.n % 17 == 3:
            raise ValueError(f"{record.value.n} is refused")
        return bool(record.value.n % 5)

    def mapped(value: Value) -> Mapped:
        calls["map", value.n] += 1
        return Mapped(None if value.n % 7 == 0 else 2 * value.n)

    builder = StreamsBuilder()
    stream = builder.stream("in", value=Value, key=key).filter(is_wanted).map_values(mapped, Mapped)
    stream = stream.peek(lambda record: calls.update([("peek", record.value.twice)]))
    grouped = stream.filter_not(lambda record: record.value.twice == 4).group_by_key()
    windows = grouped.session_window(10, 5) if kind == "session" else grouped.tumbling_window(10, 5)
    table = windows.aggregate("s", count=Count(), total=Sum("twice"), each=CollectList("twice"))
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return builder.build()


def driver_of(calls: Calls, columns_min: int, emit: Emit, kind: str = "session") -> TopologyTestDriver:
    made = topology(calls, emit, kind)
    driver = TopologyTestDriver(
        made, commit_each=False, deduplicate_updates=True, columns_min=columns_min, errors=ErrorHandlers()
    )
    assert "in" in driver.task.vectorized_executors
    return driver


def seen(driver: TopologyTestDriver) -> list[Any]:
    """All effects of the records: results, rejected and late records, state, times and counts."""
    task = driver.task
    rejected = [[(r.key, r.value, r.headers) for r in driver.read(topic)] for topic in ("in-dlq", "in-late")]
    live = sorted((s.key, s.start, s.end, s.states) for s in task.stores["s"].rows())
    metrics = task.metrics
    counts = [metrics.records_total, metrics.late_total, metrics.skipped_total, metrics.dead_letters_total]
    times = [task.sources, task.stream_time_ms, task.times.operators[0].stream_time_ms]
    return [results(driver), rejected, live, times, counts]


keys = st.sampled_from([b"a", b"a", b"b", None, b"\xff"])
steps = st.integers(-25, 12)
numbers = st.one_of(st.integers(0, 60), st.integers(0, 60), st.just("x"))


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(keys, steps, numbers), max_size=80),
    st.sampled_from([1, 7, 40, 1000]),
    st.sampled_from(["on_close", "on_update"]),
    st.sampled_from(["session", "tumbling"]),
    st.sampled_from([None, 9]),
)
def test_a_batch_is_the_records_one_by_one(
    records: list[Any], size: int, emit: Emit, kind: str, interval: int | None
) -> None:
    """A batch has the effects of single records, dead letters included, and calls each function equally often with the
    same values."""
    called: list[Calls] = [Counter(), Counter()]
    by_columns, by_records = (driver_of(c, n, emit, kind) for c, n in zip(called, (1, RECORDS_ONLY), strict=True))
    if interval is not None:
        for driver in (by_columns, by_records):
            driver.task.schedule(interval, PunctuationType.STREAM_TIME, lambda now: None, name="cut")
    now, piped = 30, []
    for key, step, n in records:
        now += max(0, step)
        value = b'{"n":%d}' % n if isinstance(n, int) else b'{"n":"x"}'
        piped.append(Piped(key, value, max(0, now + min(step, 0))))
    for start in range(0, len(piped), size):
        for driver in (by_columns, by_records):
            driver.pipe_columns("in", piped[start : start + size])
            driver.commit()
        assert seen(by_columns) == seen(by_records)
        assert called[0] == called[1]


def left(times: int) -> Callable[[], bool]:
    """Return True for so many calls, then False."""
    calls = [0]

    def has_time() -> bool:
        calls[0] += 1
        return calls[0] <= times

    return has_time


@pytest.mark.parametrize("turns", [[0, 0, 0], [1, 0, 2], [2, 30, 0], [5, 1, 1]])
def test_an_interrupted_batch_calls_functions_once_a_record(turns: list[int]) -> None:
    """If a batch is interrupted for time, functions are called once for each record, and the results equal record-by-
    record processing."""
    called: list[Calls] = [Counter(), Counter()]
    by_columns, by_records = (driver_of(c, n, "on_update") for c, n in zip(called, (4, RECORDS_ONLY), strict=True))
    for driver in (by_columns, by_records):
        driver.task.schedule(20, PunctuationType.STREAM_TIME, lambda now: None, name="cut")
    piped = [Piped(b"ab"[i % 2 : i % 2 + 1], b'{"n":%d}' % i, i * 3) for i in range(60)]
    ks, vs, times = (list(column) for column in zip(*piped, strict=True))
    columns = Columns("in", 0, ks, vs, np.array(times), np.arange(60))
    task = by_columns.task
    more = iter(turns)
    while task.sources.get("in", 0) < len(piped):
        before = task.sources.get("in", 0)
        task.process(columns[before:], 0, left(next(more, 3)))
        assert task.sources["in"] > before
    by_records.pipe_columns("in", piped)
    for driver in (by_columns, by_records):
        driver.commit()
    assert called[0] == called[1]
    assert seen(by_columns) == seen(by_records)


def test_records_beyond_the_time_slice_are_not_processed() -> None:
    """If time runs out, only the records that a function was called for count as processed."""
    calls: list[int] = []

    def is_odd(record: Record) -> bool:
        calls.append(record.timestamp)
        return record.timestamp % 2 == 1

    builder = StreamsBuilder()
    windows = builder.stream("in", value=bytes).filter(is_odd).group_by_key().session_window(10, 5)
    windows.aggregate("s", count=Count()).on_close().to("out")
    task = TopologyTestDriver(builder.build(), commit_each=False, columns_min=1, errors=ErrorHandlers()).task
    columns = Columns("in", 0, [b"a"] * 100, [b""] * 100, np.arange(100), np.arange(100))
    for stop in (1, 2, 100):
        task.process(columns[task.sources.get("in", 0) :], 0, left(0 if stop < 100 else 1000))
        assert (task.sources["in"], calls) == (stop, list(range(stop)))
    assert [row.states for row in task.stores["s"].rows()] == [[50]]


def test_a_function_that_refuses_a_whole_batch_is_called_once_a_record() -> None:
    """Each record is a dead letter, and the function is called once for each, in order."""
    seen: list[int] = []

    def fail(record: Record) -> bool:
        seen.append(record.timestamp)
        raise ValueError("none of them will do")

    builder = StreamsBuilder()
    windows = builder.stream("in").filter(fail).group_by_key().session_window(10, 5)
    windows.aggregate("s", count=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), commit_each=False, columns_min=1, errors=ErrorHandlers())
    driver.pipe_columns("in", [Piped(b"a", b"{}", at) for at in range(64)])
    assert seen == list(range(64))
    assert driver.task.metrics.dead_letters_total == 64


def test_an_error_is_that_of_its_node() -> None:
    """If a handler ends the task, the error names node and record, and the records before it are processed."""
    failures = []
    for columns_min in (1, RECORDS_ONLY):
        made = topology(Counter(), "on_close")
        handlers = ErrorHandlers(process="fail")
        driver = TopologyTestDriver(made, commit_each=False, columns_min=columns_min, errors=handlers)
        with pytest.raises(ProcessingFailed) as raised:
            driver.pipe_columns("in", [Piped(b"a", b'{"n":%d}' % n, n) for n in (1, 2, 3, 6)])
        failures.append((str(raised.value), driver.task.sources))
    assert failures[0] == failures[1]
    assert "filter-" in failures[0][0]
    assert "in-0@2" in failures[0][0]


def test_what_ends_the_worker_ends_it() -> None:
    """An error that no handler decides about is raised in its record's turn."""

    def misused(record: Record) -> bool:
        raise ConfigError("of the program, not of the record")

    builder = StreamsBuilder()
    windows = builder.stream("in").filter(misused).group_by_key().session_window(10, 5)
    windows.aggregate("s", count=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), commit_each=False, columns_min=1, errors=ErrorHandlers())
    with pytest.raises(ConfigError, match="of the program"):
        driver.pipe_columns("in", [Piped(b"a", b"{}", 1)])
