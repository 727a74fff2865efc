"""Forwards requests to the worker that can answer them: the leader, or the one that runs the connector.

A request is forwarded at most twice, because a rebalance may change the right worker meanwhile. The first worker adds
the query parameter `forward=true`, the second one adds `forward=false`. A worker never forwards a request with
`forward=false`: it answers 409 if it is not the right worker either.
"""

from __future__ import annotations

from collections.abc import Callable

import httpx
from fastapi import Request, Response

from penstock.api.http.status_codes import CONFLICT, INTERNAL_SERVER_ERROR
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.log import get_logger
from penstock.shared.connect.herder.errors import NotHere

log = get_logger(__name__)

TIMEOUT_MS = 95_000
"""Longer than `REQUEST_TIMEOUT_MS` of one step, so that the client receives the other worker's own response to a
timeout. A request with several slow steps, such as validation and write, may take longer."""
CONFLICT_MESSAGE = "Cannot complete request because of a conflicting operation (e.g. worker rebalance)"
UNREACHABLE_MESSAGE = "IO Error trying to forward REST request: {}"
REQUEST_HEADERS = (b"content-type", b"authorization", b"accept")
RESPONSE_HEADERS = ("content-type", "location")
"""Headers that are forwarded."""

ErrorResponse = Callable[[int, str], Response]


async def forward_request(request: Request, error: NotHere, error_response: ErrorResponse) -> Response:
    """Forward the request to the worker that `error` names, and return that worker's response.

    Returns a 409 response if `error` names no worker or the request was already forwarded twice. Returns a 500
    response if the worker does not answer. `error_response` makes both responses from a status and a message.
    """
    forward = next_forward(request.query_params.get("forward"))
    if forward is None or error.url is None:
        return error_response(CONFLICT, CONFLICT_MESSAGE)
    query = [(name, value) for name, value in request.query_params.multi_items() if name != "forward"]
    raw = request.scope.get("raw_path", request.url.path.encode()).partition(b"?")[0].decode("latin-1")
    url = f"{error.url.rstrip('/')}{raw}"
    # As bytes: httpx would encode a `str` as ASCII.
    headers = [(name, value) for name, value in request.headers.raw if name in REQUEST_HEADERS]
    log.debug("forwarding a request", to=url, reason=str(error))
    try:
        async with httpx.AsyncClient(timeout=TIMEOUT_MS / 1000, verify=client_tls(), trust_env=False) as client:
            response = await client.request(
                request.method,
                url,
                params=[*query, ("forward", forward)],
                content=await request.body(),
                headers=headers,
            )
    except httpx.HTTPError as e:
        return error_response(
            INTERNAL_SERVER_ERROR, UNREACHABLE_MESSAGE.format(f"{type(e).__name__}: {e}".rstrip(": "))
        )
    forwarded = {name: response.headers[name] for name in RESPONSE_HEADERS if name in response.headers}
    return Response(response.content, response.status_code, forwarded)


def next_forward(forward: str | None) -> str | None:
    """Return the parameter `forward` of the forwarded request, or None if the request must not be forwarded again.

    >>> next_forward(None), next_forward("true"), next_forward("false")
    ('true', 'false', None)
    """
    if forward is None:
        return "true"
    return "false" if forward.lower() == "true" else None
