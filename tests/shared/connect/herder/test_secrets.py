"""What REST shows of a config, and what it takes back."""

from __future__ import annotations

import pytest

from shared.connect.connectors.postgres.sink import PostgresSinkConnector
from shared.connect.herder.errors import BadRequest
from shared.connect.herder.secrets import is_secret, kept, shown

CONFIG = {
    "connection.password": "pl41n",
    "connection.user": "ann",
    "producer.override.sasl.jaas.config": "x",
    "value.converter.basic.auth.user.info": "${env:INFO}",
    "other.password": "",
}


def test_secrets_are_hidden_and_variables_are_not() -> None:
    """By the setting's type, else by its name; an empty value has nothing to hide."""
    assert shown(CONFIG, PostgresSinkConnector) == {
        **CONFIG,
        "connection.password": "[hidden]",
        "producer.override.sasl.jaas.config": "[hidden]",
    }
    assert not is_secret("connection.user", PostgresSinkConnector)


def test_a_config_that_was_read_can_be_written_back() -> None:
    """What was hidden stays as it is kept; new values are taken; where nothing was hidden it is refused."""
    sent = {**shown(CONFIG, PostgresSinkConnector), "connection.user": "bob", "other.password": "new"}
    assert kept(sent, CONFIG, PostgresSinkConnector) == {**CONFIG, "connection.user": "bob", "other.password": "new"}
    with pytest.raises(BadRequest, match=r"connection\.password: \[hidden\] stands for the value that is kept"):
        kept(sent, {}, PostgresSinkConnector)
    assert kept({"file": "[hidden]"}, {}, None) == {"file": "[hidden]"}
