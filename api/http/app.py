"""Builds the app of a service from its routers. `FastPath` handles ordinary ingest requests without them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from fastapi import APIRouter, Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from pydantic import SecretStr
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.http import problem
from penstock.api.http.auth import Guard
from penstock.api.http.openapi import Document, serve_openapi_document
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status import BAD_REQUEST
from penstock.api.settings import Credential
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.setting_names import nearest

CHECKED_PREFIX = "/v1/"
SHOWN_MAX = 40
"""Characters of an unknown name that an error message repeats."""


async def reject_unknown_query(request: Request) -> None:
    """Rejects unknown query parameters under `/v1`, and names the nearest parameter of the route.

    Without this check a misspelled `?atomic=true` would store events one by one. The routes of REST Proxy and Kafka
    Connect ignore unknown parameters, as their originals do. A forwarded route is not in the schema: the service that
    it is forwarded to checks it.

    A dependency of every route. Raises Problem (400) if the request has a parameter that its route lacks. It is async,
    since FastAPI runs other dependencies in a thread.
    """
    route = request.scope.get("route")
    if not isinstance(route, APIRoute) or not route.include_in_schema or not route.path.startswith(CHECKED_PREFIX):
        return
    if not request.scope["query_string"]:
        return
    known = sorted(set(_query_parameter_names(route.dependant)))
    for name in request.query_params:
        if name not in known:
            raise Problem(
                ErrorKind(BAD_REQUEST, "UNKNOWN_PARAMETER", "Wrong request"),
                _describe_unknown_parameter(name[:SHOWN_MAX], known),
            )


def _describe_unknown_parameter(name: str, known: list[str]) -> str:
    """Return the error message for an unknown parameter.

    >>> _describe_unknown_parameter("atomc", ["ack", "atomic"])
    "query: no parameter 'atomc' here (did you mean atomic?)"
    >>> _describe_unknown_parameter("zzz", ["ack", "atomic"]), _describe_unknown_parameter("a", [])
    ("query: no parameter 'zzz' here; there are ack, atomic", "query: no parameter 'a' here; there are none")
    """
    return f"query: no parameter {name!r} here" + (nearest(name, known) or f"; there are {', '.join(known) or 'none'}")


def _query_parameter_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for dependency in dependant.dependencies:
        yield from _query_parameter_names(dependency)


def create_app(
    *,
    ingest: APIRouter | None = None,
    admin: APIRouter | None = None,
    streams: APIRouter | None = None,
    more: Sequence[APIRouter] = (),
    dashboard: APIRouter | None = None,
    health: APIRouter | None = None,
    fast_path: Handle | None = None,
    rest_proxy: Sequence[APIRouter] = (),
    auth_token: SecretStr | None = None,
    credentials: Mapping[str, Credential] | None = None,
    cors_origins: Sequence[str] = (),
    local_hosts_only: bool = False,
    title: str = "Penstock",
    forwarded_documents: Callable[[], Iterable[Document]] = tuple,
) -> FastAPI:
    """Return an app of the given routers.

    With `auth_token` or `credentials`, every path except `/`, `/health` and `/metrics` needs a credential.
    `local_hosts_only` rejects requests whose Host header is not this machine (for a loopback address without a token).
    `fast_path` handles ordinary ingest requests without the router (`FastPath`). `forwarded_documents`
    returns the OpenAPI documents of forwarded routes.
    """
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    problem.install_problem_handlers(app)
    for router in (ingest, *rest_proxy, admin, streams, *more, dashboard, health):
        if router is not None:
            app.include_router(router, dependencies=[Depends(reject_unknown_query)])
    serve_openapi_document(app, forwarded_documents)
    if fast_path is not None:
        app.add_middleware(FastPath, handle=fast_path)
    app.add_middleware(
        Guard,
        auth_token=auth_token,
        credentials=credentials,
        local_hosts_only=local_hosts_only,
        cors_origins=cors_origins,
    )
    if cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(cors_origins),
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["*"],  # the names of key and time headers come from the settings
            expose_headers=["Retry-After", "Idempotency-Replayed"],
        )
    return app


EVENTS_PREFIX = "/v1/topics/"
EVENTS_SUFFIX = "/events"
_PLAIN_QUERY_PAIRS: dict[bytes, tuple[str, Any]] = {
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
    """Passes ordinary ingest requests to their handler before the router (ASGI middleware).

    Routing and parameter parsing double the cost of a request with one record. So a POST to `/v1/topics/{topic}/events`
    with a plain query is passed directly to the handler. All other requests go through the router, which also documents
    the route. The answers are the same.
    """

    def __init__(self, app: ASGIApp, handle: Handle) -> None:
        self._app = app
        self._handle = handle

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] == "POST":
            path: str = scope["path"]
            if path.startswith(EVENTS_PREFIX) and path.endswith(EVENTS_SUFFIX):
                topic = path[len(EVENTS_PREFIX) : -len(EVENTS_SUFFIX)]
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
    """Return the parameters of a query with known names and plain values; None if the router must parse it.

    >>> plain_query(b"offsets=true&ack=none"), plain_query(b"offsets=maybe"), plain_query(b"")
    ({'offsets': True, 'ack': 'none'}, None, {})
    """
    params: dict[str, Any] = {}
    for pair in query.split(b"&") if query else ():
        if pair not in _PLAIN_QUERY_PAIRS:
            return None
        name, value = _PLAIN_QUERY_PAIRS[pair]
        if name in params:
            return None
        params[name] = value
    return params
