"""What a worker's REST answers before there is a herder: its address is taken first, to be found taken at once."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.api.connect.errors import error_response
from penstock.api.http.problem import json_response


class StartingApp:
    """What REST answers until there is a herder to ask."""

    def __init__(self) -> None:
        self.app: ASGIApp | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if self.app is not None:
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            starting = {"status": "starting", "message": "Worker is still starting up."}
            answer = (
                json_response(starting, 503)
                if scope["path"].rstrip("/") == "/health"
                else error_response(503, "The worker is still starting up")
            )
            await answer(scope, receive, send)
