"""Admission of requests: limits of concurrent requests, and metrics of rejected ones."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from penstock.api.ingest.admission import CLIENTS_MAX, Rates
from penstock.shared.common.errors import BrokerNotAvailable
from tests.api.ingest.test_routes import NDJSON, URL, Service


async def test_the_concurrent_requests_of_a_client_are_limited(producer: Any) -> None:
    """A request beyond the limit is a 429. Other clients are served, and so is the client after its requests end."""
    release = asyncio.Event()

    async def slow() -> AsyncIterator[bytes]:
        yield b"1\n"
        await release.wait()

    service = Service(producer, max_concurrent_requests=2)
    open_requests = [asyncio.ensure_future(service.post(slow())) for _ in range(2)]
    while service.ingest.active < 2:  # noqa: ASYNC110 - httpx's transport has no event for it
        await asyncio.sleep(0)
    rejected = await service.post(b"1\n")
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "1")
    assert "max_concurrent_requests=2" in rejected.json()["detail"]
    other = httpx.ASGITransport(service.client._transport.app, client=("192.0.2.1", 1))  # type: ignore[attr-defined]
    async with httpx.AsyncClient(transport=other, base_url="http://localhost") as client:
        assert (await client.post(URL, content=b"1\n", headers=NDJSON)).status_code == 200
    release.set()
    assert [response.status_code for response in await asyncio.gather(*open_requests)] == [200, 200]
    assert (await service.post(b"1\n")).status_code == 200
    assert service.ingest.active == 0


async def test_rejections_are_counted_without_unknown_topic_names(producer: Any) -> None:
    """Rejections are counted by status and error code; the topic is a label only after a
    request for it was accepted.
    """
    service = Service(producer)
    assert (await service.post(b"1", url="/v1/topics/none/events")).status_code == 404
    assert (await service.post(b"1", {"Content-Type": "text/csv"})).status_code == 415
    assert service.metric("requests", topic="", status="404") == 1
    assert service.metric("requests", topic="none", status="404") is None
    assert (await service.post(b"1\n")).status_code == 200
    assert (await service.post(b"[", {"Content-Type": "application/json"})).status_code == 400
    assert service.metric("requests", topic="t", status="400") == 1
    read = service.registry.get_sample_value
    for code, count in (("UNKNOWN_TOPIC_OR_PARTITION", 1), ("UNSUPPORTED_MEDIA_TYPE", 1), ("MALFORMED_JSON", 1)):
        assert read("penstock_ingest_rejected_requests_total", {"error_code": code}) == count


async def test_an_outage_is_counted(producer: Any) -> None:
    """The metrics have the 503 answers while Kafka is unreachable."""
    service = Service(producer)
    assert (await service.post(b"1\n")).status_code == 200

    async def unreachable(topic: str) -> list[int]:
        raise BrokerNotAvailable("no broker")

    producer.partitions_for = unreachable
    assert (await service.post(b"1\n")).status_code == 503
    assert service.metric("requests", topic="t", status="503") == 1


def test_without_a_rate_no_client_is_limited() -> None:
    """Without a rate no client is limited."""
    rates = Rates(None)
    rates.charge("ann", 10**9, 0)
    assert rates.wait_s("ann", 0) == 0


def test_the_rate_holds_over_time_for_each_client_alone() -> None:
    """A client within its rate is served, and one with a negative balance waits. Other clients are not affected."""
    rates, served = Rates(10), 0
    for now_ms in range(0, 10_000, 10):
        if rates.wait_s("ann", now_ms) == 0:
            rates.charge("ann", 1, now_ms)
            served += 1
    assert 100 <= served <= 111
    assert rates.wait_s("bob", 10_000) == 0


def test_clients_are_bounded() -> None:
    """The client that was charged longest ago is dropped."""
    rates = Rates(1)
    for client in range(CLIENTS_MAX + 1):
        rates.charge(str(client), 5, 0)
    assert (rates.wait_s("0", 0), rates.wait_s(str(CLIENTS_MAX), 0)) == (0, 4)
