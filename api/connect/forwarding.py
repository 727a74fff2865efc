"""Forwards requests to the worker that can answer them (an edge): the leader, or the one that runs the connector.

A request is forwarded at most twice, since the group may change meanwhile. The first worker marks it `forward=true`,
the next one `forward=false`. A worker that gets `forward=false` and cannot answer either answers 409.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx
from fastapi import Request, Response

from penstock.shared.common.log import get_logger
from penstock.shared.connect.herder.errors import NotHere

log = get_logger(__name__)

TIMEOUT_MS = 95_000
"""Longer than a herder lets a request wait, so that the client gets the herder's own answer."""
CONFLICT = "Cannot complete request because of a conflicting operation (e.g. worker rebalance)"
UNREACHABLE = "IO Error trying to forward REST request: {}"
KEPT_HEADERS = ("content-type", "authorization", "accept")

ErrorResponse = Callable[[int, str], Response]


class Forwarding:
    """Forwards requests."""

    def __init__(self, timeout_ms: int = TIMEOUT_MS) -> None:
        self._timeout_s = timeout_ms / 1000

    async def forward(self, request: Request, error: NotHere, error_response: ErrorResponse) -> Response:
        """Returns the other worker's answer, or 409 if no other worker is known, or 500 if it does not answer."""
        mark = next_mark(request.query_params.get("forward"))
        if mark is None or error.url is None:
            return error_response(409, CONFLICT)
        query = [(name, value) for name, value in request.query_params.multi_items() if name != "forward"]
        raw = request.scope.get("raw_path", request.url.path.encode()).partition(b"?")[0].decode("latin-1")
        url = f"{error.url.rstrip('/')}{raw}"
        headers = {name: value for name in KEPT_HEADERS if (value := request.headers.get(name)) is not None}
        log.debug("forwarding a request", to=url, because=str(error))
        try:
            async with httpx.AsyncClient(timeout=self._timeout_s, trust_env=False) as client:
                answer = await client.request(
                    request.method,
                    url,
                    params=[*query, ("forward", mark)],
                    content=await request.body(),
                    headers=headers,
                )
        except httpx.HTTPError as e:
            return error_response(500, UNREACHABLE.format(f"{type(e).__name__}: {e}".rstrip(": ")))
        kept = {name: answer.headers[name] for name in ("content-type", "location") if name in answer.headers}
        return Response(answer.content, answer.status_code, kept)


def next_mark(mark: str | None) -> str | None:
    """Returns the mark for a forwarded request, or None if it must not be forwarded.

    >>> next_mark(None), next_mark("true"), next_mark("false")
    ('true', 'false', None)
    """
    if mark is None:
        return "true"
    return "false" if mark.lower() == "true" else None
