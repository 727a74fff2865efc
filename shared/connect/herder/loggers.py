"""Loggers' levels, to be read and set while the worker runs: Kafka Connect's `/admin/loggers`.

Names are Python's (dots between parts), and Java's as well: whoever sets `org.apache.kafka.connect` means the runtime,
which here is `penstock.shared.connect`. A level set for a name holds for everything below it, also for what has a level
of its own. `root` is everything.
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
"""Log4j's levels by Python's numbers."""
JAVA_NAMES = {"org.apache.kafka.connect": "penstock.shared.connect", "org.apache.kafka": "penstock.shared"}


class Loggers:
    """The levels of this process's loggers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._modified: dict[str, int] = {}
        self.on_level: Callable[[str, str], None] = lambda _name, _level: None
        """Called with each level that is set: tasks' processes have loggers of their own."""

    def levels(self) -> dict[str, dict[str, Any]]:
        """Every logger that has a level of its own, and the root, by name."""
        named = {
            name: logger
            for name, logger in logging.Logger.manager.loggerDict.items()
            if isinstance(logger, logging.Logger) and logger.level != logging.NOTSET
        }
        found = {ROOT: self._shown(ROOT, logging.getLogger())}
        return found | {name: self._shown(name, named[name]) for name in sorted(named)}

    def level(self, name: str) -> dict[str, Any]:
        """One logger's level in force; ConnectorNotFound where there is no logger of that name."""
        known = _known(name)
        if name != ROOT and known not in logging.Logger.manager.loggerDict:
            raise ConnectorNotFound(f"Logger {name} not found.")
        return self._shown(name, _logger(name))

    def set_level(self, name: str, level: str) -> list[str]:
        """Set a level by Log4j's name for it; gives the loggers that it now holds for, sorted."""
        number = level_number(level)
        known = _known(name)
        _logger(name).setLevel(number)
        below = [
            other
            for other, logger in list(logging.Logger.manager.loggerDict.items())
            if isinstance(logger, logging.Logger) and (name == ROOT or other.startswith(f"{known}."))
        ]
        for other in below:
            if logging.getLogger(other).level != logging.NOTSET:
                logging.getLogger(other).setLevel(number)
        changed = sorted({name, *below})
        now_ms = self._clock.now_ms()
        self._modified.update(dict.fromkeys(changed, now_ms))
        self.on_level(name, level)
        return changed

    def _shown(self, name: str, logger: logging.Logger) -> dict[str, Any]:
        number = logger.getEffectiveLevel()
        shown = next((level for level, n in LEVELS.items() if number >= n), "TRACE")
        return {"level": shown, "last_modified": self._modified.get(name)}


def level_number(level: str) -> int:
    """Python's number of a level; ConfigError where there is none of that name."""
    number = LEVELS.get(level.upper())
    if number is None:
        raise ConfigError(f"invalid log level '{level}'.")
    return number


def _known(name: str) -> str:
    for java, python in JAVA_NAMES.items():
        if name == java or name.startswith(f"{java}."):
            return python + name[len(java) :]
    return name


def _logger(name: str) -> logging.Logger:
    return logging.getLogger() if name == ROOT else logging.getLogger(_known(name))
