"""The embedded Kafka before a broker is started: its configuration, and the command lines of its JVMs.

tests/integration/test_embedded_kafka.py has the tests with a broker.
"""

from __future__ import annotations

import asyncio
import base64
import xml.etree.ElementTree as ET
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.services.local.broker_config import (
    CLIENT_LISTENER,
    CONTROLLER_LISTENER,
    RESERVED_PROPERTIES,
    EmbeddedKafkaSettings,
    broker_archive_path,
    broker_properties,
    log4j_config,
)
from penstock.services.local.embedded_kafka import (
    EmbeddedKafka,
    KafkaDied,
    broker_command,
    format_storage_command,
    new_cluster_id,
)
from penstock.services.local.kafka_command import main
from penstock.services.local.settings import UpSettings
from penstock.shared.common.errors import ConfigError, IllegalState, JarsUnavailable
from penstock.shared.common.java import installed_java
from penstock.shared.common.java.installed_java import Java
from penstock.shared.common.settings import KafkaSettings

JAVA = Java(Path("/usr/bin/java"), 17, "PATH")


def test_the_address_before_the_start_is_an_error(tmp_path: Path) -> None:
    """Before the start the address and `pause` are IllegalState."""
    kafka = EmbeddedKafka(tmp_path)
    with pytest.raises(IllegalState):
        _ = kafka.bootstrap_servers
    with pytest.raises(IllegalState):
        kafka.pause()
    assert "not started" in repr(kafka)


async def test_stop_without_start_does_nothing(tmp_path: Path) -> None:
    """A stop without a start does nothing."""
    kafka = EmbeddedKafka(tmp_path / "kafka")
    await kafka.stop()
    assert not (tmp_path / "kafka").exists()


async def test_a_broker_that_died_can_be_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A start is an IllegalState only while the broker runs. `wait` still reports the end of the broker before."""
    kafka = EmbeddedKafka(tmp_path, java=JAVA, jars=tmp_path)
    ended = asyncio.Event()

    async def launch(*_: object) -> None:
        child: Any = SimpleNamespace(returncode=None, wait=ended.wait)
        kafka._child, kafka._ports = child, dict.fromkeys((CLIENT_LISTENER, CONTROLLER_LISTENER), 1)

    monkeypatch.setattr(kafka, "_start_on_free_ports", launch)
    monkeypatch.setattr(kafka, "_explain_broker_end", lambda child: "killed")
    await kafka.start()
    with pytest.raises(IllegalState, match="already running"):
        await kafka.start()
    died: Any = kafka.child
    died.returncode = -9
    waiting = asyncio.ensure_future(kafka.wait())
    starting = asyncio.ensure_future(kafka.start())
    ended.set()
    await starting
    assert kafka.child is not died
    with pytest.raises(KafkaDied, match="killed"):
        await waiting


async def test_missing_java_is_an_error_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without Java the data folder is not created."""
    monkeypatch.setattr(installed_java, "_LINUX_FOLDER", tmp_path / "jvm")
    with pytest.raises(installed_java.JavaNotFound):
        await EmbeddedKafka(tmp_path / "kafka", environ={"PATH": ""}).start()
    assert not (tmp_path / "kafka").exists()


async def test_missing_jars_are_an_error_before_anything_is_written(tmp_path: Path) -> None:
    """Without a writable cache of jars the data folder is not created."""
    (tmp_path / "java").write_text("#!/bin/sh\necho 'openjdk version \"17.0.1\"' >&2\n")
    (tmp_path / "java").chmod(0o755)
    environ = {"PATH": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path / "java")}
    with pytest.raises(JarsUnavailable, match="cannot be written"):
        await EmbeddedKafka(tmp_path / "kafka", environ=environ).start()
    assert not (tmp_path / "kafka").exists()


def test_cluster_ids_are_kafkas_uuids() -> None:
    """A cluster id is 16 bytes in 22 characters of URL-safe base64, and usable as a command-line argument."""
    ids = {new_cluster_id() for _ in range(300)}
    assert len(ids) == 300
    assert all(len(i) == 22 and not i.startswith("-") and len(base64.urlsafe_b64decode(i + "==")) == 16 for i in ids)


def test_heap_is_bounded_and_options_are_passed() -> None:
    """The heap's limit and the user's options precede the class on the command line."""
    settings = EmbeddedKafkaSettings(heap_mb=300, jvm_options=("-Dx=y",))
    command = broker_command(JAVA, Path("/jars"), settings)
    assert command[:2] == ["/usr/bin/java", "-Xmx300m"]
    assert command.index("-Dx=y") < command.index("kafka.Kafka")
    assert "/jars/*" in command


def test_a_broker_uses_the_class_archive_that_is_there(tmp_path: Path) -> None:
    """No option names a missing file. Both the broker and the formatting use an existing one."""
    jars = tmp_path / "kafka-4.1.1"
    archive = broker_archive_path(JAVA, jars)
    commands = (broker_command(JAVA, jars, EmbeddedKafkaSettings()), format_storage_command(JAVA, jars, "id"))
    assert not any("SharedArchiveFile" in word for command in commands for word in command)
    archive.touch()
    option = f"-XX:SharedArchiveFile={archive}"
    assert option in broker_command(JAVA, jars, EmbeddedKafkaSettings())
    assert option in format_storage_command(JAVA, jars, "id")


def test_class_path_cannot_hold_a_colon() -> None:
    """A cache folder with a colon is a ConfigError."""
    with pytest.raises(ConfigError, match="/odd:place"):
        format_storage_command(JAVA, Path("/odd:place"), "id")


PORTS = {"PLAINTEXT": 21001, "CONTROLLER": 21002}


def test_listeners_and_ports_fit_together() -> None:
    """Each listener has its port and protocol, and the controller is not advertised."""
    settings = EmbeddedKafkaSettings(listeners={"SECURE": "SASL_SSL"})
    properties = broker_properties(settings, {**PORTS, "SECURE": 21003})
    assert properties["listeners"] == (
        "PLAINTEXT://127.0.0.1:21001,CONTROLLER://127.0.0.1:21002,SECURE://127.0.0.1:21003"
    )
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:21001,SECURE://127.0.0.1:21003"
    assert properties["listener.security.protocol.map"] == "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:21002"


def test_an_ipv6_host_is_in_brackets(tmp_path: Path) -> None:
    """With an IPv6 host the listeners and the bootstrap servers have it in brackets."""
    settings = EmbeddedKafkaSettings(host="::1")
    properties = broker_properties(settings, PORTS)
    assert properties["listeners"] == "PLAINTEXT://[::1]:21001,CONTROLLER://[::1]:21002"
    assert properties["advertised.listeners"] == "PLAINTEXT://[::1]:21001"
    assert properties["controller.quorum.voters"] == "1@[::1]:21002"
    kafka = EmbeddedKafka(tmp_path, settings)
    kafka._ports = PORTS
    assert KafkaSettings(bootstrap_servers=kafka.bootstrap_servers).bootstrap_servers == "[::1]:21001"


def test_a_host_that_clients_cannot_use_is_an_error() -> None:
    """Kafka does not advertise 0.0.0.0, so the setting rejects it."""
    with pytest.raises(ConfigError, match=r"broker\.host: .*0\.0\.0\.0 cannot be advertised"):
        UpSettings.load(["--broker.host=0.0.0.0"], environ={})


def test_old_event_times_are_not_deleted() -> None:
    """The broker's default retention is unlimited."""
    assert broker_properties(EmbeddedKafkaSettings(), PORTS)["log.retention.hours"] == "-1"


@pytest.mark.parametrize("name", ["log.retention.hours", "log.retention.minutes", "log.retention.ms"])
def test_a_retention_in_each_unit_replaces_the_default(name: str) -> None:
    """A retention in hours, minutes or ms is in force: no property that Kafka prefers to it is set.

    Kafka prefers ms to minutes, and minutes to hours.
    """
    properties = broker_properties(EmbeddedKafkaSettings(properties={name: "7"}), PORTS)
    preferred = ("log.retention.ms", "log.retention.minutes", "log.retention.hours")
    assert next(properties[one] for one in preferred if one in properties) == "7"


def test_settings_win_over_defaults() -> None:
    """A property of the settings replaces the embedded broker's default."""
    settings = EmbeddedKafkaSettings(properties={"log.retention.ms": "5", "message.max.bytes": "9"})
    properties = broker_properties(settings, PORTS)
    assert (properties["log.retention.ms"], properties["message.max.bytes"]) == ("5", "9")


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_reserved_properties_are_rejected(name: str) -> None:
    """A property that the embedded broker sets itself is a ConfigError with its name."""
    with pytest.raises(ConfigError, match=f"{name} cannot be set"):
        EmbeddedKafkaSettings(properties={name: "x"})


@pytest.mark.parametrize("name", ["PLAINTEXT", "CONTROLLER"])
def test_reserved_listener_names_are_rejected(name: str) -> None:
    """The names of the two built-in listeners are a ConfigError."""
    with pytest.raises(ConfigError, match=f"{name} is a listener"):
        EmbeddedKafkaSettings(listeners={name: "SSL"})


def test_log_of_the_broker_is_bounded() -> None:
    """The log4j config is well formed XML that rolls by size and keeps a fixed number of files."""
    config = ET.fromstring(log4j_config().encode())
    assert config.find(".//SizeBasedTriggeringPolicy") is not None
    assert config.find(".//DefaultRolloverStrategy").get("max") == "2"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--port", "99999"], "penstock kafka: argument --port: must be a port from 0 to 65535, got '99999'"),
        (["--port=-1"], "penstock kafka: argument --port: must be a port from 0 to 65535, got '-1'"),
        (["--prot", "1"], "penstock kafka: unrecognized arguments: --prot 1"),
    ],
)
def test_an_invalid_flag_of_the_command_is_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid flag ends with status 2 and one line."""
    with pytest.raises(SystemExit) as left:
        main(arguments)
    assert left.value.code == 2
    assert capsys.readouterr().err == f"{message}\n"
