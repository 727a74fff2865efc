"""/health and /metrics, and the checks of whether Kafka answers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import httpx
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_health_app
from penstock.api.http.health import CheckResult, run_checks
from penstock.api.http.kafka_liveness import PING_SHARE, KafkaLiveness, KafkaProbe
from penstock.shared.common import metrics
from penstock.shared.common.errors import BrokerNotAvailable, KafkaTimeout


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


LIMIT_MS = 1_000


@dataclass
class Client:
    """Implements `penstock.api.http.kafka_liveness.LivenessClient`."""

    silent: float | None = 0.0
    requests: int = 0

    def silent_ms(self) -> float | None:
        return self.silent

    def ping(self) -> None:
        self.requests += 1


def test_silence_beyond_the_limit_is_unhealthy_until_a_response_comes() -> None:
    """Silence beyond the limit is unhealthy with its duration and the setting, until the next response."""
    client = Client()
    liveness = KafkaLiveness(lambda: client, LIMIT_MS)
    assert liveness().ok
    client.silent = LIMIT_MS
    assert liveness().ok
    client.silent = LIMIT_MS + 1
    assert (liveness().ok, liveness().detail) == (
        False,
        "no response from any broker for 1001 ms (kafka_silence_max_ms=1000)",
    )
    client.silent = 0
    assert liveness().ok


def test_a_silent_client_is_probed_before_the_limit() -> None:
    """A client that has been silent for a share of the limit is probed, since it may only be waiting."""
    client = Client()
    liveness = KafkaLiveness(lambda: client, LIMIT_MS)
    liveness.run_once()
    assert client.requests == 0
    client.silent = LIMIT_MS * PING_SHARE
    liveness.run_once()
    liveness.run_once()
    assert client.requests == 2


def test_a_missing_or_closed_client_is_unhealthy() -> None:
    """Without an open client the check is unhealthy, and nothing is probed."""
    client = Client(silent=None)
    for given in (None, client):
        liveness = KafkaLiveness(lambda given=given: given, LIMIT_MS)  # type: ignore[misc]
        liveness.run_once()
        assert not liveness().ok
        assert "not connected" in liveness().detail
    assert client.requests == 0


def test_the_newest_client_counts() -> None:
    """The check uses the current client, if a fenced one is replaced."""
    clients = [Client(silent=LIMIT_MS + 1), Client()]
    liveness = KafkaLiveness(lambda: clients[-1], LIMIT_MS)
    assert liveness().ok
    clients.pop()
    assert not liveness().ok


async def test_a_probe_fails_until_the_first_response() -> None:
    """A probe fails until its first successful response."""

    async def request() -> None:
        return None

    probe = KafkaProbe(request, lambda: None, LIMIT_MS)
    assert not probe().ok
    assert await probe.run_once() == CheckResult(True)
    assert probe() == CheckResult(True)


async def test_errors_and_silence_fail_a_probe_with_their_reason() -> None:
    """An error and a long silence fail the probe with the reason, and a later success clears it."""
    refused = KafkaTimeout("not done")
    refused.__cause__ = BrokerNotAvailable("refused")
    errors = [ConnectionError("closed"), refused, KafkaTimeout("slow"), KafkaTimeout("silent"), None]
    silences = [LIMIT_MS, LIMIT_MS + 1]

    async def request() -> None:
        if (error := errors.pop(0)) is not None:
            raise error

    probe = KafkaProbe(request, lambda: silences.pop(0), LIMIT_MS)
    assert await probe.run_once() == CheckResult(False, "closed")
    assert await probe.run_once() == CheckResult(False, "not done")
    assert await probe.run_once() == CheckResult(True)
    assert await probe.run_once() == CheckResult(False, "no response from any broker for 1001 ms")
    assert (await probe.run_once()).ok


async def test_a_probe_is_repeated() -> None:
    """`run` probes by its interval until it is cancelled."""
    enough = asyncio.Event()
    count = 0

    async def request() -> None:
        nonlocal count
        count += 1
        if count == 3:
            enough.set()

    running = asyncio.ensure_future(KafkaProbe(request, lambda: None, LIMIT_MS, interval_ms=1).run())
    async with asyncio.timeout(5):
        await enough.wait()
    running.cancel()
