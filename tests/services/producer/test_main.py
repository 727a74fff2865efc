"""The producer service's entry."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from penstock.services.producer.main import main


@pytest.fixture(autouse=True)
def own_log_handlers() -> Iterator[None]:
    """An entry sets the process's logging up; the test run keeps its own."""
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
def test_a_wrong_setting_ends_it_with_status_2_and_its_name(
    arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """It ends before anything is opened."""
    try:
        status = main(arguments)
    except SystemExit as e:
        status = int(str(e.code))
    assert status == 2
    assert name in capsys.readouterr().err
