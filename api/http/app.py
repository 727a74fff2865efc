"""One app out of the parts that a service wants at its address."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import SecretStr

from penstock.api.http import problem
from penstock.api.http.auth import Guard
from penstock.api.http.known_query import reject_unknown_query
from penstock.api.http.openapi import Paths, describe
from penstock.api.ingest.asgi import FastPath, Handle
from penstock.api.settings import Credential


def create_app(
    *,
    ingest: APIRouter | None = None,
    admin: APIRouter | None = None,
    streams: APIRouter | None = None,
    more: Sequence[APIRouter] = (),
    dashboard: APIRouter | None = None,
    health: APIRouter | None = None,
    straight: Handle | None = None,
    rest_proxy: Sequence[APIRouter] = (),
    auth_token: SecretStr | None = None,
    credentials: Mapping[str, Credential] | None = None,
    cors_origins: Sequence[str] = (),
    local_hosts_only: bool = False,
    title: str = "Penstock",
    handed_on: Callable[[], Paths] = dict,
) -> FastAPI:
    """An app of the parts given; each is the router that its module makes.

    With `auth_token` or `credentials`, everything but `/`, `/health` and `/metrics` needs one; `local_hosts_only`
    refuses requests whose Host header is not this machine (for a loopback address without a token). `straight` is the
    handler of ordinary ingest requests, which then go past the router. `handed_on` describes other services' routes for
    the OpenAPI document.
    """
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    problem.install(app)
    for part in (ingest, *rest_proxy, admin, streams, *more, dashboard, health):
        if part is not None:
            app.include_router(part, dependencies=[Depends(reject_unknown_query)])
    describe(app, handed_on)
    if straight is not None:
        app.add_middleware(FastPath, handle=straight)
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
            allow_headers=["*"],  # a topic's key and time headers, and CloudEvents' ce-*, have names of their own
            expose_headers=["Retry-After", "Idempotency-Replayed"],
        )
    return app
