"""The broker's files and command lines."""

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
    log4j_config,
    render_properties,
    server_command,
)
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.java.installed_java import Java

PORTS = {"PLAINTEXT": 21001, "CONTROLLER": 21002}
JAVA = Java(Path("/usr/bin/java"), 17, "PATH")


def test_listeners_and_ports_fit_together() -> None:
    """Each listener has its port and protocol; clients are not told of the controller."""
    settings = EmbeddedKafkaSettings(listeners={"SECURE": "SASL_SSL"})
    properties = broker_properties(settings, {**PORTS, "SECURE": 21003})
    assert properties["listeners"] == (
        "PLAINTEXT://127.0.0.1:21001,CONTROLLER://127.0.0.1:21002,SECURE://127.0.0.1:21003"
    )
    assert properties["advertised.listeners"] == "PLAINTEXT://127.0.0.1:21001,SECURE://127.0.0.1:21003"
    assert properties["listener.security.protocol.map"] == "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,SECURE:SASL_SSL"
    assert properties["controller.quorum.voters"] == "1@127.0.0.1:21002"


def test_old_event_times_are_not_deleted() -> None:
    """The broker-wide retention is off."""
    assert broker_properties(EmbeddedKafkaSettings(), PORTS)["log.retention.ms"] == "-1"


def test_settings_win_over_defaults() -> None:
    """A property of the settings replaces the embedded broker's own."""
    settings = EmbeddedKafkaSettings(properties={"log.retention.ms": "5", "message.max.bytes": "9"})
    properties = broker_properties(settings, PORTS)
    assert (properties["log.retention.ms"], properties["message.max.bytes"]) == ("5", "9")


@pytest.mark.parametrize("name", sorted(RESERVED_PROPERTIES))
def test_properties_that_tie_it_to_folder_and_ports_are_refused(name: str) -> None:
    """They are refused by name rather than overwritten in silence."""
    with pytest.raises(ConfigError, match=f"{name} cannot be set"):
        EmbeddedKafkaSettings(properties={name: "x"})


@pytest.mark.parametrize("name", ["PLAINTEXT", "CONTROLLER"])
def test_listener_names_of_its_own_are_refused(name: str) -> None:
    """The two listeners that are always there cannot be given again."""
    with pytest.raises(ConfigError, match=f"{name} is a listener"):
        EmbeddedKafkaSettings(listeners={name: "SSL"})


def read_properties(text: str) -> dict[str, str]:
    """java.util.Properties.load for what `render_properties` writes, by the rules of its documentation."""
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
def test_properties_come_back_as_they_were_written(properties: dict[str, str]) -> None:
    """Whatever the characters: one ASCII line a property, and Java's reading gives the same mapping."""
    text = render_properties(properties)
    assert text.isascii()
    assert text.count("\n") == len(properties)
    assert read_properties(text) == properties


def test_log_of_the_broker_is_bounded() -> None:
    """log4j's file is well formed, rolls by size and keeps a fixed number."""
    config = ET.fromstring(log4j_config().encode())
    assert config.find(".//SizeBasedTriggeringPolicy") is not None
    assert config.find(".//DefaultRolloverStrategy").get("max") == "2"  # type: ignore[union-attr]


def test_heap_is_bounded_and_options_are_passed() -> None:
    """The heap's limit and the user's options are on the command line, before the class."""
    settings = EmbeddedKafkaSettings(heap_mb=300, jvm_options=("-Dx=y",))
    command = server_command(JAVA, Path("/jars"), settings)
    assert command[:2] == ["/usr/bin/java", "-Xmx300m"]
    assert command.index("-Dx=y") < command.index("kafka.Kafka")
    assert "/jars/*" in command


def test_class_path_cannot_hold_a_colon() -> None:
    """A cache folder with a colon is refused by its name instead of failing as a missing class."""
    with pytest.raises(ConfigError, match="/odd:place: a path with a colon"):
        format_command(JAVA, Path("/odd:place"), "id")
