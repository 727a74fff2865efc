"""The overview that the dashboard polls."""

from __future__ import annotations

import asyncio

from penstock.api.console.samples import KafkaSample, ServiceSample
from penstock.services.admin.overview_provider import Overview


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
        self.asked = 0

    async def sample(self) -> ServiceSample:
        self.asked += 1
        await asyncio.sleep(0)
        return ServiceSample("p", "", "ok", metrics={"penstock_ingest_stored_records_total": self.asked * 100.0})


class Kafka:
    """A cluster without groups."""

    async def sample(self) -> KafkaSample:
        return KafkaSample("c-1", 1)


async def test_many_pages_ask_the_sources_once() -> None:
    """Within keep_ms all requests have the same response, at once or after waiting for it."""
    clock, source = Clock(), Counting()
    overview = Overview([source], Kafka(), clock=clock, keep_ms=800)  # type: ignore[arg-type]
    first = await asyncio.gather(*(overview.overview() for _ in range(5)))
    assert source.asked == 1
    assert all(answer == first[0] for answer in first)
    clock.ms = 799
    await overview.overview()
    assert source.asked == 1


async def test_after_that_they_are_asked_again() -> None:
    """Rates are known from the second response on."""
    clock, source = Clock(), Counting()
    overview = Overview([source], Kafka(), clock=clock, keep_ms=800)  # type: ignore[arg-type]
    assert (await overview.overview())["ingest"]["records_per_second"] is None
    clock.ms = 1_000
    assert (await overview.overview())["ingest"]["records_per_second"] == 100
    assert source.asked == 2


async def test_what_has_changed_is_looked_at_anew() -> None:
    """The sources are read again after a change. A response in flight at that time is returned, but not kept."""
    clock, source = Clock(), Counting()
    overview = Overview([source], Kafka(), clock=clock, keep_ms=800)  # type: ignore[arg-type]
    await overview.overview()
    overview.changed()
    asking = asyncio.create_task(overview.overview())
    while source.asked < 2:  # noqa: ASYNC110 - it comes within a turn or two
        await asyncio.sleep(0)
    overview.changed()
    await asking
    await overview.overview()
    await overview.overview()
    assert source.asked == 3
