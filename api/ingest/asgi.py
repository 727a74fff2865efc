"""Handles ordinary ingest requests before the router (ASGI middleware).

Routing and parameter parsing double the cost of a request with one record. So a POST to `/v1/topics/{topic}/events`
with a plain query is passed directly to the handler. All other requests go through the router, which also documents the
route. The answers are the same.

>>> plain_query(b"offsets=true&ack=none"), plain_query(b"offsets=maybe"), plain_query(b"")
({'offsets': True, 'ack': 'none'}, None, {})
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.http.problem import Problem
from penstock.shared.common.errors import PenstockError

PREFIX = "/v1/topics/"
SUFFIX = "/events"
_PLAIN: dict[bytes, tuple[str, Any]] = {
    b"offsets=true": ("offsets", True),
    b"offsets=false": ("offsets", False),
    b"atomic=true": ("atomic", True),
    b"atomic=false": ("atomic", False),
    b"ack=all": ("ack", "all"),
    b"ack=none": ("ack", "none"),
}

Handle = Callable[..., Awaitable[Response]]
"""`handle(topic, request, offsets=…, atomic=…, ack=…)`."""


class FastPath:
    """The ASGI middleware that this module describes."""

    def __init__(self, app: ASGIApp, handle: Handle) -> None:
        self._app = app
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            if path.startswith(PREFIX) and path.endswith(SUFFIX):
                topic = path[len(PREFIX) : -len(SUFFIX)]
                query = plain_query(scope["query_string"])
                if topic and "/" not in topic and query is not None:
                    await self._handle_directly(topic, query, scope, receive, send)
                    return
        await self._app(scope, receive, send)

    async def _handle_directly(
        self, topic: str, query: dict[str, Any], scope: Scope, receive: Receive, send: Send
    ) -> None:
        try:
            response = await self._handle(topic, Request(scope, receive), **query)
        except Problem as e:
            response = e.response()
        except PenstockError as e:
            response = Problem.of(e).response()
        await response(scope, receive, send)


def plain_query(query: bytes) -> dict[str, Any] | None:
    """Return the parameters of a query with known names and plain values; None if the router must parse it."""
    params: dict[str, Any] = {}
    for pair in query.split(b"&") if query else ():
        if pair not in _PLAIN:
            return None
        name, value = _PLAIN[pair]
        if name in params:
            return None
        params[name] = value
    return params
