"""The settings of a local set-up's Connect worker."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import SecretStr

from penstock.services.local.connect_worker import make_connect_worker, worker_properties
from penstock.services.local.settings import ConnectWorkerSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import HttpSettings, KafkaSettings


def test_a_worker_has_the_services_settings() -> None:
    """The worker's properties have Kafka's and its own address, the common token, and its own settings."""
    settings = ConnectWorkerSettings(
        kafka=KafkaSettings(bootstrap_servers="127.0.0.1:1"),
        http=HttpSettings(host="127.0.0.1", port=2),
        auth_token=SecretStr("0123456789abcdef"),
        connect={"offset.flush.interval.ms": "9"},
        connect_files=Path("/data/files"),
    )
    found = worker_properties(settings)
    assert (found["bootstrap.servers"], found["listeners"]) == ("127.0.0.1:1", "http://127.0.0.1:2")
    assert found["connect.files.allowed"] == "/data/files"
    assert (found["rest.auth.token"], found["offset.flush.interval.ms"]) == ("0123456789abcdef", "9")


async def test_an_invalid_setting_is_an_error_before_the_start() -> None:
    """An invalid setting is a ConfigError with its name before anything starts."""
    with pytest.raises(ConfigError, match=r"offset\.flush\.interval\.ms"):
        make_connect_worker(ConnectWorkerSettings(connect={"offset.flush.interval.ms": "soon"}))
