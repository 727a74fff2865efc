"""A task's nodes: whose error it is, and what a sink refuses."""

from __future__ import annotations

import pytest

from shared.clients.connection import record_size
from shared.common.errors import RecordTooLarge
from shared.common.records import Columns, ConsumerRecord, ProducerRecord
from shared.streams.dsl import StreamsBuilder
from shared.streams.error_handlers import ErrorHandlers
from shared.streams.processor import ProcessingFailed, Record
from shared.streams.result_encoders import encode_json
from shared.streams.stream_task import StreamTask
from shared.streams.topology import SinkNode
from shared.streams.windowed_aggregate import WindowKey
from shared.streams.wiring import SinkWriter, Wiring


@pytest.mark.parametrize(("value", "node"), [(b"null", "filter-2"), (b"{}", "map_values-3"), (b'{"x":1}', "sink-4")])
def test_an_error_is_of_the_innermost_node(value: bytes, node: str) -> None:
    """Of a chain of nodes the one whose code raised is named, not those that had called it."""
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
    assert Wiring(builder.build(), 1_000, lambda record, window: None).node_of(KeyError()) is None


def test_a_sink_takes_what_the_producer_takes() -> None:
    """The limit is the producer's own measure of a record, headers included."""
    headers = (("trace", b"1" * 50),)
    size = record_size(b"k", b"12", list(headers))
    written: list[tuple[ProducerRecord, WindowKey | None]] = []
    sink = SinkWriter(SinkNode("sink", "out", encode_json), size, lambda *given: written.append(given))
    record = Record("k", 12, 7, headers)
    sink.process(record)
    windowed = record._replace(key=WindowKey("k", 5, 7))
    sink.process(windowed)
    expected = ProducerRecord("out", b"12", b"k", headers, None, 7)
    assert written == [(expected, None), (expected, WindowKey("k", 5, 7))]
    with pytest.raises(RecordTooLarge, match=f"topic out: a record of {size} bytes; max_request_size={size - 1}"):
        SinkWriter(SinkNode("sink", "out", encode_json), size - 1, lambda *given: None).process(record)
