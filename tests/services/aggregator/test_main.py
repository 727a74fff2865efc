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
from shared.common.settings import LogSettings

MODULE = """
from shared.streams.dsl import StreamsBuilder

def build(topic="in", gap="10"):
    builder = StreamsBuilder()
    builder.stream(topic).to(f"{topic}-{gap}")
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
