"""The aggregator as a service."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from services.aggregator.main import Aggregator, main
from services.aggregator.settings import AggregatorSettings
from shared.common import daemon, log
from shared.common.clock import SYSTEM_CLOCK
from shared.common.settings import LogSettings
from shared.streams.topics import Prepared

MODULE = """
from shared.streams.aggregations import Count
from shared.streams.dsl import StreamsBuilder

def build(topic="in", gap="10"):
    builder = StreamsBuilder()
    builder.stream(topic).to(f"{topic}-{gap}")
    return builder.build()

def of_days():
    builder = StreamsBuilder()
    sessions = builder.stream("in").group_by_key().session_window(10)
    sessions.aggregate("visits", day=Count()).on_close().to("out")
    return builder.build()
"""


@pytest.fixture(autouse=True)
def _module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "my_topologies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    sys.modules.pop("my_topologies", None)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


@pytest.mark.parametrize(("ends", "logged"), [("raises", "ZeroDivisionError"), ("returns", "'backlog' has ended")])
async def test_a_background_task_that_ends_takes_the_service_along(
    ends: str, logged: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service without its compactions or measurements does not go on as if it had them: exit status 1, and a line."""
    log.configure(LogSettings(format="json"), "test")
    aggregator = Aggregator(AggregatorSettings.load(["--topology=my_topologies:build"], environ={}))

    async def beside() -> None:
        if ends == "raises":
            raise ZeroDivisionError

    class Alone:
        """The aggregator without what needs Kafka to start and stop."""

        main_loop = aggregator.main_loop

        async def startup(self) -> None:
            aggregator.run_beside({"backlog": beside()})
            await asyncio.sleep(0)

        async def shutdown(self) -> None:
            pass

    assert await daemon.run(Alone(), 1_000) == 1
    said = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines()]
    assert {"level": "error", "event": "a background task has ended", "task": "backlog"}.items() <= said[0].items()
    assert said[1]["event"] == "failed"
    assert logged in str(said[1])


def test_main_says_it_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A topology that cannot be loaded ends the service at start-up: one line, exit status 2."""
    assert main(["--topology=my_topologies:biuld"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert said[-1].startswith("penstock aggregator: topology: my_topologies:biuld: ")


def test_a_name_that_the_lake_cannot_have_ends_it_at_start_up(capsys: pytest.CaptureFixture[str]) -> None:
    """Not the first compaction, when there is state that could be folded no more: one line, exit status 2."""
    assert main(["--topology=my_topologies:of_days", "--streams.lake=lake"]) == 2
    (said,) = capsys.readouterr().err.splitlines()[-1:]
    expected = "store 'visits': aggregation 'day': the lake's table closed/visits has a column 'day' of its own"
    assert said.startswith(f"penstock aggregator: {expected}")


async def test_that_no_partition_runs_is_told_and_is_no_failure() -> None:
    """Others may have them, or nobody, until the sessions of killed owners have ended: a restart would mend neither."""
    aggregator = Aggregator(AggregatorSettings.load(["--topology=my_topologies:build"], environ={}))
    aggregator._turned_ms = SYSTEM_CLOCK.monotonic_ms()
    aggregator.worker.topics = Prepared(4, 0)
    result = aggregator._check_tasks()
    assert result.ok
    assert result.detail.startswith("owns no partition: others have them")
    assert (result.facts["partitions_running"], result.facts["partitions"]) == (0, 4)
