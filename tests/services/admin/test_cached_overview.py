"""The overview that the dashboard polls."""

from __future__ import annotations

import asyncio

from penstock.api.console.overview import KafkaSample, ServiceSample
from penstock.services.admin.cached_overview import CachedOverview


class Clock:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.ms = 0

    def now_ms(self) -> int:
        return self.ms

    def monotonic_ms(self) -> int:
        return self.ms


class Counting:
    """A source that counts its requests."""

    def __init__(self) -> None:
        self.requests = 0

    async def sample(self) -> ServiceSample:
        self.requests += 1
        await asyncio.sleep(0)
        return ServiceSample("p", "", "ok", metrics={"penstock_ingest_stored_records_total": self.requests * 100.0})


class Kafka:
    """A cluster without groups."""

    async def sample(self) -> KafkaSample:
        return KafkaSample("c-1", 1)


async def test_concurrent_requests_sample_the_sources_once() -> None:
    """Within cache_ms all requests share one response, also those that arrive while it is built."""
    clock, source = Clock(), Counting()
    overview = CachedOverview([source], Kafka(), clock=clock, cache_ms=800)  # type: ignore[arg-type]
    first = await asyncio.gather(*(overview.overview() for _ in range(5)))
    assert source.requests == 1
    assert all(response == first[0] for response in first)
    clock.ms = 799
    await overview.overview()
    assert source.requests == 1


async def test_the_sources_are_sampled_again_after_cache_ms() -> None:
    """After cache_ms the sources are sampled again; rates are known from the second response on."""
    clock, source = Clock(), Counting()
    overview = CachedOverview([source], Kafka(), clock=clock, cache_ms=800)  # type: ignore[arg-type]
    assert (await overview.overview())["ingest"]["records_per_second"] is None
    clock.ms = 1_000
    assert (await overview.overview())["ingest"]["records_per_second"] == 100
    assert source.requests == 2


async def test_an_invalidated_overview_is_built_again() -> None:
    """The sources are read again after a change. A response in flight at that time is returned, but not cached."""
    clock, source = Clock(), Counting()
    overview = CachedOverview([source], Kafka(), clock=clock, cache_ms=800)  # type: ignore[arg-type]
    await overview.overview()
    overview.invalidate()
    pending = asyncio.create_task(overview.overview())
    while source.requests < 2:  # noqa: ASYNC110 - the request is made within two iterations of the loop
        await asyncio.sleep(0)
    overview.invalidate()
    await pending
    await overview.overview()
    await overview.overview()
    assert source.requests == 3
