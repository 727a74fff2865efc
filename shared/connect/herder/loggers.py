"""The levels of loggers, which can be read and set while the worker runs (Kafka Connect's `/admin/loggers`).

Names are Python's, with dots between the parts. `org.apache.kafka.connect` is accepted as well, and stands for the
runtime `penstock.shared.connect`. If a level is set for a name, it also applies to every logger below that name, even
to one that has a level of its own. `root` stands for all loggers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import ConfigError
from penstock.shared.connect.errors import ConnectorNotFound

ROOT = "root"
LEVELS = {
    "OFF": logging.CRITICAL + 10,
    "FATAL": logging.CRITICAL,
    "ERROR": logging.ERROR,
    "WARN": logging.WARNING,
    "INFO": logging.INFO,
    "DEBUG": logging.DEBUG,
    "TRACE": logging.DEBUG - 5,
}
"""Python's level numbers by Log4j's names."""
JAVA_NAMES = {"org.apache.kafka.connect": "penstock.shared.connect", "org.apache.kafka": "penstock.shared"}


class Loggers:
    """The levels of this process's loggers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._modified: dict[str, int] = {}
        """When a level was last set, by Python's name of the logger."""
        self.on_level: Callable[[str, str], None] = lambda _name, _level: None
        """Called with each level that is set: the processes of connectors have their own loggers."""

    def levels(self) -> dict[str, dict[str, Any]]:
        """Return the levels of the root and of every logger with a level of its own, by name."""
        named = {
            name: logger
            for name, logger in logging.Logger.manager.loggerDict.items()
            if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
        }
        found = {ROOT: self._shown_logger(ROOT, logging.getLogger())}
        return found | {name: self._shown_logger(name, named[name]) for name in sorted(named)}

    def level(self, name: str) -> dict[str, Any]:
        """Return the level in force of one logger. Raises ConnectorNotFound if there is no logger of that name."""
        known = _python_logger_name(name)
        if name != ROOT and known not in logging.Logger.manager.loggerDict:
            raise ConnectorNotFound(f"Logger {name} not found.")
        return self._shown_logger(name, _python_logger(name))

    def set_level(self, name: str, level: str) -> list[str]:
        """Set a level by its name in Log4j. Returns the sorted names of all loggers to which it applies."""
        number = level_number(level)
        known = _python_logger_name(name)
        _python_logger(name).setLevel(number)
        below = [
            other
            for other, logger in list(logging.Logger.manager.loggerDict.items())
            if isinstance(logger, logging.Logger) and (name == ROOT or other.startswith(f"{known}."))
        ]
        for other in below:
            if logging.getLogger(other).level != logging.NOTSET:
                logging.getLogger(other).setLevel(number)
        self._modified.update(dict.fromkeys((known, *below), self._clock.now_ms()))
        self.on_level(name, level)
        return sorted({name, *below})

    def _shown_logger(self, name: str, logger: logging.Logger) -> dict[str, Any]:
        number = logger.getEffectiveLevel()
        shown = next((level for level, n in LEVELS.items() if number >= n), "TRACE")
        return {"level": shown, "last_modified": self._modified.get(_python_logger_name(name))}


def level_number(level: str) -> int:
    """Return Python's number for the name of a level in Log4j. Raises ConfigError if there is no such level."""
    number = LEVELS.get(level.upper())
    if number is None:
        raise ConfigError(f"invalid log level '{level}'.")
    return number


def _python_logger_name(name: str) -> str:
    for java, python in JAVA_NAMES.items():
        if name == java or name.startswith(f"{java}."):
            return python + name[len(java) :]
    return name


def _python_logger(name: str) -> logging.Logger:
    return logging.getLogger() if name == ROOT else logging.getLogger(_python_logger_name(name))
