"""Session windows: the rule case by case, against a brute-force sessionizer, and of git commits, which are far out of
order.

Git commits are processed in the order in which they were made. Event time is the author's time, which may be years
earlier, and is 2056 for one of them. A normal run generates such commits. For the soak, `PENSTOCK_TEST_COMMITS` names a
file of real ones (gzip, tab-separated: commit time and author time in seconds, author, repository, parents).
"""

from __future__ import annotations

import gzip
import os
import random
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.dead_letters.late_record_headers import (
    APPLICATION,
    CLOSE_TIME_MS,
    LATENESS_MS,
    OFFSET,
    PARTITION,
    STORE,
    STREAM_TIME_MS,
    TOPIC,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.windows.window_rule import Emit, WindowRule
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

Window = tuple[str, int, int]
Update = tuple[Window, list[int] | None]


class Value(msgspec.Struct):
    """An input value: a number that identifies its record."""

    id: int


def driver_of(
    gap: int,
    grace: int = 0,
    emit: Emit = "on_close",
    *,
    commit_each: bool = True,
    deduplicate_updates: bool = False,
) -> TopologyTestDriver:
    """Sessions with the ids of their records in order of arrival."""
    builder = StreamsBuilder()
    windows = builder.stream("in", value=Value).group_by_key().session_window(gap, grace)
    ids = Aggregate(list, lambda ids, value: [*ids, value.id], lambda a, b: a + b)
    table = windows.aggregate("s", ids=ids, n=Count(), sum=Sum("id"))
    (table.on_close() if emit == "on_close" else table.on_update()).to("out")
    return TopologyTestDriver(
        builder.build(), commit_each=commit_each, deduplicate_updates=deduplicate_updates, errors=ErrorHandlers()
    )


def pipe(driver: TopologyTestDriver, *records: tuple[str | None, int]) -> None:
    """Pipe (key, timestamp) records; each record's id is its offset."""
    for key, timestamp in records:
        offset = len(driver.source_log["in"])
        value = msgspec.json.encode({"id": offset})
        driver.pipe("in", key=None if key is None else key.encode(), value=value, timestamp=timestamp)


def closed(driver: TopologyTestDriver) -> list[tuple[Window, list[int]]]:
    """The windows that were emitted on close since the last call, with the ids of their records."""
    out = []
    for record in driver.read("out"):
        result = msgspec.json.decode(record.value or b"")
        assert (record.key, record.timestamp) == (result["key"].encode(), result["end"])
        assert (result["n"], result["sum"]) == (len(result["ids"]), sum(result["ids"]))
        out.append(((result["key"], result["start"], result["end"]), result["ids"]))
    return out


def updates(driver: TopologyTestDriver) -> list[Update]:
    """Return the new updates. None is a retraction."""
    out: list[Update] = []
    for record in driver.read("out"):
        key = msgspec.json.decode(record.key or b"")
        assert record.timestamp == key["end"]
        ids = None if record.value is None else msgspec.json.decode(record.value)["ids"]
        out.append(((key["key"], key["start"], key["end"]), ids))
    return out


def live(driver: TopologyTestDriver) -> set[tuple[str, int, int, tuple[int, ...]]]:
    return {(s.key, s.start, s.end, tuple(s.states[0])) for s in driver.task.stores["s"].rows()}


def late(driver: TopologyTestDriver) -> list[int]:
    """The offsets of the records sent to the late topic since the last look."""
    return [int(dict(record.headers)[OFFSET] or b"") for record in driver.read("in-late")]


# --- case by case ---


def test_gap_is_inclusive() -> None:
    """Two records exactly the gap apart are in one session. One millisecond more makes two sessions."""
    driver = driver_of(gap=10, grace=100)
    pipe(driver, ("a", 0), ("a", 10), ("b", 0), ("b", 11))
    assert live(driver) == {("a", 0, 10, (0, 1)), ("b", 0, 0, (2,)), ("b", 11, 11, (3,))}


def test_record_bridges_two_sessions() -> None:
    """A record within the gap of two sessions merges them. The records of the earlier session come first."""
    driver = driver_of(gap=10, grace=100)
    pipe(driver, ("a", 16), ("a", 0), ("a", 8))
    assert live(driver) == {("a", 0, 16, (1, 0, 2))}


def test_bridge_reaches_no_further_than_the_gap() -> None:
    """A record merges only the sessions within its own gap, even if another session is closer to the merged one."""
    driver = driver_of(gap=10, grace=100)
    pipe(driver, ("a", 0), ("a", 16), ("a", 40), ("a", 8))
    assert live(driver) == {("a", 0, 16, (0, 1, 3)), ("a", 40, 40, (2,))}


def test_record_extends_to_the_left() -> None:
    """An out-of-order record moves its session's start, which is the session's key in the store."""
    driver = driver_of(gap=10, grace=100)
    pipe(driver, ("a", 20), ("a", 12), ("a", 5))
    assert live(driver) == {("a", 5, 20, (0, 1, 2))}


def test_record_inside_changes_no_bound() -> None:
    """A record within a session's bounds only adds to it."""
    driver = driver_of(gap=10, grace=100)
    pipe(driver, ("a", 0), ("a", 9), ("a", 4))
    assert live(driver) == {("a", 0, 9, (0, 1, 2))}


def test_keys_do_not_meet() -> None:
    """Sessions of different keys never merge, but one stream time closes them all."""
    driver = driver_of(gap=10)
    pipe(driver, ("a", 0), ("b", 1), ("a", 2), ("c", 13))
    assert closed(driver) == [(("b", 1, 1), [1]), (("a", 0, 2), [0, 2])]
    assert live(driver) == {("c", 13, 13, (3,))}


def test_end_at_the_close_time_is_not_late() -> None:
    """A record at the close time is in time, and a record one millisecond earlier is late."""
    driver = driver_of(gap=10, grace=5)
    pipe(driver, ("a", 100), ("b", 85), ("c", 84))
    assert late(driver) == [2]
    assert live(driver) == {("a", 100, 100, (0,)), ("b", 85, 85, (1,))}


def test_a_session_at_the_close_time_is_open() -> None:
    """A session closes when the close time has passed its end, not when it has reached it."""
    driver = driver_of(gap=10)
    pipe(driver, ("a", 0), ("b", 10))
    assert closed(driver) == []
    pipe(driver, ("b", 11))
    assert closed(driver) == [(("a", 0, 0), [0])]


def test_an_old_record_is_rescued_by_the_session_it_merges_into() -> None:
    """A record before the close time is not late if it merges into an open session."""
    driver = driver_of(gap=10)
    pipe(driver, ("a", 25), ("a", 16), ("a", 12), ("b", 12))
    assert late(driver) == [3]
    assert live(driver) == {("a", 12, 25, (0, 1, 2))}


def test_late_record_has_its_lateness() -> None:
    """A late record is forwarded unchanged, with its coordinates, its lateness, the close time and the operator's
    time."""
    driver = driver_of(gap=10, grace=5)
    pipe(driver, ("a", 100))
    driver.pipe("in", key=b"b", value=b'{"id":7}', timestamp=80, headers=(("trace", b"x"),))
    (record,) = driver.read("in-late")
    assert (record.key, record.value, record.timestamp) == (b"b", b'{"id":7}', 80)
    assert record.headers == (
        ("trace", b"x"),
        (TOPIC, b"in"),
        (PARTITION, b"0"),
        (OFFSET, b"1"),
        (LATENESS_MS, b"5"),
        (CLOSE_TIME_MS, b"85"),
        (STREAM_TIME_MS, b"100"),
        (STORE, b"s"),
        (APPLICATION, b"test-driver"),
    )
    assert driver.task.metrics.late_total == 1


def test_grace_0_closes_after_the_gap() -> None:
    """Without grace a session closes by the first record more than a gap after its end, also one of its own key."""
    driver = driver_of(gap=10)
    pipe(driver, ("a", 0), ("a", 11))
    assert closed(driver) == [(("a", 0, 0), [0])]
    assert live(driver) == {("a", 11, 11, (1,))}


def test_the_same_start_closes_twice() -> None:
    """A key can have two closed sessions with the same start: the second one reached it by merging to the left."""
    driver = driver_of(gap=10)
    pipe(driver, ("a", 0), ("b", 8), ("a", 8), ("b", 11))
    assert closed(driver) == []
    # Now [0, 8] and then, after it closed, another session of the key reaches back to 0.
    pipe(driver, ("b", 19))
    assert closed(driver) == [(("a", 0, 8), [0, 2])]
    driver = driver_of(gap=10)
    pipe(driver, ("a", 0), ("x", 11), ("a", 10), ("a", 0))
    assert closed(driver) == [(("a", 0, 0), [0])]
    assert live(driver) == {("a", 0, 10, (2, 3)), ("x", 11, 11, (1,))}
    pipe(driver, ("x", 21))
    assert closed(driver) == [(("a", 0, 10), [2, 3])]


def test_on_close_once_in_order_of_end_and_start() -> None:
    """Windows that one record closes come once each, in order of their ends, then starts."""
    driver = driver_of(gap=10, grace=50)
    pipe(driver, ("c", 30), ("b", 20), ("b", 29), ("b", 30), ("a", 5), ("z", 500))
    assert [window for window, _ in closed(driver)] == [("a", 5, 5), ("b", 20, 30), ("c", 30, 30)]
    pipe(driver, ("z", 501), ("z", 600))
    assert closed(driver) == [(("z", 500, 501), [5, 6])]
    assert driver.task.metrics.closed_total == 4


def test_null_keys_are_skipped_and_counted() -> None:
    """A record without a key belongs to no session: it is counted, moves the task's time and not the operator's."""
    driver = driver_of(gap=10)
    pipe(driver, ("a", 0), (None, 1_000), ("a", 5))
    assert live(driver) == {("a", 0, 5, (0, 2))}
    assert (driver.task.metrics.skipped_total, driver.task.stream_time_ms) == (1, 1_000)
    assert closed(driver) == []


def test_on_update_forwards_each_change() -> None:
    """Without reduction each record forwards its session, after retractions of the sessions merged into it."""
    driver = driver_of(gap=10, grace=100, emit="on_update")
    pipe(driver, ("a", 0), ("a", 0), ("a", 16), ("a", 8), ("a", 8))
    assert updates(driver) == [
        (("a", 0, 0), [0]),
        (("a", 0, 0), [0, 1]),
        (("a", 16, 16), [2]),
        (("a", 0, 0), None),
        (("a", 16, 16), None),
        (("a", 0, 16), [0, 1, 2, 3]),
        (("a", 0, 16), None),
        (("a", 0, 16), [0, 1, 2, 3, 4]),
    ]


def test_on_update_reduced_to_the_last_of_a_commit() -> None:
    """With reduction a commit has the last result of each window, and none of a window that existed only within the
    commit."""
    driver = driver_of(gap=10, grace=100, emit="on_update", commit_each=False, deduplicate_updates=True)
    pipe(driver, ("a", 0), ("a", 16), ("b", 3), ("a", 8))
    assert updates(driver) == []
    driver.commit()
    assert updates(driver) == [(("b", 3, 3), [2]), (("a", 0, 16), [0, 1, 3])]


def test_on_update_retracts_only_what_was_shown() -> None:
    """A merged window is retracted if an earlier commit had shown it, and not otherwise."""
    driver = driver_of(gap=10, grace=100, emit="on_update", commit_each=False, deduplicate_updates=True)
    pipe(driver, ("a", 0))
    driver.commit()
    pipe(driver, ("a", 16), ("a", 8))
    driver.commit()
    assert updates(driver) == [(("a", 0, 0), [0]), (("a", 0, 0), None), (("a", 0, 16), [0, 1, 2])]
    pipe(driver, ("a", 32))
    driver.commit()
    pipe(driver, ("a", 24))
    driver.commit()
    shown = [(("a", 32, 32), [3]), (("a", 0, 16), None), (("a", 32, 32), None), (("a", 0, 32), [0, 1, 2, 3, 4])]
    assert updates(driver) == shown


def test_a_shown_window_stays_shown_over_a_restore() -> None:
    """After a crash a window that the lost task's last commit had shown is retracted when it is merged."""
    driver = driver_of(gap=10, grace=100, emit="on_update", commit_each=False, deduplicate_updates=True)
    pipe(driver, ("a", 0))
    driver.commit()
    driver.crash()
    driver.restore()
    pipe(driver, ("a", 8))
    driver.commit()
    assert updates(driver) == [(("a", 0, 0), [0]), (("a", 0, 0), None), (("a", 0, 8), [0, 1])]


def test_a_window_closed_within_its_commit_is_still_shown() -> None:
    """On update, a window that is opened and closed between two commits shows its last result."""
    driver = driver_of(gap=10, emit="on_update", commit_each=False, deduplicate_updates=True)
    pipe(driver, ("a", 0), ("a", 5), ("a", 100))
    driver.commit()
    assert updates(driver) == [(("a", 0, 5), [0, 1]), (("a", 100, 100), [2])]


def test_advance_time_closes_without_a_record() -> None:
    """The operator's time can be advanced, never set back. The advance closes the windows that are due."""
    driver = driver_of(gap=10)
    pipe(driver, ("a", 0))
    (operator,) = driver.task.times.operators
    driver.task.advance_time(10)
    assert len(driver.task.stores["s"]) == 1
    driver.task.advance_time(1)
    operator.advance_time(5)
    assert (len(driver.task.stores["s"]), operator.stream_time_ms) == (0, 11)


def test_a_rejected_record_leaves_its_session_alone() -> None:
    """If one aggregation rejects a value, no other one has it, not even a sketch that is declared before it."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 100)
    windows.aggregate(
        "s", who=CountDistinct("who"), n=Count(), sum=Sum("x"), where=CountDistinct("where")
    ).on_update().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b'{"who":"a","x":1,"where":"p"}', timestamp=0)
    driver.pipe("in", key=b"k", value=b'{"who":"b","x":"one","where":"q"}', timestamp=5)
    driver.pipe("in", key=b"k", value=b'{"who":"b","x":1}', timestamp=5)
    assert [r.value for r in driver.read("out")] == [b'{"key":"k","start":0,"end":0,"who":1,"n":1,"sum":1.0,"where":1}']
    assert len(driver.read("in-dlq")) == 2
    driver.pipe("in", key=b"k", value=b'{"who":"a","x":1,"where":"p"}', timestamp=9)
    assert [r.value for r in driver.read("out")] == [
        None,
        b'{"key":"k","start":0,"end":9,"who":1,"n":2,"sum":2.0,"where":1}',
    ]


@pytest.mark.parametrize(("gap", "grace", "named"), [(0, 0, "gap"), (-1, 0, "gap"), (1, -1, "grace")])
def test_windows_reject_what_is_no_duration(gap: int, grace: int, named: str) -> None:
    """A gap below 1 ms and a negative grace are rejected by name."""
    with pytest.raises(ConfigError, match=f"session {named}"):
        WindowRule("session", gap, grace)


# --- against a brute-force sessionizer ---


@dataclass
class BruteForce:
    """The session rule of Kafka Streams over plain lists."""

    gap: int
    grace: int
    time: int = -1
    sessions: list[tuple[str, int, int, list[int]]] = field(default_factory=list)
    closed: list[tuple[Window, list[int]]] = field(default_factory=list)
    updates: list[Update] = field(default_factory=list)
    late: list[int] = field(default_factory=list)

    def take(self, id_: int, key: str | None, at: int) -> None:
        if key is None:
            return
        self.time = max(self.time, at)
        close_time = self.time - self.grace - self.gap
        found = sorted(
            s
            for s in self.sessions
            if s[0] == key and s[2] >= at - self.gap and s[1] <= at + self.gap and s[2] >= close_time
        )
        start, end = min([at, *(s[1] for s in found)]), max([at, *(s[2] for s in found)])
        if end < close_time:
            self.late.append(id_)
        else:
            for session in found:
                self.sessions.remove(session)
                if (start, end) != (at, at):
                    self.updates.append((session[:3], None))
            merged = (key, start, end, [*(i for s in found for i in s[3]), id_])
            self.sessions.append(merged)
            self.updates.append((merged[:3], merged[3]))
        gone = sorted((s for s in self.sessions if s[2] < close_time), key=lambda s: (s[2], s[1]))
        self.sessions = [s for s in self.sessions if s[2] >= close_time]
        self.closed += [(s[:3], s[3]) for s in gone]

    def live(self) -> set[tuple[str, int, int, tuple[int, ...]]]:
        return {(*s[:3], tuple(s[3])) for s in self.sessions}


def net(raw: list[Update], shown: set[Window]) -> list[Update]:
    """The updates of one commit, reduced to the last of each window, with retractions only of results of earlier
    commits."""
    last: dict[Window, list[int] | None] = {}
    for window, ids in raw:
        last.pop(window, None)
        last[window] = ids
    out = [(window, ids) for window, ids in last.items() if ids is not None or window in shown]
    shown |= {window for window, ids in out if ids is not None}
    shown -= {window for window, ids in out if ids is None}
    return out


keys = st.sampled_from(["a", "a", "b", "c", None])
steps = st.one_of(st.integers(-30, 30), st.integers(0, 5), st.sampled_from([-10, 10, 11, 100]))


@st.composite
def inputs(draw: st.DrawFn) -> list[tuple[str | None, int]]:
    """Records around a time that mostly rises, so that merging, closing and lateness all happen."""
    now, out = draw(st.integers(0, 50)), []
    for key, step in draw(st.lists(st.tuples(keys, steps), max_size=60)):
        out.append((key, max(0, now + step)))
        now = max(now, now + step // 2)
    return out


gaps, graces = st.sampled_from([1, 5, 10, 20]), st.sampled_from([0, 1, 7, 30])


@given(gaps, graces, inputs())
def test_record_by_record_equals_brute_force(gap: int, grace: int, records: list[tuple[str | None, int]]) -> None:
    """With a commit after each record, closed windows, updates, late records and open windows equal those of a
    brute-force rule."""
    model = BruteForce(gap, grace)
    on_close, on_update = driver_of(gap, grace), driver_of(gap, grace, "on_update")
    for id_, (key, at) in enumerate(records):
        model.take(id_, key, at)
        pipe(on_close, (key, at))
        pipe(on_update, (key, at))
        assert sorted(closed(on_close)) == sorted(model.closed)
        assert updates(on_update) == model.updates
        assert late(on_close) == late(on_update) == model.late
        assert live(on_close) == live(on_update) == model.live()
        model.closed, model.updates, model.late = [], [], []


@given(gaps, graces, inputs(), st.lists(st.integers(1, 12), min_size=1))
def test_batches_equal_brute_force_net_of_commits(
    gap: int, grace: int, records: list[tuple[str | None, int]], sizes: list[int]
) -> None:
    """With commits after random batches, outputs equal those of a brute-force rule, reduced by commit."""
    model = BruteForce(gap, grace)
    options: dict[str, Any] = {"commit_each": False, "deduplicate_updates": True}
    on_close, on_update = driver_of(gap, grace, **options), driver_of(gap, grace, "on_update", **options)
    shown: set[Window] = set()
    done, turn = 0, 0
    while done < len(records):
        batch = records[done : done + sizes[turn % len(sizes)]]
        for id_, (key, at) in enumerate(batch, done):
            model.take(id_, key, at)
        pipe(on_close, *batch)
        pipe(on_update, *batch)
        on_close.commit()
        on_update.commit()
        done, turn = done + len(batch), turn + 1
        assert sorted(closed(on_close)) == sorted(model.closed)
        assert sorted(updates(on_update), key=repr) == sorted(net(model.updates, shown), key=repr)
        assert late(on_close) == late(on_update) == model.late
        assert live(on_close) == live(on_update) == model.live()
        model.closed, model.updates, model.late = [], [], []


def test_a_rejected_record_does_not_move_time() -> None:
    """A record that an aggregation rejects closes no window and makes no record late."""
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(gap=10)
    windows.aggregate("s", total=Sum("n")).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b'{"n":1}', timestamp=0)
    driver.pipe("in", key=b"k", value=b'{"n":"many"}', timestamp=1_000)
    driver.pipe("in", key=b"k", value=b'{"n":2}', timestamp=5)
    assert driver.read("out") == []
    assert len(driver.read("in-dlq")) == 1
    [session] = driver.task.stores["s"].rows()
    assert (session.start, session.end) == (0, 5)


COMMITS_FILE = os.environ.get("PENSTOCK_TEST_COMMITS")
GAP_MS, GRACE_MS = 2 * 3_600_000, 24 * 3_600_000
MAX_FUTURE_MS = 24 * 3_600_000
HOUR_MS, DAY_MS, YEAR_MS = 3_600_000, 24 * 3_600_000, 365 * 24 * 3_600_000
FIRST_MS, FAR_AHEAD_MS = 1_400_000_000_000, 2_720_000_000_000  # 2014 and 2056
BATCH_RECORDS, CRASH_AFTER = 2_000, 100  # batches: a restore reads the whole changelog before it
GENERATED, GENERATED_BATCH_RECORDS, GENERATED_CRASH_AFTER = 6_000, 150, 12

Commit = tuple[int, int, str, int]
"""Commit time and author time (ms), author, number of parents."""
Session = tuple[str, int, int, int, int]
"""Author, start, end, commits, parents."""


class CommitValue(msgspec.Struct):
    """The value of a commit's record."""

    parents: int


def generated(seed: int = 1) -> Iterator[Commit]:
    """Commits of twenty authors, a third of them late by hours, days or years, and one ahead of its time."""
    random_ = random.Random(seed)
    now = FIRST_MS
    for number in range(GENERATED):
        now += random_.choice((60_000, 600_000, HOUR_MS))
        late = random_.choices((0, 3 * HOUR_MS, 20 * DAY_MS, 6 * YEAR_MS), (69, 16, 13, 2))[0]
        at = FAR_AHEAD_MS if number == GENERATED // 2 else now - random_.randint(0, late)
        author = f"author-{min(int(random_.expovariate(0.3)), 19)}"
        yield now, at, author, random_.choice((0, 1, 1, 1, 2))


def commits() -> Iterator[Commit]:
    """The file's."""
    assert COMMITS_FILE is not None
    with gzip.open(Path(COMMITS_FILE), "rt", encoding="utf-8") as lines:
        next(lines)
        for line in lines:
            committed, authored, author, _, parents, *_ = line.split("\t")
            yield int(committed) * 1_000, int(authored) * 1_000, author, int(parents)


def batches(of: Iterable[Commit], records: int) -> Iterator[list[Commit]]:
    rest = iter(of)
    while batch := list(islice(rest, records)):
        yield batch


def reference(work: Iterable[list[Commit]], max_future_ms: int | None) -> tuple[list[Session], int, int]:
    """All sessions, late records and rejected records, by the rule of session windows on plain lists."""
    open_: dict[str, list[list[int]]] = defaultdict(list)
    sessions: list[Session] = []
    time, late, rejected = -1, 0, 0
    for batch in work:
        now = batch[-1][0]
        for _, at, author, parents in batch:
            if max_future_ms is not None and at > now + max_future_ms:
                rejected += 1
                continue
            time = max(time, at)
            close = time - GRACE_MS - GAP_MS
            start, end, number, total = at, at, 1, parents
            apart = []
            for own in open_[author]:
                if own[1] < close:
                    sessions.append((author, *own))  # type: ignore[arg-type]
                elif own[1] >= at - GAP_MS and own[0] <= at + GAP_MS:
                    start, end = min(start, own[0]), max(end, own[1])
                    number, total = number + own[2], total + own[3]
                else:
                    apart.append(own)
            if end < close:
                late += 1
            else:
                apart.append([start, end, number, total])
            open_[author] = apart
    sessions += [(author, *own) for author, rows in open_.items() for own in rows]  # type: ignore[misc]
    return sorted(sessions), late, rejected


def streamed(
    work: Iterable[list[Commit]], max_future_ms: int | None, crash_after: int
) -> tuple[list[Session], int, int]:
    """Return the same for a task that processes batches, with one crash in between."""
    builder = StreamsBuilder()
    windows = builder.stream("commits", CommitValue).group_by_key().session_window(GAP_MS, GRACE_MS)
    windows.aggregate("s", n=Count(), parents=Sum("parents")).on_close().to("sessions")
    driver = TopologyTestDriver(builder.build(), commit_each=False, max_future_ms=max_future_ms, errors=ErrorHandlers())
    sessions: list[Session] = []
    late = rejected = 0
    for number, batch in enumerate(work):
        driver.clock.advance(batch[-1][0] - driver.clock.now_ms())
        driver.pipe_columns("commits", [(a.encode(), b'{"parents":%d}' % p, at) for _, at, a, p in batch])
        driver.commit()
        if number == crash_after:
            driver.crash()
            driver.restore()
        for record in driver.read("sessions"):
            r = msgspec.json.decode(record.value or b"")
            sessions.append((r["key"], r["start"], r["end"], r["n"], r["parents"]))
        late, rejected = late + len(driver.read("commits-late")), rejected + len(driver.read("commits-dlq"))
    sessions += [
        (row.key, row.start, row.end, row.states[0], row.states[1][0]) for row in driver.task.stores["s"].rows()
    ]
    return sorted(sessions), late, rejected


@pytest.mark.parametrize("max_future_ms", [None, MAX_FUTURE_MS])
def test_sessions_of_commits(max_future_ms: int | None) -> None:
    """Sessions, sums and late records equal the reference's, also after a crash.

    One commit has a time thirty years ahead. Without a limit it closes every session, and all later records are late.
    With `max_future_ms` it is a dead letter and has no other effect.
    """
    work = list(batches(generated(), GENERATED_BATCH_RECORDS))
    expected, late, rejected = reference(work, max_future_ms)
    assert streamed(work, max_future_ms, GENERATED_CRASH_AFTER) == (expected, late, rejected)
    if max_future_ms is None:
        assert (late > GENERATED // 2, rejected) == (True, 0)
    else:
        assert (GENERATED // 10 < late < GENERATED // 3, rejected) == (True, 1)
        assert all(end < FAR_AHEAD_MS for _, _, end, *_ in expected)


@pytest.mark.soak
@pytest.mark.skipif(COMMITS_FILE is None, reason="PENSTOCK_TEST_COMMITS names no file")
@pytest.mark.parametrize("max_future_ms", [None, MAX_FUTURE_MS])
def test_sessions_of_real_commits(max_future_ms: int | None) -> None:
    """The same of a file of real commits."""
    expected, late, rejected = reference(batches(commits(), BATCH_RECORDS), max_future_ms)
    assert streamed(batches(commits(), BATCH_RECORDS), max_future_ms, CRASH_AFTER) == (expected, late, rejected)
    if max_future_ms is not None:
        assert rejected >= 1
