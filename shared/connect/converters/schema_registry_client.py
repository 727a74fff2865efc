"""The client of a schema registry's REST API: schemas by id, and ids by schema.

Converters cache the results, so requests are rare. Each request has its own connection. If an address does not answer,
or answers 429 or a server error, the request is sent to the next address. If all of them fail, all are tried again
after a wait, at most twice. Then RetriableError is raised. If the registry rejects a request, DataError is raised with
its message.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import httpx

from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.common.http_responses import ACCEPTED_ENCODING, UnreadableResponse, read_response
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.json_decoding import InvalidJson, decode_json

CONTENT_TYPE = "application/vnd.schemaregistry.v1+json"
RESPONSE_BYTES_MAX = 16 << 20
"""A larger response is an error: a schema is a record of the registry's topic, by default of at most 1 MiB."""
TRIES = 3
BACKOFF = ExponentialBackoff(200, 1_000)
REFERENCES_MAX = 1_000
"""The maximum number of schemas that one schema may refer to, directly or indirectly."""


@dataclass(frozen=True)
class RegistryAccess:
    """The registry's addresses and credentials. `user` is user:password for Basic authentication, or empty."""

    urls: tuple[str, ...]
    user: str = field(default="", repr=False)
    token: str = field(default="", repr=False)
    timeout_ms: int = 30_000
    normalize: bool = False


@dataclass(frozen=True)
class RegistrySchema:
    """A schema of the registry, with the schemas it refers to: (name, text), the innermost first."""

    kind: str
    text: str
    references: tuple[tuple[str, str], ...] = ()


class RegistryClient:
    """Sends requests to one registry."""

    def __init__(self, access: RegistryAccess) -> None:
        self._access = access

    def __repr__(self) -> str:
        return f"<RegistryClient of {len(self._access.urls)} addresses>"

    async def by_id(self, id: int) -> RegistrySchema:
        """Return the schema with that id."""
        return await self._schema_with_references(await self._request_registry("GET", f"/schemas/ids/{id}"))

    async def latest(self, subject: str) -> tuple[int, RegistrySchema]:
        """Return the id of a subject's latest schema, and the schema."""
        found = await self._request_registry("GET", f"/subjects/{quote(subject, safe='')}/versions/latest")
        return int(found["id"]), await self._schema_with_references(found)

    async def register(self, subject: str, kind: str, text: str) -> int:
        """Return the id of a schema in a subject. If the subject lacks the schema, the schema is registered as a new
        version."""
        return await self._post_for_schema_id(f"/subjects/{quote(subject, safe='')}/versions", kind, text)

    async def lookup(self, subject: str, kind: str, text: str) -> int:
        """Return the id of a schema in a subject. Raises DataError if the subject lacks the schema."""
        return await self._post_for_schema_id(f"/subjects/{quote(subject, safe='')}", kind, text)

    async def _post_for_schema_id(self, path: str, kind: str, text: str) -> int:
        body = {"schema": text} if kind == "AVRO" else {"schema": text, "schemaType": kind}
        normalize = "?normalize=true" if self._access.normalize else ""
        return int((await self._request_registry("POST", path + normalize, body))["id"])

    async def _schema_with_references(self, found: dict[str, Any]) -> RegistrySchema:
        references: dict[str, str] = {}
        await self._collect_references(found, references)
        return RegistrySchema(found.get("schemaType") or "AVRO", found["schema"], tuple(references.items()))

    async def _collect_references(self, found: dict[str, Any], references: dict[str, str]) -> None:
        for reference in found.get("references") or ():
            if reference["name"] in references:
                continue
            if len(references) >= REFERENCES_MAX:
                raise DataError(f"a schema refers to more than {REFERENCES_MAX} others")
            path = f"/subjects/{quote(reference['subject'], safe='')}/versions/{int(reference['version'])}"
            other = await self._request_registry("GET", path)
            await self._collect_references(other, references)
            references[reference["name"]] = other["schema"]

    async def _request_registry(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        message = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(BACKOFF.wait_ms(attempt) / 1000)
            for url in self._access.urls:
                try:
                    response = await self._send_to_registry(method, url + path, body)
                except httpx.HTTPError as e:
                    message = f"{type(e).__name__}: {e}"
                    continue
                except UnreadableResponse as e:
                    raise DataError(f"the schema registry's response to {method} {path} cannot be read: {e}") from e
                status = response.status_code
                if status < httpx.codes.INTERNAL_SERVER_ERROR and status != httpx.codes.TOO_MANY_REQUESTS:
                    return _accepted_registry_body(response, f"{method} {path}")
                message = f"{status}: {response.text[:500]}"
        raise RetriableError(f"the schema registry did not answer {method} {path}: {message}")

    async def _send_to_registry(self, method: str, url: str, body: dict[str, Any] | None) -> httpx.Response:
        headers = {"Accept": CONTENT_TYPE, "Content-Type": CONTENT_TYPE, **ACCEPTED_ENCODING}
        if self._access.token:
            headers["Authorization"] = f"Bearer {self._access.token}"
        user, _, password = self._access.user.partition(":")
        # Without credentials here, the user and password in the URL apply. The user may be empty.
        auth = httpx.BasicAuth(user, password) if self._access.user else None
        timeout_s = self._access.timeout_ms / 1000
        async with (
            httpx.AsyncClient(
                auth=auth, headers=headers, timeout=timeout_s, verify=client_tls(), trust_env=False
            ) as client,
            client.stream(method, url, json=body) as response,
        ):
            return await read_response(response, RESPONSE_BYTES_MAX)


def _accepted_registry_body(response: httpx.Response, request: str) -> dict[str, Any]:
    try:
        body = decode_json(response.content)
    except InvalidJson:
        body = None
    if response.is_success and isinstance(body, dict):
        return body
    if isinstance(body, dict) and "message" in body:
        code = body.get("error_code", response.status_code)
        raise DataError(f"the schema registry rejected {request}: {body['message']}; error code: {code}")
    raise DataError(f"the schema registry rejected {request}: {response.status_code} {response.text[:500]}")
