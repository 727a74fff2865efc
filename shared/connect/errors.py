"""What goes wrong in a connector or around one.

A task's `put` or `poll` that raises RetriableError is called again with the same records; every other error fails the
task. DataError says that a record is not what it must be: under `errors.tolerance=all` it is skipped or becomes a dead
letter. ConfigError names a setting. The three are Penstock's own bases, so that a client's error means the same here.
"""

from __future__ import annotations

from shared.common.errors import ConfigError, DataError, PenstockError, RetriableError

__all__ = ["ConfigError", "ConnectError", "ConnectorNotFound", "DataError", "PenstockError", "RetriableError"]


class ConnectError(PenstockError):
    """A connector, a task or the worker cannot do what was asked (Kafka's ConnectException)."""


class ConnectorNotFound(ConnectError):
    """No connector, task or plugin of that name."""
