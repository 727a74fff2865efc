"""The examples of docs/streams.md run, and its statements on punctuation hold."""

from __future__ import annotations

import re
from datetime import datetime, timedelta
from typing import Any

import pytest

from penstock import Processor, PunctuationType, Record, StreamsBuilder
from penstock.errors import ConfigError, IllegalState
from penstock.shared.streams.settings import StreamsSettings
from penstock.streams import ProcessorContext
from penstock.testing import TopologyTestDriver
from tests.documents import DOCS, blocks, names_of

DOCUMENT = DOCS / "streams.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")
STREAM, WALL = PunctuationType.STREAM_TIME, PunctuationType.WALL_CLOCK_TIME


class Scheduling(Processor):
    """Creates the given schedules, and forwards the time of each call."""

    def __init__(self, *schedules: tuple[Any, ...], **named: Any) -> None:
        self._schedules, self._named = schedules, named

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        for interval, kind in self._schedules:
            context.schedule(interval, kind, self.call, **self._named)

    def process(self, record: Record) -> None:
        """Ignores records: only the schedules forward."""

    def call(self, now_ms: int) -> None:
        self.context.forward(Record("now", {"at": now_ms}, now_ms))


def driver_of(*schedules: tuple[Any, ...], **named: Any) -> TopologyTestDriver:
    builder = StreamsBuilder()
    builder.stream("in").process(lambda: Scheduling(*schedules, **named)).to("out")
    return TopologyTestDriver(builder.build())


def calls(driver: TopologyTestDriver, *stream_times: int, wall_ms: int = 0) -> list[int | None]:
    for at in stream_times:
        driver.pipe("in", key=b"a", value=b"{}", timestamp=at)
    if wall_ms:
        driver.advance_wall_clock(wall_ms)
    return [record.timestamp for record in driver.read("out")]


def test_its_blocks_run() -> None:
    """Each topology of the document can be built, and the cart example writes the notes that the document shows."""
    shown = names_of(DOCUMENT)
    assert len(blocks(DOCUMENT)) == 5
    assert [note[0] for note in shown["notes"]] == [b"ann", b"all"]


def test_a_cart_that_closes_cancels_its_schedule() -> None:
    """Cancelling the handle that `schedule` returned ends the calls."""
    shown = names_of(DOCUMENT)
    driver = TopologyTestDriver(shown["builder"].build())
    driver.pipe("cart-events", key=b"ann", value=b'{"closes": true}', timestamp=0)
    driver.advance_wall_clock(600_000)
    assert driver.read("cart-notes") == []


def test_grids_without_a_start() -> None:
    """Without a start, a stream-time grid begins at 0 and a wall-clock grid one interval from now."""
    assert calls(driver_of((5, STREAM))) == []
    assert calls(driver_of((5, STREAM)), 0, 4, 5) == [0, 5]
    driver = driver_of((5, WALL))
    assert (calls(driver, wall_ms=4), calls(driver, wall_ms=1)) == ([], [5])


def test_missed_points_are_one_call() -> None:
    """Several missed grid points cause one call, and the grid stays the same."""
    driver = driver_of((5, STREAM), start=5)
    assert calls(driver, 4, 21, 24, 25) == [21, 25]


@pytest.mark.parametrize(("name", "after"), [("n", [1_000]), (None, [])])
def test_a_named_grid_survives(name: str | None, after: list[int]) -> None:
    """A named grid survives a restart. An unnamed grid begins one interval after the restart."""
    driver = driver_of((1_000, WALL), name=name)
    driver.pipe("in", key=b"a", value=b"{}", timestamp=0)
    driver.advance_wall_clock(500)
    driver.crash()
    driver.restore()
    assert calls(driver, wall_ms=500) == after


def test_what_it_says_is_refused_is_refused() -> None:
    """An invalid argument of `schedule` is rejected by its name, and so is a call outside the task's callbacks."""
    for schedule, named, argument in (
        ((0, STREAM), {}, "interval"),
        ((timedelta(microseconds=1_500), STREAM), {}, "interval"),
        ((5, "stream_time"), {}, "type"),
        ((5, WALL), {"start": datetime(2024, 1, 1)}, "start"),
        ((5, WALL), {"start": -1}, "start"),
    ):
        with pytest.raises(ConfigError, match=f"schedule: {argument}"):
            driver_of(schedule, **named)
    with pytest.raises(ConfigError, match="'n'"):
        driver_of((5, STREAM), (5, WALL), name="n")
    kept = Scheduling((5, STREAM))
    builder = StreamsBuilder()
    builder.stream("in").process(lambda: kept).to("out")
    TopologyTestDriver(builder.build())
    with pytest.raises(IllegalState, match="schedule"):
        kept.context.schedule(5, STREAM, kept.call)
    with pytest.raises(IllegalState, match="init"):
        Scheduling().context.schedule(5, STREAM, kept.call)


def test_what_it_names_is_there() -> None:
    """Each `streams.` setting that the document names exists."""
    named = set(re.findall(r"`streams\.([a-z_]+)", TEXT))
    assert len(named) > 10
    assert named - StreamsSettings.model_fields.keys() == set()
