"""Builds one app from the parts that a service serves at its address."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from fastapi import APIRouter, Depends, FastAPI
from fastapi.middleware.cors import CORSMiddleware
from pydantic import SecretStr

from penstock.api.http import problem
from penstock.api.http.auth import Guard
from penstock.api.http.known_query import reject_unknown_query
from penstock.api.http.openapi import Document, describe
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
    handed_on: Callable[[], Iterable[Document]] = tuple,
) -> FastAPI:
    """Return an app of the given parts. Each part is a router that its module builds.

    With `auth_token` or `credentials`, every path except `/`, `/health` and `/metrics` needs a credential.
    `local_hosts_only` rejects requests whose Host header is not this machine (for a loopback address without a token).
    `straight` handles ordinary ingest requests and bypasses the router. `handed_on` returns the OpenAPI
    documents of routes of other services.
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
            allow_headers=["*"],  # the names of key and time headers come from the settings
            expose_headers=["Retry-After", "Idempotency-Replayed"],
        )
    return app
