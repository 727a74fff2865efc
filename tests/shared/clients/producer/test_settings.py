"""The producer's settings and their contradictions."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.shared.clients.producer.settings import ProducerSettings, with_timeouts_that_fit
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import KafkaSettings


@pytest.mark.parametrize(("given", "meant"), [("all", "all"), (-1, "all"), ("-1", "all"), ("1", 1), (1, 1), (0, 0)])
def test_acks(given: object, meant: object) -> None:
    """acks takes Kafka's spellings."""
    assert ProducerSettings.model_validate({"acks": given}).acks == meant


@pytest.mark.parametrize("conflict", [{"acks": 1}, {"retries": 0}, {"max_in_flight_requests_per_connection": 6}])
def test_idempotence_and_what_contradicts_it(conflict: dict[str, int]) -> None:
    """Explicit idempotence rejects contradictory settings, the default is switched off. Transactions require it."""
    (name,) = conflict
    with capture_logs() as logged:
        assert ProducerSettings().enable_idempotence
        assert not ProducerSettings.model_validate({**conflict, "enable_idempotence": False}).enable_idempotence
    assert logged == []
    with capture_logs() as logged:
        assert not ProducerSettings.model_validate(conflict).enable_idempotence
    (line,) = logged
    assert (line["event"], line["log_level"]) == ("idempotence is switched off", "warning")
    assert line["because"].startswith(f"{name}={conflict[name]} ")
    with pytest.raises(ConfigError, match=f"enable_idempotence=true contradicts {name}"):
        ProducerSettings.model_validate({"enable_idempotence": True, **conflict})
    with pytest.raises(ConfigError, match=f"transactional_id needs idempotence.*{name}"):
        ProducerSettings.model_validate({"transactional_id": "tx", **conflict})


def test_a_delivery_timeout_that_is_too_short() -> None:
    """The default is raised to linger plus one request, with a warning. An explicit value is rejected."""
    kafka = KafkaSettings(request_timeout_ms=115_000)
    fitting = ProducerSettings(linger_ms=5_000)
    with capture_logs() as logged:
        assert with_timeouts_that_fit(kafka, fitting) is fitting
    assert logged == []
    with capture_logs() as logged:
        raised = with_timeouts_that_fit(kafka, ProducerSettings(linger_ms=6_000))
    assert (raised.delivery_timeout_ms, raised.linger_ms) == (121_000, 6_000)
    assert [(one["log_level"], one["delivery_timeout_ms"]) for one in logged] == [("warning", 121_000)]
    wrong = ProducerSettings(linger_ms=6_000, delivery_timeout_ms=120_999)
    with pytest.raises(ConfigError, match=r"delivery_timeout_ms=120999.*linger_ms.*121000"):
        with_timeouts_that_fit(kafka, wrong)


def test_transactions_without_idempotence() -> None:
    """Switching idempotence off contradicts a transactional id."""
    with pytest.raises(ConfigError, match="switched off"):
        ProducerSettings(transactional_id="tx", enable_idempotence=False)


def test_defaults_are_javas() -> None:
    """The defaults are those of Kafka 4's producer."""
    settings = ProducerSettings()
    assert (settings.acks, settings.linger_ms, settings.batch_size) == ("all", 5, 16_384)
    assert (settings.buffer_memory, settings.max_request_size) == (32 * 1024**2, 1024**2)
    assert (settings.max_block_ms, settings.delivery_timeout_ms) == (60_000, 120_000)
    assert (settings.retries, settings.retry_backoff_max_ms) == (2**31 - 1, 1_000)
    assert (settings.max_in_flight_requests_per_connection, settings.compression_type) == (5, "none")


def test_compression_levels() -> None:
    """The levels have Java's names and defaults. The effective level is that of the compression type."""
    settings = ProducerSettings()
    levels = settings.compression_gzip_level, settings.compression_lz4_level, settings.compression_zstd_level
    assert levels == (-1, 9, 3)
    assert settings.compression_level is None
    given = {"compression_gzip_level": 1, "compression_lz4_level": 17, "compression_zstd_level": -131_072}
    found = [ProducerSettings(compression_type=t, **given).compression_level for t in ("gzip", "snappy", "lz4", "zstd")]  # type: ignore[arg-type]
    assert found == [1, None, 17, -131_072]


@pytest.mark.parametrize(
    "wrong",
    [
        {"acks": 2},
        {"batch_size": 0},
        {"linger_ms": -1},
        {"compression_type": "brotli"},
        {"compression_gzip_level": 0},
        {"compression_gzip_level": 10},
        {"compression_lz4_level": 18},
        {"compression_zstd_level": 23},
        {"retries": -1},
        {"max_in_flight_requests_per_connection": 0},
        {"transactional_id": ""},
    ],
)
def test_values_out_of_range_are_rejected(wrong: dict[str, object]) -> None:
    """The error names the setting."""
    (name,) = wrong
    with pytest.raises(ConfigError, match=name):
        ProducerSettings.model_validate(wrong)
