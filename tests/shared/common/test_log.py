"""Logging: one renderer for structlog and the standard library."""

from __future__ import annotations

import json
import logging
import subprocess
import sys

import pytest
import structlog
from pydantic import SecretStr

from penstock.shared.common.log import configure, get_logger
from penstock.shared.common.settings import LogSettings, Section


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


def test_lines_of_the_standard_library_are_json_too(capsys: pytest.CaptureFixture[str]) -> None:
    """A line of the standard library's logging is JSON with the same fields."""
    configure(LogSettings(format="json"), "producer")
    logging.getLogger("some.library").warning("lost %s", "connection")
    (line,) = lines(capsys)
    fields = json.loads(line)
    assert (fields["event"], fields["level"], fields["logger"]) == ("lost connection", "warning", "some.library")
    assert fields["service"] == "producer"


def test_an_exception_stays_on_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    """As JSON a traceback is a field of its event's line."""
    configure(LogSettings(format="json"), "admin")
    try:
        raise ValueError("broken")
    except ValueError:
        get_logger("room").exception("failed")
    (line,) = lines(capsys)
    assert "ValueError: broken" in json.loads(line)["exception"]


def test_console(capsys: pytest.CaptureFixture[str]) -> None:
    """On the console an event is readable text, without colours if there is no terminal."""
    configure(LogSettings(format="console"), "admin")
    get_logger("room").info("partitions assigned", partitions=[0, 1])
    (line,) = lines(capsys)
    assert "partitions assigned" in line
    assert "partitions=[0, 1]" in line
    assert not line.startswith("{")
    assert "\x1b" not in line


def test_auto_without_a_terminal_is_json(capsys: pytest.CaptureFixture[str]) -> None:
    """If standard error is no terminal, `auto` is JSON."""
    configure(LogSettings(), "admin")
    get_logger("room").info("up")
    assert json.loads(lines(capsys)[0])["event"] == "up"


def test_levels(capsys: pytest.CaptureFixture[str]) -> None:
    """Events below the level are left out, as are those of noisy libraries below a warning."""
    configure(LogSettings(format="json", level="debug"), "admin")
    get_logger("room").debug("seen")
    logging.getLogger("httpx").info("not seen")
    logging.getLogger("httpx").warning("seen, too")
    assert [json.loads(line)["event"] for line in lines(capsys)] == ["seen", "seen, too"]
    configure(LogSettings(format="json", level="error"), "admin")
    structlog.get_logger("another").warning("not seen")
    logging.getLogger("httpx").warning("not seen")
    assert lines(capsys) == []


def test_aiokafka_is_logged_at_debug_level_only(capsys: pytest.CaptureFixture[str]) -> None:
    """aiokafka is logged at the level debug only, since its errors are mostly retried."""
    configure(LogSettings(format="json"), "admin")
    logging.getLogger("aiokafka.conn").error("not seen")
    assert lines(capsys) == []
    configure(LogSettings(format="json", level="debug"), "admin")
    logging.getLogger("aiokafka.conn").debug("seen")
    assert [json.loads(line)["event"] for line in lines(capsys)] == ["seen"]


def test_configuring_again_does_not_double(capsys: pytest.CaptureFixture[str]) -> None:
    """An event is written once although logging is configured twice."""
    configure(LogSettings(format="json"), "one")
    configure(LogSettings(format="json"), "two")
    logging.getLogger("x").error("once")
    (line,) = lines(capsys)
    assert json.loads(line)["service"] == "two"


@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_are_masked(capsys: pytest.CaptureFixture[str], form: str) -> None:
    """Logged settings and secrets do not show their value."""
    configure(LogSettings(format=form), "admin")  # type: ignore[arg-type]
    get_logger("room").info("starting", login=Login(), password=Login().password)
    (line,) = lines(capsys)
    assert "hunter2" not in line
    assert "**********" in line


def test_a_traceback_shows_no_variables(capsys: pytest.CaptureFixture[str]) -> None:
    """A traceback on the console does not contain the values of variables."""
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


def test_without_configuration_nothing_is_printed(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Without configuration an event goes to the module's logger of the standard library, and nothing is printed."""
    logger = get_logger("shared.room")
    with caplog.at_level(logging.INFO, "shared.room"):
        logger.info("producer open", client_id="c-1", waited="100 %s")
        logger.debug("not wanted")
        try:
            raise ValueError("broken")
        except ValueError:
            logger.exception("failed", node=3)
    opened, failed = caplog.records
    assert (opened.name, opened.levelname, opened.getMessage()) == (
        "shared.room",
        "INFO",
        "producer open client_id='c-1' waited='100 %s'",
    )
    assert (failed.levelname, failed.getMessage()) == ("ERROR", "failed node=3")
    assert failed.exc_info is not None
    assert failed.exc_info[0] is ValueError
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "")


def test_a_configured_structlog_receives_the_events(capsys: pytest.CaptureFixture[str]) -> None:
    """Events go to structlog if the process configures it, even after the logger was created."""
    logger = get_logger("shared.room")
    with structlog.testing.capture_logs() as lines_of_it:
        logger.info("producer open", client_id="c-1")
    assert lines_of_it == [{"event": "producer open", "client_id": "c-1", "log_level": "info"}]


def test_without_configuration_only_warnings_are_on_standard_error() -> None:
    """In an unconfigured process infos are not printed, and warnings go to Python's last-resort handler."""
    code = (
        "from penstock.shared.common.log import get_logger as g; "
        "g('penstock.x').info('open'); g('penstock.x').warning('off', a=1)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert (ended.stdout, ended.stderr) == ("", "off a=1\n")
