"""The routes `/health` and `/metrics` of a service.

Checks run together, each within a time limit. A check that fails, raises or takes too long makes the service unhealthy:
the response is 503 with the reason. Both paths need no credentials, for orchestrators and Prometheus. They show names
and counts, never a record.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Response
from fastapi.responses import PlainTextResponse
from prometheus_client import CollectorRegistry
from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http.json_response import json_response
from penstock.api.http.status_codes import OK, SERVICE_UNAVAILABLE
from penstock.shared.common import metrics

CHECK_TIMEOUT_MS = 2_000

METRICS_EXAMPLE = 'penstock_ingest_stored_records_total{topic="flights"} 40.0\n'

Check = Callable[[], "Awaitable[CheckResult] | CheckResult"]


class Health(TypedDict):
    """Whether a service can do its work, and the result of each check."""

    status: Literal["ok", "failing"]
    service: Annotated[str, Field(examples=["gateway"])]
    checks: Annotated[dict[str, dict[str, Any]], Field(examples=[{"kafka": {"status": "ok", "detail": ""}}])]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check; `facts` are plain values to show with it."""

    ok: bool
    detail: str = ""
    facts: Mapping[str, Any] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        """Return the check's result as plain values, for the body of `/health`."""
        return {"status": "ok" if self.ok else "failing", "detail": self.detail, **self.facts}


async def run_checks(checks: Mapping[str, Check], timeout_ms: int = CHECK_TIMEOUT_MS) -> dict[str, CheckResult]:
    """Run all checks and return the results by name. An error of a check is a failed result."""
    results = await asyncio.gather(*(_run_check(check, timeout_ms) for check in checks.values()))
    return dict(zip(checks, results, strict=True))


async def _run_check(check: Check, timeout_ms: int) -> CheckResult:
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            result = check()
            return await result if inspect.isawaitable(result) else result
    except TimeoutError:
        return CheckResult(False, f"no response within {timeout_ms} ms")
    except Exception as e:
        return CheckResult(False, f"{type(e).__name__}: {e}")


def health_body(service: str, results: Mapping[str, CheckResult]) -> Health:
    """Return the response of `/health` as plain values."""
    return {
        "status": "ok" if all(result.ok for result in results.values()) else "failing",
        "service": service,
        "checks": {name: result.body() for name, result in results.items()},
    }


def describe_failing_checks(checks: Mapping[str, Any]) -> str:
    """Return the failing checks of a response of `/health` with their reasons, in one line."""
    return "; ".join(f"{name}: {c.get('detail') or 'failing'}" for name, c in checks.items() if c.get("status") != "ok")


def health_router(
    service: str,
    checks: Mapping[str, Check],
    registry: CollectorRegistry,
    render: Callable[[], Awaitable[bytes]] | None = None,
) -> APIRouter:
    """Return the routes `/health` and `/metrics`. `render` returns the metrics' text; default: that of the registry."""
    router = APIRouter(tags=["health"])

    @router.get(
        "/health",
        summary="Whether the service can do its work (200) or not (503)",
        responses={200: {"model": Health}, 503: {"model": Health, "description": "a check fails"}},
    )
    async def get_health() -> Response:
        body = health_body(service, await run_checks(checks))
        return json_response(body, OK if body["status"] == "ok" else SERVICE_UNAVAILABLE)

    @router.get(
        "/metrics",
        summary="Metrics in Prometheus' text format",
        response_class=PlainTextResponse,
        responses={200: {"content": {"text/plain": {"schema": {"type": "string", "examples": [METRICS_EXAMPLE]}}}}},
    )
    async def render_metrics() -> Response:
        text = metrics.render(registry) if render is None else await render()
        return Response(text, headers={"Content-Type": metrics.CONTENT_TYPE})

    return router
