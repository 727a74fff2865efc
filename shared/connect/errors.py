"""What goes wrong in a connector or around one.

A task's `put` or `poll` that raises RetriableError is called again with the same records; every other error fails the
task. DataError says that a record is not what it must be: under `errors.tolerance=all` it is skipped or becomes a dead
letter. ConfigError names a setting. The three are Penstock's own bases, so that a client's error means the same here.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable

from penstock.shared.common.errors import ConfigError, DataError, PenstockError, RetriableError
from penstock.shared.common.public_names import publish

__all__ = [
    "ConfigError",
    "ConfigErrorThere",
    "ConnectError",
    "ConnectErrorThere",
    "ConnectorNotFound",
    "DataError",
    "FailedThere",
    "MoreNeeded",
    "PenstockError",
    "RetriableError",
    "RetriableThere",
    "ToleranceExceeded",
    "said_of",
    "trace_of",
]


class ConnectError(PenstockError):
    """A connector, a task or the worker cannot do what was asked (Kafka's ConnectException)."""


class ConnectorNotFound(ConnectError):
    """No connector, task or plugin of that name."""


class FailedThere(PenstockError):
    """Raised in another process: `kind` is the class that it had there, `trace` where it came from."""

    def __init__(self, said: str, kind: str, trace: str) -> None:
        super().__init__(said)
        self.kind, self.trace = kind, trace


class RetriableThere(FailedThere, RetriableError):
    """Raised in another process, and passing."""


class ConfigErrorThere(FailedThere, ConfigError):
    """Raised in another process: a setting is wrong."""


class ConnectErrorThere(FailedThere, ConnectError):
    """Raised in another process: it cannot be done."""


class BadRequest(ConnectError):
    """A request or a setting in it is malformed (400)."""


class ToleranceExceeded(ConnectError):
    """A record failed, and errors are not tolerated."""


class MoreNeeded(ConnectError):
    """The converter must fetch something first; await `fetch()` and convert again."""

    def __init__(self, what: str, fetch: Callable[[], Awaitable[None]]) -> None:
        super().__init__(what)
        self.fetch = fetch


def said_of(error: BaseException) -> str:
    """The error in one line, with its class.

    >>> said_of(FailedThere("'k'", "KeyError", "Traceback …"))
    "KeyError: 'k'"
    """
    kind = error.kind if isinstance(error, FailedThere) else type(error).__name__
    return f"{kind}: {error}"


def trace_of(error: BaseException) -> str:
    """The error with where it came from, as status and REST show it."""
    if isinstance(error, FailedThere):
        return error.trace
    return "".join(traceback.format_exception(error)).rstrip()


publish("penstock.connect", globals(), ["ConnectError", "MoreNeeded", "ToleranceExceeded"])
