"""The outcome of a record at each stage under each exception handler."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.common.errors import ProcessingFailed
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor
from penstock.shared.streams.record import Record
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.consumed import as_consumed

BAD = {"deserialize": b"{", "process": b'{"n":0}', "produce": b'{"n":1}'}
SETTINGS = {
    "deserialize": "deserialization_exception_handler",
    "process": "processing_exception_handler",
    "produce": "production_exception_handler",
}


def encode(record: Any) -> tuple[bytes | None, bytes | None]:
    if record.value == 1:
        raise ValueError("not to be written")
    return None, b"%d" % record.value


def driver_of(**handlers: Any) -> TopologyTestDriver:
    """A node that raises at n = 0 and a sink that raises at n = 1."""
    builder = StreamsBuilder()
    builder.stream("in").map_values(lambda value: value["n"] // value["n"] * value["n"]).to("out", encode)
    return TopologyTestDriver(builder.build(), errors=ErrorHandlers(**handlers))


def pipe(driver: TopologyTestDriver, *values: bytes) -> list[bytes | None]:
    for value in values:
        driver.pipe("in", key=b"k", value=value)
    return [record.value for record in driver.read("out")]


@pytest.mark.parametrize("stage", BAD)
def test_dead_letter(stage: str) -> None:
    """By default a record goes to the dead-letter topic, with the stage that failed and the application's
    incarnation."""
    driver = driver_of()
    driver.task.changelog_id = "an id"
    assert pipe(driver, b'{"n":2}', BAD[stage], b'{"n":3}') == [b"2", b"3"]
    (dead,) = driver.read("in-dlq")
    assert dead.headers[-1] == ("penstock.dlq.changelog_id", b"an id")
    dead_letter = parse_dead_letter(as_consumed(dead))
    assert (dead_letter.stage, dead_letter.record.offset) == (stage, 1)


@pytest.mark.parametrize("stage", BAD)
def test_continue(stage: str) -> None:
    """`continue` leaves the record out and counts it as skipped, by stage."""
    driver = driver_of(**{stage: "continue"})
    assert pipe(driver, b'{"n":2}', BAD[stage], b'{"n":3}') == [b"2", b"3"]
    assert (driver.read("in-dlq"), driver.task.metrics.skipped_total) == ([], 1)
    assert driver.task.metrics.rejected_at == {"skipped": "in-0@1"}


@pytest.mark.parametrize("stage", BAD)
def test_fail(stage: str) -> None:
    """With `fail` the task stops before the record, and the error names the record and the setting. Other stages keep
    their own handler."""
    driver = driver_of(**{stage: "fail"})
    others = [value for name, value in BAD.items() if name != stage]
    pipe(driver, b'{"n":2}', *others)
    assert len(driver.read("in-dlq")) == 2
    with pytest.raises(ProcessingFailed, match=rf"in-0@3 \({SETTINGS[stage]} is fail\)"):
        pipe(driver, BAD[stage])
    assert driver.task.sources == {"in": 3}


def test_a_processor_that_fails_after_a_store_change_ends_the_task() -> None:
    """A processor that raises after changing its own store ends the task, under any handler."""

    class Half(Processor):
        def process(self, record: Record) -> None:
            self.context.store("rows").put(record.key, record.value)
            raise KeyError("half")

    builder = StreamsBuilder()
    builder.stream("in").process_values(Half, builder.add_store("rows")).to("out")
    driver = TopologyTestDriver(builder.build(), errors=ErrorHandlers("continue", "continue", "continue"))
    with pytest.raises(ProcessingFailed, match=r"in-0@0.*store"):
        driver.pipe("in", key=b"k", value=b"{}")
