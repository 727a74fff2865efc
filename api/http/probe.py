"""A check that runs on a schedule, so reading its result costs nothing and never waits (an edge).

A service probes whether Kafka answers. `/health` shows the result, and ingest answers 503 at once while the brokers are
known to be unreachable. Otherwise every client would wait for a timeout.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from penstock.api.http.health import CheckResult
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

INTERVAL_MS = 2_000
TIMEOUT_MS = 5_000


class Probe:
    """The latest result of an asynchronous request. It is not ok until the first answer."""

    def __init__(
        self,
        name: str,
        request: Callable[[], Awaitable[Any]],
        *,
        interval_ms: int = INTERVAL_MS,
        timeout_ms: int = TIMEOUT_MS,
    ) -> None:
        self._name = name
        self._request = request
        self._interval_ms = interval_ms
        self._timeout_ms = timeout_ms
        self._result = CheckResult(False, "not probed yet")

    def __repr__(self) -> str:
        return f"Probe({self._name}, {self._result})"

    def __call__(self) -> CheckResult:
        """Return the latest result."""
        return self._result

    async def run_once(self) -> CheckResult:
        """Send the request and store the result. An error, or no answer in time, is a failed result."""
        try:
            async with asyncio.timeout(self._timeout_ms / 1000):
                await self._request()
            result = CheckResult(True)
        except TimeoutError:
            result = CheckResult(False, f"{self._name} did not answer within {self._timeout_ms} ms")
        except Exception as e:
            result = CheckResult(False, str(e) or type(e).__name__)
        if result.ok != self._result.ok:
            log.info("check changed", check=self._name, ok=result.ok, detail=result.detail)
        self._result = result
        return result

    async def run(self) -> None:
        """Repeat at intervals until cancelled."""
        while True:
            await self.run_once()
            await asyncio.sleep(self._interval_ms / 1000)
