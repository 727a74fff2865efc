"""Reading and setting logger levels while the worker runs."""

from __future__ import annotations

import logging
from collections.abc import Iterator

import pytest

from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.errors import ConnectorNotFound
from penstock.shared.connect.herder.loggers import Loggers, level_number
from penstock.shared.testing.manual_clock import ManualClock

NAME = "a.connectors.own"


@pytest.fixture(autouse=True)
def _levels_as_they_were() -> Iterator[None]:
    names = (NAME, f"{NAME}.deep", "penstock.shared.connect", None)
    before = {name: logging.getLogger(name).level for name in names}
    yield
    for name, level in before.items():
        logging.getLogger(name).setLevel(level)


def test_a_level_applies_to_descendants() -> None:
    """A level applies to all loggers below, even if they had their own, and is shown with its time."""
    clock = ManualClock()
    logging.getLogger(f"{NAME}.deep").setLevel(logging.ERROR)
    loggers = Loggers(clock)
    assert loggers.set_level(NAME, "debug") == [NAME, f"{NAME}.deep"]
    assert logging.getLogger(f"{NAME}.deep").getEffectiveLevel() == logging.DEBUG
    assert loggers.level(NAME) == {"level": "DEBUG", "last_modified": clock.now_ms()}
    assert loggers.levels()[NAME]["level"] == "DEBUG"


def test_kafka_connects_logger_names_are_mapped() -> None:
    """Setting the level of Kafka Connect's package sets the level of our runtime."""
    loggers = Loggers(ManualClock())
    loggers.set_level("org.apache.kafka.connect", "TRACE")
    assert logging.getLogger("penstock.shared.connect").level == logging.DEBUG - 5
    assert loggers.level("org.apache.kafka.connect")["level"] == "TRACE"


def test_a_mapped_logger_has_one_time_of_change() -> None:
    """The time of the last change is shown under both names of a logger, whichever name the request had."""
    clock = ManualClock()
    loggers = Loggers(clock)
    for name in ("org.apache.kafka.connect", "penstock.shared.connect"):
        clock.advance(1)
        loggers.set_level(name, "DEBUG")
        shown = {"level": "DEBUG", "last_modified": clock.now_ms()}
        assert loggers.level("org.apache.kafka.connect") == loggers.level("penstock.shared.connect") == shown
        assert loggers.levels()["penstock.shared.connect"] == shown


def test_the_root_loggers_level_is_shown() -> None:
    """Every Log4j level of the root logger is shown by its name."""
    loggers = Loggers(ManualClock())
    for level in ("OFF", "FATAL", "ERROR", "WARN", "INFO", "DEBUG"):
        logging.getLogger().setLevel(level_number(level))
        assert loggers.levels()["root"]["level"] == level


def test_unknown_loggers_and_levels_are_errors() -> None:
    """An unknown logger and an unknown level are errors."""
    loggers = Loggers(ManualClock())
    with pytest.raises(ConnectorNotFound):
        loggers.level("no.such.logger")
    with pytest.raises(ConfigError, match="LOUD"):
        loggers.set_level("root", "LOUD")
