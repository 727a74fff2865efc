"""One app out of the parts that a service wants at its address."""

from __future__ import annotations

from fastapi import APIRouter, FastAPI
from pydantic import SecretStr

from api import problem
from api.auth import Guard


def create_app(
    *,
    ingest: APIRouter | None = None,
    admin: APIRouter | None = None,
    streams: APIRouter | None = None,
    dashboard: APIRouter | None = None,
    health: APIRouter | None = None,
    auth_token: SecretStr | None = None,
    local_hosts_only: bool = False,
    title: str = "Penstock",
) -> FastAPI:
    """An app of the parts given; each is the router that its module makes.

    With `auth_token`, everything but `/`, `/health` and `/metrics` needs it; `local_hosts_only` refuses requests
    whose Host header is not this machine (for a loopback address without a token).
    """
    app = FastAPI(title=title, docs_url=None, redoc_url=None)
    problem.install(app)
    for part in (ingest, admin, streams, dashboard, health):
        if part is not None:
            app.include_router(part)
    app.add_middleware(Guard, auth_token=auth_token, local_hosts_only=local_hosts_only)
    return app
