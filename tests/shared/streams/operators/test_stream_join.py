"""Stream-stream joins: pairs, late records and unmatched left records, also against a brute-force model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.dead_letters.late_record_headers import (
    CLOSE_TIME_MS,
    LATENESS_MS,
    OFFSET,
    STORE,
    STREAM_TIME_MS,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.serialization import struct_deserializer
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinRows, JoinWindows, Remembered
from penstock.shared.streams.windows.late_changelog_entries import NO_OFFSET
from penstock.shared.testing.topology_test_driver import TopologyTestDriver

Pair = tuple[Any, Any]
Step = tuple[str, str | None, int]
"""Topic, key, timestamp."""


def driver_of(windows: JoinWindows, *, left: bool = False) -> TopologyTestDriver:
    """Return a driver that joins the topics `left` and `right` into pairs of values."""
    builder = StreamsBuilder()
    one, other = builder.stream("left"), builder.stream("right")
    method = one.left_join if left else one.join
    method(other, lambda a, b: [a, b], windows, name="j").to("out")
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers())


def pipe(driver: TopologyTestDriver, *steps: Step) -> None:
    """Pipes records whose values are their topic's first letter and offset."""
    for topic, key, timestamp in steps:
        value = msgspec.json.encode(f"{topic[0]}{len(driver.source_log[topic])}")
        driver.pipe(topic, key=None if key is None else key.encode(), value=value, timestamp=timestamp)


def out(driver: TopologyTestDriver) -> list[tuple[Pair, int]]:
    """Return the new pairs with their timestamps."""
    return [(tuple(msgspec.json.decode(record.value or b"")), record.timestamp or 0) for record in driver.read("out")]


def late(driver: TopologyTestDriver) -> tuple[int, int]:
    return len(driver.read("left-late")), len(driver.read("right-late"))


def test_records_within_the_window_meet() -> None:
    """Both bounds are inclusive, in either order of arrival. A result has the key and the higher timestamp."""
    driver = driver_of(JoinWindows(10, 5, grace_ms=100))
    pipe(driver, ("left", "k", 50), ("right", "k", 39), ("right", "k", 40), ("right", "k", 55), ("right", "k", 56))
    assert out(driver) == [(("l0", "r1"), 50), (("l0", "r2"), 55)]
    pipe(driver, ("left", "k", 46), ("left", "other", 50))
    assert out(driver) == [(("l1", "r0"), 46), (("l1", "r1"), 46)]


def test_results_with_keys_of_bytes_are_the_same_after_a_restore() -> None:
    """Window results that a join stores are restored with their keys as bytes."""
    joined: list[tuple[Any, Any]] = []
    builder = StreamsBuilder()
    sessions = builder.stream("in", key="bytes").group_by_key().session_window(10).aggregate("s", n=Count()).on_close()
    results = sessions.key_by(lambda record: record.key.key, key="bytes", name="again")
    other = builder.stream("other", key="bytes")
    results.join(other, lambda a, b: joined.append((a.key, a.results)) or "", JoinWindows.of(100), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for at in (0, 50):
        driver.pipe("in", key=b"\xff\x01", value=b"{}", timestamp=at)
    driver.pipe("other", key=b"\xff\x01", value=b"{}", timestamp=0)
    driver.crash()
    driver.restore()
    driver.pipe("other", key=b"\xff\x01", value=b"{}", timestamp=1)
    assert joined == [(b"\xff\x01", {"n": 1})] * 2


def test_an_unnamed_join_keeps_its_stores_below_new_nodes() -> None:
    """The stores' names come from the topics. A second join of the same topics needs a name."""

    def unnamed(*, filtered: bool) -> tuple[StreamsBuilder, Callable[[], Any]]:
        builder = StreamsBuilder()
        left = builder.stream("left")
        right = builder.stream("right")
        if filtered:
            left = left.filter(lambda record: True)
        join = partial(left.join, right, lambda a, b: [a, b], JoinWindows.of(10))
        join().to("out")
        return builder, join

    driver = TopologyTestDriver(unnamed(filtered=False)[0].build(), errors=ErrorHandlers())
    driver.pipe("left", key=b"k", value=b"1", timestamp=0)
    driver.crash()
    builder, join = unnamed(filtered=True)
    driver.topology = builder.build()
    driver.restore()
    driver.pipe("right", key=b"k", value=b"2", timestamp=0)
    assert [record.value for record in driver.read("out")] == [b"[1,2]"]
    with pytest.raises(ConfigError, match="'left-right-join-left' exists already"):
        join()


def gone_on_with(driver: TopologyTestDriver, windows: JoinWindows, *, left: bool = False) -> TopologyTestDriver:
    """Return a driver with these windows that restores the state of another, and commits once without a record."""
    driver.commit()
    other = driver_of(windows, left=left)
    other.changelog = list(driver.changelog)
    other.source_log |= {topic: list(records) for topic, records in driver.source_log.items()}
    other.restore()
    other.task.needs_commit = True
    other.commit()
    return other


def test_an_inner_join_may_become_a_left_join() -> None:
    """A left record that the inner join has joined is not forwarded alone by the left join, whichever came first."""
    driver = driver_of(JoinWindows.of(10))
    pipe(driver, ("left", "k", 100), ("right", "k", 105), ("left", "k", 106), ("left", "z", 100))
    assert out(driver) == [(("l0", "r0"), 105), (("l1", "r0"), 106)]
    driver = gone_on_with(driver, JoinWindows.of(10), left=True)
    pipe(driver, ("left", "k", 1_000))
    assert out(driver) == [(("l2", None), 100)]


@pytest.mark.parametrize("left", [False, True])
def test_a_longer_grace_opens_nothing_that_was_settled(left: bool) -> None:
    """A longer grace does not reopen closed times: records of those times stay late, and their headers have the old
    close time. Times that were not closed stay open by the new grace."""
    driver = driver_of(JoinWindows.of(5), left=left)
    pipe(driver, ("right", "k", 100), ("left", "k", 101), ("right", "z", 1_000))
    assert out(driver) == [(("l0", "r0"), 101)]
    driver = gone_on_with(driver, JoinWindows.of(5, 2_000), left=left)
    driver = gone_on_with(driver, JoinWindows.of(5, 3_000), left=left)
    pipe(driver, ("left", "k", 102), ("right", "k", 989))
    headers = dict(driver.outputs["left-late"][0].headers)
    assert (headers[CLOSE_TIME_MS], headers[STREAM_TIME_MS]) == (b"1000", b"1000")
    assert late(driver) == (1, 1)
    pipe(driver, ("left", "z", 995), ("right", "z", 2_000), ("left", "z", 995), ("left", "z", 996))
    assert out(driver) == [(("l2", "r1"), 1_000), (("l3", "r1"), 1_000), (("l4", "r1"), 1_000)]
    pipe(driver, ("right", "z", 4_100), ("left", "z", 1_094))
    assert late(driver) == (1, 0)


@pytest.mark.parametrize("left", [False, True])
def test_a_shorter_grace_settles_what_is_due_with_the_next_record(left: bool) -> None:
    """A shorter grace takes effect with the next record, even if that record is late. If it is reverted before that,
    nothing is closed."""
    driver = driver_of(JoinWindows.of(5, 1_000), left=left)
    pipe(driver, ("left", "k", 100), ("right", "m", 100), ("right", "z", 500))
    driver = gone_on_with(driver, JoinWindows.of(5, 10), left=left)
    assert out(driver) == []
    driver = gone_on_with(driver, JoinWindows.of(5, 1_000), left=left)
    pipe(driver, ("left", "m", 101))
    assert out(driver) == [(("l1", "r0"), 101)]
    in_time, too_late = (("left", "z", 499), [(("l2", "r1"), 500)], (0, 0)), (("left", "k", 300), [], (1, 0))
    for step, pairs, are_late in (in_time, too_late):
        one = gone_on_with(driver, JoinWindows.of(5, 10), left=left)
        pipe(one, step)
        found = out(one)
        assert [pair for pair in found if None not in pair[0]] == pairs
        assert [pair for pair in found if None in pair[0]] == [(("l0", None), 100)] * left
        assert late(one) == are_late
        one = gone_on_with(one, JoinWindows.of(5, 1_000), left=left)
        pipe(one, ("right", "k", 101))
        assert late(one) == (0, 1)


def test_records_of_one_moment_are_all_kept() -> None:
    """Several records of one key and timestamp each meet the other side."""
    driver = driver_of(JoinWindows.of(0, grace=100))
    pipe(driver, ("left", "k", 5), ("left", "k", 5), ("right", "k", 5), ("right", "k", 5))
    assert out(driver) == [(("l0", "r0"), 5), (("l1", "r0"), 5), (("l0", "r1"), 5), (("l1", "r1"), 5)]


def test_a_left_join_waits_for_the_window_and_the_grace() -> None:
    """An unmatched left record is forwarded once stream time has passed its window and the grace. Both sides advance
    stream time."""
    driver = driver_of(JoinWindows.of(10, grace=5), left=True)
    pipe(driver, ("left", "a", 0), ("left", "b", 1), ("right", "b", 3), ("right", "x", 15))
    assert out(driver) == [(("l1", "r0"), 3)]
    pipe(driver, ("right", "x", 16))
    assert out(driver) == [(("l0", None), 0)]
    pipe(driver, ("left", "x", 100))
    assert out(driver) == []


def test_a_forwarded_left_record_is_joined_no_more() -> None:
    """A left record that was forwarded unmatched is not joined with a later right record that is in time."""
    driver = driver_of(JoinWindows(10, 0), left=True)
    pipe(driver, ("left", "k", 15), ("left", "x", 20), ("right", "k", 15))
    assert (out(driver), late(driver)) == ([(("l0", None), 15)], (0, 0))


def test_late_records_go_to_their_own_late_topic() -> None:
    """A left record is late once its window and the grace have passed. A right record is late once all left records it
    could match are late."""
    driver = driver_of(JoinWindows(10, 5, grace_ms=2))
    pipe(driver, ("right", "x", 100), ("left", "k", 93), ("right", "k", 83))
    assert late(driver) == (0, 0)
    pipe(driver, ("left", "k", 92), ("right", "k", 82))
    headers = [dict(driver.read(f"{side}-late")[0].headers) for side in ("left", "right")]
    assert [h[CLOSE_TIME_MS] for h in headers] == [b"98", b"98"]
    assert headers[0][STORE] == b"j-left"
    assert driver.task.metrics.late_total == 2
    assert [pair for pair, _ in out(driver)] == [("l0", "r1")]


def test_a_late_result_of_a_join_is_no_source_record() -> None:
    """If a window is closed for a result of a join, the result itself is the late record, without coordinates and
    without a source offset. The join has taken the source record, and a replay would join it again."""
    builder = StreamsBuilder()
    left, right = builder.stream("left"), builder.stream("right")
    joined = left.left_join(right, lambda a, b: [a, b], JoinWindows.of(100), name="j")
    joined.group_by_key().tumbling_window(10).aggregate("w", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers(), commit_each=False)
    driver.task.keeps_late = True
    pipe(driver, ("left", "a", 0), ("left", "b", 5), ("left", "k", 60), ("right", "k", 60))
    # The pair of `b` is late. The record of `c` closes the join window of `a`. The record of `d` is late for the join.
    pipe(driver, ("right", "b", 5), ("left", "c", 200), ("left", "d", 0))
    offsets = [offset for rows in driver.task.late_rows for offset in rows.offsets.tolist()]
    driver.commit()
    records = driver.read("right-late") + driver.read("left-late")
    headers = [dict(record.headers) for record in records]
    found = [
        (record.key, record.value, record.timestamp, own.get(OFFSET), own[LATENESS_MS])
        for record, own in zip(records, headers, strict=True)
    ]
    assert found == [
        (b"b", b'["l1","r1"]', 5, None, b"55"),
        (b"a", b'["l0",null]', 0, None, b"60"),
        (b"d", b'"l4"', 0, b"4", b"200"),
    ]
    assert (offsets, driver.task.metrics.late_total) == ([NO_OFFSET, NO_OFFSET], 3)


def test_null_keys_and_values_are_skipped() -> None:
    """A record without a key or value is skipped and counted: it joins with nothing and advances no time."""
    driver = driver_of(JoinWindows.of(5), left=True)
    pipe(driver, ("left", "k", 0), ("right", None, 99))
    driver.pipe("right", key=b"k", value=None, timestamp=99)
    assert (out(driver), driver.task.metrics.skipped_total) == ([], 2)


def test_advanced_time_forwards_unmatched_left_records() -> None:
    """Advancing time without a record forwards unmatched left records and deletes the stored records of both sides."""
    driver = driver_of(JoinWindows.of(5), left=True)
    pipe(driver, ("left", "k", 0), ("right", "x", 0))
    driver.task.advance_time(5)
    assert [len(store) for store in driver.task.stores.values()] == [1, 1]
    driver.task.advance_time(1)
    driver.task.times.operators[0].advance_time(2)
    driver.commit()
    assert out(driver) == [(("l0", None), 0)]
    driver.task.advance_time(5)
    assert [len(store) for store in driver.task.stores.values()] == [0, 0]


def test_an_error_of_a_joiner_makes_a_dead_letter() -> None:
    """A record for which the joiner raises becomes a dead letter and is not stored."""
    builder = StreamsBuilder()
    builder.stream("left").join(builder.stream("right"), lambda a, b: a["x"] / b["x"], JoinWindows.of(5)).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("left", key=b"k", value=b'{"x":6}', timestamp=0)
    for x in (b"0", b"3"):
        driver.pipe("right", key=b"k", value=b'{"x":%s}' % x, timestamp=0)
    assert [record.value for record in driver.read("out")] == [b"2.0"]
    assert len(driver.read("right-dlq")) == 1


@pytest.mark.parametrize(("before", "after", "grace"), [(-5, 4, 0), (1, 1, -1)])
def test_invalid_join_windows_are_rejected(before: int, after: int, grace: int) -> None:
    """JoinWindows rejects a window that ends before it starts, and a negative grace. A window of one instant is
    valid."""
    with pytest.raises(ConfigError, match="join"):
        JoinWindows(before, after, grace)
    assert JoinWindows(-5, 5).reach(0) == (-5, 5)


def test_joins_of_incompatible_sides_are_rejected() -> None:
    """A stream-stream join requires windows, a table join rejects them, and both sides need the same key type."""
    builder = StreamsBuilder()
    stream, other, bytes_ = builder.stream("a"), builder.stream("b"), builder.stream("c", key="bytes")
    table = builder.table("t")
    with pytest.raises(ConfigError, match="JoinWindows"):
        stream.join(other, max)
    with pytest.raises(ConfigError, match="JoinWindows"):
        stream.join(table, max, JoinWindows.of(1))
    with pytest.raises(ConfigError, match="key function"):
        stream.join(table, max, key=lambda record: record.key)
    with pytest.raises(ConfigError, match=r"string.*bytes"):
        stream.join(bytes_, max, JoinWindows.of(1))


def test_rows_are_kept_as_they_are() -> None:
    """The stored records of one timestamp keep their type and their joined flag in the changelog."""
    rows = JoinRows(int)
    state = rows.add(rows.initial(), Remembered(7, joined=True))
    assert rows.from_columns(rows.to_columns(state)) == (Remembered(7, True),)
    assert rows.result(rows.merge(state, state)) == [7, 7]


class Ratio(msgspec.Struct):
    """A value with a float."""

    x: float


def test_a_join_takes_only_values_that_can_be_restored() -> None:
    """A record whose value in JSON is not of its stream's type is a dead letter, so that a restore succeeds."""
    builder = StreamsBuilder()
    ratios = builder.stream("left").map_values(lambda value: Ratio(float(value)), value=Ratio)
    ratios.join(builder.stream("right"), lambda a, b: [a.x, b], JoinWindows.of(10), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value in (b'"0.5"', b'"nan"'):
        driver.pipe("left", key=b"k", value=value)
    driver.crash()
    driver.restore()
    driver.pipe("right", key=b"k", value=b"1")
    assert (len(driver.read("left-dlq")), out(driver)) == (1, [((0.5, 1), 0)])


def test_a_join_keeps_the_type_of_a_deserializer() -> None:
    """The records of a stream that is read with `struct_deserializer` have their type after a restart."""
    builder = StreamsBuilder()
    ratios = builder.stream("left", struct_deserializer(Ratio))
    ratios.join(builder.stream("right"), lambda a, b: [a.x, b], JoinWindows.of(10), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("left", key=b"k", value=b'{"x":0.5}')
    driver.crash()
    driver.restore()
    driver.pipe("right", key=b"k", value=b"1")
    assert (driver.read("right-dlq"), out(driver)) == ([], [((0.5, 1), 0)])


def test_a_join_takes_the_results_of_a_typed_aggregate() -> None:
    """The results are plain JSON, so a restore of the join's rows does not change them."""
    last = Aggregate(lambda: Ratio(0.0), lambda state, value: Ratio(value), lambda a, b: b, Ratio)
    builder = StreamsBuilder()
    rows = builder.stream("in").group_by_key().aggregate("last", ratio=last).to_stream()
    rows.left_join(builder.stream("right"), lambda a, b: [a["ratio"]["x"], b], JoinWindows.of(10), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b"0.5")
    driver.crash()
    driver.restore()
    driver.pipe("right", key=b"k", value=b"1")
    assert (driver.read("in-dlq"), driver.read("right-dlq"), out(driver)) == ([], [], [((0.5, 1), 0)])


@pytest.mark.parametrize("topics", [("left", "right"), ("right", "left")])
def test_a_joiner_gets_the_types_that_a_restore_gives(topics: tuple[str, str]) -> None:
    """The joiner gets a value of the same type whether its record arrives first or second."""
    builder = StreamsBuilder()
    left, right = (builder.stream(topic).map_values(lambda v: defaultdict(int, v)) for topic in ("left", "right"))
    left.join(right, lambda a, b: [type(a).__name__, type(b).__name__], JoinWindows.of(10), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for topic in topics:
        driver.pipe(topic, key=b"k", value=b'{"n":1}')
    assert out(driver) == [(("dict", "dict"), 0)]


def test_a_joiner_gets_these_types_also_for_a_left_record_without_a_key() -> None:
    """Such a record is not stored, but its value is that of a record with a key."""
    builder = StreamsBuilder()
    left = builder.stream("left").map_values(lambda v: defaultdict(int, v))
    left.left_join(builder.stream("right"), lambda a, b: type(a).__name__, JoinWindows.of(10), name="j").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("left", value=b'{"n":1}')
    assert [record.value for record in driver.read("out")] == [b'"dict"']


def test_a_join_rejects_objects_without_a_declared_type() -> None:
    """Without `value=`, a restore does not know the type of a mapper's objects: their records are dead letters."""
    builder = StreamsBuilder()
    ratios = builder.stream("left").map_values(lambda value: Ratio(value) if value else {"x": 0.0})
    calls: list[Any] = []
    ratios.left_join(builder.stream("right"), lambda a, b: calls.append(a), JoinWindows.of(10), name="j")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("right", key=b"k", value=b"1")
    for value in (b"0", b"0.5"):
        driver.pipe("left", key=b"k", value=value)
    assert (calls, len(driver.store("j-left"))) == ([{"x": 0.0}], 1)
    (dead_letter,) = driver.read("left-dlq")
    assert b"Ratio" in dict(dead_letter.headers)["penstock.dlq.message"]


def test_its_stores_are_in_the_changelog_beside_others() -> None:
    """A join and a window in one application restore their own rows from one changelog."""
    builder = StreamsBuilder()
    left, right = builder.stream("left"), builder.stream("right")
    left.join(right, lambda a, b: [a, b], JoinWindows.of(10), name="j").to("out")
    left.group_by_key().tumbling_window(10).aggregate("w", n=Count()).on_close().to("counts")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    pipe(driver, ("left", "k", 0))
    driver.crash()
    driver.restore()
    pipe(driver, ("right", "k", 3), ("left", "k", 10))
    assert out(driver) == [(("l0", "r0"), 3), (("l1", "r0"), 10)]
    assert [record.value for record in driver.read("counts")] == [b'{"key":"k","start":0,"end":10,"n":1}']


steps = st.lists(st.tuples(st.sampled_from(["left", "right"]), st.sampled_from("aab"), st.integers(0, 60)), max_size=30)


def model(windows: JoinWindows, given_: list[Step], *, left: bool) -> tuple[list[tuple[Pair, int]], tuple[int, int]]:
    """All pairs and lone left records, and how many records of each side were late."""
    time, found, known, lates = -1, [], [], [0, 0]
    counts, joined = [0, 0], set()
    for topic, key, at in given_:
        side = int(topic == "right")
        name, counts[side] = f"{topic[0]}{counts[side]}", counts[side] + 1
        moment = max(time, at)
        closed = moment - windows.grace_ms - max(0, windows.after_ms)
        if at < (closed if side == 0 else closed - windows.before_ms):
            lates[side] += 1
            continue
        time = moment
        for row in sorted((r for r in known if r[0] == 0 and r[2] < closed), key=lambda r: (r[2], r[1])):
            known.remove(row)
            if left and row[3] not in joined:
                found.append(((row[3], None), row[2]))
        for other_side, other_key, other_at, other in sorted(known, key=lambda r: r[2]):
            l_at, r_at = (at, other_at) if side == 0 else (other_at, at)
            if other_side != side and other_key == key and -windows.before_ms <= r_at - l_at <= windows.after_ms:
                pair = (name, other) if side == 0 else (other, name)
                found.append((pair, max(at, other_at)))
                joined.add(pair[0])
        known.append((side, key, at, name))
    return found, (lates[0], lates[1])


shapes = st.sampled_from([JoinWindows(10, 10, 5), JoinWindows(5, 0), JoinWindows(0, 8, 20), JoinWindows(-2, 6, 3)])


@given(shapes, steps, st.lists(st.integers(0, 29), max_size=3), st.booleans())
def test_equals_brute_force_over_crashes(
    windows: JoinWindows, given_: list[Step], crashes: list[int], left: bool
) -> None:
    """Pairs, unmatched records and late records equal the model's, in its order, also after crashes."""
    driver = driver_of(windows, left=left)
    for i, step in enumerate(given_):
        if i in crashes:
            driver.crash()
            driver.restore()
        pipe(driver, step)
    found, lates = model(windows, given_, left=left)
    assert (out(driver), late(driver)) == (found, lates)


def test_a_left_record_without_a_key_goes_on_alone() -> None:
    """A left join forwards a left record without a key at once, with None. A right record without a key is skipped, and
    so are both in an inner join."""
    driver = driver_of(JoinWindows.of(5), left=True)
    pipe(driver, ("left", None, 7), ("right", None, 8))
    assert (out(driver), driver.task.metrics.skipped_total) == ([(("l0", None), 7)], 1)
    driver = driver_of(JoinWindows.of(5))
    pipe(driver, ("left", None, 7))
    assert (out(driver), driver.task.metrics.skipped_total) == ([], 1)


@pytest.mark.parametrize("mutates", ["joiner", "branch"])
def test_user_code_cannot_change_stored_records(mutates: str) -> None:
    """A joiner or branch that mutates a value does not change the stored record, in memory or after a restore."""

    def change(value: dict[str, Any]) -> dict[str, Any]:
        value["n"].append("changed")
        return value

    def both(left: dict[str, Any], right: dict[str, Any]) -> list[Any]:
        return [change(left)["n"], change(right)["n"]] if mutates == "joiner" else [left["n"], right["n"]]

    builder = StreamsBuilder()
    left, right = builder.stream("left"), builder.stream("right")
    left.join(right, both, JoinWindows.of(10), name="j").to("out")
    if mutates == "branch":
        left.map_values(change).to("left-out")
        right.map_values(change).to("right-out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())

    def joined(topic: str, n: int) -> list[Any]:
        driver.pipe(topic, key=b"k", value=b'{"n":[%d]}' % n, timestamp=n)
        return [msgspec.json.decode(record.value or b"") for record in driver.read("out")]

    expected = [[1], [2]] if mutates == "branch" else [[1, "changed"], [2, "changed"]]
    assert joined("left", 1) == []
    assert joined("right", 2) == [expected]
    assert joined("left", 3) == [[[3, *expected[0][1:]], expected[1]]]
    driver.crash()
    driver.restore()
    driver.read("out")
    assert joined("right", 4) == [[[n, *expected[0][1:]], [4, *expected[0][1:]]] for n in (1, 3)]
