"""Settings of the producer service, and how the service ends if one is invalid."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.services.producer.main import main
from penstock.services.producer.settings import ProducerServiceSettings
from penstock.shared.common.errors import ConfigError

TOKEN = "a-token-of-enough-length"


def load(*arguments: str, **environ: str) -> ProducerServiceSettings:
    return ProducerServiceSettings.load(arguments, environ=environ)


def test_the_default_timeouts_are_consistent() -> None:
    """By default an HTTP client receives a failure before its own timeout, and Kafka's rule on timeouts holds."""
    settings = load()
    assert settings.producer.delivery_timeout_ms >= settings.kafka.request_timeout_ms + settings.producer.linger_ms
    assert settings.producer.delivery_timeout_ms < settings.ingest.ack_timeout_ms
    assert settings.http.host == "127.0.0.1"


def test_a_transactional_producer_is_rejected() -> None:
    """A transactional id is a ConfigError, since such a producer cannot send outside of transactions."""
    with pytest.raises(ConfigError, match=r"producer\.transactional_id"):
        load("--producer.transactional-id", "t")


def test_a_producer_without_acknowledgements_is_rejected() -> None:
    """Under acks=0 the ingest would report events as stored that Kafka never got."""
    without_idempotence = "--no-producer.enable-idempotence"
    with pytest.raises(ConfigError, match=r"producer\.acks"):
        load("--producer.acks=0", without_idempotence)
    assert load("--producer.acks=1", without_idempotence).producer.acks == 1


def test_acks_alone_switch_idempotence_off() -> None:
    """The default of enable_idempotence gives way to another setting, wherever that comes from."""
    for settings in (load("--producer.acks=1"), load(PENSTOCK_PRODUCER__ACKS="1")):
        assert (settings.producer.acks, settings.producer.enable_idempotence) == (1, False)


def test_topics_are_read_from_the_file(tmp_path: Path) -> None:
    """The file has a table for each topic and one for the default."""
    file = tmp_path / "penstock.toml"
    file.write_text(
        '[ingest.topics.flights]\nkey = ["/carrier", "/origin"]\ntime = "/at"\n'
        "[ingest.default_topic]\nallowed = false\n"
    )
    settings = load("--config", str(file)).ingest
    assert settings.for_topic("flights").key == ("/carrier", "/origin")
    assert not settings.for_topic("other").allowed


def test_a_partial_section_keeps_the_services_own_defaults() -> None:
    """Setting one value of a section keeps the service's defaults for the others."""
    settings = load(PENSTOCK_KAFKA__BOOTSTRAP_SERVERS="k:1", PENSTOCK_PRODUCER__LINGER_MS="1")
    assert (settings.kafka.request_timeout_ms, settings.producer.delivery_timeout_ms) == (10_000, 25_000)


@pytest.mark.parametrize("token", [{}, {"PENSTOCK_AUTH_TOKEN": "short"}])
def test_an_open_address_needs_a_token(token: dict[str, str]) -> None:
    """An open address without a sufficient token is a ConfigError that does not contain the token."""
    with pytest.raises(ConfigError, match="auth_token") as e:
        load("--http.host", "0.0.0.0", **token)
    assert "short" not in str(e.value)


def test_an_open_address_with_a_token_or_insecure_no_auth_is_served() -> None:
    """An open address is accepted with a token or with `insecure_no_auth`."""
    assert load("--http.host", "0.0.0.0", PENSTOCK_AUTH_TOKEN=TOKEN).auth_token is not None
    assert load("--http.host", "0.0.0.0", "--insecure-no-auth").insecure_no_auth


def test_the_token_is_in_no_repr() -> None:
    """The repr of settings, which may be logged, does not contain the token."""
    assert TOKEN not in repr(load(PENSTOCK_AUTH_TOKEN=TOKEN))


def test_an_invalid_pointer_is_named() -> None:
    """An invalid JSON pointer is a ConfigError with its path."""
    with pytest.raises(ConfigError, match=r"ingest\.topics\.flights\.time: a JSON pointer"):
        load(PENSTOCK_INGEST__TOPICS='{"flights": {"time": "at"}}')


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """Restore the log handlers of the test run, which the entry point replaces."""
    before = logging.root.handlers[:], logging.root.level
    yield
    logging.root.handlers[:], logging.root.level = before


@pytest.mark.parametrize(
    ("arguments", "name"),
    [
        (["--http.port", "99999"], "http.port"),
        (["--http.host", "0.0.0.0"], "auth_token"),
        (["--ingest.max-line-bytes", "0"], "ingest.max_line_bytes"),
        (["--producer.acks", "2"], "producer.acks"),
        (["--kafka.request-timeout-ms", "60000"], "delivery_timeout_ms"),
    ],
)
def test_an_invalid_setting_exits_with_status_2_and_names_the_setting(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """An invalid setting ends with status 2 and its name before any connection is opened."""
    try:
        status = main(arguments)
    except SystemExit as e:
        status = int(str(e.code))
    assert status == 2
    assert name in capsys.readouterr().err
