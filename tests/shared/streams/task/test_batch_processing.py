"""Batches of columns equal record-by-record processing, with invalid records, functions, schedules and crashes, in
memory and on disk."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.common.errors import ConfigError, ProcessingFailed
from penstock.shared.common.records import INT64_MAX, Columns
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, Sum
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.dsl.builder import Stream, StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.state.persistent_stores import PersistentStore
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.fetch_ahead import FetchAhead
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples
from tests.shared.streams.batches_beside_records import (
    BELOW,
    RECORDS_ONLY,
    Piped,
    Windowed,
    batches,
    below,
    driver_of,
    emits,
    hopping,
    inputs,
    live,
    odd,
    pair_of,
    path_of,
    pipe_all,
    rejected_records,
    require_equal,
    results,
    schedule,
    sessions,
    sizes,
    sliding,
    state,
    topology,
)

graces = st.sampled_from([0, 7, 30])
windows = st.one_of(
    st.builds(sessions, st.sampled_from([1, 10, 20]), graces),
    st.builds(hopping, st.just(20), st.sampled_from([20, 7, 5]), graces),
    st.builds(sliding, st.sampled_from([0, 10, 20]), graces),
)


@settings(max_examples=examples(200))
@given(windows, inputs(with_odd=True), sizes, emits, below, st.data())
def test_odd_records_grids_and_crashes(
    windowed: Windowed, records: list[Piped], parts: list[int], emit: Emit, below: str, data: st.DataObject
) -> None:
    """Results equal those of single records, with invalid records, stream-time schedules and crashes among the
    batches."""
    interval = data.draw(st.sampled_from([None, 7, 50]))
    columns_min = data.draw(st.sampled_from([1, 4]))
    drivers: list[tuple[Any, list[Any]]] = []
    for driver in pair_of(topology(windowed, emit, below=below), columns_min):
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
        require_equal(drivers[0][0], drivers[1][0])
        assert drivers[0][1] == drivers[1][1]


large = st.sampled_from([0, 1, -1, 2**59, -(2**60), 3 * 2**59, 2**61, 2**62, 2**63 - 1, -(2**63)])


@settings(max_examples=examples(200))
@given(windows, inputs(), st.lists(large, min_size=1, max_size=90), sizes)
def test_sums_that_leave_64_bits(
    windowed: Windowed, records: list[Piped], numbers: list[int], parts: list[int]
) -> None:
    """A record whose sum would exceed 64 bits is rejected in a batch as it is in record-by-record processing."""
    drivers = pair_of(topology(windowed, "on_update"))
    values = [b'{"n":%d}' % numbers[index % len(numbers)] for index in range(len(records))]
    piped = [Piped(key, value, at) for (key, _, at), value in zip(records, values, strict=True)]
    for batch in batches(piped, parts):
        pipe_all(drivers, batch)
        require_equal(*drivers)


def test_sessions_that_a_batch_joins_are_added_up_before_it_is_taken() -> None:
    """If a batch merges seven sessions, the record whose merged sum would exceed 64 bits is rejected."""
    drivers = pair_of(topology(sessions(10, 1_000), "on_update"))
    for n in range(7):
        pipe_all(drivers, [Piped(b"a", b'{"n":%d}' % 1_500_000_000_000_000_000, n * 20)])
    pipe_all(drivers, [Piped(b"a", b'{"n":0}', n * 20 + 10) for n in range(7)])
    require_equal(*drivers)
    assert drivers[0].task.metrics.dead_letters_total == 1


@pytest.mark.parametrize("windowed", [sessions(10, 0), hopping(10, 10, 0)])
def test_large_numbers_of_many_keys_are_taken_as_columns(windowed: Windowed, monkeypatch: pytest.MonkeyPatch) -> None:
    """Large numbers of many keys stay in the vectorized executor, and closed windows do not count. Single records are
    processed only if a sum may exceed 64 bits."""
    by_columns, by_records = pair_of(topology(windowed, "on_close"))
    singly: list[int] = []
    take_records = by_columns.task.take_records
    monkeypatch.setattr(by_columns.task, "take_records", lambda part: (singly.append(len(part)), take_records(part)))
    for round_ in range(8):
        batch = [Piped(b"k%d" % n, b'{"n":%d}' % 2**59, round_ * 100 + n % 3) for n in range(60)]
        pipe_all((by_columns, by_records), [*batch, *batch[:20]])
        require_equal(by_columns, by_records)
    assert singly == []
    pipe_all((by_columns, by_records), batch[:1] * 18)
    require_equal(by_columns, by_records)
    assert singly == [1] * singly.count(1) != []


@pytest.mark.parametrize(("beyond", "taken"), [(-1, []), (0, []), (1, [301])])
def test_a_window_that_would_leave_64_bits(monkeypatch: pytest.MonkeyPatch, beyond: int, taken: list[int]) -> None:
    """Its batch is processed record by record. A window whose bounds just fit is processed in columns."""
    by_columns, by_records = pair_of(topology(sessions(10, 5), "on_update"))
    at_once: list[int] = []
    take_records = by_columns.task.take_records
    monkeypatch.setattr(by_columns.task, "take_records", lambda part: (at_once.append(len(part)), take_records(part)))
    batch = [Piped(b"a", b'{"n":1}', 0)] * 300 + [Piped(b"a", b'{"n":1}', INT64_MAX - 15 + beyond)]
    pipe_all((by_columns, by_records), batch)
    require_equal(by_columns, by_records)
    assert at_once == taken


def test_large_sums_that_were_restored_are_known() -> None:
    """Restored sums count towards the 64-bit limit."""
    made = topology(sessions(10, 1_000), "on_update")
    drivers = pair_of(made)
    pipe_all(drivers, [Piped(b"a", b'{"n":%d}' % (2**61 + 2**60), at) for at in (0, 20, 40)])
    for driver in drivers:
        driver.crash()
        driver.restore()
    pipe_all(drivers, [Piped(b"a", b'{"n":0}', at) for at in (10, 30)])
    require_equal(*drivers)
    assert drivers[0].task.metrics.dead_letters_total == 1


@pytest.mark.parametrize("windowed", [sessions(10, 1_000), hopping(20, 5, 1_000), sliding(10, 1_000)])
def test_a_batch_is_left_where_it_is_cut_once_there_is_no_time(windowed: Windowed) -> None:
    """Without time left, a batch stops before and after a single record and where a schedule is due. The next turn
    continues from there."""
    cut, whole = pair_of(topology(windowed, "on_update"))
    for driver in (cut, whole):
        schedule(driver, 100, [])
    piped = [Piped(b"ab"[n % 2 : n % 2 + 1], b'{"n":%d}' % n, n * 3) for n in range(100)]
    for at in (10, 12, 70):
        piped[at] = Piped(b"a", b"{", 0)
    keys, values, times = (list(column) for column in zip(*piped, strict=True))
    columns = Columns("in", 0, keys, values, np.array(times), np.arange(len(piped)))
    stops = []
    while cut.task.sources.get("in", 0) < len(piped):
        cut.task.process(columns[cut.task.sources.get("in", 0) :], 0, lambda: False)
        stops.append(cut.task.sources["in"])
        assert cut.task.metrics.records_total == stops[-1]
    assert stops == [1, 10, 11, 12, 13, 35, 68, 70, 71, 100]
    whole.pipe_columns("in", piped)
    for driver in (cut, whole):
        driver.commit()
    require_equal(cut, whole)


def test_records_without_a_key_are_counted_in_their_turn() -> None:
    """They are counted once, also around records that the kernel rejects, and the last of them is named."""
    drivers = pair_of(topology(sessions(10, 1_000), "on_update"))
    half = b'{"n":%d}' % 2**62
    keys = [b"a", None, None, None, b"a", b"a", None, None, None, None]
    pipe_all(drivers, [Piped(key, half, at) for at, key in enumerate(keys)])
    require_equal(*drivers)
    metrics = drivers[0].task.metrics
    assert (metrics.skipped_total, metrics.dead_letters_total) == (7, 2)


def test_a_large_batch_is_cut_at_records_that_are_rejected() -> None:
    """One cannot be decoded, and the kernel rejects two, the second of which begins a part."""
    drivers = pair_of(topology(sessions(10, 1_000), "on_update"))
    valid, half = Piped(b"a", b'{"n":1}', 0), Piped(b"b", b'{"n":%d}' % 2**62, 0)
    pipe_all(drivers, [*[valid] * 300, Piped(b"a", b"{", 0), half, half, half, valid])
    require_equal(*drivers)
    assert drivers[0].task.metrics.dead_letters_total == 3


@pytest.mark.parametrize("start", [50, 100])
def test_a_schedule_that_is_due_already_cuts_a_batch(start: int) -> None:
    """A schedule that begins at the stream time or before fires after the next record, even after an earlier one."""
    fired: list[list[tuple[int, int]]] = [[], []]
    drivers = pair_of(topology(sessions(10, 1_000), "on_update"))
    for driver, seen in zip(drivers, fired, strict=True):
        driver.pipe_columns("in", [Piped(b"a", b'{"n":1}', 100)])
        task = driver.task

        def note(now: int, task: Any = task, seen: list[tuple[int, int]] = seen) -> None:
            seen.append((now, task.sources["in"]))

        task.schedule(1_000, PunctuationType.STREAM_TIME, note, start=start)
        driver.pipe_columns("in", [Piped(b"a", b'{"n":1}', at) for at in (10, 20, 60)])
    assert fired == [[(100, 2)], [(100, 2)]]


KINDS: dict[str, Windowed] = {
    "session": sessions(10, 0),
    "tumbling": hopping(10, 10, 0),
    "hopping": hopping(10, 4, 0),
    "sliding": sliding(10, 0),
}


@pytest.mark.parametrize("kind", KINDS)
def test_other_nodes_beside_the_windows_disable_batches(kind: str) -> None:
    """A source is processed record by record if a flat_map is between it and its windows, if it has a second child, or
    if its aggregation runs user functions."""
    own = Aggregate(int, lambda state, value: state + 1, lambda a, b: a + b)
    for how in ("between", "beside", "own functions"):
        builder = StreamsBuilder()
        stream = builder.stream("in")
        if how == "beside":
            stream.to("copy")
        if how == "between":
            stream = stream.flat_map_values(lambda value: [value])
        aggregation = own if how == "own functions" else Count()
        KINDS[kind](stream.group_by_key()).aggregate("s", result=aggregation).on_close().to("out")
        assert driver_of(builder.build(), 1).task.vectorized_executors == {}


@pytest.mark.parametrize("emit", ["on_close", "on_update"])
@pytest.mark.parametrize("deduplicate_updates", [False, True])
def test_each_update_is_forwarded_by_its_record(emit: Emit, deduplicate_updates: bool) -> None:
    """With on_update(), records are processed singly unless updates are deduplicated."""
    made = topology(KINDS["session"], emit)
    driver = TopologyTestDriver(made, deduplicate_updates=deduplicate_updates, errors=ErrorHandlers())
    assert (path_of(driver) is None) == (emit == "on_update" and not deduplicate_updates)


def test_a_source_without_windows_may_precede_one_with_windows() -> None:
    """Each source is judged alone."""
    builder = StreamsBuilder()
    builder.stream("first").to("copy")
    KINDS["session"](builder.stream("in").group_by_key()).aggregate("s", result=Count()).on_close().to("out")
    assert list(driver_of(builder.build(), 1).task.vectorized_executors) == ["in"]


BETWEEN: dict[str, Callable[[Stream], Stream]] = {
    "filter": lambda stream: stream.filter(lambda record: True),
    "three": lambda stream: stream.filter_not(lambda record: False).map_values(lambda value: value).peek(print),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_functions_of_single_records_may_stand_between(between: str) -> None:
    """Functions of single records, like filter and map_values, keep the vectorized executor, unless the stream also has
    a second child."""
    for is_beside in (False, True):
        builder = StreamsBuilder()
        stream = BETWEEN[between](builder.stream("in"))
        if is_beside:
            stream.to("copy")
        KINDS["session"](stream.group_by_key()).aggregate("s", result=Count()).on_close().to("out")
        assert ("in" in driver_of(builder.build(), 1).task.vectorized_executors) == (not is_beside)


@pytest.mark.parametrize("below", sorted(BELOW))
@pytest.mark.parametrize("emit", ["on_close", "on_update"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_processor_gets_each_window_at_its_close_time(kind: str, emit: Emit, below: str) -> None:
    """With on_close() and a processor below, records are processed singly, so that the processor sees each window at
    its close time."""
    drivers = pair_of(topology(KINDS[kind], emit, below=below))
    assert (path_of(drivers[0]) is None) == (emit == "on_close" and below.startswith("processor"))
    pipe_all(drivers, [Piped(b"a", b'{"n":1}', at) for at in range(1, 400, 25)])
    of_columns, of_records = (results(driver) for driver in drivers)
    assert of_columns == of_records
    if emit == "on_close" and below == "processor":
        moments = [msgspec.json.decode(value or b"")[-1] for key, value, _ in of_records if key == b"a"]
        assert set(moments) == set(range(26, 400, 25))
        assert [key for key, _, _ in of_records if key == b"tick"]


KINDS_ON_DISK: dict[str, Windowed] = {
    "session": sessions(10, 5),
    "tumbling": hopping(10, 10, 5),
    "hopping": hopping(10, 4, 5),
    "sliding": sliding(10, 5),
}
MEMORY_BYTES_MAX = 8 * 1024 * 1024
NONE = 0
"""No row stays in memory past its commit."""

turns = st.lists(st.sampled_from(["commit", "commit", "commit", "nothing", "crash"]), min_size=1, max_size=8)
RARELY = 39
"""One of 40 records does not fit a column. If most did not, single records would be processed anyway."""

many_keys = st.sampled_from([b"a", b"b", b"c", b"d", b"e", b"", None])
steps = st.one_of(st.integers(0, 6), st.integers(-25, 30), st.sampled_from([-40, 0, 60]))
parts = st.lists(st.sampled_from([1, 3, 8, 8, 13, 25]), min_size=1, max_size=5)


@st.composite
def spread(draw: st.DrawFn) -> list[Piped]:
    """Records of so many keys that most rows are only on disk, some of them unfit for columns."""
    now, out = draw(st.integers(0, 30)), []
    for key, step in draw(st.lists(st.tuples(many_keys, steps), min_size=20, max_size=60)):
        value: bytes | None = b'{"n":%d,"ms":%d.5}' % (len(out), len(out) % 7)
        if draw(st.integers(0, RARELY)) == RARELY:
            key, value = draw(st.one_of(st.tuples(st.just(key), odd), st.just((b"\xff", value))))
        out.append(Piped(key, value, max(0, now + step)))
        now = max(now, now + step)
    return out


@contextmanager
def both(windowed: Windowed, emit: Emit) -> Iterator[tuple[TopologyTestDriver, TopologyTestDriver]]:
    """Yields drivers of the topology in memory and on disk, both with the vectorized executor."""
    with tempfile.TemporaryDirectory() as folder:
        on_disk = StateDirectory(folder, "app", memory_bytes_max=MEMORY_BYTES_MAX, cache_bytes_max=NONE)
        drivers = tuple(
            TopologyTestDriver(
                topology(windowed, emit),
                commit_each=False,
                deduplicate_updates=True,
                columns_min=1,
                errors=ErrorHandlers(),
                state=where,
            )
            for where in (None, on_disk)
        )
        assert None not in map(path_of, drivers)
        try:
            yield drivers[0], drivers[1]
        finally:
            drivers[1].close()


@pytest.mark.parametrize("kind", KINDS_ON_DISK)
@settings(max_examples=examples(30))
@given(records=spread(), sizes=parts, plan=turns, emit=emits)
def test_batches_have_the_same_results_on_disk(
    kind: str, records: list[Piped], sizes: list[int], plan: list[str], emit: Emit
) -> None:
    """After each batch, commit or crash, windows on disk equal those in memory: results, late records, dead letters and
    state."""
    with both(KINDS_ON_DISK[kind], emit) as drivers:
        for number, batch in enumerate(batches(records, sizes)):
            for driver in drivers:
                driver.pipe_columns("in", batch)
                if plan[number % len(plan)] == "crash":
                    driver.crash(torn_entries=2)
                    driver.restore()
                if plan[number % len(plan)] == "commit":
                    driver.commit()
            in_memory, on_disk = drivers
            assert state(on_disk) == state(in_memory)
            assert len(on_disk.task.stores["s"]) == len(live(in_memory))
            assert rejected_records(on_disk) == rejected_records(in_memory)
            assert results(on_disk) == results(in_memory)


@pytest.mark.parametrize("kind", KINDS_ON_DISK)
@pytest.mark.parametrize("late", [False, True])
def test_any_record_of_a_batch_closes_windows_on_disk(kind: str, late: bool) -> None:
    """Any record of a batch, not only its first or last, closes the windows of a key that is only on disk."""
    with both(KINDS_ON_DISK[kind], "on_close") as drivers:
        for driver in drivers:
            driver.pipe_columns("in", [(b"gone", b'{"n":1}', 20)])
            driver.commit()
            driver.pipe_columns("in", [(b"b", b'{"n":2}', at) for at in ((21, 90, 22) if late else (21, 90))])
            driver.commit()
        of_memory, of_disk = (results(driver) for driver in drivers)
        assert of_disk == of_memory
        assert b"gone" in {key for key, _, _ in of_disk}


class Keeps(Processor):
    """A processor with its own store."""

    def process(self, record: Record) -> None:
        self.context.forward(record)


class Recorder(PersistentStore[Any]):
    """Records the keys that it is asked to fetch."""

    def __init__(self) -> None:
        self.requests: list[list[bytes | None]] = []

    def __repr__(self) -> str:
        return f"Recorder({self.requests})"

    def _row_from_disk(self, key: Any, start: int, end: int, states: list[Any]) -> Any:
        return key, start, end, states

    def fetch_ahead(self, keys: Any) -> None:
        self.requests.append(list(keys))


def columns_of(topic: str, keys: list[bytes | None]) -> Columns:
    count = len(keys)
    return Columns(topic, 0, keys, [b"{}"] * count, np.full(count, 5), np.arange(count))


def test_a_source_reaches_the_stores_below_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The keys of records are fetched for the windows and tables below their topic, but not behind another topic, nor
    for the store of a processor."""
    monkeypatch.setattr("penstock.shared.streams.task.fetch_ahead.KEYS_AT_ONCE", 2)
    builder = StreamsBuilder()
    own = builder.add_store("own")
    clicks = builder.stream("clicks").process_values(Keeps, own)
    clicks.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    clicks.join(builder.table("users", name="users"), lambda click, user: user).to("joined")
    other = clicks.key_by(lambda record: record.value["user"], name="by-user")
    other.group_by_key().tumbling_window(10).aggregate("t", n=Count()).on_close().to("out2")
    topology = builder.build().of_application("app")
    stores = {name: Recorder() for name in topology.stores}
    ahead = FetchAhead(topology, stores)
    slices = ahead.slices(columns_of("clicks", [b"a", None, b"c"]))
    assert list(next(slices).keys) == [b"a", None]
    requests = {name: store.requests for name, store in stores.items() if store.requests}
    assert requests == {"s": [[b"a", None]], "users": [[b"a", None]]}
    assert [list(rest.keys) for rest in slices] == [[b"c"]]
    (internal,) = topology.internal_topics()
    list(ahead.slices(columns_of(internal, [b"x"])))
    assert (stores["t"].requests, stores["s"].requests[1:]) == ([[b"x"]], [[b"c"]])


def test_in_memory_there_is_nothing_to_fetch() -> None:
    """With state in memory, a batch is not sliced."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    columns = columns_of("in", [b"a"] * 5_000)
    assert list(FetchAhead(driver.task.topology, driver.task.stores).slices(columns)) == [columns]


def test_keys_are_loaded_before_they_are_read(tmp_path: Path) -> None:
    """Fetching ahead loads keys with their windows from disk. A value that is not a valid key is ignored."""
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().sliding_window(10, 5).aggregate("s", n=Count()).on_close().to("out")
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=8 * 1024 * 1024, cache_bytes_max=0)
    driver = TopologyTestDriver(builder.build(), state=state)
    for at in (1, 2, 30):
        driver.pipe_columns("in", [(b"k%d" % i, b"{}", at) for i in range(9)])
    store: Any = driver.task.stores["s"]
    count = len(store)
    assert "0 keys in memory" in repr(store)
    store.fetch_ahead([b"k1", None, b"k1", b"\xff", b"new"])
    assert "2 keys in memory" in repr(store)
    assert (len(store), {row.key for row in store.rows()}) == (count, {f"k{i}" for i in range(9)})
    assert [row.start for row in store.windows.rows_of("k1")] == [row.start for row in store.rows_of("k2")]
    driver.close()


Calls = Counter[Any]


class Value(msgspec.Struct):
    """A value whose number determines how it is handled."""

    n: int


class Mapped(msgspec.Struct):
    """The result of the functions."""

    twice: int | None


def chained(calls: Calls, emit: Emit, kind: str = "session", key: Any = "string") -> Topology:
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


def chained_driver(calls: Calls, columns_min: int, emit: Emit, kind: str = "session") -> TopologyTestDriver:
    made = chained(calls, emit, kind)
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
chain_steps = st.integers(-25, 12)
numbers = st.one_of(st.integers(0, 60), st.integers(0, 60), st.just("x"))


@settings(max_examples=examples(150))
@given(
    st.lists(st.tuples(keys, chain_steps, numbers), max_size=80),
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
    by_columns, by_records = (chained_driver(c, n, emit, kind) for c, n in zip(called, (1, RECORDS_ONLY), strict=True))
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
    by_columns, by_records = (chained_driver(c, n, "on_update") for c, n in zip(called, (4, RECORDS_ONLY), strict=True))
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


def test_a_window_beyond_64_bits_behind_functions() -> None:
    """Its batch is processed record by record, at least one in each turn. Functions are called once a record."""
    called: list[Calls] = [Counter(), Counter()]
    by_columns, by_records = (chained_driver(c, n, "on_update") for c, n in zip(called, (1, RECORDS_ONLY), strict=True))
    columns = Columns("in", 0, [b"a"] * 2, [b'{"n":1}', b'{"n":6}'], np.array([0, INT64_MAX]), np.arange(2))
    for driver in (by_columns, by_records):
        driver.task.process(columns, 0, lambda: False)
        assert driver.task.sources["in"] == 1
        driver.task.process(columns[1:], 0, lambda: False)
        driver.commit()
    assert called[0] == called[1]
    assert seen(by_columns) == seen(by_records)


def test_an_error_that_ends_the_worker_names_the_record_that_closed_the_window() -> None:
    """A node below the windows raises it, so a store has taken the batch."""

    def misused(window: Any) -> Any:
        raise ConfigError("of the program, not of the record")

    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 5).aggregate("s", count=Count())
    windows.on_close().map_values(misused).to("out")
    driver = TopologyTestDriver(builder.build(), commit_each=False, columns_min=1, errors=ErrorHandlers())
    with pytest.raises(ProcessingFailed, match="in-0@1, which a store had taken"):
        driver.pipe_columns("in", [Piped(b"a", b"{}", at) for at in (0, 50, 51)])


class Level(IntEnum):
    """An int that no column accepts."""

    LOW = 1
    HIGH = 5


def test_functions_are_called_once_for_numbers_that_fit_no_column() -> None:
    """Records are then processed one by one, with the results of their functions, also if time has run out."""
    calls: list[int] = []

    def level(value: Value) -> Mapped:
        calls.append(value.n)
        return Mapped(Level.HIGH if value.n % 2 else Level.LOW)

    builder = StreamsBuilder()
    mapped = builder.stream("in", value=Value).map_values(level, Mapped)
    mapped.group_by_key().session_window(10, 5).aggregate("s", total=Sum("twice")).on_close().to("out")
    task = TopologyTestDriver(builder.build(), commit_each=False, columns_min=1, errors=ErrorHandlers()).task
    values = [b'{"n":%d}' % n for n in range(9)]
    columns = Columns("in", 0, [b"a"] * 9, values, np.arange(9), np.arange(9))
    for times, stop in ((4, 5), (8, 9)):
        task.process(columns[task.sources.get("in", 0) :], 0, left(times))
        assert (task.sources["in"], calls) == (stop, list(range(stop)))
    assert [row.states for row in task.stores["s"].rows()] == [[(25, 9)]]


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


def test_a_function_that_rejects_a_whole_batch_is_called_once_a_record() -> None:
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
        made = chained(Counter(), "on_close")
        handlers = ErrorHandlers(process="fail")
        driver = TopologyTestDriver(made, commit_each=False, columns_min=columns_min, errors=handlers)
        with pytest.raises(ProcessingFailed) as raised:
            driver.pipe_columns("in", [Piped(b"a", b'{"n":%d}' % n, n) for n in (1, 2, 3, 6)])
        failures.append((str(raised.value), driver.task.sources))
    assert failures[0] == failures[1]
    assert "filter-" in failures[0][0]
    assert "in-0@2" in failures[0][0]


def test_an_error_without_a_handler_is_raised_in_its_records_turn() -> None:
    """An error that no handler decides about is raised in its record's turn."""

    def misused(record: Record) -> bool:
        raise ConfigError("of the program, not of the record")

    builder = StreamsBuilder()
    windows = builder.stream("in").filter(misused).group_by_key().session_window(10, 5)
    windows.aggregate("s", count=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), commit_each=False, columns_min=1, errors=ErrorHandlers())
    with pytest.raises(ConfigError, match="of the program"):
        driver.pipe_columns("in", [Piped(b"a", b"{}", 1)])
