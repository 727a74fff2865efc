"""A periodic health probe."""

from __future__ import annotations

import asyncio

from penstock.api.http.health import CheckResult
from penstock.api.http.probe import Probe


async def test_it_fails_until_the_first_answer() -> None:
    """A probe fails until its first successful answer."""

    async def request() -> None:
        return None

    probe = Probe("kafka", request)
    assert not probe().ok
    assert await probe.run_once() == CheckResult(True)
    assert probe() == CheckResult(True)


async def test_errors_and_silence_are_failures_with_their_reason() -> None:
    """An error and a timeout fail the probe with the reason, and a later success clears it."""
    answers = ["error", "silence", "ok"]

    async def request() -> None:
        match answers.pop(0):
            case "error":
                raise ConnectionError("refused")
            case "silence":
                await asyncio.Event().wait()

    probe = Probe("kafka", request, timeout_ms=10)
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

    running = asyncio.ensure_future(Probe("kafka", request, interval_ms=1).run())
    async with asyncio.timeout(5):
        await enough.wait()
    running.cancel()
