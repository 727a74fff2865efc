"""/health and /metrics."""

from __future__ import annotations

import asyncio

import httpx
from prometheus_client import CollectorRegistry

from penstock.api.http.health import CheckResult, create_health_app, run_checks
from penstock.shared.common import metrics


async def ask(path: str, checks: dict, registry: CollectorRegistry | None = None) -> httpx.Response:
    app = create_health_app("aggregator", checks, registry or CollectorRegistry())
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
        return await client.get(path)


async def well() -> CheckResult:
    return CheckResult(True, facts={"brokers": 3})


async def test_all_well_is_200() -> None:
    """Checks may be plain or asynchronous; their facts are shown."""
    answer = await ask("/health", {"kafka": well, "tasks": lambda: CheckResult(True)})
    assert answer.status_code == 200
    assert answer.json() == {
        "status": "ok",
        "service": "aggregator",
        "checks": {
            "kafka": {"status": "ok", "detail": "", "brokers": 3},
            "tasks": {"status": "ok", "detail": ""},
        },
    }


async def test_one_failing_check_is_503() -> None:
    """The service is as well as its worst check, and the reason is told."""

    async def broken() -> CheckResult:
        raise ConnectionError("refused")

    answer = await ask("/health", {"kafka": well, "store": broken})
    assert answer.status_code == 503
    assert answer.json()["status"] == "failing"
    assert answer.json()["checks"]["store"] == {"status": "failing", "detail": "ConnectionError: refused"}


async def test_a_check_that_hangs_fails_alone() -> None:
    """Each check has a limit, and the others are not held up by it."""

    async def hanging() -> CheckResult:
        await asyncio.Event().wait()
        return CheckResult(True)

    results = await run_checks({"slow": hanging, "kafka": well}, timeout_ms=10)
    assert results["slow"] == CheckResult(False, "no answer within 10 ms")
    assert results["kafka"].ok


async def test_metrics_are_in_prometheus_format() -> None:
    """The registry that was handed in is what is served."""
    registry = CollectorRegistry()
    metrics.counter(registry, "test_things", "Things.").inc(7)
    answer = await ask("/metrics", {}, registry)
    assert answer.headers["content-type"] == metrics.CONTENT_TYPE
    assert "penstock_test_things_total 7.0" in answer.text
