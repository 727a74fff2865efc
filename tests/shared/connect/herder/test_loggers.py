"""Levels of loggers, read and set while the worker runs."""

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


def test_a_level_holds_for_all_below() -> None:
    """Also for what had a level of its own; each is said with the time."""
    clock = ManualClock()
    logging.getLogger(f"{NAME}.deep").setLevel(logging.ERROR)
    loggers = Loggers(clock)
    assert loggers.set_level(NAME, "debug") == [NAME, f"{NAME}.deep"]
    assert logging.getLogger(f"{NAME}.deep").getEffectiveLevel() == logging.DEBUG
    assert loggers.level(NAME) == {"level": "DEBUG", "last_modified": clock.now_ms()}
    assert loggers.levels()[NAME]["level"] == "DEBUG"


def test_kafkas_names_mean_ours() -> None:
    """Who sets the level of Kafka Connect's packages sets the runtime's."""
    loggers = Loggers(ManualClock())
    loggers.set_level("org.apache.kafka.connect", "TRACE")
    assert logging.getLogger("penstock.shared.connect").level == logging.DEBUG - 5
    assert loggers.level("org.apache.kafka.connect")["level"] == "TRACE"


def test_the_root_is_shown_with_what_was_set() -> None:
    """Every level that Log4j has is said by its name."""
    loggers = Loggers(ManualClock())
    for level in ("OFF", "FATAL", "ERROR", "WARN", "INFO", "DEBUG"):
        logging.getLogger().setLevel(level_number(level))
        assert loggers.levels()["root"]["level"] == level


def test_what_is_not_there_is_said() -> None:
    """A logger that nobody has, a level that there is not."""
    loggers = Loggers(ManualClock())
    with pytest.raises(ConnectorNotFound):
        loggers.level("no.such.logger")
    with pytest.raises(ConfigError, match="LOUD"):
        loggers.set_level("root", "LOUD")
