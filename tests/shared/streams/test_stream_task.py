"""The stream task: what one partition does with its records, commits and crashes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from shared.clients.consumer.dead_letters import parse_dead_letter
from shared.common.errors import ConfigError, DataError, IllegalState, SchemaMismatch
from shared.common.records import Columns, ConsumerRecord, ProducerRecord
from shared.streams.aggregations import Aggregate, Count, CountDistinct, Mean, Sum
from shared.streams.changelog_format import FINAL, LIVE, PROGRESS, decode, decode_progress
from shared.streams.dsl import Stream, StreamsBuilder
from shared.streams.processor import Processor, ProcessorContext, Record
from shared.streams.punctuation import PunctuationType
from shared.streams.restore import restore_task
from shared.streams.stream_task import ProcessingFailed, StreamTask
from shared.streams.topology import Topology
from shared.testing.topology_test_driver import TopologyTestDriver


def columns(topic: str, *records: tuple[int, bytes | None, bytes | None, int]) -> Columns:
    """(offset, key, value, timestamp) records of partition 0."""
    return Columns.of([ConsumerRecord(topic, 0, o, t, k, v) for o, k, v, t in records])


def task_of(topology: Topology, **options: Any) -> StreamTask:
    task = StreamTask(topology, 0, application="app", **options)
    task.initialize(0)
    return task


def sessions(gap: int = 10, grace: int = 0) -> Topology:
    builder = StreamsBuilder()
    builder.stream("in").group_by_key().session_window(gap, grace).aggregate("s", n=Count()).on_close().to("out")
    return builder.build()


def plain() -> tuple[StreamsBuilder, Stream]:
    builder = StreamsBuilder()
    return builder, builder.stream("in")


def as_consumed(record: ProducerRecord) -> ConsumerRecord:
    return ConsumerRecord(record.topic, 0, 0, record.timestamp or 0, record.key, record.value, record.headers)


# --- taking records ---


def test_offsets_before_the_position_are_skipped() -> None:
    """A record is taken once: what a poll brings again from before the task's position changes nothing."""
    task = task_of(sessions())
    task.process(columns("in", (3, b"a", b"{}", 0), (5, b"a", b"{}", 1)), 0)
    assert (task.sources, task.metrics.records_total) == ({"in": 6}, 2)
    task.process(columns("in", (3, b"a", b"{}", 0), (5, b"a", b"{}", 1), (6, b"a", b"{}", 2)), 0)
    assert (task.sources, task.metrics.records_total) == ({"in": 7}, 3)
    (session,) = task.stores["s"].sessions()
    assert session.states == [3]


def test_nothing_new_needs_no_commit() -> None:
    """A poll of records that were all taken before leaves nothing to commit."""
    task = task_of(sessions())
    task.process(columns("in", (0, b"a", b"{}", 0)), 0)
    task.prepare_commit(0)
    task.commit_succeeded()
    task.process(columns("in", (0, b"a", b"{}", 0)), 0)
    assert not task.needs_commit


def test_stream_time_is_the_highest_timestamp() -> None:
    """Stream time rises with the records, of any key and any source, and never falls."""
    builder, a = plain()
    a.merge(builder.stream("other")).to("out")
    task = task_of(builder.build())
    seen = []
    for topic, offset, timestamp in (("in", 0, 5), ("other", 0, 9), ("in", 1, 7), ("in", 2, 12)):
        task.process(columns(topic, (offset, None, b"{}", timestamp)), 0)
        seen.append(task.stream_time_ms)
    assert seen == [5, 9, 9, 12]
    assert task.sources == {"in": 3, "other": 1}


def test_before_the_first_record() -> None:
    """Stream time is -1, the position unknown, and nothing is to be committed."""
    task = task_of(sessions())
    assert (task.stream_time_ms, task.sources, task.needs_commit) == (-1, {}, False)
    assert repr(task) == ("StreamTask(app-0, epoch 1, commit 0, stream time -1, sources {}, stores {'s': 0})")


# --- what cannot be handled ---


@pytest.mark.parametrize(
    ("key", "value", "timestamp", "said"),
    [
        (b"k", b"{", 5, "in: not JSON"),
        (b"\xff", b"{}", 5, "in: not UTF-8: invalid start byte at byte 0"),
        (b"k", b"{}", -1, "without a timestamp"),
    ],
)
def test_what_cannot_be_decoded_becomes_a_dead_letter(key: bytes, value: bytes, timestamp: int, said: str) -> None:
    """A key, value or timestamp that cannot be read goes to the dead-letter topic, raw, with its headers and place."""
    driver = TopologyTestDriver(sessions())
    driver.pipe("in", key=b"k", value=b"{}", timestamp=1)
    driver.pipe("in", key=key, value=value, timestamp=timestamp, headers=(("trace", b"\x00"),))
    driver.pipe("in", key=b"k", value=b"{}", timestamp=2)
    (record,) = driver.read("in-dlq")
    letter = parse_dead_letter(as_consumed(record))
    assert letter.record == ConsumerRecord("in", 0, 1, timestamp, key, value, (("trace", b"\x00"),))
    assert (letter.stage, letter.attempts, letter.group) == ("deserialize", 1, "test-driver")
    assert said in letter.message
    assert (driver.task.metrics.dead_letters_total, driver.task.sources) == (1, {"in": 3})
    (session,) = driver.task.stores["s"].sessions()
    assert session.states == [2]


def test_a_refused_value_becomes_a_dead_letter() -> None:
    """A DataError while processing sends the source record there, stage `process`, whatever the record became since."""
    builder, stream = plain()

    def refuse(value: Any) -> Any:
        if value["x"] == "bad":
            raise DataError("x is bad")
        return {"y": value["x"]}

    stream.map_values(refuse).to("out")
    registry = CollectorRegistry()
    task = task_of(builder.build(), registry=registry)
    task.process(columns("in", (0, b"k", b'{"x":"bad"}', 0), (1, b"k", b'{"x":"ok"}', 0)), 0)
    dead, out = task.prepare_commit(0).outputs
    letter = parse_dead_letter(as_consumed(dead))
    assert (dead.topic, dead.value, letter.stage, letter.message) == ("in-dlq", b'{"x":"bad"}', "process", "x is bad")
    assert letter.exception == "shared.common.errors.DataError"
    assert (out.topic, out.value) == ("out", b'{"y":"ok"}')
    labels = {"partition": "0", "topic": "in", "stage": "process"}
    assert registry.get_sample_value("penstock_streams_dead_letters_total", labels) == 1


def test_a_dead_letter_topic_of_ones_own() -> None:
    """Late and dead-letter topics are the source's, by name if it was given one."""
    builder = StreamsBuilder()
    stream = builder.stream("in", dead_letters="refused", late="too-late")
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build())
    for value, timestamp in ((b"{}", 100), (b"{", 0), (b"{}", 0)):
        driver.pipe("in", key=b"k", value=value, timestamp=timestamp)
    assert [len(driver.read(topic)) for topic in ("refused", "too-late", "in-dlq", "in-late")] == [1, 1, 0, 0]


def test_any_other_error_fails_the_task() -> None:
    """An error of the user's code that is no DataError is not swallowed."""
    builder, stream = plain()
    stream.map_values(lambda value: value["missing"]).to("out")
    with pytest.raises(KeyError):
        task_of(builder.build()).process(columns("in", (0, b"k", b"{}", 0)), 0)


def _refuse(record: Record) -> None:
    raise DataError("no")


def test_a_refusal_after_a_store_took_effect_is_fatal() -> None:
    """Downstream of a store a refused record cannot become a dead letter: its effect would count twice."""
    builder, stream = plain()
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_update().peek(_refuse).to("out")
    task = task_of(builder.build(), deduplicate_updates=False)
    with pytest.raises(ProcessingFailed, match="'s' forwarded was refused after its record had taken effect: no"):
        task.process(columns("in", (0, b"k", b"{}", 0)), 0)


def test_a_refusal_by_a_second_child_is_fatal() -> None:
    """Where another branch has taken the record, a refusal is fatal; where the first refuses, it is a dead letter."""
    builder, stream = plain()
    stream.to("out")
    stream.peek(_refuse).to("never")
    with pytest.raises(ProcessingFailed, match="no"):
        task_of(builder.build()).process(columns("in", (0, b"k", b"{}", 0)), 0)
    builder, stream = plain()
    stream.peek(_refuse).to("never")
    stream.to("out")
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b"{}", 0)), 0)
    assert [record.topic for record in task.prepare_commit(0).outputs] == ["in-dlq"]


def test_skipped_and_late_are_counted_by_reason_and_topic() -> None:
    """A null key and a late record each have a counter of their own."""
    registry = CollectorRegistry()
    task = task_of(sessions(), registry=registry)
    task.process(columns("in", (0, b"a", b"{}", 100), (1, None, b"{}", 100), (2, b"a", b"{}", 3)), 0)
    values = {
        "penstock_streams_records_total": ({}, 3),
        "penstock_streams_skipped_records_total": ({"reason": "null key"}, 1),
        "penstock_streams_late_records_total": ({"topic": "in"}, 1),
        "penstock_streams_stream_time_ms": ({}, 100),
        "penstock_streams_open_windows": ({}, 1),
    }
    for name, (labels, expected) in values.items():
        assert registry.get_sample_value(name, {"partition": "0", **labels}) == expected, name


# --- what a processor may ask ---


class _Asking(Processor):
    """Calls what a test gives it with its context and each record."""

    def __init__(self, ask: Any) -> None:
        self._ask = ask

    def process(self, record: Record) -> None:
        self._ask(self.context, record)


def test_a_processor_sees_where_its_record_was_read() -> None:
    """During `process` the context names topic, partition, offset, stream time and wall clock."""
    seen: list[Any] = []

    def ask(context: ProcessorContext, record: Record) -> None:
        seen.append((context.record_metadata, context.partition, context.stream_time_ms, context.now_ms))

    builder, stream = plain()
    stream.process(lambda: _Asking(ask))
    task = task_of(builder.build())
    task.process(columns("in", (7, b"k", b"{}", 30)), 55)
    assert seen == [(("in", 0, 7), 0, 30, 55)]
    assert task.record_metadata is None


def test_forward_to_one_child() -> None:
    """A processor may forward to a child by name; one that it does not have is refused."""
    builder, stream = plain()
    parent = stream.process(lambda: _Asking(lambda c, r: c.forward(r, to=r.value["to"])), name="parent")
    parent.to("a")
    parent.to("b")
    (first, second) = builder.build().children["parent"]
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b'{"to":"%s"}' % second.encode(), 0)), 0)
    task.process(columns("in", (1, b"k", b'{"to":"%s"}' % first.encode(), 0)), 0)
    assert [r.topic for r in task.prepare_commit(0).outputs] == ["b", "a"]
    with pytest.raises(ConfigError, match="'parent' forwards to 'elsewhere', which is none of its children"):
        task.process(columns("in", (2, b"k", b'{"to":"elsewhere"}', 0)), 0)


def test_a_store_must_be_connected() -> None:
    """A processor gets the stores it was connected to, and no others."""
    builder, stream = plain()
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    sizes: list[int] = []
    stream.process(lambda: _Asking(lambda c, r: sizes.append(len(c.store("s")))), "s")
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b"{}", 0)), 0)
    assert sizes == [1]
    stream.process(lambda: _Asking(lambda c, r: c.store("s")), name="stranger")
    with pytest.raises(ConfigError, match="'stranger' asks for the store 's', to which it is not connected"):
        task_of(builder.build()).process(columns("in", (0, b"k", b"{}", 0)), 0)


def test_init_and_close_are_called_once() -> None:
    """Each task makes its processors anew, initializes them and closes them."""
    calls: list[str] = []

    class Counting(Processor):
        """Notes its life."""

        def init(self, context: ProcessorContext) -> None:
            calls.append("init")

        def close(self) -> None:
            calls.append("close")

    builder, stream = plain()
    stream.process(Counting)
    task = StreamTask(builder.build(), 0, application="app")
    assert calls == []
    task.initialize(0)
    task.close()
    assert calls == ["init", "close"]


def test_a_processor_without_process() -> None:
    """A processor that does not say what to do with a record fails by its own name."""
    builder, stream = plain()
    stream.process(Processor)
    with pytest.raises(TypeError, match="Processor does not define process"):
        task_of(builder.build()).process(columns("in", (0, b"k", b"{}", 0)), 0)


# --- commits ---


def test_a_commit_holds_everything_since_the_last() -> None:
    """Outputs, the stores' changes and, last, a progress record with position, times and schemas."""
    task = task_of(sessions(), epoch=4)
    task.process(columns("in", (0, b"a", b"{}", 0), (1, b"b", b"{}", 3), (2, None, b"{}", 99), (3, b"b", b"{}", 11)), 7)
    commit = task.prepare_commit(8)
    assert (commit.epoch, commit.commit, commit.sources) == (4, 1, {"in": 4})
    assert [(r.topic, r.key, r.timestamp) for r in commit.outputs] == [("out", b"a", 0)]
    entries = [decode(value) for _, value in commit.changelog]
    assert [(e.operation, e.epoch, e.commit) for e in entries] == [(FINAL, 4, 1), (LIVE, 4, 1), (PROGRESS, 4, 1)]
    assert [key for key, _ in commit.changelog] == [b"a", b"b", None]
    progress = decode_progress(entries[-1].body)
    assert (progress.application, progress.guarantee, progress.sources) == ("app", "exactly_once", {"in": 4})
    assert (progress.stream_time_ms, progress.operator_times_ms, progress.wall_ms) == (99, {"s": 11}, 8)
    assert progress.stores == task.topology.schemas()


def test_needs_commit_from_a_record_until_it_succeeded() -> None:
    """A commit is due from the first record on, and still after it was prepared: only success ends it."""
    task = task_of(sessions())
    task.process(columns("in", (0, b"a", b"{}", 0)), 0)
    assert task.needs_commit
    task.prepare_commit(0)
    assert task.needs_commit
    task.commit_succeeded()
    assert not task.needs_commit
    second = task.prepare_commit(0)
    assert (second.outputs, len(second.changelog), second.commit) == ([], 1, 2)


def test_closed_windows_are_counted_with_their_commit() -> None:
    """The count of closed windows is of those that a commit wrote."""
    task = task_of(sessions())
    task.process(columns("in", (0, b"a", b"{}", 0), (1, b"a", b"{}", 100)), 0)
    assert task.metrics.closed_total == 0
    task.prepare_commit(0)
    assert task.metrics.closed_total == 1


# --- crash and restore ---


def test_restore_checks_the_schema_first() -> None:
    """State of another topology is refused before any of it is put in place."""
    driver = TopologyTestDriver(sessions())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    builder, stream = plain()
    table = stream.group_by_key().session_window(10).aggregate("s", n=Count(), sum=Sum("x"))
    table.on_close().to("out")
    driver.topology = builder.build()
    driver.crash()
    with pytest.raises(SchemaMismatch, match="the aggregations changed: sum"):
        driver.restore()


def test_restore_without_progress_is_a_fresh_start() -> None:
    """Nothing confirmed means position unknown, time unknown, no windows."""
    task = StreamTask(sessions(), 0, application="app")
    restore_task(task, [], None)
    task.initialize(0)
    assert (task.sources, task.stream_time_ms, len(task.stores["s"])) == ({}, -1, 0)


def test_operator_time_is_restored() -> None:
    """What was late before a crash is late after it, also where no live window tells the time."""
    driver = TopologyTestDriver(sessions(gap=10))
    for key, timestamp in ((b"a", 1_000), (b"a", 2_000)):
        driver.pipe("in", key=key, value=b"{}", timestamp=timestamp)
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"b", value=b"{}", timestamp=1_989)
    assert len(driver.read("in-late")) == 1


def test_schedule_before_initialize_is_refused() -> None:
    """A task that is being restored cannot be scheduled on yet."""
    with pytest.raises(IllegalState):
        StreamTask(sessions(), 0, application="app").schedule(1, PunctuationType.STREAM_TIME, print)


def every_aggregation() -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream("in").group_by_key().session_window(10, 5)
    ids = Aggregate(list, lambda ids, value: [*ids, value["id"]], lambda a, b: a + b)
    table = windows.aggregate("s", n=Count(), ids=ids, mean=Mean("id"), sum=Sum("id"), who=CountDistinct("id"))
    table.on_close().to("out")
    return builder.build()


TOPICS = ("out", "in-late", "in-dlq")

times = st.one_of(st.integers(0, 20), st.sampled_from([30, 60, 61]))
turns = st.lists(
    st.tuples(
        st.lists(st.tuples(st.sampled_from([b"a", b"b", None]), times, st.booleans()), max_size=5),
        st.sampled_from(["commit", "nothing", "crash", "torn"]),
        st.integers(1, 4),
    ),
    max_size=15,
)


def observed(driver: TopologyTestDriver) -> tuple[Any, ...]:
    """Outputs in order by topic, live windows, position and times; a dead letter's stage and place, not its moment."""
    task = driver.task
    live = {(s.key, s.start, s.end): task._operator_of("s").results(s.states) for s in task.stores["s"].sessions()}
    outputs = {topic: list(driver.outputs.get(topic, ())) for topic in TOPICS}
    progress = task._progress(0)
    return outputs, live, progress.sources, progress.stream_time_ms, progress.operator_times_ms


@given(turns)
def test_a_crash_changes_nothing_that_was_committed(plan: list[tuple[list[Any], str, int]]) -> None:
    """With crashes at random points and torn commits, outputs and state equal those of a run without any."""
    crashed = TopologyTestDriver(every_aggregation(), commit_each=False)
    steady = TopologyTestDriver(every_aggregation(), commit_each=False)
    number = now = 0
    for records, then, torn in plan:
        for key, step, good in records:
            value = msgspec.json.encode({"id": number}) if good else b"{"
            for driver in (crashed, steady):
                driver.pipe("in", key=key, value=value, timestamp=now + step)
            number += 1
        now += 7
        if then == "commit":
            crashed.commit()
        elif then in ("crash", "torn"):
            crashed.crash(torn_entries=torn if then == "torn" else 0)
            crashed.restore()
    crashed.commit()
    steady.commit()
    assert observed(crashed) == observed(steady)


def test_a_crash_at_every_commit_boundary() -> None:
    """Whether a task is lost before, within or after each commit, the committed outputs are the same."""
    inputs = [(b"a", 0), (b"b", 3), (b"a", 8), (b"a", 40), (b"b", 41), (b"b", 20), (b"a", 90)]

    def run(crash_after: int | None, torn: int) -> tuple[Any, ...]:
        driver = TopologyTestDriver(every_aggregation(), commit_each=False)
        for number, (key, timestamp) in enumerate(inputs):
            driver.pipe("in", key=key, value=b'{"id":%d}' % number, timestamp=timestamp)
            if number == crash_after:
                driver.crash(torn_entries=torn)
                driver.restore()
            driver.commit()
        return observed(driver)

    expected = run(None, 0)
    assert [run(at, torn) for at in range(len(inputs)) for torn in (0, 1, 2)] == [expected] * 3 * len(inputs)
