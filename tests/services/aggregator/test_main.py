"""Loading a topology by name."""

from __future__ import annotations

import asyncio
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog

from services.aggregator.main import Aggregator, load_topology, main
from services.aggregator.settings import AggregatorSettings
from shared.common import daemon, log
from shared.common.errors import ConfigError
from shared.common.settings import LogSettings

MODULE = """
from shared.streams.dsl import StreamsBuilder

CONSTANT = 3

def build(topic="in", gap="10"):
    builder = StreamsBuilder()
    builder.stream(topic).to(f"{topic}-{gap}")
    return builder.build()

def unfinished():
    return StreamsBuilder()

def empty():
    return StreamsBuilder().build()
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


def test_a_function_of_the_current_folder() -> None:
    """A module of the current folder is found, and its function gets the options."""
    topology = load_topology("my_topologies:build", {"topic": "clicks", "gap": "5"})
    assert topology.source_topics() == ["clicks"]
    assert "clicks-5" in topology.output_topics()


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("no_such_module:build", {}, "no_such_module:build: No module named 'no_such_module'"),
        ("my_topologies:biuld", {}, "my_topologies:biuld: module 'my_topologies' has no attribute 'biuld'"),
        ("my_topologies:CONSTANT", {}, "my_topologies:CONSTANT: 'int' object is not callable"),
        ("my_topologies:build", {"gpa": "5"}, "unexpected keyword argument 'gpa'"),
        ("my_topologies:unfinished", {}, "my_topologies:unfinished returned StreamsBuilder, not a Topology"),
        ("my_topologies:empty", {}, "no stream was defined"),
    ],
)
def test_what_is_wrong_with_a_topology(name: str, options: dict[str, str], said: str) -> None:
    """A module, function or option that is not there, and what is no topology, is a ConfigError that says so."""
    with pytest.raises(ConfigError, match="topology: ") as raised:
        load_topology(name, options)
    assert said in str(raised.value)


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
