"""Redaction of secrets in configs, and how a redacted config is restored."""

from __future__ import annotations

import pytest

from penstock.shared.connect.connectors.http import HttpSinkConnector
from penstock.shared.connect.connectors.postgres.sink import PostgresSinkConnector
from penstock.shared.connect.errors import BadRequest
from penstock.shared.connect.redaction import is_secret, redacted, restored

CONFIG = {
    "connection.password": "pl41n",
    "connection.user": "ann",
    "producer.override.sasl.jaas.config": "x",
    "value.converter.basic.auth.user.info": "${env:INFO}",
    "other.password": "",
}


def test_secrets_are_hidden_and_variables_are_not() -> None:
    """Secrets are hidden by the setting's type or name; variables and empty values are not."""
    assert redacted(CONFIG, PostgresSinkConnector) == {
        **CONFIG,
        "connection.password": "[hidden]",
        "producer.override.sasl.jaas.config": "[hidden]",
    }
    assert not is_secret("connection.user", PostgresSinkConnector)


def test_a_config_that_was_read_can_be_written_back() -> None:
    """A redacted value keeps the stored one; without a stored value it is a BadRequest."""
    sent = {**redacted(CONFIG, PostgresSinkConnector), "connection.user": "bob", "other.password": "new"}
    assert restored(sent, CONFIG, PostgresSinkConnector) == {
        **CONFIG,
        "connection.user": "bob",
        "other.password": "new",
    }
    with pytest.raises(BadRequest, match=r"connection\.password.*\[hidden\]"):
        restored(sent, {}, PostgresSinkConnector)
    assert restored({"file": "[hidden]"}, {}, None) == {"file": "[hidden]"}


URL = "postgresql://ann:pl41n@db/shop?sslmode=require"


def test_passwords_of_urls_are_hidden() -> None:
    """A URL's password is hidden, and restored only for the same URL."""
    config = {"connection.url": URL, "http.url": "http://api/items?page=1"}
    assert redacted(config, PostgresSinkConnector) == {
        "connection.url": "postgresql://ann:[hidden]@db/shop?sslmode=require",
        "http.url": "http://api/items?page=1",
    }
    assert restored(redacted(config, PostgresSinkConnector), config, PostgresSinkConnector) == config
    with pytest.raises(BadRequest, match=r"connection\.url.*\[hidden\]"):
        restored({"connection.url": URL.replace("pl41n@db", "[hidden]@other")}, config, PostgresSinkConnector)


def test_headers_and_private_keys_are_hidden() -> None:
    """HTTP headers and PEM keys are hidden."""
    config = {"http.headers": "Authorization: Bearer t0k3n", "producer.override.ssl.keystore.key": "-----BEGIN PRIVATE"}
    assert set(redacted(config, HttpSinkConnector).values()) == {"[hidden]"}
    assert set(redacted(config, None).values()) == {"[hidden]"}
