"""Sessions in columns against single records, and both against a brute-force sessionizer."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.collecting import CollectList
from penstock.shared.streams.column_path import Moments
from penstock.shared.streams.dsl import StreamsBuilder
from penstock.shared.streams.session_path import SessionPath, previous_lower
from penstock.shared.streams.windowed_aggregate import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.shared.streams.columns_beside_records import (
    Piped,
    Value,
    batches,
    below,
    emits,
    graces,
    inputs,
    pair_of,
    path_of,
    pipe_all,
    require_equal,
    sessions,
    sizes,
    state,
    states_of,
    topology,
)

gaps = st.sampled_from([1, 5, 10, 20])


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


@settings(max_examples=300)
@given(gaps, graces, inputs(), sizes, emits, below)
def test_columns_equal_records_and_brute_force(
    gap: int, grace: int, records: list[Piped], parts: list[int], emit: Emit, below: str
) -> None:
    """After every commit results, late records, live sessions and the changelog are those of single records."""
    model = Model(gap, grace)
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
    drivers = pair_of(topology(sessions(10, 5), "on_close"))
    path = path_of(drivers[0])
    assert isinstance(path, SessionPath)
    codes = np.array([path._store.code_of(key_at(at)) for at in times])
    arrived = np.array(times)
    order = np.lexsort((arrived, codes))
    slow = path._slow_keys(codes[order], arrived[order], order, Moments(arrived, order, 0, 15).closing)
    assert slow.tolist() == ([path._store.code_of(b"a")] if ARRIVALS[times] else [])
    pipe_all(drivers, [Piped(key_at(at), b'{"n":1}', at) for at in times])
    require_equal(*drivers)


@given(st.lists(st.integers(0, 9), min_size=1, max_size=40))
def test_the_nearest_lower_value_before_each_place(values: list[int]) -> None:
    """As a walk back from each place finds it."""
    walked = [max((i for i in range(at) if values[i] < values[at]), default=-1) for at in range(len(values))]
    assert previous_lower(np.array(values), np.arange(len(values))).tolist() == walked


class Counted(np.ndarray[Any, Any]):
    """An array whose indexings are counted, with those of what is computed from it."""

    count = 0

    def __getitem__(self, at: Any) -> Any:
        Counted.count += 1
        return super().__getitem__(at)


def test_records_in_falling_order_of_time_cost_no_walk_each() -> None:
    """Looking back from 16 times as many records takes four rounds more; their key's sessions are walked over once."""
    rounds = []
    for size in (1_000, 16_000):
        Counted.count = 0
        falling = np.arange(size)[::-1].copy().view(Counted)
        assert (previous_lower(falling, np.arange(size)) == -1).all()
        rounds.append(Counted.count)
    assert rounds[1] - rounds[0] < 20
    columns, records = pair_of(topology(sessions(1_000, 1_500), "on_close", value=bytes))
    walks: list[int] = []
    path = path_of(columns)
    assert isinstance(path, SessionPath)
    chain_of = path._store.chain_of
    path._store.chain_of = lambda code: walks.append(code) or chain_of(code)  # type: ignore[method-assign, func-returns-value]
    apart = [Piped(b"a", b"", at) for at in (11_200, 12_500)]
    falling_run = [Piped(b"a", b"", 10_999 - i) for i in range(300)]
    for batch in (apart, falling_run, [Piped(b"b", b"", 10**6)]):
        pipe_all([columns, records], batch)
    require_equal(columns, records)
    assert len(walks) == 1


@pytest.mark.parametrize("columns_min", [1, 10_000])
@pytest.mark.parametrize("lists", [False, True])
def test_a_longer_gap_joins_what_is_stored_by_records_alone(columns_min: int, lists: bool) -> None:
    """Two sessions stored under a shorter gap: a batch out of reach of one leaves it, one between joins them."""

    def driver(gap: int) -> TopologyTestDriver:
        builder = StreamsBuilder()
        windows = builder.stream("in").group_by_key().session_window(gap, 500)
        more = {"ids": CollectList("id", 10)} if lists else {}
        windows.aggregate("s", n=Count(), **more).on_close().to("out")
        return TopologyTestDriver(builder.build(), columns_min=columns_min)

    def live(of: TopologyTestDriver) -> list[tuple[int, int, int]]:
        return [(row.start, row.end, row.states[0]) for row in of.task.stores["s"].rows_of("a")]

    old, new = driver(10), driver(100)
    old.pipe_columns("in", [(b"a", b'{"id": 1}', 10_200), (b"a", b'{"id": 2}', 10_290)])
    old.commit()
    new.changelog, new.source_log = old.changelog, old.source_log
    new.restore()
    new.pipe_columns("in", [(b"a", b'{"id": 3}', 10_020), (b"b", b'{"id": 4}', 10_300)])
    assert live(new) == [(10_020, 10_020, 1), (10_200, 10_200, 1), (10_290, 10_290, 1)]
    new.pipe_columns("in", [(b"a", b'{"id": 5}', 10_110), (b"a", b'{"id": 6}', 10_245)])
    assert live(new) == [(10_020, 10_290, 5)]


def closed_across_gaps(
    columns_min: int, before: list[Piped], after: list[Piped], gaps: tuple[int, int], graces: tuple[int, int]
) -> list[bytes | None]:
    """What is closed of records, the later ones taken after a restart with another gap and grace."""

    def driver(gap: int, grace: int) -> TopologyTestDriver:
        builder = StreamsBuilder()
        windows = builder.stream("in", late="late").group_by_key().session_window(gap, grace)
        windows.aggregate("s", n=Count()).on_close().to("out")
        return TopologyTestDriver(builder.build(), columns_min=columns_min, now_ms=10**9)

    first, second = (driver(*of) for of in zip(gaps, graces, strict=True))
    first.pipe_columns("in", before)
    first.commit()
    second.changelog, second.source_log = first.changelog, first.source_log
    second.restore()
    second.pipe_columns("in", after)
    second.pipe_columns("in", [(b"z", b"{}", 10**6)])
    return sorted(record.value or b"" for record in (*first.read("out"), *second.read("out"), *second.read("late")))


@pytest.mark.parametrize("graces", [(1000, 10), (65, 10), (30, 30)])
def test_a_longer_gap_joins_nothing_that_was_closed_meanwhile(graces: tuple[int, int]) -> None:
    """Of two sessions in reach of a record the earlier was passed by one before it, in the same batch."""
    before = [(b"e", b"{}", time) for time in (100, 103, 115, 120, 121)]
    after = [(b"x", b"{}", 170 + graces[1]), (b"e", b"{}", 140), (b"x", b"{}", 1_000)]
    columns, records = (closed_across_gaps(least, before, after, (5, 60), graces) for least in (1, 10_000))
    assert columns == records
    assert b'{"key":"e","start":115,"end":140,"n":4}' in columns


def timed(first: int, last: int) -> st.SearchStrategy[list[Piped]]:
    times = st.integers(first, last)
    return st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.just(b"{}"), times), min_size=1, max_size=15)


@settings(max_examples=150)
@given(
    timed(100, 150),
    timed(110, 250),
    st.tuples(st.integers(1, 10), st.integers(10, 60)),
    st.tuples(st.just(200), st.integers(0, 40)),
)
def test_a_longer_gap_in_columns_is_that_of_records(
    before: list[Piped], after: list[Piped], gaps: tuple[int, int], graces: tuple[int, int]
) -> None:
    """Whatever is stored closer than it by then."""
    gaps = (gaps[0], gaps[0] + gaps[1])
    columns, records = (closed_across_gaps(least, before, after, gaps, graces) for least in (1, 10_000))
    assert columns == records
