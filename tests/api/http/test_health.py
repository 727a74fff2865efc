"""/health and /metrics."""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_health_app
from penstock.api.http.health import CheckResult, run_checks
from penstock.shared.common import metrics


async def send_request(path: str, checks: dict, registry: CollectorRegistry | None = None) -> httpx.Response:
    app = create_health_app("aggregator", checks, registry or CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.get(path)


async def healthy() -> CheckResult:
    return CheckResult(True, facts={"brokers": 3})


async def test_all_healthy_is_200() -> None:
    """Health is 200 if all checks, plain or asynchronous, are healthy, and shows their facts."""
    response = await send_request("/health", {"kafka": healthy, "tasks": lambda: CheckResult(True)})
    assert response.status_code == 200
    assert response.json() == {
        "status": "ok",
        "service": "aggregator",
        "checks": {
            "kafka": {"status": "ok", "detail": "", "brokers": 3},
            "tasks": {"status": "ok", "detail": ""},
        },
    }


async def test_one_failing_check_is_503() -> None:
    """Health is 503 with the reason if a check fails."""

    async def broken() -> CheckResult:
        raise ConnectionError("refused")

    response = await send_request("/health", {"kafka": healthy, "store": broken})
    assert response.status_code == 503
    assert response.json()["status"] == "failing"
    assert response.json()["checks"]["store"] == {"status": "failing", "detail": "ConnectionError: refused"}


async def test_a_check_that_hangs_fails_alone() -> None:
    """A check that hangs fails after its timeout and delays no other."""

    async def hanging() -> CheckResult:
        await asyncio.Event().wait()
        return CheckResult(True)

    results = await run_checks({"slow": hanging, "kafka": healthy}, timeout_ms=10)
    assert results["slow"] == CheckResult(False, "no response within 10 ms")
    assert results["kafka"].ok


async def test_metrics_are_in_prometheus_format() -> None:
    """/metrics serves the registry in Prometheus' format."""
    registry = CollectorRegistry()
    metrics.counter(registry, "test_things", "Things.").inc(7)
    response = await send_request("/metrics", {}, registry)
    assert response.headers["content-type"] == metrics.CONTENT_TYPE
    assert "penstock_test_things_total 7.0" in response.text
