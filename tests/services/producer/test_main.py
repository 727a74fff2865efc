"""The entry point of the producer service."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from penstock.services.producer.main import main


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
