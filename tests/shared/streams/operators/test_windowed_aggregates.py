"""Windows in batches: against brute force, and against the same records one by one, also with states that are
objects."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.clients.dead_letters.late_record_headers import CLOSE_TIME_MS, OFFSET, STREAM_TIME_MS
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
from tests.shared.streams.batches_beside_records import (
    LATE,
    RECORDS_ONLY,
    Piped,
    Value,
    batches,
    below,
    driver_of,
    emits,
    graces,
    hopping,
    inputs,
    live,
    pair_of,
    path_of,
    pipe_all,
    rejected_records,
    require_equal,
    results,
    sessions,
    sizes,
    sliding,
    state,
    states_of,
    topology,
)

gaps = st.sampled_from([1, 5, 10, 20])


class Sessions:
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


@settings(max_examples=examples(300))
@given(gaps, graces, inputs(), sizes, emits, below)
def test_sessions_equal_brute_force(
    gap: int, grace: int, records: list[Piped], parts: list[int], emit: Emit, below: str
) -> None:
    """After every commit results, late records, open sessions and the changelog are those of single records."""
    model = Sessions(gap, grace)
    by_columns, by_records = pair_of(topology(sessions(gap, grace), emit, below=below))
    offset = 0
    for batch in batches(records, parts):
        pipe_all((by_columns, by_records), batch)
        for record in batch:
            model.take(offset, record)
            offset += 1
        require_equal(by_columns, by_records)
        assert state(by_columns)[0] == model.live()
    assert by_columns.task.metrics.late_total == len(model.late)
    assert by_columns.task.metrics.closed_total == len(model.closed)


BATCH_SIZES = (1, 7, 1_000)
spans = st.sampled_from([(1, 1), (10, 10), (10, 5), (10, 4), (25, 7), (12, 1)])


class TimeWindows:
    """Kafka Streams' rule over plain lists: each window's values, by key and start."""

    def __init__(self, size: int, advance: int, grace: int) -> None:
        self.size, self.advance, self.grace, self.time = size, advance, grace, -1
        self.windows: dict[tuple[bytes, int], list[tuple[int, Value]]] = {}
        self.late: list[int] = []
        self.missed = self.closed = 0

    def take(self, offset: int, record: Piped) -> None:
        if record.key is None:
            return
        at, value = record.timestamp, msgspec.json.decode(record.value or b"", type=Value)
        self.time = max(self.time, at)
        starts = [s for s in range(0, at + 1, self.advance) if s + self.size > at]
        taken = [s for s in starts if s + self.size > self.time - self.grace]
        for start in taken:
            self.windows.setdefault((record.key, start), []).append((at, value))
        self.missed += len(starts) - len(taken)
        if not taken:
            self.late.append(offset)
        due = [w for w in self.windows if w[1] + self.size <= self.time - self.grace]
        self.closed += len(due)
        for window in due:
            del self.windows[window]

    def live(self) -> list[Any]:
        return sorted(
            (key.decode(), start, start + self.size, [max(at for at, _ in taken), *states_of([v for _, v in taken])])
            for (key, start), taken in self.windows.items()
        )


@settings(max_examples=examples(300))
@given(spans, graces, inputs(), sizes, emits, below)
def test_time_windows_equal_brute_force(
    span: tuple[int, int], grace: int, records: list[Piped], parts: list[int], emit: Emit, below: str
) -> None:
    """After every commit results, late records, live windows and the changelog are those of single records."""
    model = TimeWindows(*span, grace)
    by_columns, by_records = pair_of(topology(hopping(*span, grace), emit, below=below))
    offset = 0
    for batch in batches(records, parts):
        pipe_all((by_columns, by_records), batch)
        for record in batch:
            model.take(offset, record)
            offset += 1
        require_equal(by_columns, by_records)
        assert state(by_columns)[0] == model.live()
    metrics = by_columns.task.metrics
    assert (metrics.late_total, metrics.missed_windows_total) == (len(model.late), model.missed)
    assert metrics.closed_total == model.closed


def drawn(seed: int) -> tuple[tuple[int, int, int], list[Piped]]:
    """Size, advance and grace, and 1,000 records: some from far ahead or behind, with numbers of any size."""
    random = np.random.default_rng(seed)
    size = int(random.integers(1, 200))
    advance = size if random.random() < 0.4 else int(random.integers(max(1, size // 12), size + 1))
    grace = int(random.choice([0, 1, size // 2, 3 * size]))
    now, records = int(random.choice([0, 10**6, 2**60])), []
    for number in range(1_000):
        now += int(random.choice([0, 0, 1, 3, size, 5 * size], p=[0.4, 0.2, 0.2, 0.15, 0.04, 0.01]))
        behind = int(random.integers(0, random.choice([1, size + 1, 4 * size], p=[0.7, 0.2, 0.1])))
        key = None if random.random() < 0.02 else b"k%d" % int(random.zipf(1.5) % 60)
        n = int(random.choice([number, -number, 2**62, -(2**61)], p=[0.5, 0.46, 0.02, 0.02]))
        ms = b"%.3f" % random.normal(0, 10.0 ** random.integers(0, 18))
        value = b'{"n":%d,"ms":%s}' % (n, b"null" if number % 9 == 0 else ms)
        records.append(Piped(key, value, max(0, now - behind)))
    return (size, advance, grace), records


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.soak) for seed in range(3, 12))])
def test_drawn_cases_in_batches_of_any_size(seed: int) -> None:
    """For any sizes of windows and batches and any numbers, columns give the results of single records."""
    span, records = drawn(seed)
    emit: Emit = "on_close" if seed % 2 else "on_update"
    sums_differ = 1e-9
    for size in BATCH_SIZES:
        by_columns, by_records = pair_of(topology(hopping(*span), emit))
        assert path_of(by_columns) is not None
        step = size if size > 1 else len(records) // 20
        for start in range(0, len(records), step):
            for driver in (by_columns, by_records):
                for at in range(start, min(start + step, len(records)), size):
                    driver.pipe_columns("in", records[at : at + size])
                driver.commit()
            assert rejected_records(by_columns) == rejected_records(by_records)
            _require_close(_decoded(by_columns), _decoded(by_records), sums_differ)
            _require_close(live(by_columns), live(by_records), sums_differ)
        assert state(by_columns)[1:] == state(by_records)[1:]


def _decoded(driver: TopologyTestDriver) -> list[Any]:
    return [(key, msgspec.json.decode(value or b""), at) for key, value, at in results(driver)]


def _require_close(ours: Any, theirs: Any, tolerance: float) -> None:
    """Equal, floats aside: those are sums that were added up in another order."""
    if isinstance(ours, float) and isinstance(theirs, float):
        assert ours == pytest.approx(theirs, rel=tolerance, abs=1e3)
    elif isinstance(ours, dict):
        _require_close(sorted(ours.items()), sorted(theirs.items()), tolerance)
    elif isinstance(ours, list | tuple):
        assert len(ours) == len(theirs)
        for one, other in zip(ours, theirs, strict=True):
            _require_close(one, other, tolerance)
    else:
        assert ours == theirs


def test_a_late_record_has_the_close_time_at_its_position() -> None:
    """The close time of a late record is that of its own position in the batch. A record that misses only one of its
    windows is not counted as later."""
    driver = driver_of(topology(hopping(10, 5, 0), "on_close", value=bytes), 1)
    driver.pipe_columns("in", [Piped(b"a", b"", at) for at in (12, 8, 20, 9, 99)])
    driver.commit()
    [late] = driver.read(LATE)
    headers = dict(late.headers)
    assert [headers[name] for name in (OFFSET, CLOSE_TIME_MS, STREAM_TIME_MS)] == [b"3", b"20", b"20"]
    assert (driver.task.metrics.late_total, driver.task.metrics.missed_windows_total) == (1, 3)


@pytest.mark.parametrize("grace", [0, 100])
def test_times_near_the_end_of_64_bits_go_record_by_record(grace: int) -> None:
    """A record whose window would end beyond 64 bits is rejected, as it is alone. No sum of times wraps around."""
    by_columns, by_records = pair_of(topology(hopping(10, 5, grace), "on_close"))
    latest = 2**63 - 1
    for times in ((5, latest - 200), (latest - 60, latest - 11, latest - 9), (latest,)):
        pipe_all((by_columns, by_records), [Piped(b"a", b'{"n":1}', at) for at in times])
        require_equal(by_columns, by_records)
    assert by_columns.task.metrics.dead_letters_total == 2


def test_idle_time_closes_windows_of_columns() -> None:
    """If time advances without records, windows close as in the other store, many at once or one by one."""
    for keys in (3, 100):
        by_columns, by_records = pair_of(topology(hopping(10, 5, 0), "on_close"))
        pipe_all((by_columns, by_records), [Piped(b"k%d" % n, b'{"n":1}', 7) for n in range(keys)])
        for driver in (by_columns, by_records):
            driver.task.advance_time(3)
            driver.task.advance_time(50)
            driver.commit()
        closed = [r.value for r in by_columns.outputs["out"]]
        assert len(closed) == 2 * keys
        assert closed == [r.value for r in by_records.outputs["out"]]
        require_equal(by_columns, by_records)


@settings(max_examples=examples(300))
@given(st.sampled_from([0, 1, 7, 20]), graces, inputs(), sizes, emits, below)
def test_sliding_windows_are_those_of_single_records(
    difference: int, grace: int, records: list[Piped], parts: list[int], emit: Emit, below: str
) -> None:
    """After every commit results, late records, live windows and the changelog are those of single records."""
    by_columns, by_records = pair_of(topology(sliding(difference, grace), emit, below=below))
    for batch in batches(records, parts):
        pipe_all((by_columns, by_records), batch)
        require_equal(by_columns, by_records)


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


class Paged(msgspec.Struct):
    """A value with text that may be missing, and a number."""

    n: int
    page: str | None = None


def topology_of(
    names: list[str], gap: int, grace: int, emit: Emit, value: Any = Paged, kind: str = "session"
) -> Topology:
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


def batch_driver(made: Topology, columns_min: int) -> TopologyTestDriver:
    driver = TopologyTestDriver(
        made, commit_each=False, deduplicate_updates=True, columns_min=columns_min, errors=ErrorHandlers()
    )
    assert "in" in driver.task.vectorized_executors
    return driver


def outputs(driver: TopologyTestDriver, topic: str) -> list[Any]:
    """The outputs since the last call; outputs of one commit are sorted."""
    read = [(r.key, r.value, r.timestamp) for r in driver.read(topic)]
    return sorted(read, key=repr) if topic == "out" else read


def live_results(driver: TopologyTestDriver, rows: Any = None) -> list[Any]:
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
    return live_results(again)


keys = st.sampled_from([b"a", b"a", b"b", b"c", None])
steps = st.one_of(st.integers(-40, 30), st.integers(0, 3), st.integers(0, 3), st.sampled_from([-10, 10, 11, 100, -70]))
kinds = st.sampled_from(["session", "session", "tumbling", "hopping", "overlapping", "sliding"])
names = st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=1, max_size=4, unique=True)
odd_values = st.sampled_from([None, b"{", b"{}", b'{"n":"x"}', b'{"n":1.5}', b'{"n":2,"page":7}'])


@st.composite
def paged_inputs(draw: st.DrawFn) -> list[Piped]:
    """Records around a mostly rising time, some with equal times, some that are rejected."""
    now = draw(st.integers(0, 50))
    out: list[Piped] = []
    for key, step in draw(st.lists(st.tuples(keys, steps), max_size=90)):
        number = len(out)
        page = b"null" if number % 5 == 0 else b'"p%d"' % (number * 7 % 13)
        value: bytes | None = b'{"n":%d,"page":%s}' % (number * 7 % 11 - 5, page)
        if draw(st.integers(0, 25)) == 0:
            value = draw(odd_values)
        out.append(Piped(key, value, max(0, now + step)))
        now = max(now, now + step // 2)
    return out


@settings(max_examples=examples(250))
@given(names, kinds, gaps, graces, paged_inputs(), st.sampled_from([1, 7, 20, 1000]), emits)
def test_batches_equal_single_records(
    own: list[str], kind: str, gap: int, grace: int, records: list[Piped], size: int, emit: Emit
) -> None:
    """After every commit results, late records, dead letters, open sessions and changelog are the same."""
    made = topology_of(own, gap, grace, emit, kind=kind)
    batches, singly = batch_driver(made, 1), batch_driver(made, RECORDS_ONLY)
    for start in range(0, len(records), size):
        for driver in (batches, singly):
            driver.pipe_columns("in", records[start : start + size])
            driver.commit()
        for topic in ("out", "in-late"):
            assert outputs(batches, topic) == outputs(singly, topic)
        assert [r.value for r in batches.read("in-dlq")] == [r.value for r in singly.read("in-dlq")]
        assert batches.task.metrics.skipped_total == singly.task.metrics.skipped_total
        assert live_results(batches) == live_results(singly)
    expected = live_results(singly)
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
    made = topology_of(own, 10, grace, "on_update", kind=kind)
    batches, singly = batch_driver(made, 1), batch_driver(made, RECORDS_ONLY)
    piped = [Piped(k, b'{"n":%d,"page":%s}' % (i, p.encode()), at) for i, (k, at, p) in enumerate(records)]
    for start in range(0, len(piped), size):
        for driver in (batches, singly):
            driver.pipe_columns("in", piped[start : start + size])
            driver.commit()
        assert outputs(batches, "out") == outputs(singly, "out")
        assert live_results(batches) == live_results(singly)


@settings(max_examples=examples(60))
@given(names, paged_inputs(), st.data())
def test_crashes_in_the_midst(own: list[str], records: list[Piped], data: st.DataObject) -> None:
    """Changes that a batch made to states in place are lost with the task, and are not counted twice."""
    made = topology_of(own, 10, 7, "on_close")
    batches, singly = batch_driver(made, 1), batch_driver(made, RECORDS_ONLY)
    for start in range(0, len(records), 15):
        crash = data.draw(st.booleans())
        for driver in (batches, singly):
            driver.pipe_columns("in", records[start : start + 15])
            if crash:
                driver.crash(torn_entries=2)
                driver.restore()
            driver.commit()
        assert outputs(batches, "out") == outputs(singly, "out")
        assert live_results(batches) == live_results(singly)


def of_pages(arrivals: list[tuple[bytes, int]], names: list[str], grace: int) -> list[Any]:
    """Results of hopping windows after a batch of records with the pages 0, 1, 2..., as columns and as singly."""
    made = topology_of(names, 10, grace, "on_update", kind="hopping")
    found = []
    for driver in (batch_driver(made, 1), batch_driver(made, RECORDS_ONLY)):
        driver.pipe_columns(
            "in", [Piped(key, b'{"n":%d,"page":"%d"}' % (i, i), at) for i, (key, at) in enumerate(arrivals)]
        )
        driver.commit()
        found.append(outputs(driver, "out"))
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
def test_a_value_without_json_is_a_dead_letter(name: str, columns_min: int) -> None:
    """A value with which the state could not be written makes its record a dead letter, in columns too. Its window
    continues."""
    driver = batch_driver(topology_of(["count", name], 10, 0, "on_close", value=made_of), columns_min)
    times = {b"text": 1, b"object": 0}  # the first value, though it came second
    pipe_and_commit(driver, [Piped(b"a", v, times[v]) for v in (b"text", b"object", b"text")])
    pipe_and_commit(driver, [Piped(b"b", b"text", 30)])
    (dead_letter,) = driver.read("in-dlq")
    assert dict(dead_letter.headers)["penstock.dlq.offset"] == b"1"
    (result,) = outputs(driver, "out")
    assert msgspec.json.decode(result[1])["count"] == 2


def test_numbers_of_other_types_are_taken_as_one_by_one() -> None:
    """If an aggregation accepts a number that fits no column, its batch is processed record by record."""
    made = topology_of(["total", "ranks"], 10, 0, "on_close", value=lambda topic, data: {"n": np.float64(data or b"0")})
    drivers = [batch_driver(made, 1), batch_driver(made, RECORDS_ONLY)]
    for driver in drivers:
        pipe_and_commit(driver, [Piped(b"a", b"1.5", 1), Piped(b"a", b"2", 2), Piped(b"a", b"3", 90)])
    in_batches, one_by_one = (outputs(driver, "out") for driver in drivers)
    assert in_batches == one_by_one
    assert [msgspec.json.decode(value)["total"] for _, value, _ in in_batches] == [3.5]


def pipe_and_commit(driver: TopologyTestDriver, records: list[Piped]) -> None:
    driver.pipe_columns("in", records)
    driver.commit()


def test_rows_that_are_gone_hold_nothing() -> None:
    """A session that was closed or merged away leaves no state behind in its row, whenever that is used again."""
    driver = batch_driver(topology_of(["distinct", "first"], 10, 0, "on_close"), 1)
    batches = [[Piped(b"a", b'{"n":1,"page":"x"}', at) for at in part] for part in ((0, 15), (8,), (100,))]
    for batch in batches:
        driver.pipe_columns("in", batch)
        driver.commit()
    store: Any = driver.task.stores["s"]
    left = [[type(state).__name__ for state in own.rows if state is not None] for own in store.columns.objects]
    assert left == [["hll_sketch"], ["tuple"]]
