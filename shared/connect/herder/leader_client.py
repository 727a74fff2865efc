"""The client with which a worker sends requests of its own to the cluster's leader: to store task configs, and to fence
tasks.

The leader's REST API has routes for these requests that only workers use. The session key signs them (KIP-507).
"""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import httpx
import msgspec

from penstock.shared.common.errors import RetriableError
from penstock.shared.common.http_tls import client_tls
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.herder.session_keys import sign
from penstock.shared.connect.storage.config_records import Config, SessionKey

LEADER_TIMEOUT_MS = 30_000


class LeaderRequestFailed(RetriableError, ConnectError):
    """The leader did not answer, or rejected the request. The message contains the start of any response.

    The request may be retried: the leader may be rebalancing, or this worker may not have read a new session key yet.
    """


class LeaderClient:
    """Sends signed REST requests of a worker to the leader."""

    def __init__(self, *, token: str = "", user: str = "", signature_algorithm: str = "HmacSHA256") -> None:
        """Authenticate to the workers' REST API with `token`, or else with `user` (`user:password`)."""
        self._signature_algorithm = signature_algorithm
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        name, _, password = user.partition(":")
        auth = httpx.BasicAuth(name, password) if user and not token else None
        self._client = httpx.AsyncClient(
            timeout=LEADER_TIMEOUT_MS / 1000, verify=client_tls(), trust_env=False, headers=headers, auth=auth
        )

    async def close(self) -> None:
        """Close the connections to the leader."""
        await self._client.aclose()

    async def put_tasks(self, url: str, connector: str, configs: Sequence[Config], key: SessionKey | None) -> None:
        """Request the leader to store a connector's task configs. Raises LeaderRequestFailed."""
        await self._send_to_leader(
            "POST", f"{url.rstrip('/')}/connectors/{quote(connector, safe='')}/tasks", list(configs), key
        )

    async def fence(self, url: str, connector: str, key: SessionKey | None) -> None:
        """Request the leader to fence a source connector's older tasks. Raises LeaderRequestFailed."""
        await self._send_to_leader("PUT", f"{url.rstrip('/')}/connectors/{quote(connector, safe='')}/fence", None, key)

    async def _send_to_leader(self, method: str, url: str, body: object, key: SessionKey | None) -> None:
        data = b"" if body is None else msgspec.json.encode(body)
        signed = {} if key is None else sign(key, data, self._signature_algorithm)
        headers = {"Content-Type": "application/json", **signed}
        try:
            response = await self._client.request(method, url, content=data, headers=headers)
        except httpx.HTTPError as e:
            raise LeaderRequestFailed(f"{method} {url}: {type(e).__name__}: {e}") from None
        if not response.is_success:
            raise LeaderRequestFailed(f"{method} {url}: {response.status_code}: {response.text:.500}")
