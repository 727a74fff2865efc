"""What a herder answers when it does not do what was asked; each stands for one status of REST.

ConnectorNotFound (404), BadRequest (400) and ConfigError (400) are in `penstock.shared.connect.errors`.
"""

from __future__ import annotations

from penstock.shared.connect.errors import ConnectError


class AlreadyExists(ConnectError):
    """There is a connector of that name (409)."""


class RebalanceNeeded(ConnectError):
    """The group is about to assign anew; ask again when that is done (409)."""


class StaleConfig(ConnectError):
    """The configs changed under the request; ask again (409)."""


class NotHere(ConnectError):
    """Another worker is to be asked: the leader, or the one that runs the connector or task.

    `url` is that worker's, None where it is not known.
    """

    def __init__(self, message: str, url: str | None) -> None:
        super().__init__(message)
        self.url = url


class RequestTimedOut(ConnectError):
    """The herder did not come to it in time (500)."""


class Forbidden(ConnectError):
    """A request between workers that is not signed as it must be (403)."""
