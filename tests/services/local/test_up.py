"""The checks of `penstock up` before anything is started."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from penstock.services.local.broker_config import LOG_FOLDER
from penstock.services.local.embedded_kafka import META_PROPERTIES, EmbeddedKafka
from penstock.services.local.settings import UpSettings
from penstock.services.local.stack import ServiceSpec
from penstock.services.local.up import Up, main, require_topics
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import HttpSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.topology import Topology

MODULE = """
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder

def build():
    builder = StreamsBuilder()
    builder.stream("clicks").to("visits")
    return builder.build()
"""


@pytest.fixture(autouse=True)
def _own_folder_and_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "up_topologies.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = logging.root.handlers[:], logging.root.level
    yield
    sys.modules.pop("up_topologies", None)
    logging.root.handlers[:], logging.root.level = before


@pytest.mark.parametrize(("flag", "setting"), [("http.port", "http.port"), ("connect-port", "connect_port")])
def test_a_port_in_use_is_an_error_before_kafka_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: str, setting: str
) -> None:
    """A port in use ends with status 2 and one line with the setting, without a data folder."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        free = ["--http.port=0", "--connect-port=0"]
        assert main([*free, f"--{flag}={port}", "--data-dir=data", "--log.format=json"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert f"{setting}: port {port}" in line
    assert not (tmp_path / "data").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topic=clicks"], "reads the topic events, which Kafka does not have: `up` creates only clicks (--topic)"),
        (
            ["--topology=up_topologies:build"],
            "reads the topic clicks, which Kafka does not have: `up` creates only events",
        ),
        (
            ["--topology=up_topologies:build", "--topic=clicks"],
            "handles the topic sessions (--topics), which Kafka does not have: the topology up_topologies:build writes "
            "to visits, clicks-dlq",
        ),
        (["--topology=up_topologies:biuld"], "topology: up_topologies:biuld: "),
        (["--topology=nowhere:build"], "No module named 'nowhere'"),
    ],
    ids=["another topic", "another topology", "results that nobody writes", "no function", "no module"],
)
def test_a_topology_that_cannot_run_is_an_error_before_kafka_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], arguments: list[str], message: str
) -> None:
    """A topology that cannot run ends with status 2 and one line with topology and topic, without a data folder."""
    assert main([*arguments, "--http.port=0", "--connect-port=0", "--data-dir=data", "--log.format=json"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert not (tmp_path / "data").exists()


def test_an_invalid_setting_of_the_aggregator_is_an_error_before_kafka_is_started(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An invalid setting of the aggregator ends with status 2 and its name, without a data folder."""
    monkeypatch.setenv("PENSTOCK_COMPACTION__INTERVAL_MS", "soon")
    assert main(["--http.port=0", "--connect-port=0", "--data-dir=data", "--log.format=json"]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert "compaction.interval_ms" in line
    assert not (tmp_path / "data").exists()


class Started(Exception):
    """Raised when Kafka would be started."""


class BrokerWithData:
    """A broker with the data of an earlier start."""

    def has_data(self) -> bool:
        return True

    async def start(self) -> None:
        raise Started


async def test_a_broker_with_data_is_asked_for_its_topics() -> None:
    """With data of an earlier start, topics are checked only once Kafka runs."""
    settings = UpSettings(http=HttpSettings(port=0), connect_port=0, topology="up_topologies:build")
    up = Up(settings, Console(quiet=True))
    up._broker = BrokerWithData()  # type: ignore[assignment]
    with pytest.raises(Started):
        await up.startup()


class RunningBroker:
    """A broker that runs until it is cancelled."""

    async def wait(self) -> None:
        await asyncio.Event().wait()


async def test_a_service_with_an_invalid_setting_ends_up(tmp_path: Path) -> None:
    """A service that ends with status 2 is not restarted: `up` ends with the service's last output."""
    (tmp_path / "rejects.py").write_text("print('topics: unset'); raise SystemExit(2)")
    up = Up(UpSettings(), Console(quiet=True))
    up._broker = RunningBroker()  # type: ignore[assignment]
    path = {"PYTHONPATH": str(tmp_path)}
    service = await up._stack.start(ServiceSpec("consumer", {}, module="rejects", environment=path))
    with pytest.raises(ExceptionGroup) as ended:
        async with asyncio.timeout(20):
            await up.main_loop()
    (error,) = ended.value.exceptions
    assert isinstance(error, ConfigError)
    assert "topics: unset" in str(error)
    assert service.starts == 1


def joined() -> Topology:
    builder = StreamsBuilder()
    names = builder.global_table("names")
    named = builder.stream("events").join(names, lambda event, name: event, key=lambda record: record.key)
    by_name = named.key_by(lambda record: "k", name="by-name").group_by_key()
    by_name.tumbling_window(10).aggregate("s", n=Count()).on_close().to("sessions")
    return builder.build().of_application("app")


def test_topics_of_an_earlier_run_may_be_read() -> None:
    """Topics of sources and global tables must exist or be created by `up`; the topology's internal topics need not."""
    settings = UpSettings()
    require_topics(settings, joined(), ["names"])
    with pytest.raises(ConfigError, match="topic names"):
        require_topics(settings, joined(), ["clicks"])
    settings = UpSettings(topic="clicks", topics="a, sessions,clicks")
    with pytest.raises(ConfigError, match="topics events, names"):
        require_topics(settings, joined(), ())
    with pytest.raises(ConfigError, match="handles the topic a "):
        require_topics(settings, joined(), ["events", "names"])
    require_topics(settings, joined(), ["events", "names", "a"])


def test_a_folder_has_data_once_a_broker_ran_in_it(tmp_path: Path) -> None:
    """A folder has data once it is formatted."""
    kafka = EmbeddedKafka(tmp_path)
    assert not kafka.has_data()
    (tmp_path / LOG_FOLDER).mkdir()
    (tmp_path / LOG_FOLDER / META_PROPERTIES).touch()
    assert kafka.has_data()
