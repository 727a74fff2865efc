"""Settings of standalone workers."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.runtime.worker_config import StandaloneConfig

PROPS = {
    "bootstrap.servers": "a:9092",
    "key.converter": "org.apache.kafka.connect.json.JsonConverter",
    "value.converter": "org.apache.kafka.connect.json.JsonConverter",
}


def test_standalone_needs_a_file() -> None:
    """A standalone worker requires an offset file."""
    with pytest.raises(ConfigError, match=r"offset\.storage\.file\.filename"):
        StandaloneConfig(PROPS)
    assert not StandaloneConfig(PROPS | {"offset.storage.file.filename": "x"}).exactly_once


def test_standalone_workers_have_no_processes() -> None:
    """A standalone worker rejects process isolation, since one process uses its offset file."""
    with pytest.raises(ConfigError, match=r"penstock\.task\.isolation"):
        StandaloneConfig(PROPS | {"offset.storage.file.filename": "x", "penstock.task.isolation": "process"})
