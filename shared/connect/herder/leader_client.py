"""What a worker asks of the leader over REST, signed (an edge): to keep task configs, and to fence old tasks."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

import httpx
import msgspec

from penstock.shared.common.errors import RetriableError
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.herder.session_keys import sign
from penstock.shared.connect.storage.config_records import Config, SessionKey

TIMEOUT_MS = 30_000
CONFLICT = 409


class LeaderRefused(ConnectError):
    """The leader did not do it; the message has its words."""


class LeaderNotReached(RetriableError, ConnectError):
    """The leader did not answer, or asks to be asked again."""


class LeaderClient:
    """Requests to whoever leads at the time."""

    def __init__(self, timeout_ms: int = TIMEOUT_MS, *, token: str = "", user: str = "") -> None:
        """`token`, or else `user` (user:password), is what the workers' REST asks for."""
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        name, _, password = user.partition(":")
        auth = httpx.BasicAuth(name, password) if user and not token else None
        self._client = httpx.AsyncClient(timeout=timeout_ms / 1000, trust_env=False, headers=headers, auth=auth)

    async def close(self) -> None:
        """Close its connections."""
        await self._client.aclose()

    async def put_tasks(self, url: str, connector: str, configs: Sequence[Config], key: SessionKey | None) -> None:
        """Have the leader keep a connector's task configs; LeaderNotReached, LeaderRefused."""
        await self._send("POST", f"{url.rstrip('/')}/connectors/{quote(connector, safe='')}/tasks", list(configs), key)

    async def fence(self, url: str, connector: str, key: SessionKey | None) -> None:
        """Have the leader fence a source connector's older tasks; LeaderNotReached, LeaderRefused."""
        await self._send("PUT", f"{url.rstrip('/')}/connectors/{quote(connector, safe='')}/fence", None, key)

    async def _send(self, method: str, url: str, body: object, key: SessionKey | None) -> None:
        data = b"" if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json", **({} if key is None else sign(key, data))}
        try:
            answer = await self._client.request(method, url, content=data, headers=headers)
        except httpx.HTTPError as e:
            raise LeaderNotReached(f"{method} {url}: {type(e).__name__}: {e}") from None
        if answer.status_code == CONFLICT or answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            raise LeaderNotReached(f"{method} {url}: {answer.status_code}: {answer.text:.500}")
        if answer.is_error:
            raise LeaderRefused(f"{method} {url}: {answer.status_code}: {answer.text:.500}")
