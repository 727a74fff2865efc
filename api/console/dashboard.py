"""The page at `/` and the JSON that it polls, `GET /v1/overview`.

The page is one file without external assets. Its content security policy allows no script and no style but the page's
own inline ones, by their hashes.
"""

from __future__ import annotations

import base64
import hashlib
import re
from importlib import resources

from fastapi import APIRouter, Response

from penstock.api.console.history import HistoryResponse
from penstock.api.console.overview import Overview, OverviewProvider
from penstock.api.http.json_response import json_response

HTML_TYPE = "text/html; charset=utf-8"


def dashboard_router(provider: OverviewProvider) -> APIRouter:
    """Return the routes of the page and its data."""
    router = APIRouter(tags=["dashboard"])
    page = resources.files("penstock.api.console").joinpath("dashboard.html").read_bytes()
    headers = {"Content-Security-Policy": content_security_policy(page)}

    @router.get("/", include_in_schema=False)
    async def get_dashboard_page() -> Response:
        return Response(page, headers=headers, media_type=HTML_TYPE)

    @router.get(
        "/v1/overview",
        summary="Services, ingest rate, lag, stream time, sessions and compactions at once",
        responses={200: {"model": Overview}},
    )
    async def get_overview() -> Response:
        return json_response(await provider.overview())

    @router.get(
        "/v1/history",
        summary="The charts' data: a point every few seconds since the service started",
        responses={200: {"model": HistoryResponse}},
    )
    async def get_history() -> Response:
        return json_response(HistoryResponse(points=provider.history()))

    return router


def content_security_policy(page: bytes) -> str:
    """Return the policy under which only the page's own inline script and style run.

    >>> content_security_policy(b"<style>a{}</style><script>1</script>").split("; ")[1]
    "script-src 'sha256-a4ayc/80/OGda4BO/1o/V0etpOqiLx1JwB5S3beHW0s='"
    """
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {_csp_hashes(page, b'script')}",
            f"style-src {_csp_hashes(page, b'style')}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
        ]
    )


def _csp_hashes(page: bytes, tag: bytes) -> str:
    blocks = re.findall(rb"<%s>(.*?)</%s>" % (tag, tag), page, re.DOTALL)
    return " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(block).digest()).decode()}'" for block in blocks)
