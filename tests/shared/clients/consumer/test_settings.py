"""The consumer's settings and their contradictions."""

from __future__ import annotations

import pytest

from penstock.shared.clients.consumer.settings import ConsumerSettings
from penstock.shared.clients.producer import ProducerSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import KafkaSettings, Section


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"commit_strategy": "auto"}, "commit_strategy=auto needs a group_id"),
        ({"group_instance_id": "i"}, "group_instance_id needs a group_id"),
        (
            {"group_id": "g", "heartbeat_interval_ms": 5_000, "session_timeout_ms": 5_000},
            "must be below session_timeout",
        ),
        ({"group_id": ""}, "group_id"),
        ({"max_poll_records": 0}, "max_poll_records"),
        ({"max_poll_interval_ms": 2**31}, "max_poll_interval_ms"),
        ({"session_timeout_ms": 2**31}, "session_timeout_ms"),
        ({"fetch_min_bytes": 2**31}, "fetch_min_bytes"),
        ({"fetch_max_bytes": 2**31}, "fetch_max_bytes"),
        ({"fetch_max_wait_ms": 2**31}, "fetch_max_wait_ms"),
        ({"max_partition_fetch_bytes": 2**31}, "max_partition_fetch_bytes"),
        ({"fetch_buffer_bytes": 0}, "fetch_buffer_bytes"),
        ({"auto_offset_reset": "by_duration:soon"}, "'soon' is not a duration"),
        ({"auto_offset_reset": "first"}, "'first'.*earliest, latest, none"),
    ],
)
def test_contradictory_settings_are_rejected(wrong: dict[str, object], message: str) -> None:
    """Settings that cannot be combined are rejected by name."""
    with pytest.raises(ConfigError, match=message):
        ConsumerSettings.model_validate(wrong)


def test_javas_defaults() -> None:
    """The defaults are those of Java's consumer."""
    settings = ConsumerSettings()
    assert (settings.auto_offset_reset, settings.isolation_level) == ("latest", "read_uncommitted")
    assert (settings.session_timeout_ms, settings.heartbeat_interval_ms, settings.max_poll_interval_ms) == (
        45_000,
        3_000,
        300_000,
    )
    assert settings.max_poll_records == 500


def test_a_reset_by_duration() -> None:
    """A reset policy may be a duration in either notation."""
    for text in ("none", "by_duration:P7D", "by_duration:90m"):
        assert ConsumerSettings(auto_offset_reset=text).auto_offset_reset == text


@pytest.mark.parametrize(
    ("settings", "name", "use"),
    [
        (ConsumerSettings, "enable_auto_commit", 'commit_strategy="auto"'),
        (ConsumerSettings, "group.protocol", "classic protocol"),
        (ConsumerSettings, "client_rack", "reads from the leader"),
        (ConsumerSettings, "enable.auto.commit", 'commit_strategy="auto"'),
        (ConsumerSettings, "group.id", "use group_id"),
        (ConsumerSettings, "bootstrap.servers", "KafkaSettings"),
        (ConsumerSettings, "value_deserializer", "Consumer("),
        (ProducerSettings, "client_id", "KafkaSettings"),
        (ProducerSettings, "socket.connection.setup.timeout.ms", "it is a setting of KafkaSettings"),
        (ProducerSettings, "max_batch_size", "use batch_size"),
        (ProducerSettings, "queue.buffering.max.ms", "use linger_ms"),
        (ProducerSettings, "linger.ms", "use linger_ms"),
        (KafkaSettings, "sasl_plain_password", "use sasl_password"),
    ],
)
def test_settings_of_other_clients_are_rejected(settings: type[Section], name: str, use: str) -> None:
    """The error names the equivalent setting and does not show the value."""
    with pytest.raises(ConfigError, match="no such setting") as raised:
        settings(**{name: "given"})
    assert use in str(raised.value)
    assert "given" not in str(raised.value)
