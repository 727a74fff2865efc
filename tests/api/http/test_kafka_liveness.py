"""Checks of whether Kafka answers: a client that is silent for a time that the test sets, and a probe."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from penstock.api.http.health import CheckResult
from penstock.api.http.kafka_liveness import PING_SHARE, KafkaLiveness, KafkaProbe

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


def test_silence_beyond_the_limit_is_unhealthy_until_an_answer_comes() -> None:
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


async def test_it_fails_until_the_first_answer() -> None:
    """A probe fails until its first successful response."""

    async def request() -> None:
        return None

    probe = KafkaProbe(request)
    assert not probe().ok
    assert await probe.run_once() == CheckResult(True)
    assert probe() == CheckResult(True)


async def test_errors_and_silence_are_failures_with_their_reason() -> None:
    """An error and a timeout fail the probe with the reason, and a later success clears it."""
    responses = ["error", "silence", "ok"]

    async def request() -> None:
        match responses.pop(0):
            case "error":
                raise ConnectionError("refused")
            case "silence":
                await asyncio.Event().wait()

    probe = KafkaProbe(request, timeout_ms=10)
    assert await probe.run_once() == CheckResult(False, "refused")
    assert await probe.run_once() == CheckResult(False, "kafka did not answer within 10 ms")
    assert (await probe.run_once()).ok


async def test_it_probes_repeatedly() -> None:
    """`run` probes by its interval until it is cancelled."""
    enough = asyncio.Event()
    count = 0

    async def request() -> None:
        nonlocal count
        count += 1
        if count == 3:
            enough.set()

    running = asyncio.ensure_future(KafkaProbe(request, interval_ms=1).run())
    async with asyncio.timeout(5):
        await enough.wait()
    running.cancel()
