"""`penstock aggregator`: a stream worker, its compactions, and an HTTP address for health, metrics and state."""

from __future__ import annotations

import asyncio
import importlib
import sys
from pathlib import Path
from typing import Any, cast

from prometheus_client import CollectorRegistry

from api.app import create_app
from api.health import CheckResult, health_router
from api.server import HttpServer
from api.state import StreamsState, streams_router
from services.aggregator.compaction import SCHEDULE_NAME, CompactionSupervisor
from services.aggregator.settings import AggregatorSettings
from shared.common import daemon, log
from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import ConfigError
from shared.common.settings import load_or_exit
from shared.streams.punctuation import PunctuationType
from shared.streams.stream_task import StreamTask
from shared.streams.stream_worker import StreamWorker
from shared.streams.topology import Topology

PROGRAM = "penstock aggregator"
STUCK_MS = 60_000  # a turn polls, processes and commits: it takes a fraction of a second
COMPACTION_PARTITION = 0  # the one instance that owns it asks for compactions


def load_topology(name: str, options: dict[str, str]) -> Topology:
    """The topology that `module:function` returns; ConfigError says what is wrong with it."""
    module, _, function = name.partition(":")
    here = str(Path.cwd())
    if here not in sys.path:  # a console script does not look in the current folder, where user code lies
        sys.path.insert(0, here)
    try:
        build = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError) as e:
        raise ConfigError(f"topology: {name}: {e}") from e
    try:
        topology = build(**options)
    except TypeError as e:
        raise ConfigError(f"topology: {name}: {e}") from e
    if not isinstance(topology, Topology):
        raise ConfigError(f"topology: {name} returned {type(topology).__name__}, not a Topology")
    return topology


class Aggregator:
    """The service; see `shared.common.daemon`."""

    def __init__(self, settings: AggregatorSettings) -> None:
        self._settings = settings
        self._registry = CollectorRegistry()
        self.compaction = CompactionSupervisor(settings, self._registry)
        topology = load_topology(settings.topology, settings.topology_options)
        self.worker = StreamWorker(
            settings.kafka, settings.streams, topology, on_task=self._on_task, registry=self._registry
        )
        app = create_app(
            streams=streams_router(self),
            health=health_router("aggregator", {"tasks": self._check_tasks}, self._registry),
            auth_token=settings.auth_token,
            local_hosts_only=settings.local_hosts_only,
            title="Penstock aggregator",
        )
        self.server = HttpServer(app, settings.http)
        self._supervising: asyncio.Task[None] | None = None
        self._turned_ms: int | None = None

    async def startup(self) -> None:
        await self.server.start()
        await self.worker.startup()
        self._supervising = asyncio.create_task(self.compaction.run(), name="compaction")

    async def main_loop(self) -> None:
        while True:
            self._turned_ms = SYSTEM_CLOCK.monotonic_ms()
            await self.worker.run_once()

    async def shutdown(self) -> None:
        await self.worker.shutdown()
        if self._supervising is not None:
            self._supervising.cancel()
            await asyncio.gather(self._supervising, return_exceptions=True)
        await self.server.stop()

    async def describe(self) -> StreamsState:
        """What `GET /v1/streams` answers."""
        state: dict[str, Any] = {**self.worker.describe(), "compactions": self.compaction.describe()}
        return cast(StreamsState, state)

    def _on_task(self, task: StreamTask) -> None:
        if task.partition == COMPACTION_PARTITION and self.compaction.enabled:
            interval = self._settings.compaction.interval_ms
            task.schedule(interval, PunctuationType.WALL_CLOCK_TIME, self.compaction.ask, name=SCHEDULE_NAME)

    def _check_tasks(self) -> CheckResult:
        """Restoring is no illness: a service that is restarted for it would never get done."""
        if self._turned_ms is None:
            return CheckResult(ok=False, detail="not started: waiting for the source topics and the group")
        stood_ms = SYSTEM_CLOCK.monotonic_ms() - self._turned_ms
        if stood_ms > STUCK_MS:
            return CheckResult(ok=False, detail=f"one turn of the loop has taken {stood_ms} ms")
        restoring = [p for p, owned in self.worker.tasks().items() if owned.task is None]
        return CheckResult(ok=True, detail=f"restoring partitions {restoring}" if restoring else "")


def main(arguments: list[str]) -> int:
    """Run until SIGTERM; the exit status."""
    settings = load_or_exit(AggregatorSettings, arguments, PROGRAM)
    log.configure(settings.log, "aggregator")
    try:
        aggregator = Aggregator(settings)
    except ConfigError as e:
        print(f"{PROGRAM}: {e}", file=sys.stderr)
        return 2

    async def run() -> int:
        return await daemon.run(aggregator, settings.shutdown_timeout_ms)

    return asyncio.run(run())
