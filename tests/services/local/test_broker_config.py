"""The embedded broker's config files and command lines."""

from __future__ import annotations

import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.local.broker_config import (
    RESERVED_PROPERTIES,
    EmbeddedKafkaSettings,
    broker_properties,
    format_command,
    kafka_archive,
    log4j_config,
    render_properties,
    server_command,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.java.installed_java import Java

PORTS = {"PLAINTEXT": 21001, "CONTROLLER": 21002}
JAVA = Java(Path("/usr/bin/java"), 17, "PATH")


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


def test_old_event_times_are_not_deleted() -> None:
    """The broker's default retention is unlimited."""
    assert broker_properties(EmbeddedKafkaSettings(), PORTS)["log.retention.ms"] == "-1"


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


def read_properties(text: str) -> dict[str, str]:
    """java.util.Properties.load for the output of `render_properties`, by the rules of its documentation."""
    named = {"n": "\n", "r": "\r", "t": "\t"}
    read: dict[str, str] = {}
    for line in text.split("\n")[:-1]:
        parts, units, i = [[], []], 0, 0  # type: ignore[var-annotated]
        while i < len(line):
            character = line[i]
            if character == "\\" and line[i + 1] == "u":
                parts[units].append(chr(int(line[i + 2 : i + 6], 16)))
                i += 6
            elif character == "\\":
                parts[units].append(named.get(line[i + 1], line[i + 1]))
                i += 2
            elif character == "=" and units == 0:
                units, i = 1, i + 1
            else:
                parts[units].append(character)
                i += 1
        name, value = ("".join(p).encode("utf-16", "surrogatepass").decode("utf-16") for p in parts)
        read[name] = value
    return read


texts = st.text(st.characters(exclude_categories=("Cs",)))


@given(st.dictionaries(texts.filter(bool), texts))
def test_properties_round_trip(properties: dict[str, str]) -> None:
    """Any properties round-trip as one ASCII line each, as Java reads them."""
    text = render_properties(properties)
    assert text.isascii()
    assert text.count("\n") == len(properties)
    assert read_properties(text) == properties


def test_log_of_the_broker_is_bounded() -> None:
    """The log4j config is well formed XML that rolls by size and keeps a fixed number of files."""
    config = ET.fromstring(log4j_config().encode())
    assert config.find(".//SizeBasedTriggeringPolicy") is not None
    assert config.find(".//DefaultRolloverStrategy").get("max") == "2"  # type: ignore[union-attr]


def test_heap_is_bounded_and_options_are_passed() -> None:
    """The heap's limit and the user's options precede the class on the command line."""
    settings = EmbeddedKafkaSettings(heap_mb=300, jvm_options=("-Dx=y",))
    command = server_command(JAVA, Path("/jars"), settings)
    assert command[:2] == ["/usr/bin/java", "-Xmx300m"]
    assert command.index("-Dx=y") < command.index("kafka.Kafka")
    assert "/jars/*" in command


def test_a_broker_uses_the_class_archive_that_is_there(tmp_path: Path) -> None:
    """No option names a missing file. Both the broker and the formatting use an existing one."""
    jars = tmp_path / "kafka-4.1.1"
    archive = kafka_archive(JAVA, jars)
    commands = (server_command(JAVA, jars, EmbeddedKafkaSettings()), format_command(JAVA, jars, "id"))
    assert not any("SharedArchiveFile" in word for command in commands for word in command)
    archive.touch()
    option = f"-XX:SharedArchiveFile={archive}"
    assert option in server_command(JAVA, jars, EmbeddedKafkaSettings())
    assert option in format_command(JAVA, jars, "id")


def test_class_path_cannot_hold_a_colon() -> None:
    """A cache folder with a colon is a ConfigError."""
    with pytest.raises(ConfigError, match="/odd:place"):
        format_command(JAVA, Path("/odd:place"), "id")
