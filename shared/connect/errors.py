"""The errors of connectors and of the Connect runtime.

If `put` or `poll` raises RetriableError, the worker calls the method again, `put` with the same records. Every other
error of these methods fails the task. A converter or transform raises DataError for an invalid record, which
`errors.tolerance=all` skips. ConfigError names a setting. These three are in `penstock.shared.common.errors`, so they
have the same meaning when a Kafka client raises them.
"""

from __future__ import annotations

import traceback
from collections.abc import Awaitable, Callable

from penstock.shared.common.errors import ConfigError, PenstockError, error_text
from penstock.shared.common.public_names import publish


class ConnectError(PenstockError):
    """A connector, a task or the worker cannot do what was requested (Kafka's ConnectException)."""


class ConnectorNotFound(ConnectError):
    """A connector, task, plugin, logger or status is not known here (404)."""


class TooManyTasks(ConnectError):
    """A connector has made more tasks than `tasks.max` (Kafka's TooManyTasksException)."""


class FailedThere(PenstockError):
    """An error raised in a connector's process. `kind` is the name of its class, and `trace` its traceback."""

    def __init__(self, message: str, kind: str, trace: str) -> None:
        super().__init__(message)
        self.kind = kind
        self.trace = trace


class ConfigErrorThere(FailedThere, ConfigError):
    """A ConfigError raised in another process."""


class ConnectErrorThere(FailedThere, ConnectError):
    """A ConnectError raised in another process."""


class ConnectorNotFoundThere(FailedThere, ConnectorNotFound):
    """A ConnectorNotFound raised in another process."""


class TooManyTasksThere(FailedThere, TooManyTasks):
    """A TooManyTasks raised in another process."""


class BadRequest(ConnectError):
    """A request is invalid, or the connector's state does not allow it (400)."""


class ToleranceExceeded(ConnectError):
    """A record failed, and its error is not tolerated."""


class MoreNeeded(ConnectError):
    """The converter needs data first, such as a schema. The caller awaits `fetch()` and converts again."""

    def __init__(self, subject: str, fetch: Callable[[], Awaitable[None]]) -> None:
        super().__init__(subject)
        self.fetch = fetch


def encodable(text: str) -> str:
    """Return a text of an error with an escape for each lone surrogate, which UTF-8 cannot encode.

    >>> encodable(b"caf\\xe9".decode(errors="surrogateescape"))
    'caf\\\\udce9'
    """
    return text.encode(errors="backslashreplace").decode()


def summary_of(error: BaseException) -> str:
    """Return the class and the text of an error, without its traceback.

    >>> summary_of(FailedThere("'k'", "KeyError", "Traceback …"))
    "KeyError: 'k'"
    """
    kind = error.kind if isinstance(error, FailedThere) else type(error).__name__
    return encodable(f"{kind}: {error_text(error)}")


def trace_of(error: BaseException) -> str:
    """Return an error of a connector or task with its traceback: for FailedThere the one in the other process."""
    if isinstance(error, FailedThere):
        return error.trace
    return encodable("".join(traceback.format_exception(error)).rstrip())


publish("penstock.connect", globals(), ["ConnectError", "MoreNeeded", "ToleranceExceeded"])
