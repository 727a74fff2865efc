"""Runs one topology in batches and record by record, and generates records for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import msgspec
from hypothesis import strategies as st

from penstock.shared.streams.aggregations.aggregation import Count, Max, Mean, Min, Sum
from penstock.shared.streams.dsl.builder import GroupedStream, Stream, StreamsBuilder, WindowedGroup
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task.vectorized_executor import VectorizedExecutor
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

RECORDS_ONLY = 1 << 30
RESULTS, LATE, DEAD = "out", "in-late", "in-dlq"

Windowed = Callable[[GroupedStream], WindowedGroup]


class Value(msgspec.Struct):
    """A value with a field of each kind."""

    n: int
    ms: float | None = None


class Piped(NamedTuple):
    """One record as it is piped."""

    key: bytes | None
    value: bytes | None
    timestamp: int


class Timed(Processor):
    """Writes at which stream time it is given each window, and on a grid that begins with the first one."""

    def __init__(self) -> None:
        self._is_scheduled = False

    def process(self, record: Record) -> None:
        at, window = self.context.stream_time_ms, record.key
        value = None if record.value is None else record.value.results
        self.context.forward(record._replace(value=[*window, value, at]))
        if not self._is_scheduled:
            self._is_scheduled = True
            self.context.schedule(
                7, PunctuationType.STREAM_TIME, lambda now: self.context.forward(Record("tick", now, now))
            )


def by_function(windows: Stream) -> Stream:
    """Functions of single records, which do not depend on time."""
    of_two = windows.filter(lambda r: r.value is None or r.value.results["count"] != 3).branch(
        lambda r: r.key.start % 2
    )
    return of_two[0].map_values(lambda v: v and {"of": v.key, "start": v.start, "end": v.end, **v.results})


BELOW: dict[str, Callable[[Stream], Stream]] = {
    "sink": lambda windows: windows,
    "functions": by_function,
    "processor": lambda windows: windows.process(Timed),
    "processor of values": lambda windows: windows.filter(lambda r: True).process_values(Timed),
}
below = st.sampled_from(sorted(BELOW))


def sessions(gap: int, grace: int) -> Windowed:
    return lambda grouped: grouped.session_window(gap, grace)


def hopping(size: int, advance: int, grace: int) -> Windowed:
    return lambda grouped: grouped.hopping_window(size, advance, grace)


def sliding(difference: int, grace: int) -> Windowed:
    return lambda grouped: grouped.sliding_window(difference, grace)


def topology(windowed: Windowed, emit: Emit, value: Any = Value, below: str = "sink") -> Topology:
    """Windows with every vectorized aggregation, and the given nodes between them and the results topic."""
    builder = StreamsBuilder()
    windows = windowed(builder.stream("in", value=value).group_by_key())
    sums = {"total": Sum("n"), "mean": Mean("ms"), "low": Min("ms"), "high": Max("n")}
    table = windows.aggregate("s", count=Count(), **(sums if value is not bytes else {}))
    BELOW[below](table.on_close() if emit == "on_close" else table.on_update()).to(RESULTS)
    return builder.build()


def driver_of(made: Topology, columns_min: int) -> TopologyTestDriver:
    return TopologyTestDriver(
        made, commit_each=False, deduplicate_updates=True, columns_min=columns_min, errors=ErrorHandlers()
    )


def pair_of(made: Topology, columns_min: int = 1) -> tuple[TopologyTestDriver, TopologyTestDriver]:
    """Return two drivers of the topology: one with batches, one record by record."""
    return driver_of(made, columns_min), driver_of(made, RECORDS_ONLY)


def path_of(driver: TopologyTestDriver) -> VectorizedExecutor | None:
    return driver.task.vectorized_executors.get("in")


def results(driver: TopologyTestDriver) -> list[tuple[bytes | None, bytes | None, int | None]]:
    """Return the new results, sorted, because the order of windows within a commit is undefined."""
    read = [(r.key, r.value, r.timestamp) for r in driver.read(RESULTS)]
    assert len({(key, value) for key, value, _ in read}) == len(read)
    return sorted(read, key=repr)


def rejected_records(driver: TopologyTestDriver) -> list[Any]:
    """Return late records and dead letters in order, without the time at which dead letters were written."""
    late = [(r.key, r.value, r.timestamp, r.headers) for r in driver.read(LATE)]
    return [late, [(r.key, r.value, r.headers) for r in driver.read(DEAD)]]


def state(driver: TopologyTestDriver) -> Any:
    """Live windows and all that the progress record holds."""
    task = driver.task
    operator = task.times.operators[0]
    metrics = task.metrics
    return (
        live(driver),
        (
            task.sources,
            task.stream_time_ms,
            operator.stream_time_ms,
            task.schedules.grids_ms(0),
        ),
        dict(task.times.source_times_ms),
        (metrics.records_total, metrics.late_total, metrics.skipped_total, metrics.dead_letters_total),
        (metrics.closed_total, metrics.missed_windows_total),
        dict(metrics.rejected_at),
    )


def live(driver: TopologyTestDriver) -> list[Any]:
    return sorted((s.key, s.start, s.end, s.states) for s in driver.task.stores["s"].rows())


def restored(driver: TopologyTestDriver, made: Topology) -> list[Any]:
    """Return the windows that a new owner running `made` restores from the changelog."""
    again = TopologyTestDriver(made, commit_each=False, deduplicate_updates=True, errors=ErrorHandlers())
    again.changelog = list(driver.changelog)
    again.restore()
    return live(again)


keys = st.sampled_from([b"a", b"a", b"b", b"", None])
steps = st.one_of(st.integers(-40, 30), st.integers(0, 3), st.integers(0, 3), st.sampled_from([-10, 10, 11, 100, -70]))
graces = st.sampled_from([0, 1, 7, 30])
emits: st.SearchStrategy[Emit] = st.sampled_from(["on_close", "on_update"])
sizes = st.lists(st.integers(1, 25), min_size=1, max_size=5)
odd = st.sampled_from([None, b"{", b"{}", b'{"n":"x"}', b'{"n":1.5}', b'{"n":99999999999999999999}'])


@st.composite
def inputs(draw: st.DrawFn, *, with_odd: bool = False) -> list[Piped]:
    """Records around a time that mostly rises, so that merging, closing and lateness all happen."""
    now, out = draw(st.integers(0, 50)), []
    for key, step in draw(st.lists(st.tuples(keys, steps), max_size=90)):
        number = len(out)
        ms = b"null" if number % 5 == 0 else b"%d.25" % number
        value: bytes | None = b'{"n":%d,"ms":%s}' % (number * 7 % 11 - 5, ms)
        timestamp = max(0, now + step)
        if with_odd and draw(st.integers(0, 15)) == 0:
            value = draw(odd)
        elif with_odd and draw(st.integers(0, 30)) == 0:
            key, timestamp = draw(st.sampled_from([(b"\xff", timestamp), (key, -1)]))
        out.append(Piped(key, value, timestamp))
        now = max(now, now + step // 2)
    return out


def batches(records: list[Piped], parts: list[int]) -> list[list[Piped]]:
    found, at = [], 0
    while at < len(records):
        size = parts[len(found) % len(parts)]
        found.append(records[at : at + size])
        at += size
    return found


def states_of(values: list[Value]) -> list[Any]:
    """The states of `topology`'s aggregations after these values."""
    ms = [v.ms for v in values if v.ms is not None]
    n = [v.n for v in values]
    return [
        len(n),
        (sum(n), len(n)),
        (float(sum(ms)), len(ms)) if ms else (0, 0),
        (min(ms), len(ms)) if ms else (0, 0),
        (max(n), len(n)),
    ]


def pipe_all(drivers: Iterable[TopologyTestDriver], batch: list[Piped]) -> None:
    """Pipes the batch into each driver and commits."""
    for driver in drivers:
        driver.pipe_columns("in", batch)
        driver.commit()


def require_equal(one: TopologyTestDriver, other: TopologyTestDriver) -> None:
    """Requires that new results, rejected records and state are equal, and that each topology restores the other's
    changelog."""
    assert results(one) == results(other)
    assert rejected_records(one) == rejected_records(other)
    assert state(one) == state(other)
    assert state(one)[0] == restored(one, other.topology) == restored(other, one.topology)


def schedule(driver: TopologyTestDriver, interval: int | None, seen: list[Any]) -> None:
    """Schedules a stream-time callback that records the store's windows."""
    if interval is not None:
        store = driver.task.stores["s"]
        look = lambda now: seen.append((now, sorted((s.key, s.start, s.end, s.states) for s in store.rows())))  # noqa: E731
        driver.task.schedule(interval, PunctuationType.STREAM_TIME, look, name="look")
