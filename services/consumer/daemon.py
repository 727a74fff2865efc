"""The handler daemon: the handler runner with `/health` and `/metrics`, as a service.

`/health` and `/metrics` respond before any record is read. On SIGTERM the service drains as `HandlerRunner.close` does.
"""

from __future__ import annotations

import asyncio

from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_health_app
from penstock.api.http.health import Check, CheckResult
from penstock.api.http.kafka_liveness import KafkaLiveness
from penstock.api.http.server import HttpServer
from penstock.services.consumer.handler_runner import HandlerRunner
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.gc_tuning import spare_the_collector

SERVICE = "consumer"


class ConsumerDaemon:
    """Runs the service with its settings. `server.url` is known after `startup`.

    Raises ConfigError as `HandlerRunner` does.
    """

    def __init__(self, settings: ConsumerServiceSettings) -> None:
        registry = CollectorRegistry()
        self.runner = HandlerRunner(settings, registry=registry)
        self._kafka_liveness = KafkaLiveness(lambda: self.runner.consumer, settings.kafka_silence_max_ms)
        checks: dict[str, Check] = {"progress": self.check, "kafka": self._kafka_liveness}
        self.server = HttpServer(create_health_app(SERVICE, checks, registry), settings.http)

    def __repr__(self) -> str:
        return f"ConsumerDaemon({self.server!r}, {self.runner!r})"

    async def startup(self) -> None:
        """Listen for HTTP requests. Raises ConfigError as `HttpServer.start` does."""
        spare_the_collector()
        await self.server.start()

    async def main_loop(self) -> None:
        """Connect, then handle records until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._kafka_liveness.run())
            await self.runner.run()

    async def shutdown(self) -> None:
        """Drain, commit, leave the group and close the clients."""
        try:
            await self.runner.close()
        finally:
            await self.server.stop(grace_ms=1_000)

    def check(self) -> CheckResult:
        """Return the health check `progress`. It fails in three cases:

        1. The runner waits for Kafka, or for a topic that does not exist yet.
        2. The consumer has been stuck for longer than `stuck_after_ms` (see `ProgressWatch`).
        3. The write of a dead letter has failed repeatedly.
        """
        loop = self.runner.loop
        consumer = self.runner.consumer
        if loop is None:
            return CheckResult(False, self.runner.waits_for)
        progress = loop.progress
        facts = {"lag": progress.lag, "finished": loop.finished, "in_flight": loop.scheduler.in_flight}
        rebalance_ms = 0.0 if consumer is None else consumer.rebalance_ms()
        trouble = progress.trouble(SYSTEM_CLOCK.monotonic_ms(), rebalance_ms)
        trouble = "; ".join(filter(None, (trouble, loop.unwritten())))
        return CheckResult(not trouble, trouble, facts)
