"""Conversion of the Java clients' properties to our clients' settings."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.runtime.client_settings import (
    consumer_settings,
    kafka_settings,
    producer_settings,
    sink_group_id,
    unknown_properties,
)


def test_names_are_java_names_with_underscores() -> None:
    """Each client takes the properties that it has a setting for."""
    props = {"bootstrap.servers": "a:1", "linger.ms": "7", "auto.offset.reset": "earliest", "acks": "all"}
    assert kafka_settings(props)[0].bootstrap_servers == "a:1"
    assert producer_settings(props).linger_ms == 7
    assert consumer_settings(props, group_id="connect-x").auto_offset_reset == "earliest"
    assert consumer_settings(props, group_id="connect-x").group_id == "connect-x"


def test_credentials_come_from_jaas() -> None:
    """User and password are read from `sasl.jaas.config`, quoted or not."""
    jaas = 'org.apache.kafka.common.security.plain.PlainLoginModule required username="ann" password=s3cret;'
    props = {"security.protocol": "SASL_PLAINTEXT", "sasl.mechanism": "PLAIN", "sasl.jaas.config": jaas}
    kafka, unknown = kafka_settings(props)
    assert kafka.sasl_username == "ann"
    assert kafka.sasl_password is not None
    assert kafka.sasl_password.get_secret_value() == "s3cret"
    assert unknown == []


def test_invalid_values_are_named() -> None:
    """An invalid property is a ConfigError that names it."""
    with pytest.raises(ConfigError, match="linger_ms"):
        producer_settings({"linger.ms": "soon"})


def test_unknown_properties_are_listed() -> None:
    """Properties without an equivalent are listed, except those that may be ignored silently."""
    props = {"metric.reporters": "1", "key.serializer": "x", "linger.ms": "1"}
    assert unknown_properties(props) == ["metric.reporters"]


def test_a_sink_reads_in_its_own_group() -> None:
    """A sink's group is named after the connector, unless its config overrides it."""
    assert sink_group_id("snk", {}) == "connect-snk"
    assert sink_group_id("snk", {"consumer.override.group.id": "g"}) == "g"
    assert sink_group_id("snk", {"consumer.override.group.id": ""}) == "connect-snk"
