"""Forwards requests to other services, and returns their responses.

So the dashboard, and any client of this service, can use routes of the aggregator (STREAMS_PATHS) and of Kafka Connect
(CONNECT_PATHS) at this service's address. Of a request's headers only Content-Type is forwarded, so the client's
credentials are not. This service has its own credentials for the other services. Of a response's headers only
Content-Type, Retry-After and Location are returned.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, Protocol
from urllib.parse import unquote, urlsplit

import httpx
from fastapi import APIRouter, Request, Response

from penstock.api.http.auth import INSUFFICIENT_SCOPE
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import BAD_GATEWAY, BAD_REQUEST, NOT_FOUND, UNAUTHORIZED

METHODS = ["GET", "POST", "PUT", "PATCH", "DELETE"]
CONNECT_PATHS = ("/connectors", "/connector-plugins")
STREAMS_PATHS = ("/v1/streams", "/v1/compactions")

FORWARD_TIMEOUT_S = 100
"""The time limit of a forwarded request. A Connect worker may wait 95 s for another one. With a longer limit
here, the client receives Connect's own response."""
CONNECT_TIMEOUT_S = 10
"""The time limit for a connection to the service."""


class UpstreamResponse(NamedTuple):
    """The response of another service."""

    status: int
    media_type: str
    body: bytes
    retry_after: str = ""
    location: str = ""
    """The path of the created resource."""


class Upstream(Protocol):
    """Another service."""

    name: str

    async def forward(self, method: str, path: str, query: str, body: bytes, media_type: str) -> UpstreamResponse:
        """Forward a request and return the response.

        Raises Problem (502 or 503, by implementation) if the service does not answer.
        """
        ...


class HttpUpstream:
    """A service in another process that receives forwarded requests over HTTP."""

    def __init__(self, name: str, url: str, client: httpx.AsyncClient) -> None:
        self.name = name
        self._url = url
        self._client = client

    async def forward(self, method: str, path: str, query: str, body: bytes, media_type: str) -> UpstreamResponse:
        """Forward a request over HTTP and return the response.

        Raises Problem (502) if the service does not answer, or does not accept this service's credentials.
        """
        # Latin-1 as Starlette decodes it: httpx would encode a `str` as ASCII.
        headers = {b"Content-Type": media_type.encode("latin-1")} if media_type else {}
        url = f"{self._url}{path}?{query}" if query else f"{self._url}{path}"
        timeout = httpx.Timeout(FORWARD_TIMEOUT_S, connect=CONNECT_TIMEOUT_S)
        try:
            response = await self._client.request(method, url, content=body, headers=headers, timeout=timeout)
        except httpx.HTTPError as e:
            kind = ErrorKind(BAD_GATEWAY, "SERVICE_UNREACHABLE", "Another service does not answer", 5)
            raise Problem(kind, f"{self.name}: {type(e).__name__}: {e}".rstrip(": ")) from None
        # Returned unchanged, it would seem to be about the credentials of this service's own client. Other 403 are
        # about the request, or about the other service's permissions in Kafka.
        lacks_scope = response.headers.get("www-authenticate", "") == INSUFFICIENT_SCOPE
        if response.status_code == UNAUTHORIZED or lacks_scope:
            kind = ErrorKind(BAD_GATEWAY, "SERVICE_UNAUTHORIZED", "Another service rejects this one's credentials")
            reason = "this service's token lacks a scope" if lacks_scope else "it rejects this service's token"
            raise Problem(kind, f"{self.name}: {reason} (services_auth_token of the admin)")
        return UpstreamResponse(
            response.status_code,
            response.headers.get("content-type", ""),
            response.content,
            retry_after=response.headers.get("retry-after", ""),
            # The service may have forwarded the request to another worker, which names its own host.
            location=_without_host(response.headers.get("location", "")).removeprefix(_without_host(self._url)),
        )


def _without_host(url: str) -> str:
    return urlsplit(url)._replace(scheme="", netloc="").geturl()


def forward_router(upstreams: Mapping[str, Upstream | None]) -> APIRouter:
    """Return routes that forward each path prefix to its upstream. A prefix whose upstream is None answers 404."""
    router = APIRouter(include_in_schema=False)
    for prefix, upstream in upstreams.items():
        _add_upstream_routes(router, prefix, upstream)
    return router


def _add_upstream_routes(router: APIRouter, prefix: str, upstream: Upstream | None) -> None:
    """Add the routes of one prefix."""

    async def forward_request(request: Request) -> Response:
        if upstream is None:
            raise Problem(
                ErrorKind(NOT_FOUND, "NO_SUCH_SERVICE", "No such service"), f"no service here serves {prefix}"
            )
        path = request.scope.get("raw_path", b"").decode("latin-1") or request.url.path
        if ".." in unquote(path).split("/"):
            raise Problem(ErrorKind(BAD_REQUEST, "INVALID_REQUEST", "Wrong request"), "a path must not contain '..'")
        response = await upstream.forward(
            request.method,
            path,
            request.url.query,
            await request.body(),
            request.headers.get("content-type", ""),
        )
        location = str(request.base_url).rstrip("/") + response.location if response.location else ""
        values = {"Content-Type": response.media_type, "Retry-After": response.retry_after, "Location": location}
        headers = {name: value for name, value in values.items() if value}
        return Response(response.body, response.status, headers)

    router.add_api_route(prefix, forward_request, methods=METHODS)
    router.add_api_route(prefix + "/{rest:path}", forward_request, methods=METHODS)
