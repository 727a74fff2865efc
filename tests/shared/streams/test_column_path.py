"""Columns against single records, and both against a brute-force sessionizer that sees all records at once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.streams.aggregations import Count, Max, Mean, Min, Sum
from shared.streams.column_path import ColumnPath, Moments
from shared.streams.dsl import Stream, StreamsBuilder
from shared.streams.processor import Processor, Record
from shared.streams.punctuation import PunctuationType
from shared.streams.topology import Topology
from shared.streams.windowed_aggregate import Emit
from shared.testing.topology_test_driver import TopologyTestDriver

RECORDS_ONLY = 1 << 30
RESULTS, LATE, DEAD = "out", "in-late", "in-dlq"
PLACE = ("penstock.late.offset", "penstock.late.lateness_ms", "penstock.late.close_time_ms")

Window = tuple[str, int, int]


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
    """What no time can be told by: functions of single records."""
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


def topology(gap: int, grace: int, emit: Emit, value: Any = Value, below: str = "sink") -> Topology:
    """Sessions with every aggregation that has columns, and what is between them and their topic."""
    builder = StreamsBuilder()
    windows = builder.stream("in", value=value).group_by_key().session_window(gap, grace)
    sums = {"total": Sum("n"), "mean": Mean("ms"), "low": Min("ms"), "high": Max("n")}
    table = windows.aggregate("s", count=Count(), **(sums if value is not bytes else {}))
    BELOW[below](table.on_close() if emit == "on_close" else table.on_update()).to(RESULTS)
    return builder.build()


def driver_of(made: Topology, columns_min: int) -> TopologyTestDriver:
    return TopologyTestDriver(made, commit_each=False, deduplicate_updates=True, columns_min=columns_min)


def path_of(driver: TopologyTestDriver) -> ColumnPath | None:
    return driver.task.column_paths.get("in")


def results(driver: TopologyTestDriver) -> list[tuple[bytes | None, bytes | None, int | None]]:
    """Results since the last look, in an order of their own: that of two windows in one commit says nothing."""
    read = [(r.key, r.value, r.timestamp) for r in driver.read(RESULTS)]
    assert len({(key, value) for key, value, _ in read}) == len(read)
    return sorted(read, key=repr)


def refused(driver: TopologyTestDriver) -> list[Any]:
    """Late records and dead letters, in order; dead letters without the time of their writing."""
    late = [(r.key, r.value, r.timestamp, r.headers) for r in driver.read(LATE)]
    return [late, [(r.key, r.value, r.headers) for r in driver.read(DEAD)]]


def state(driver: TopologyTestDriver) -> Any:
    """Live sessions and all that the progress record holds."""
    task = driver.task
    live = sorted((s.key, s.start, s.end, s.states) for s in task.stores["s"].rows())
    operator = task.operators()[0]
    metrics = task.metrics
    return (
        live,
        (task.sources, task.stream_time_ms, operator.stream_time_ms, task.schedules.grids_ms()),
        (metrics.records_total, metrics.late_total, metrics.skipped_total, metrics.dead_letters_total),
        dict(metrics.refused_at),
    )


def replayed(driver: TopologyTestDriver) -> Any:
    """What a new owner restores from the changelog."""
    again = TopologyTestDriver(driver.topology, commit_each=False, deduplicate_updates=True)
    again.changelog = list(driver.changelog)
    again.restore()
    return sorted((s.key, s.start, s.end, s.states) for s in again.task.stores["s"].rows())


# --- brute force ---


class Model:
    """Kafka Streams' rule over plain lists: (key, start, end, count, total, numbers) a session."""

    def __init__(self, gap: int, grace: int) -> None:
        self.gap, self.grace, self.time = gap, grace, -1
        self.sessions: list[tuple[bytes, int, int, list[Value]]] = []
        self.closed: list[tuple[bytes, int, int, list[Value]]] = []
        self.late: list[int] = []

    def take(self, offset: int, record: Piped) -> None:
        if record.key is None:
            return
        at = record.timestamp
        value = msgspec.json.decode(record.value or b"", type=Value)
        self.time = max(self.time, at)
        close_time = self.time - self.gap - self.grace
        found = [s for s in self.sessions if s[0] == record.key and s[2] >= max(at - self.gap, close_time)]
        found = [s for s in found if s[1] <= at + self.gap]
        start, end = min([at, *(s[1] for s in found)]), max([at, *(s[2] for s in found)])
        if end < close_time:
            self.late.append(offset)
        else:
            self.sessions = [s for s in self.sessions if s not in found]
            self.sessions.append((record.key, start, end, [v for s in found for v in s[3]] + [value]))
        self.closed += [s for s in self.sessions if s[2] < close_time]
        self.sessions = [s for s in self.sessions if s[2] >= close_time]

    def live(self) -> list[tuple[str, int, int, list[Any]]]:
        return sorted((k.decode(), s, e, states_of(values)) for k, s, e, values in self.sessions)


def states_of(values: list[Value]) -> list[Any]:
    """The states of topology()'s aggregations after these values."""
    ms = [v.ms for v in values if v.ms is not None]
    n = [v.n for v in values]
    return [
        len(n),
        (sum(n), len(n)),
        (float(sum(ms)), len(ms)) if ms else (0, 0),
        (min(ms), len(ms)) if ms else (0, 0),
        (max(n), len(n)),
    ]


# --- properties ---

keys = st.sampled_from([b"a", b"a", b"b", b"c", None])
steps = st.one_of(st.integers(-40, 30), st.integers(0, 3), st.integers(0, 3), st.sampled_from([-10, 10, 11, 100, -70]))
gaps, graces = st.sampled_from([1, 5, 10, 20]), st.sampled_from([0, 1, 7, 30])
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


@settings(max_examples=300)
@given(gaps, graces, inputs(), sizes, st.sampled_from(["on_close", "on_update"]), below)
def test_columns_equal_records_and_brute_force(
    gap: int, grace: int, records: list[Piped], parts: list[int], emit: Emit, below: str
) -> None:
    """After every commit results, late records, live sessions and the changelog are those of single records."""
    model = Model(gap, grace)
    made = topology(gap, grace, emit, below=below)
    by_columns, by_records = driver_of(made, 1), driver_of(made, RECORDS_ONLY)
    offset = 0
    for batch in batches(records, parts):
        for driver in (by_columns, by_records):
            driver.pipe_columns("in", batch)
            driver.commit()
        for record in batch:
            model.take(offset, record)
            offset += 1
        assert results(by_columns) == results(by_records)
        assert refused(by_columns) == refused(by_records)
        assert state(by_columns) == state(by_records)
        assert state(by_columns)[0] == replayed(by_columns) == model.live()
    assert by_columns.task.metrics.late_total == len(model.late)
    assert by_columns.task.metrics.closed_total == by_records.task.metrics.closed_total == len(model.closed)


@settings(max_examples=150)
@given(gaps, graces, inputs(with_odd=True), sizes, st.sampled_from(["on_close", "on_update"]), below, st.data())
def test_odd_records_grids_and_crashes(
    gap: int, grace: int, records: list[Piped], parts: list[int], emit: Emit, below: str, data: st.DataObject
) -> None:
    """What cannot be taken as a column, a grid of stream time in the midst and a crash change nothing of that."""
    interval = data.draw(st.sampled_from([None, 7, 50]))
    drivers = []
    for columns_min in (data.draw(st.sampled_from([1, 4])), RECORDS_ONLY):
        driver = driver_of(topology(gap, grace, emit, below=below), columns_min)
        drivers.append((driver, []))
        schedule(driver, interval, drivers[-1][1])
    for batch in batches(records, parts):
        crash = data.draw(st.integers(0, 5)) == 0
        for driver, seen in drivers:
            driver.pipe_columns("in", batch)
            if crash:
                seen.clear()
                driver.crash(torn_entries=2)
                driver.restore()
                schedule(driver, interval, seen)
            driver.commit()
        (by_columns, seen_by_columns), (by_records, seen_by_records) = drivers
        assert results(by_columns) == results(by_records)
        assert refused(by_columns) == refused(by_records)
        assert state(by_columns) == state(by_records)
        assert seen_by_columns == seen_by_records
        assert state(by_columns)[0] == replayed(by_columns)


@pytest.mark.parametrize("below", sorted(BELOW))
@pytest.mark.parametrize("emit", ["on_close", "on_update"])
def test_who_sees_the_time_is_given_each_window_at_its_moment(emit: Emit, below: str) -> None:
    """Columns are taken unless a processor is below on_close(): the updates of a batch come with its commit anyway."""
    drivers = [driver_of(topology(10, 0, emit, below=below), columns_min) for columns_min in (1, RECORDS_ONLY)]
    assert (path_of(drivers[0]) is None) == (emit == "on_close" and below.startswith("processor"))
    for driver in drivers:
        driver.pipe_columns("in", [Piped(b"a", b'{"n":1}', at) for at in range(1, 400, 25)])
        driver.commit()
    of_columns, of_records = (results(driver) for driver in drivers)
    assert of_columns == of_records
    if emit == "on_close" and below == "processor":
        moments = [msgspec.json.decode(value or b"")[-1] for key, value, _ in of_records if key == b"a"]
        assert sorted(moments) == list(range(26, 400, 25))
        assert len([key for key, _, _ in of_records if key == b"tick"]) == len(moments)


def schedule(driver: TopologyTestDriver, interval: int | None, seen: list[Any]) -> None:
    """Have a punctuator look at the store's sessions on a grid of stream time."""
    if interval is not None:
        store = driver.task.stores["s"]
        look = lambda now: seen.append((now, sorted((s.key, s.start, s.end, s.states) for s in store.rows())))  # noqa: E731
        driver.task.schedule(interval, PunctuationType.STREAM_TIME, look, name="look")


ARRIVALS = {  # of records at 80 and at 88, both of key a, and others of key b: whether a is taken singly
    (80, 88, 100): False,
    (88, 80, 100): False,  # 80 is behind by more than the grace, but what it could miss is not there
    (80, 100, 88): True,  # 80 was closed when 88 came, and a batch in order of time would merge them
    (88, 100, 80): True,  # 80 is below the close time: only what it merges into keeps it from being late
    (100, 80, 88): True,
    (100, 88, 80): True,
    (80, 81, 100, 88): True,  # 88 is second in order of key and time, and came last
}


def key_at(time: int) -> bytes:
    return b"a" if time in (80, 88) else b"b"


@pytest.mark.parametrize("times", ARRIVALS)
def test_arrival_order_decides_which_keys_are_taken_singly(times: tuple[int, ...]) -> None:
    """The same records are merged in bulk or one by one by the order in which they came, and end as single ones do."""
    drivers = [driver_of(topology(10, 5, "on_close"), columns_min) for columns_min in (1, RECORDS_ONLY)]
    path = path_of(drivers[0])
    assert path is not None
    codes = np.array([path._store.code_of(key_at(at)) for at in times])
    arrived = np.array(times)
    order = np.lexsort((arrived, codes))
    slow = path._slow_keys(codes[order], arrived[order], order, Moments(arrived, order, 0, 15).times)
    assert slow.tolist() == ([path._store.code_of(b"a")] if ARRIVALS[times] else [])
    for driver in drivers:
        driver.pipe_columns("in", [Piped(key_at(at), b'{"n":1}', at) for at in times])
        driver.commit()
    assert results(drivers[0]) == results(drivers[1])
    assert refused(drivers[0]) == refused(drivers[1])
    assert state(drivers[0]) == state(drivers[1])
