"""A task's nodes: the node of an error, and the records that a sink rejects."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.errors import ProcessingFailed, RecordTooLarge
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.operators.stream_join import JoinWindows
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_json
from penstock.shared.streams.task.processor_nodes import ProcessorNodes, SinkNodeWriter
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import SinkNode
from penstock.shared.streams.window_result import WindowKey
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.consumed import as_consumed


@pytest.mark.parametrize(("value", "node"), [(b"null", "filter-2"), (b"{}", "map_values-3"), (b'{"x":1}', "sink-4")])
def test_an_error_is_of_the_innermost_node(value: bytes, node: str) -> None:
    """In a chain of nodes the error names the node whose code raised, not its callers."""
    builder = StreamsBuilder()
    chain = builder.stream("in").filter(lambda record: "y" not in record.value).map_values(lambda value: value["x"])
    chain.to("out", lambda record: (None, record.value.encode()))
    task = StreamTask(builder.build(), 0, application="app", handlers=ErrorHandlers("fail", "fail", "fail"))
    task.initialize(0)
    with pytest.raises(ProcessingFailed, match=f"node '{node}': in-0@0 "):
        task.process(Columns.of([ConsumerRecord("in", 0, 0, 0, b"k", value)]), 0)


def test_an_error_from_elsewhere_is_of_no_node() -> None:
    """An error that was raised outside of the nodes names none."""
    builder = StreamsBuilder()
    builder.stream("in").to("out")
    assert ProcessorNodes(builder.build(), 1_000, lambda record, source_key: None).node_of(KeyError()) is None


def test_a_sink_takes_what_the_producer_takes() -> None:
    """The limit is the producer's own measure of a record, headers included."""
    headers = (("trace", b"1" * 50),)
    size = record_size(b"k", b"12", list(headers))
    written: list[tuple[ProducerRecord, bytes | None]] = []
    sink = SinkNodeWriter(SinkNode("sink", "out", encode_json), size, lambda *given: written.append(given))
    record = Record("k", 12, 7, headers)
    sink.process(record)
    windowed = record._replace(key=WindowKey("k", 5, 7))
    sink.process(windowed)
    expected = ProducerRecord("out", b"12", b"k", headers, None, 7)
    assert written == [(expected, None), (expected, None)]
    with pytest.raises(RecordTooLarge, match=f"topic out.*{size}.*max_request_size={size - 1}"):
        SinkNodeWriter(SinkNode("sink", "out", encode_json), size - 1, lambda *given: None).process(record)


WINDOWS = ["tumbling_window", "hopping_window", "sliding_window", "session_window", "join"]


class Timed(Processor):
    """Sets a record's time to its value."""

    def process(self, record: Record) -> None:
        self.context.forward(record._replace(timestamp=record.value["at"]))


def windowed(kind: str, supplier: type[Processor] | None, **options: Any) -> TopologyTestDriver:
    """Windows of 10 ms over the output of a processor."""
    builder = StreamsBuilder()
    stream = builder.stream("in")
    stream = stream if supplier is None else stream.process_values(supplier)
    if kind == "join":
        stream.join(builder.stream("right"), lambda a, b: a, JoinWindows.of(10), name="s").to("out")
    else:
        sizes = (10, 5) if kind == "hopping_window" else (10,)
        getattr(stream.group_by_key(), kind)(*sizes).aggregate("s", n=Count()).on_close().to("out")
    return TopologyTestDriver(builder.build(), **options, errors=ErrorHandlers())


@pytest.mark.parametrize("columns_min", [1, 100])
@pytest.mark.parametrize("kind", WINDOWS)
def test_a_time_whose_window_would_leave_64_bits_is_a_dead_letter(kind: str, columns_min: int) -> None:
    """A record near the end of time is rejected before a window has it: it closes no window, and its task continues."""
    driver = windowed(kind, None, columns_min=columns_min)
    driver.pipe_columns("in", [(b"a", b"{}", 5), (b"a", b"{}", 2**63 - 1), (b"a", b"{}", 2**63 - 2), (b"a", b"{}", 6)])
    dead_letters = [parse_dead_letter(as_consumed(record)) for record in driver.read("in-dlq")]
    assert [(dead_letter.stage, dead_letter.record.offset) for dead_letter in dead_letters] == [
        ("process", 1),
        ("process", 2),
    ]
    assert "leaves 64 bits" in dead_letters[0].message
    assert (driver.task.times.operators[0].stream_time_ms, driver.read("out"), driver.read("in-late")) == (6, [], [])
    driver.crash()
    driver.restore()
    assert driver.task.sources["in"] == 4


@pytest.mark.parametrize("kind", WINDOWS)
def test_the_limit_on_the_future_is_of_the_time_that_a_window_meets(kind: str) -> None:
    """A time that a processor sets is held to `max_future_ms` as a record's own is."""
    driver = windowed(kind, Timed, now_ms=1_000, max_future_ms=100)
    for at in (990, 1_100, 1_101, 2**41, 995):
        driver.pipe("in", key=b"a", value=b'{"at":%d}' % at, timestamp=1_000)
    dead_letters = [parse_dead_letter(as_consumed(record)) for record in driver.read("in-dlq")]
    assert [dead_letter.record.offset for dead_letter in dead_letters] == [2, 3]
    assert "in the future; max_future_ms=100" in dead_letters[0].message
    assert driver.task.times.operators[0].stream_time_ms == 1_100


def test_what_a_punctuation_forwards_too_far_ahead_is_skipped() -> None:
    """It has no source record, so it is counted and has no other effect."""

    class Ticking(Processor):
        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            wall = PunctuationType.WALL_CLOCK_TIME
            context.schedule(10, wall, lambda now: self.context.forward(Record("k", {}, 2**41)))

        def process(self, record: Record) -> None:
            self.context.forward(record)

    driver = windowed("tumbling_window", Ticking, max_future_ms=100)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=5)
    driver.advance_wall_clock(10)
    assert (driver.task.metrics.skipped_total, driver.task.times.operators[0].stream_time_ms) == (1, 5)


@pytest.mark.parametrize("at", ["-1", "9223372036854775808", "1.5", "null"])
def test_a_time_that_is_none_is_refused_where_it_is_forwarded(at: str) -> None:
    """A record with a negative or a missing time is rejected with a message that says so."""
    builder = StreamsBuilder()
    builder.stream("in").process(Timed, name="timed").to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers())
    for time in (at, "0", "9223372036854775807"):
        driver.pipe("in", key=b"a", value=b'{"at":%s}' % time.encode(), timestamp=5)
    (dead_letter,) = [parse_dead_letter(as_consumed(record)) for record in driver.read("in-dlq")]
    assert (dead_letter.stage, dead_letter.record.offset) == ("process", 0)
    assert dead_letter.message.startswith("a record's timestamp must be a whole number of ms from 0 to 2^63 - 1, got ")
    assert [record.timestamp for record in driver.read("out")] == [0, 2**63 - 1]
