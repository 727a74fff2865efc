"""The stream task: the records, commits and crashes of one partition, and when it is inside a callback."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.common.errors import ConfigError, DataError, IllegalState, ProcessingFailed, SchemaMismatch
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Mean, Sum
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader
from penstock.shared.streams.changelog.format import FINAL, LIVE, PROGRESS, decode_entry, decode_progress
from penstock.shared.streams.dsl.builder import Stream, StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task.callbacks import in_callback, is_in_callback
from penstock.shared.streams.task.metrics import Totals
from penstock.shared.streams.task.restore import restore_changes, restore_progress
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import ProcessorNode, Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.consumed import as_consumed


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


# --- taking records ---


def test_offsets_before_the_position_are_skipped() -> None:
    """A record is processed once: records before the task's position have no effect."""
    task = task_of(sessions())
    task.process(columns("in", (3, b"a", b"{}", 0), (5, b"a", b"{}", 1)), 0)
    assert (task.sources, task.metrics.records_total) == ({"in": 6}, 2)
    task.process(columns("in", (3, b"a", b"{}", 0), (5, b"a", b"{}", 1), (6, b"a", b"{}", 2)), 0)
    assert (task.sources, task.metrics.records_total) == ({"in": 7}, 3)
    (session,) = task.stores["s"].rows()
    assert session.states == [3]


def test_nothing_new_needs_no_commit() -> None:
    """After a poll of known records there is nothing to commit."""
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
    """Stream time is -1, the position unknown, and there is nothing to commit."""
    task = task_of(sessions())
    assert (task.stream_time_ms, task.sources, task.needs_commit) == (-1, {}, False)
    assert repr(task) == ("StreamTask(app-0, epoch 1, commit 0, stream time -1, sources {}, stores {'s': 0})")


# --- what cannot be handled ---


@pytest.mark.parametrize(
    ("key", "value", "timestamp", "message"),
    [
        (b"k", b"{", 5, "in: not JSON"),
        (b"\xff", b"{}", 5, "in: not UTF-8: invalid start byte at byte 0"),
        (b"k", b"{}", -1, "has no timestamp"),
    ],
)
def test_an_undecodable_record_becomes_a_dead_letter(key: bytes, value: bytes, timestamp: int, message: str) -> None:
    """A record with an invalid key, value or timestamp goes to the dead-letter topic, raw, with its headers and
    coordinates."""
    driver = TopologyTestDriver(sessions(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b"{}", timestamp=1)
    driver.pipe("in", key=key, value=value, timestamp=timestamp, headers=(("trace", b"\x00"),))
    driver.pipe("in", key=b"k", value=b"{}", timestamp=2)
    (record,) = driver.read("in-dlq")
    dead_letter = parse_dead_letter(as_consumed(record))
    assert dead_letter.record == ConsumerRecord("in", 0, 1, timestamp, key, value, (("trace", b"\x00"),))
    assert (dead_letter.stage, dead_letter.attempts, dead_letter.group) == ("deserialize", 1, "test-driver")
    assert message in dead_letter.message
    assert (driver.task.metrics.dead_letters_total, driver.task.sources) == (1, {"in": 3})
    (session,) = driver.task.stores["s"].rows()
    assert session.states == [2]


def test_a_rejected_value_becomes_a_dead_letter() -> None:
    """A DataError during processing sends the unchanged source record to the dead-letter topic, with stage
    `process`."""
    builder, stream = plain()

    def fail(value: Any) -> Any:
        if value["x"] == "bad":
            raise DataError("x is bad")
        return {"y": value["x"]}

    stream.map_values(fail).to("out")
    registry = CollectorRegistry()
    task = task_of(builder.build(), registry=registry)
    task.process(columns("in", (0, b"k", b'{"x":"bad"}', 0), (1, b"k", b'{"x":"ok"}', 0)), 0)
    dead, out = task.prepare_commit(0).outputs
    dead_letter = parse_dead_letter(as_consumed(dead))
    assert (dead.topic, dead.value, dead_letter.stage, dead_letter.message) == (
        "in-dlq",
        b'{"x":"bad"}',
        "process",
        "x is bad",
    )
    assert dead_letter.exception == "penstock.errors.DataError"
    assert (out.topic, out.value) == ("out", b'{"y":"ok"}')
    labels = {"partition": "0", "topic": "in", "stage": "process"}
    assert registry.get_sample_value("penstock_streams_dead_letters_total", labels) == 1


def test_a_source_names_its_late_and_dead_letter_topics() -> None:
    """Late and dead-letter topics are the source's, by the given name or by default."""
    builder = StreamsBuilder()
    stream = builder.stream("in", dead_letters="refused", late="too-late")
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for value, timestamp in ((b"{}", 100), (b"{", 0), (b"{}", 0)):
        driver.pipe("in", key=b"k", value=value, timestamp=timestamp)
    assert {topic: len(records) for topic, records in driver.outputs.items()} == {"refused": 1, "too-late": 1}


def raising(kind: str) -> Topology:
    """A topology whose one node of user code reads the field x of every value."""
    builder, stream = plain()
    match kind:
        case "filter":
            stream.filter(lambda record: record.value["x"] > 0).to("out")
        case "map_values":
            stream.map_values(lambda value: value["x"] + 0).to("out")
        case "peek":
            stream.peek(lambda record: record.value["x"] + 0).to("out")
        case "aggregate":
            adding = Aggregate(int, lambda state, value: state + value["x"], lambda a, b: a + b)
            stream.group_by_key().session_window(10).aggregate("s", x=adding).on_update().to("out")
    return builder.build()


@pytest.mark.parametrize("kind", ["filter", "map_values", "peek", "aggregate"])
@pytest.mark.parametrize(
    ("value", "exception"),
    [(None, "TypeError"), (b"{}", "KeyError"), (b'{"x":"one"}', "TypeError"), (b"7", "TypeError")],
)
def test_an_error_of_user_code_makes_a_dead_letter(kind: str, value: bytes | None, exception: str) -> None:
    """A value at which a user's function raises, such as a tombstone, is a dead letter. The next record is
    processed."""
    driver = TopologyTestDriver(raising(kind), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=value, timestamp=5, headers=(("trace", b"1"),))
    driver.pipe("in", key=b"k", value=b'{"x":1}', timestamp=6)
    (record,) = driver.read("in-dlq")
    dead_letter = parse_dead_letter(as_consumed(record))
    assert dead_letter.record == ConsumerRecord("in", 0, 0, 5, b"k", value, (("trace", b"1"),))
    assert (dead_letter.stage, dead_letter.exception) == ("process", exception)
    assert dead_letter.message
    assert (driver.task.metrics.dead_letters_total, driver.task.sources) == (1, {"in": 2})
    assert len(driver.read("out")) == 1


def test_a_deserializer_that_raises_makes_a_dead_letter() -> None:
    """A user's deserializer may raise any error. The dead letter has the stage."""
    builder = StreamsBuilder()
    builder.stream("in", value=lambda topic, data: int(data or b"")).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b"x")
    dead_letter = parse_dead_letter(as_consumed(driver.read("in-dlq")[0]))
    assert (dead_letter.stage, dead_letter.exception) == ("deserialize", "ValueError")


def test_fail_stops_before_the_record() -> None:
    """With `fail` an error other than DataError names the coordinates. Earlier records are committed, later ones are
    not."""
    task = task_of(raising("map_values"), handlers=ErrorHandlers(process="fail"))
    records = columns(
        "in", (0, b"k", b'{"x":1}', 0), (1, b"k", b"{", 0), (2, b"k", b"null", 0), (3, b"k", b'{"x":1}', 0)
    )
    with pytest.raises(ProcessingFailed, match=r"'map_values-2'.*in-0@2.*TypeError"):
        task.process(records, 0)
    assert task.needs_commit
    commit = task.prepare_commit(0)
    assert ([r.topic for r in commit.outputs], commit.sources) == (["out", "in-dlq"], {"in": 2})


def _fail_always(record: Record) -> None:
    raise DataError("no")


def _fail(record: Record) -> None:
    raise ValueError("no")


def test_an_error_behind_a_store_that_nothing_handles_is_fatal() -> None:
    """With `fail` half of a record's effect is never committed, and the error names the record."""
    builder, stream = plain()
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_update().peek(_fail).to("out")
    task = task_of(builder.build(), deduplicate_updates=False, handlers=ErrorHandlers(process="fail"))
    with pytest.raises(ProcessingFailed, match=r"'peek-2'.*in-0@0.*ValueError: no"):
        task.process(columns("in", (0, b"k", b"{}", 0)), 0)
    assert not task.needs_commit
    with pytest.raises(ProcessingFailed, match="in-0@0"):
        task.prepare_commit(0)


def test_a_task_that_does_not_run_has_no_commit() -> None:
    """Before `initialize`, and as a standby, a task has nothing to commit."""
    task = StreamTask(sessions(), 0, application="app")
    with pytest.raises(IllegalState, match="does not run"):
        task.prepare_commit(0)


def test_a_failed_task_does_not_commit_earlier_records() -> None:
    """A record that is half done leaves the task unfit for a commit, though records before it would have needed one."""
    builder, stream = plain()
    windows = stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close()
    windows.peek(lambda record: record.value.missing).to("out")
    task = task_of(builder.build(), handlers=ErrorHandlers(process="fail"))
    task.process(columns("in", (0, b"k", b"{}", 0)), 0)
    assert task.needs_commit
    with pytest.raises(ProcessingFailed, match=r"'peek-2': in-0@1, .*AttributeError"):
        task.process(columns("in", (1, b"k", b"{}", 100)), 0)
    assert not task.needs_commit


def test_one_part_of_many_may_be_rejected() -> None:
    """If a record was split up and the store has its first part, an error in the second costs only this part."""
    builder, stream = plain()
    parts = stream.flat_map_values(lambda value: value).map_values(lambda value: {"x": value["x"]})
    parts.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b'[{"x":1},{},{"x":2}]', 0)), 0)
    (dead_letter,) = task.prepare_commit(0).outputs
    assert dict(dead_letter.headers)["penstock.dlq.node"] == b"map_values-3"
    assert [session.states for session in task.stores["s"].rows()] == [[2]]


@pytest.mark.parametrize("first", ["refuses", "takes"])
def test_a_dead_letter_discards_earlier_outputs_of_its_record(first: str) -> None:
    """If one branch rejects a record, no branch writes anything of it, in any order."""
    builder, stream = plain()
    if first == "takes":
        stream.to("out")
    stream.peek(_fail_always).to("never")
    if first == "refuses":
        stream.to("out")
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b"{}", 0)), 0)
    commit = task.prepare_commit(0)
    assert [record.topic for record in commit.outputs] == ["in-dlq"]


def test_a_late_record_that_another_branch_rejects_is_not_counted_late() -> None:
    """Counts agree with the topics: a dead letter is in no other topic and no other count."""
    builder, stream = plain()
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    stream.filter(lambda record: record.value["x"] > 0).to("also")
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b'{"x":1}', 100), (1, b"k", b"{}", 0)), 0)
    assert [record.topic for record in task.prepare_commit(0).outputs] == ["also", "in-dlq"]
    assert (task.metrics.late_total, task.metrics.dead_letters_total) == (0, 1)


def test_a_result_that_is_too_large_is_rejected_at_its_sink() -> None:
    """A result above `record_bytes_max` is a dead letter, or with `fail` a fatal error with sink and coordinates."""
    builder, stream = plain()
    stream.to("out")
    task = task_of(builder.build(), record_bytes_max=1_000)
    task.process(columns("in", (0, b"k", b'"%s"' % (b"x" * 1_000), 0)), 0)
    (dead,) = task.prepare_commit(0).outputs
    dead_letter = parse_dead_letter(as_consumed(dead))
    assert dead_letter.exception == "penstock.errors.RecordTooLarge"
    assert "topic out: a record of" in dead_letter.message
    builder, stream = plain()
    every = Aggregate(list, lambda state, value: [*state, value], lambda a, b: a + b)
    stream.group_by_key().session_window(10).aggregate("s", all=every).on_close().to("out")
    task = task_of(builder.build(), record_bytes_max=1_000, handlers=ErrorHandlers(produce="fail"))
    key, large = b"k" * 200, b'"%s"' % (b"x" * 260)
    with pytest.raises(ProcessingFailed, match=r"'sink-2'.*in-0@2.*RecordTooLarge.*out"):
        task.process(columns("in", (0, key, large, 0), (1, key, large, 1), (2, b"k", b"0", 100)), 0)


LARGE_KEY = b"\x01" * 800  # much larger in a result: twice six bytes of JSON a character


@pytest.mark.parametrize("emit", ["on_close", "on_update"])
@pytest.mark.parametrize("key", ["string", "bytes"])
def test_a_key_that_no_result_could_hold_is_rejected_before_the_store(emit: str, key: Any) -> None:
    """A record whose key could not be written is a dead letter, and the partition continues. The largest accepted key
    is written, in its result and its changelog entry."""
    builder = StreamsBuilder()
    windows = builder.stream("in", key=key).group_by_key().session_window(10).aggregate("s", n=Count())
    getattr(windows, emit)().to("out")
    one = 2 if key == "string" else 4 / 3 * 2
    fits = b"k" * int((2_000 - 8) / one)
    task = task_of(builder.build(), record_bytes_max=4_000)
    records = [(fits, 0), (fits + b"k" * 10, 0), (fits, 5), (b"k", 100), (LARGE_KEY, 101), (b"k", 200)]
    task.process(columns("in", *((i, k, b"{}", at) for i, (k, at) in enumerate(records))), 0)
    commit = task.prepare_commit(0)
    dead_letters = [parse_dead_letter(as_consumed(record)) for record in commit.outputs if record.topic == "in-dlq"]
    assert [(dead_letter.record.offset, dead_letter.stage) for dead_letter in dead_letters] == [
        (1, "process"),
        (4, "process"),
    ]
    assert {dead_letter.exception for dead_letter in dead_letters} == {"penstock.errors.RecordTooLarge"}
    assert all("store 's': the key " in dead_letter.message for dead_letter in dead_letters)
    assert all("key_bytes_max=2000" in dead_letter.message for dead_letter in dead_letters)
    assert all(len(dead_letter.message) < 700 for dead_letter in dead_letters)
    results = [record for record in commit.outputs if record.topic == "out"]
    assert max(len(record.key or b"") + len(record.value or b"") for record in results) > 2 * len(fits)
    assert sum(len(key or b"") == len(fits) for key, _ in commit.changelog) == 1


def test_the_entry_that_is_measured_is_the_whole_of_it() -> None:
    """The limit applies to the changelog entry: key and all states together."""
    builder, stream = plain()
    add = Aggregate(str, lambda state, value: state + value, lambda a, b: a + b)
    stream.group_by_key().session_window(10).aggregate("s", a=add, b=add).on_close().to("out")
    task = task_of(builder.build(), record_bytes_max=50_000)
    key, value = b"k" * 15_000, b'"%s"' % (b"x" * 17_400)
    task.process(columns("in", (0, key, value, 0), (1, key[1:], b'"x"', 0), (2, b"k", value, 0)), 0)
    (dead,) = task.prepare_commit(0).outputs
    dead_letter = parse_dead_letter(as_consumed(dead))
    assert (dead_letter.record.offset, dead_letter.stage) == (0, "process")
    assert dead_letter.message.startswith(
        f"store 's': key '{'k' * 100}'... (15000 characters): key and state take 49812 bytes"
    )
    assert "at most 49744 fit" in dead_letter.message


def test_a_setting_may_leave_less_to_a_key() -> None:
    """If results are large by themselves, `key_bytes_max` limits the key."""
    task = task_of(sessions(), key_bytes_max=20)
    task.process(columns("in", (0, b"12345678", b"{}", 0), (1, b"123456789", b"{}", 0)), 0)
    (dead,) = task.prepare_commit(0).outputs
    assert parse_dead_letter(as_consumed(dead)).record.offset == 1


def test_an_invalid_store_key_fails_its_record() -> None:
    """A processor's key that is neither bytes nor text in UTF-8 fails its record, not every later commit."""

    class Keyed(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record._replace(key=(7, "\ud800", "k")[record.value]))

    builder, stream = plain()
    builder._topology.add(ProcessorNode("keyed", Keyed), stream._node)  # as `process`, but with no topic after it
    Stream(builder, "keyed", stream._traits).group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to(
        "out"
    )
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b"0", 0), (1, b"k", b"1", 0), (2, b"k", b"2", 0)), 0)
    dead_letters = [parse_dead_letter(as_consumed(record)) for record in task.prepare_commit(0).outputs]
    assert [(dead_letter.record.offset, dead_letter.message) for dead_letter in dead_letters] == [
        (0, "store 's': a key must be text or bytes, got int"),
        (1, "store 's': the key '\\ud800' is not encodable as UTF-8: surrogates not allowed"),
    ]


@pytest.mark.parametrize(("emit", "time_moves"), [("on_close", 100), ("on_update", 2)])
def test_an_unwritable_result_is_named_by_its_window(emit: str, time_moves: int) -> None:
    """The error of a result is about its window, by key and bounds, and not only about the record that moved time."""
    builder, stream = plain()
    every = Aggregate(list, lambda state, value: [*state, value], lambda a, b: a + b)
    windows = stream.group_by_key().session_window(10).aggregate("s", all=every)
    getattr(windows, emit)().to("out")
    task = task_of(builder.build(), record_bytes_max=2_000, handlers=ErrorHandlers(produce="fail"))
    key, large = b"k" * 250, b'"%s"' % (b"x" * 740)
    shown = f"'{'k' * 100}'... (250 characters)"
    records = columns("in", (0, key, large, 0), (1, key, large, 1), (2, b"a", b"0", time_moves))
    if emit == "on_update":
        task.process(records, 0)
    with pytest.raises(ProcessingFailed) as raised:
        task.prepare_commit(0) if emit == "on_update" else task.process(records, 0)
    message = str(raised.value)
    assert (
        f"cannot be processed: the result of store 's', key {shown}, window 0 to 1: RecordTooLarge: topic out"
        in message
    )
    assert "max_request_size=2000" in message


@pytest.mark.parametrize(("value", "exception"), [(b'"odd"', "TypeError"), (b'"large"', "RecordTooLarge")])
def test_a_record_whose_state_cannot_be_stored_is_rejected(value: bytes, exception: str) -> None:
    """The record that makes a state unwritable is the dead letter. The window stays unchanged."""
    spoil = {"odd": object(), "large": "x" * 50_000}
    builder, stream = plain()
    add = Aggregate(list, lambda state, value: [*state, spoil.get(value, value)], lambda a, b: a + b)
    stream.group_by_key().session_window(10).aggregate("s", all=add, n=Count()).on_close().to("out")
    task = task_of(builder.build(), record_bytes_max=50_000)
    task.process(columns("in", (0, b"k", b"1", 0), (1, b"k", value, 1), (2, b"k", b"2", 2)), 0)
    commit = task.prepare_commit(0)
    dead_letter = parse_dead_letter(as_consumed(commit.outputs[0]))
    assert (dead_letter.record.offset, dead_letter.exception.rpartition(".")[2]) == (1, exception)
    (session,) = task.stores["s"].rows()
    assert session.states == [[1, 2], 2]


@pytest.mark.parametrize("type_", PunctuationType)
def test_a_punctuation_that_raises_fails_the_task(type_: PunctuationType) -> None:
    """With `fail` the error names node, time and partition, and nothing is committed."""

    def tick(now_ms: int) -> None:
        raise KeyError("tick")

    class Ticking(Processor):
        """Schedules a callback that raises."""

        def init(self, context: ProcessorContext) -> None:
            context.schedule(10, type_, self._tick)

        def _tick(self, now_ms: int) -> None:
            tick(now_ms)

        def process(self, record: Record) -> None:
            pass

    builder, stream = plain()
    stream.process(Ticking, name="ticking")
    task = task_of(builder.build(), handlers=ErrorHandlers(process="fail"))
    message = rf"'ticking': .*{type_.name}.*(in-0@0|partition 0).*KeyError: 'tick'"
    stream_time = type_ is PunctuationType.STREAM_TIME
    record = columns("in", (0, b"k", b"{}", 5))
    with pytest.raises(ProcessingFailed, match=message):
        task.process(record, 0) if stream_time else task.punctuate_wall_clock(10)
    assert not task.needs_commit


# --- what a punctuation requests ---


@pytest.mark.parametrize("does", ["nothing", "forwards", "moves time"])
def test_a_wall_clock_call_needs_a_commit(does: str) -> None:
    """Any wall-clock call needs a commit, because its grid has advanced."""

    class Ticking(Processor):
        """Has an effect of one kind at each firing."""

        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            context.schedule(10, PunctuationType.WALL_CLOCK_TIME, self._tick, name="tick")

        def process(self, record: Record) -> None:
            pass

        def _tick(self, now_ms: int) -> None:
            if does == "forwards":
                self.context.forward(Record("k", 1, now_ms))
            elif does == "moves time":
                (operator,) = task.times.operators
                operator.advance_time(now_ms)

    builder, stream = plain()
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    stream.process(Ticking, "s").to("ticks")
    task = task_of(builder.build())
    task.prepare_commit(0)
    task.commit_succeeded()
    task.punctuate_wall_clock(9)
    assert not task.needs_commit
    task.punctuate_wall_clock(15)
    assert task.needs_commit
    progress = decode_progress(decode_entry(task.prepare_commit(15).changelog[-1][1]).body)
    assert progress.grids_ms == {"process-3/tick (wall_clock_time, every 10 ms)": 20}


def test_a_firing_without_effect_is_not_done_again() -> None:
    """A grid point fires once: the next commit has the next grid point, and a restart continues there."""
    fired: list[int] = []

    class Ticking(Processor):
        """Notes its firings."""

        def init(self, context: ProcessorContext) -> None:
            context.schedule(10, PunctuationType.WALL_CLOCK_TIME, fired.append, name="tick")

        def process(self, record: Record) -> None:
            pass

    builder, stream = plain()
    stream.process(Ticking)
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    driver.pipe("in", key=b"k", value=b"{}")
    for _ in range(5):
        driver.advance_wall_clock(10)
    assert fired == [10, 20, 30, 40, 50]
    driver.crash()
    driver.restore()
    driver.advance_wall_clock(3)
    driver.advance_wall_clock(7)
    assert fired[5:] == [60]


def test_skipped_and_late_are_counted_by_reason_and_topic() -> None:
    """A null key and a late record each have a counter of their own."""
    registry = CollectorRegistry()
    task = task_of(sessions(), registry=registry)
    task.process(columns("in", (0, b"a", b"{}", 100), (1, None, b"{}", 100), (2, b"a", b"{}", 3)), 0)
    task.prepare_commit(0)
    values = {
        "penstock_streams_records_total": ({}, 3),
        "penstock_streams_skipped_records_total": ({"reason": "null key"}, 1),
        "penstock_streams_late_records_total": ({"topic": "in"}, 1),
        "penstock_streams_stream_time_seconds": ({}, 0.1),
        "penstock_streams_operator_time_seconds": ({"store": "s"}, 0.1),
        "penstock_streams_state_rows": ({}, 1),
    }
    for name, (labels, expected) in values.items():
        assert registry.get_sample_value(name, {"partition": "0", **labels}) == expected, name


def gauges(registry: CollectorRegistry) -> list[float | None]:
    """The stream time of a task of `sessions`, the time of its store, and the number of rows in its store."""
    of = {"partition": "0"}
    return [
        registry.get_sample_value("penstock_streams_stream_time_seconds", of),
        registry.get_sample_value("penstock_streams_operator_time_seconds", {**of, "store": "s"}),
        registry.get_sample_value("penstock_streams_state_rows", of),
    ]


def test_gauges_follow_time_that_advances_without_records() -> None:
    """After the commit of an idle advance, the gauges have the advanced times, and not the windows that it closed."""
    registry = CollectorRegistry()
    task = task_of(sessions(), registry=registry)
    task.process(columns("in", (0, b"a", b"{}", 100)), 0)
    task.prepare_commit(0)
    assert gauges(registry) == [0.1, 0.1, 1]
    task.commit_succeeded()
    task.advance_time(900)
    task.prepare_commit(900)
    assert gauges(registry) == [1.0, 1.0, 0]


def test_gauges_are_set_by_a_restore() -> None:
    """A restored task has the gauges of its state before the first record."""
    before = task_of(sessions())
    before.process(columns("in", (0, b"a", b"{}", 100)), 0)
    commit = before.prepare_commit(0)
    registry = CollectorRegistry()
    task = StreamTask(sessions(), 0, application="app", registry=registry)
    reader = ChangelogReader(partial(restore_changes, task), epoch=1)
    for offset, (key, value) in enumerate(commit.changelog):
        reader.feed_record(offset, key, value)
    assert reader.progress is not None
    restore_progress(task, reader.progress)
    task.initialize(0)
    assert gauges(registry) == [0.1, 0.1, 1]


def test_a_closed_task_has_no_gauges() -> None:
    """A closed task's gauges are removed, also if a processor cannot be closed. Its counters stay."""

    class Unclosable(Processor):
        def process(self, record: Record) -> None:
            pass

        def close(self) -> None:
            raise ValueError("open")

    builder, stream = plain()
    stream.process(Unclosable)
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    registry = CollectorRegistry()
    task = task_of(builder.build(), registry=registry)
    task.process(columns("in", (0, b"a", b"{}", 100)), 0)
    task.prepare_commit(0)
    assert gauges(registry) == [0.1, 0.1, 1]
    with pytest.raises(ProcessingFailed):
        task.close()
    assert gauges(registry) == [None, None, None]
    assert registry.get_sample_value("penstock_streams_records_total", {"partition": "0"}) == 1


def test_a_dead_letter_moves_no_time() -> None:
    """A value years ahead that an aggregation rejects advances neither the task's nor the operator's time, and fires no
    schedule."""
    fired: list[int] = []

    class Ticks(Processor):
        """Schedules by stream time."""

        def init(self, context: ProcessorContext) -> None:
            context.schedule(1_000, PunctuationType.STREAM_TIME, fired.append)

        def process(self, record: Record) -> None:
            """Processes each record."""

    builder = StreamsBuilder()
    stream = builder.stream("in", value=dict)
    stream.process(Ticks)
    stream.group_by_key().session_window(10).aggregate("s", total=Sum("x")).on_close().to("out")
    registry = CollectorRegistry()
    task = task_of(builder.build(), registry=registry)
    ahead = 40_000_000_000
    task.process(columns("in", (0, b"a", b'{"x":1}', 100), (1, b"a", b'{"x":"no"}', ahead)), 0)
    assert task.metrics.dead_letters_total == 1
    assert (task.stream_time_ms, task.times.by_store()) == (100, {"s": 100})
    assert fired == [100]
    task.prepare_commit(0)
    assert registry.get_sample_value("penstock_streams_stream_time_seconds", {"partition": "0"}) == 0.1


# --- what a processor may ask ---


class _Calling(Processor):
    """Calls a test's function with its context and each record."""

    def __init__(self, call: Any) -> None:
        self._call = call

    def process(self, record: Record) -> None:
        self._call(self.context, record)


def test_a_processor_sees_where_its_record_was_read() -> None:
    """During `process` the context names topic, partition, offset, stream time and wall clock."""
    seen: list[Any] = []

    def call(context: ProcessorContext, record: Record) -> None:
        seen.append((context.record_metadata, context.partition, context.stream_time_ms, context.now_ms))

    builder, stream = plain()
    stream.process(lambda: _Calling(call))
    task = task_of(builder.build())
    task.process(columns("in", (7, b"k", b"{}", 30)), 55)
    assert seen == [(("in", 0, 7), 0, 30, 55)]
    assert task.record_metadata is None


def test_forward_to_one_child() -> None:
    """A processor may forward to a child by name. An unknown name is rejected."""
    builder, stream = plain()
    parent = stream.process(lambda: _Calling(lambda c, r: c.forward(r, to=r.value["to"])), name="parent")
    parent.to("a")
    parent.to("b")
    (first, second) = builder.build().children["parent"]
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b'{"to":"%s"}' % second.encode(), 0)), 0)
    task.process(columns("in", (1, b"k", b'{"to":"%s"}' % first.encode(), 0)), 0)
    assert [r.topic for r in task.prepare_commit(0).outputs] == ["b", "a"]
    with pytest.raises(ConfigError, match=r"'parent'.*'elsewhere'"):
        task.process(columns("in", (2, b"k", b'{"to":"elsewhere"}', 0)), 0)


def test_a_store_must_be_connected() -> None:
    """A processor gets the stores it was connected to, and no others."""
    builder, stream = plain()
    stream.group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    sizes: list[int] = []
    stream.process(lambda: _Calling(lambda c, r: sizes.append(len(c.store("s")))), "s")
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b"{}", 0)), 0)
    assert sizes == [1]
    stream.process(lambda: _Calling(lambda c, r: c.store("s")), name="stranger")
    with pytest.raises(ProcessingFailed, match=r"'stranger'.*'s'"):
        task_of(builder.build()).process(columns("in", (0, b"k", b"{}", 0)), 0)


def test_init_and_close_are_called_once() -> None:
    """Each task creates its processors, initializes them and closes them."""
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


@pytest.mark.parametrize(
    "call",
    [
        lambda context: context.schedule(1, PunctuationType.STREAM_TIME, print),
        lambda context: context.forward(Record("k", 1, 0)),
    ],
    ids=["schedule", "forward"],
)
def test_a_processor_cannot_act_when_it_is_closed(call: Callable[[ProcessorContext], object]) -> None:
    """No commit follows `close`: a record would be lost, and a punctuator never called."""

    class Late(Processor):
        """Acts too late."""

        def close(self) -> None:
            call(self.context)

    builder, stream = plain()
    stream.process(Late)
    task = task_of(builder.build())
    with pytest.raises(ProcessingFailed, match=r"IllegalState: .*close"):
        task.close()


def test_a_processor_without_process() -> None:
    """A processor that does not implement `process` fails with its own name."""
    builder, stream = plain()
    stream.process(Processor)
    with pytest.raises(ConfigError, match=r"Processor .*process"):
        task_of(builder.build()).process(columns("in", (0, b"k", b"{}", 0)), 0)


# --- commits ---


def test_a_commit_holds_everything_since_the_last() -> None:
    """Outputs, the stores' changes and, last, a progress record with position, times and schemas."""
    task = task_of(sessions(), epoch=4)
    task.process(columns("in", (0, b"a", b"{}", 0), (1, b"b", b"{}", 3), (2, None, b"{}", 99), (3, b"b", b"{}", 11)), 7)
    commit = task.prepare_commit(8)
    assert commit.sources == {"in": 4}
    assert [(r.topic, r.key, r.timestamp) for r in commit.outputs] == [("out", b"a", 0)]
    entries = [decode_entry(value) for _, value in commit.changelog]
    assert [(e.operation, e.epoch, e.commit) for e in entries] == [(FINAL, 4, 1), (LIVE, 4, 1), (PROGRESS, 4, 1)]
    assert [key for key, _ in commit.changelog] == [b"a", b"b", None]
    progress = decode_progress(entries[-1].body)
    assert (progress.application, progress.guarantee, progress.sources) == ("app", "exactly_once", {"in": 4})
    assert (progress.stream_time_ms, progress.operator_times_ms, progress.wall_ms) == (99, {"s": 11}, 8)
    assert progress.stores == task.topology.schemas()


def test_a_commit_has_no_offset_of_a_topic_that_is_no_longer_read() -> None:
    """Once its source is removed, a topic may be deleted, so no offset is committed. The progress record keeps it."""
    builder, stream = plain()
    stream.merge(builder.stream("removed")).to("out")
    before = task_of(builder.build())
    for topic in ("in", "removed"):
        before.process(columns(topic, (0, b"k", b"{}", 0)), 0)
    builder, stream = plain()
    stream.to("out")
    after = StreamTask(builder.build(), 0, application="app")
    restore_progress(after, before.progress_record(0))
    after.initialize(0)
    commit = after.prepare_commit(0)
    assert commit.sources == {"in": 1}
    assert decode_progress(decode_entry(commit.changelog[-1][1]).body).sources == {"in": 1, "removed": 1}


def test_needs_commit_from_a_record_until_it_succeeded() -> None:
    """A task needs a commit from the first record until a commit has succeeded."""
    task = task_of(sessions())
    task.process(columns("in", (0, b"a", b"{}", 0)), 0)
    assert task.needs_commit
    task.prepare_commit(0)
    assert task.needs_commit
    task.commit_succeeded()
    assert not task.needs_commit
    second = task.prepare_commit(0)
    assert second.outputs == []
    assert [decode_entry(value).commit for _, value in second.changelog] == [2]


def test_closed_windows_are_counted_with_their_commit() -> None:
    """The count has the closed windows of successful commits only."""
    task = task_of(sessions())
    task.process(columns("in", (0, b"a", b"{}", 0), (1, b"a", b"{}", 100)), 0)
    for _ in range(2):
        task.prepare_commit(0)
        assert task.metrics.closed_total == 0
    task.commit_succeeded()
    assert task.metrics.closed_total == 1


def test_committed_totals_are_those_of_the_last_commit() -> None:
    """Records that are processed and not committed may be processed again by another task, so they are in no committed
    total."""
    task = task_of(sessions())
    task.process(columns("in", (0, b"a", b"{}", 100), (1, b"a", b"{", 100), (2, b"a", b"{}", 0), (3, None, b"", 0)), 0)
    assert task.metrics.committed == Totals()
    task.prepare_commit(0)
    assert task.metrics.committed == Totals()
    task.commit_succeeded()
    rejected_at = {"late": "in-0@2", "dead_letters": "in-0@3"}
    assert task.metrics.committed == Totals(records=4, late=1, dead_letters=2, rejected_at=rejected_at)
    task.process(columns("in", (4, b"a", b"{}", 0)), 0)
    assert (task.metrics.late_total, task.metrics.committed.late) == (2, 1)


# --- crash and restore ---


def test_restore_checks_the_schema_first() -> None:
    """State of another topology is rejected before any of it is restored."""
    driver = TopologyTestDriver(sessions(), errors=ErrorHandlers())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    builder, stream = plain()
    table = stream.group_by_key().session_window(10).aggregate("s", n=Sum("x"))
    table.on_close().to("out")
    driver.topology = builder.build()
    driver.crash()
    with pytest.raises(SchemaMismatch, match="the aggregations changed: n"):
        driver.restore()


def test_restore_without_progress_is_a_fresh_start() -> None:
    """A task without a progress record starts without positions, time or windows."""
    task = StreamTask(sessions(), 0, application="app")
    task.initialize(0)
    assert (task.sources, task.stream_time_ms, len(task.stores["s"])) == ({}, -1, 0)


def test_operator_time_is_restored() -> None:
    """A record that was late before a crash is late after it, also if no live window shows the time."""
    driver = TopologyTestDriver(sessions(gap=10), errors=ErrorHandlers())
    for key, timestamp in ((b"a", 1_000), (b"a", 2_000)):
        driver.pipe("in", key=key, value=b"{}", timestamp=timestamp)
    driver.crash()
    driver.restore()
    driver.pipe("in", key=b"b", value=b"{}", timestamp=1_989)
    assert len(driver.read("in-late")) == 1


def test_schedule_before_initialize_is_rejected() -> None:
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
    """Outputs in order by topic, live windows, position and times; of a dead letter its stage and coordinates, not its
    time."""
    task = driver.task
    aggregations = task.topology.stores["s"].aggregations
    rows = task.stores["s"].rows()
    live = {(s.key, s.start, s.end): [a.result(x) for a, x in zip(aggregations, s.states, strict=True)] for s in rows}
    outputs = {topic: list(driver.outputs.get(topic, ())) for topic in TOPICS}
    progress = task.progress_record(0)
    return outputs, live, progress.sources, progress.stream_time_ms, progress.operator_times_ms


@given(turns)
def test_a_crash_changes_nothing_that_was_committed(plan: list[tuple[list[Any], str, int]]) -> None:
    """With crashes at random points and torn commits, outputs and state equal those of a run without them."""
    crashed = TopologyTestDriver(every_aggregation(), commit_each=False, errors=ErrorHandlers())
    steady = TopologyTestDriver(every_aggregation(), commit_each=False, errors=ErrorHandlers())
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
        driver = TopologyTestDriver(every_aggregation(), commit_each=False, errors=ErrorHandlers())
        for number, (key, timestamp) in enumerate(inputs):
            driver.pipe("in", key=key, value=b'{"id":%d}' % number, timestamp=timestamp)
            if number == crash_after:
                driver.crash(torn_entries=torn)
                driver.restore()
            driver.commit()
        return observed(driver)

    expected = run(None, 0)
    assert [run(at, torn) for at in range(len(inputs)) for torn in (0, 1, 2)] == [expected] * 3 * len(inputs)


@pytest.mark.parametrize("columns_min", [1, 100])
def test_an_undecodable_record_does_not_advance_stream_time(columns_min: int) -> None:
    """A dead letter of stage `deserialize` calls no punctuation and does not advance stream time."""
    fired: list[int] = []

    class Ticking(Processor):
        def init(self, context: ProcessorContext) -> None:
            context.schedule(100, PunctuationType.STREAM_TIME, fired.append)

        def process(self, record: Record) -> None:
            pass

    builder, stream = plain()
    stream.process(Ticking)
    task = task_of(builder.build())
    task.process(columns("in", (0, b"k", b"{}", 5), (1, b"k", b"{", 900), (2, b"k", b"{}", 6)), 0)
    assert (fired, task.stream_time_ms, task.metrics.dead_letters_total) == ([5], 6, 1)
    task = task_of(raising_sum(), columns_min=columns_min)
    records = [(i, b"k", b'{"x":1}', i) for i in range(40)]
    task.process(columns("in", *records, (40, b"k", b"{", 900), (41, b"k", b'{"x":1}', 41)), 0)
    assert (task.stream_time_ms, task.metrics.dead_letters_total) == (41, 1)


def raising_sum() -> Topology:
    """Sums in sessions, which can be processed in columns."""
    builder, stream = plain()
    stream.group_by_key().session_window(10).aggregate("s", x=Sum("x")).on_close().to("out")
    return builder.build()


class Keeper(Processor):
    """Puts each record into its own store."""

    def process(self, record: Record) -> None:
        self.context.store("own").put(record.key, record.value)


def _of_table(builder: StreamsBuilder) -> None:
    builder.table("in")


def _of_own_store(builder: StreamsBuilder) -> None:
    builder.add_store("own")
    builder.stream("in").process(Keeper, "own")


def _of_join(builder: StreamsBuilder) -> None:
    builder.stream("in").join(builder.stream("other"), lambda a, b: a, JoinWindows.of(10), name="join").to("out")


@pytest.mark.parametrize("kind", [_of_table, _of_own_store, _of_join])
def test_a_row_that_the_changelog_cannot_hold_is_rejected_before_the_store(kind: Any) -> None:
    """In a table, a processor's store and a join the record is a dead letter, and all others are kept."""
    builder = StreamsBuilder()
    kind(builder)
    task = task_of(builder.build(), record_bytes_max=2_000)
    task.process(columns("in", (0, b"k", b'"%s"' % (b"x" * 1_800), 0), (1, b"k", b'"fits"', 1)), 0)
    commit = task.prepare_commit(0)
    (dead_letter,) = [record for record in commit.outputs if record.topic == "in-dlq"]
    headers = dict(dead_letter.headers)
    assert headers["penstock.dlq.offset"] == b"0"
    assert b"at most 1744 fit" in (headers["penstock.dlq.message"] or b"")
    assert sum(key == b"k" for key, _ in commit.changelog) == 1


@in_callback("process")
class Task:
    """Something whose `process` is a callback."""

    def process(self, other: Task | None = None, *, fails: bool = False) -> tuple[bool, bool]:
        """Whether this task, and the other, is inside a callback."""
        if fails:
            raise ValueError("half_processed")
        seen = other.process()[0] if other is not None else False
        return is_in_callback(self), seen

    def elsewhere(self) -> list[bool]:
        """Whether it is inside a callback in another thread."""
        seen: list[bool] = []
        thread = threading.Thread(target=lambda: seen.append(is_in_callback(self)))
        thread.start()
        thread.join()
        return seen


def test_only_the_task_whose_method_runs() -> None:
    """A task is inside a callback while its method runs, also after another task's ran within, but not afterwards."""
    one, other = Task(), Task()
    assert one.process(other) == (True, True)
    assert not is_in_callback(one)
    assert not is_in_callback(other)


def test_an_error_ends_the_callback() -> None:
    """A method that raises leaves no task inside a callback."""
    task = Task()
    with pytest.raises(ValueError, match="half_processed"):
        task.process(fails=True)
    assert not is_in_callback(task)


def test_another_thread() -> None:
    """A call from another thread is not inside a callback of the task."""
    made = in_callback("elsewhere")(type("Threaded", (Task,), {"elsewhere": Task.elsewhere}))
    assert made().elsewhere() == [False]


@pytest.mark.anyio
@pytest.mark.parametrize("below", ["map_values", "sink"])
def test_init_forwards_nothing(below: str) -> None:
    """`forward` in `init` raises IllegalState that names the processor, because the nodes below are not initialized."""

    class Announcing(Processor):
        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            context.forward(Record("k", "started", 0))

        def process(self, record: Record) -> None:
            pass

    builder = StreamsBuilder()
    stream = builder.stream("in").process_values(Announcing, name="announcing")
    (stream.map_values(str) if below == "map_values" else stream).to("out")
    with pytest.raises(IllegalState, match=r"'announcing'.*init\(\)"):
        TopologyTestDriver(builder.build())


@pytest.mark.parametrize("how", ["create_task", "call_soon"])
async def test_an_asyncio_task_of_process_is_outside_of_callbacks(how: str) -> None:
    """An asyncio task or a callback made in process() runs after it: its context forwards and schedules nothing."""
    messages: list[str] = []

    class Later(Processor):
        def process(self, record: Record) -> None:
            loop = asyncio.get_running_loop()
            if how == "create_task":
                self.later = loop.create_task(self.forward_later(record))
            else:
                loop.call_soon(self.forward_now, record)

        async def forward_later(self, record: Record) -> None:
            self.forward_now(record)

        def forward_now(self, record: Record) -> None:
            calls: list[Callable[[], object]] = [
                lambda: self.context.forward(record),
                lambda: self.context.schedule(5, PunctuationType.STREAM_TIME, print),
            ]
            for call in calls:
                with pytest.raises(IllegalState, match="asyncio task") as raised:
                    call()
                messages.append(str(raised.value).split("(")[0])

    builder = StreamsBuilder()
    builder.stream("in").process(Later, name="late").to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    for _ in range(3):
        await asyncio.sleep(0)
    assert messages == ["'late': forward", "'late': schedule"]
    assert driver.read("out") == []
