"""The embedded broker's configuration files."""

from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from penstock.services.local.broker_config import (
    RESERVED_PROPERTIES,
    EmbeddedKafkaSettings,
    broker_properties,
    log4j_config,
)
from penstock.shared.common.errors import ConfigError

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


def test_log_of_the_broker_is_bounded() -> None:
    """The log4j config is well formed XML that rolls by size and keeps a fixed number of files."""
    config = ET.fromstring(log4j_config().encode())
    assert config.find(".//SizeBasedTriggeringPolicy") is not None
    assert config.find(".//DefaultRolloverStrategy").get("max") == "2"  # type: ignore[union-attr]
