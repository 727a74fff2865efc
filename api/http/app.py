"""Builds the app of a service from its routers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from fastapi import APIRouter as APIRouter
from fastapi import Depends, FastAPI, Request
from fastapi.dependencies.models import Dependant
from fastapi.middleware.cors import CORSMiddleware
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from starlette.types import ASGIApp

from penstock.api.http import problem
from penstock.api.http.auth import Guard
from penstock.api.http.health import Check, health_router
from penstock.api.http.openapi import Document, serve_openapi_document
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import BAD_REQUEST
from penstock.api.settings import Credential
from penstock.shared.common.setting_names import nearest

CHECKED_PREFIX = "/v1/"
SHOWN_MAX = 40
"""Characters of an unknown name that an error message repeats."""


async def reject_unknown_query(request: Request) -> None:
    """Raise Problem (400) if a request under `/v1/` has a query parameter that the route does not know.

    The error names a similar parameter, or all parameters of the route if none is similar. Routes outside of the
    OpenAPI schema, such as forwarded routes, are not checked.
    """
    # The function is async because FastAPI runs other dependencies in a thread.
    route = request.scope.get("route")
    # The routes of REST Proxy ignore unknown parameters, as the original does. The service that receives a forwarded
    # request checks it.
    if not isinstance(route, APIRoute) or not route.include_in_schema or not route.path.startswith(CHECKED_PREFIX):
        return
    if not request.scope["query_string"]:
        return
    # Without this check, a request that misspells `?atomic=true` would store its events one by one.
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
    fast_path: Callable[[ASGIApp], ASGIApp] | None = None,
    rest_proxy: Sequence[APIRouter] = (),
    auth_token: SecretStr | None = None,
    credentials: Mapping[str, Credential] | None = None,
    cors_origins: Sequence[str] = (),
    local_hosts_only: bool = False,
    title: str = "Penstock",
    forwarded_documents: Callable[[], Iterable[Document]] = tuple,
) -> FastAPI:
    """Return an app of the given routers.

    With `auth_token` or `credentials`, every path except `/`, `/health` and `/metrics` needs a credential. With
    `local_hosts_only`, the Host header must be `localhost` or a loopback address. `fast_path` is a middleware for
    ordinary ingest requests. `forwarded_documents` returns the OpenAPI documents of forwarded routes.
    """
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    problem.install_problem_handlers(app)
    for router in (ingest, *rest_proxy, admin, streams, *more, dashboard, health):
        if router is not None:
            app.include_router(router, dependencies=[Depends(reject_unknown_query)])
    serve_openapi_document(app, forwarded_documents)
    if fast_path is not None:
        app.add_middleware(fast_path)
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


def create_health_app(service: str, checks: Mapping[str, Check], registry: CollectorRegistry) -> FastAPI:
    """Return the app of a service that needs no routes but `/health` and `/metrics`."""
    app = FastAPI(title=f"Penstock {service}", docs_url=None, redoc_url=None)
    problem.install_problem_handlers(app)
    app.include_router(health_router(service, checks, registry))
    return app
