"""Builds the app of a service from its routers."""

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
    `fast_path` handles ordinary ingest requests without the router (`penstock.api.ingest.asgi`). `forwarded_documents`
    returns the OpenAPI documents of forwarded routes.
    """
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    problem.install(app)
    for router in (ingest, *rest_proxy, admin, streams, *more, dashboard, health):
        if router is not None:
            app.include_router(router, dependencies=[Depends(reject_unknown_query)])
    describe(app, forwarded_documents)
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
