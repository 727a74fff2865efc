"""The errors of a herder's requests, with their HTTP statuses.

ConnectorNotFound (404) and BadRequest (400) are in `penstock.shared.connect.errors`, ConfigError (400) is in
`penstock.shared.common.errors`.
"""

from __future__ import annotations

from penstock.shared.connect.errors import ConnectError


class AlreadyExists(ConnectError):
    """A connector of that name exists already (409)."""


class RebalanceNeeded(ConnectError):
    """The worker cannot carry out the request now, mostly because a rebalance of the group is pending. The client may
    retry later (409)."""


class StaleConfig(ConnectError):
    """A connector's config is no longer the one that the caller expected (409)."""


class NotHere(ConnectError):
    """Another worker must handle the request: the leader, or the worker that runs the connector or task.

    REST forwards the request to `url`, the address of that worker. The status is 409 if `url` is None (not known), or
    if the request was already forwarded twice.
    """

    def __init__(self, message: str, url: str | None) -> None:
        super().__init__(message)
        self.url = url


class RequestTimedOut(ConnectError):
    """The request was not completed in time (500)."""


class Forbidden(ConnectError):
    """A request between workers with a wrong signature, or an action that the settings forbid (403)."""
