"""The overview that the dashboard polls. All sources are sampled together, at most once in `CACHE_MS`, unless the
cached overview was invalidated.

The number of open pages does not change the load: concurrent requests wait for the same samples.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.api.console.history import History, Point
from penstock.api.console.overview import Overview, OverviewBuilder
from penstock.services.admin.overview_sources import KafkaSource, Source
from penstock.services.kafka_daemon import KafkaHttpDaemon
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

CACHE_MS = 800
"""How long an overview is served from the cache: less than the page's polling interval."""
SAMPLE_INTERVAL_MS = 2_000


class CachedOverview:
    """Implements `penstock.api.console.overview.OverviewProvider` over sources."""

    def __init__(self, sources: Sequence[Source], kafka: KafkaSource, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._sources = sources
        self._kafka = kafka
        self._clock = clock
        self._builder = OverviewBuilder()
        self._history = History()
        self._lock = asyncio.Lock()
        self._newest: Overview | None = None
        self._sampled_ms: int | None = None
        self._changes = 0

    async def overview(self) -> Overview:
        """Return the newest overview, at most CACHE_MS old."""
        async with self._lock:
            now_ms = self._clock.monotonic_ms()
            newest = self._newest
            if newest is None or self._sampled_ms is None or now_ms - self._sampled_ms >= CACHE_MS:
                changes = self._changes
                newest = await self._sample_overview()
                self._newest = newest
                self._history.add(newest)
                self._sampled_ms = self._clock.monotonic_ms() if changes == self._changes else None
            return newest

    def invalidate(self) -> None:
        """Discard the cached overview, for example after connecting to Kafka. The next request samples again."""
        self._changes += 1
        self._sampled_ms = None

    def history(self) -> list[Point]:
        """Return the points of the dashboard's charts, oldest first."""
        return self._history.points

    async def run(self) -> None:
        """Build an overview every SAMPLE_INTERVAL_MS, so the history has no gaps while no page is open."""
        while True:
            try:
                await self.overview()
            except Exception:
                # The service has other work, so a defect of the overview does not end it.
                log.exception("the overview could not be built")
            await asyncio.sleep(SAMPLE_INTERVAL_MS / 1000)

    async def _sample_overview(self) -> Overview:
        kafka, services = await asyncio.gather(
            self._kafka.sample(), asyncio.gather(*(source.sample() for source in self._sources))
        )
        return self._builder.build(
            services, kafka, now_ms=self._clock.now_ms(), monotonic_ms=self._clock.monotonic_ms()
        )


class OverviewDaemon(KafkaHttpDaemon):
    """A service with an overview, which a subclass sets as `_overview`."""

    _overview: CachedOverview

    async def main_loop(self) -> None:
        """Build the overview at intervals while the server runs."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._overview.run())
            tasks.create_task(super().main_loop())

    async def connect(self) -> None:
        await super().connect()
        self._overview.invalidate()
