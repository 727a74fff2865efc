"""The DSL's processors without a store."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ProcessingFailed
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.testing.topology_test_driver import TopologyTestDriver


class Keeping(Processor):
    """A values processor that uses a store and a schedule, and holds records back until a commit."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.held: list[Record] = []

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self.rows = context.store("rows")
        context.schedule(
            10, PunctuationType.STREAM_TIME, lambda now: context.forward(Record("other", now, now)), start=10
        )

    def process(self, record: Record) -> None:
        self.rows.put(record.key, record.value)
        self.held.append(record)
        if record.value == "rekey":
            self.context.forward(record._replace(key="else"))

    def commit(self) -> None:
        while self.held:
            self.context.forward(self.held.pop())

    def close(self) -> None:
        self.calls.append("closed")


def test_a_values_processor_is_a_whole_processor() -> None:
    """A values processor has stores, schedules, commit and close. It may change keys only outside of `process`."""
    made: list[Keeping] = []

    def supplier() -> Keeping:
        made.append(Keeping())
        return made[-1]

    builder = StreamsBuilder()
    builder.stream("in").process_values(supplier, builder.add_store("rows", str)).to("out")
    driver = TopologyTestDriver(builder.build())
    driver.pipe("in", key=b"k", value=b'"a"', timestamp=12)
    assert [(r.key, r.value) for r in driver.read("out")] == [(b"other", b"12"), (b"k", b'"a"')]
    assert driver.store("rows").get("k") == "a"
    driver.task.close()
    assert made[-1].calls == ["closed"]
    with pytest.raises(ProcessingFailed, match=r"'else'.*'k'"):
        driver.pipe("in", key=b"k", value=b'"rekey"', timestamp=13)


def test_a_processor_that_rekeys_is_counted_in_one_place() -> None:
    """Records that `process` forwards pass a repartition topic before a grouping, and may have another key type."""

    class Rekeyed(Processor):
        def process(self, record: Record) -> None:
            self.context.forward(record._replace(key=record.value.encode()))

    builder = StreamsBuilder()
    stream = builder.stream("in").process(Rekeyed, name="users", key="bytes")
    stream.group_by_key().session_window(10)
    topology = builder.build()
    assert topology.internal_topics() == ["users-repartition"]
    assert [source.key for source in topology.sources()] == ["string", "bytes"]
