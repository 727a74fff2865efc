"""Logging: one renderer for structlog and the standard library."""

from __future__ import annotations

import json
import logging

import pytest
import structlog
from pydantic import SecretStr

from shared.common.log import configure, get_logger
from shared.common.settings import LogSettings, Section


class Login(Section):
    """Settings with a secret."""

    password: SecretStr = SecretStr("hunter2")


def lines(capsys: pytest.CaptureFixture[str]) -> list[str]:
    captured = capsys.readouterr()
    assert captured.out == "", "logs go to standard error"
    return captured.err.splitlines()


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON each event is one line with its fields, level, logger, service and an ISO time in UTC."""
    configure(LogSettings(format="json"), "aggregator")
    get_logger("room").info("task restored", partition=3, name="ä")
    (line,) = lines(capsys)
    fields = json.loads(line)
    assert fields.pop("timestamp").endswith("Z")
    assert fields == {
        "event": "task restored",
        "level": "info",
        "logger": "room",
        "service": "aggregator",
        "partition": 3,
        "name": "ä",
    }


def test_the_standard_library_goes_the_same_way(capsys: pytest.CaptureFixture[str]) -> None:
    """A library's log line comes out as JSON, too, with the same fields."""
    configure(LogSettings(format="json"), "producer")
    logging.getLogger("some.library").warning("lost %s", "connection")
    (line,) = lines(capsys)
    fields = json.loads(line)
    assert (fields["event"], fields["level"], fields["logger"]) == ("lost connection", "warning", "some.library")
    assert fields["service"] == "producer"


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON a traceback is a field: one event is one line."""
    configure(LogSettings(format="json"), "admin")
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("room").exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    """For people an event is readable text without JSON; without a terminal it has no colours."""
    configure(LogSettings(format="console"), "admin")
    get_logger("room").info("partitions assigned", partitions=[0, 1])
    (line,) = lines(capsys)
    assert "partitions assigned" in line
    assert "partitions=[0, 1]" in line
    assert not line.startswith("{")
    assert "\x1b" not in line


def test_auto_without_a_terminal_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard error is no terminal, `auto` is JSON."""
    configure(LogSettings(), "admin")
    get_logger("room").info("up")
    assert json.loads(lines(capsys)[0])["event"] == "up"


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    """Below the level nothing is said, and noisy libraries say nothing below a warning."""
    configure(LogSettings(format="json", level="debug"), "admin")
    get_logger("room").debug("seen")
    logging.getLogger("httpx").info("not seen")
    logging.getLogger("httpx").warning("seen, too")
    assert [json.loads(line)["event"] for line in lines(capsys)] == ["seen", "seen, too"]
    configure(LogSettings(format="json", level="error"), "admin")
    structlog.get_logger("another").warning("not seen")
    logging.getLogger("httpx").warning("not seen")
    assert lines(capsys) == []


def test_aiokafka_speaks_while_debugging_alone(capsys: pytest.CaptureFixture[str]) -> None:
    """Its errors are mostly retries, whose outcome our clients tell; at the level debug all of it is there."""
    configure(LogSettings(format="json"), "admin")
    logging.getLogger("aiokafka.conn").error("not seen")
    assert lines(capsys) == []
    configure(LogSettings(format="json", level="debug"), "admin")
    logging.getLogger("aiokafka.conn").debug("seen")
    assert [json.loads(line)["event"] for line in lines(capsys)] == ["seen"]


def test_configuring_again_does_not_double(capsys: pytest.CaptureFixture[str]) -> None:
    """However often it is configured, an event is written once."""
    configure(LogSettings(format="json"), "one")
    configure(LogSettings(format="json"), "two")
    logging.getLogger("x").error("once")
    (line,) = lines(capsys)
    assert json.loads(line)["service"] == "two"


@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_are_masked(capsys: pytest.CaptureFixture[str], form: str) -> None:
    """Settings that are logged, or a secret itself, do not show what they hide."""
    configure(LogSettings(format=form), "admin")  # type: ignore[arg-type]
    get_logger("room").info("starting", login=Login(), password=Login().password)
    (line,) = lines(capsys)
    assert "hunter2" not in line
    assert "**********" in line


def test_a_traceback_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """For people too a traceback is the lines of the program, not what was in its variables."""
    configure(LogSettings(format="console"), "producer")
    options = {"sasl_plain_password": "hunter2"}
    try:
        options["nothing"]
    except KeyError:
        get_logger("room").exception("failed")
    text = "\n".join(lines(capsys))
    assert "KeyError" in text
    assert 'options["nothing"]' in text
    assert "hunter2" not in text
