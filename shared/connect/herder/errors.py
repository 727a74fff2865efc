"""The errors of a herder's requests. Each has its own HTTP status.

ConnectorNotFound (404), BadRequest (400) and ConfigError (400) are in `penstock.shared.connect.errors`.
"""

from __future__ import annotations

from penstock.shared.connect.errors import ConnectError


class AlreadyExists(ConnectError):
    """A connector of that name exists already (409)."""


class RebalanceNeeded(ConnectError):
    """The group is about to rebalance. The client retries when that is done (409)."""


class StaleConfig(ConnectError):
    """The configs changed during the request. The client retries (409)."""


class NotHere(ConnectError):
    """Another worker must handle the request: the leader, or the one that runs the connector or task.

    `url` is that worker's, or None if it is not known.
    """

    def __init__(self, message: str, url: str | None) -> None:
        super().__init__(message)
        self.url = url


class RequestTimedOut(ConnectError):
    """The herder did not reach the request in time (500)."""


class Forbidden(ConnectError):
    """A request between workers without a valid signature, or an action that the settings forbid (403)."""
