"""Windows in batches: against brute force, and against the same records one by one."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.shared.streams.task.late_records import CLOSE_TIME_MS, OFFSET, STREAM_TIME_MS
from penstock.shared.streams.windows.window_rule import Emit
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.property_tests import examples
from tests.shared.streams.batches_beside_records import (
    LATE,
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
    """After every commit results, late records, live sessions and the changelog are those of single records."""
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


def test_a_late_record_says_how_late_at_its_own_moment() -> None:
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
