"""Limits of requests: how many at once, how fast, how slow a body may be, and the drain."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx

from penstock.api.ingest.admission import CLIENTS_MAX, Rates
from penstock.shared.common.errors import BrokerNotAvailable
from penstock.shared.testing.manual_clock import ManualClock
from tests.api.ingest.service import JSON, NDJSON, URL, Service
from tests.virtual_time import let_pass


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
    """The metrics have the 503 responses while Kafka is unreachable."""
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


async def test_a_client_over_its_rate_is_429(producer: Any) -> None:
    """A client over its limit of requests or records is a 429; Retry-After is the time until
    its balance is positive.
    """
    clock = ManualClock()
    service = Service(producer, max_requests_per_second=2, max_records_per_second=1_000, clock=clock)
    assert [(await service.post(b"1\n")).status_code for _ in range(3)] == [200, 200, 429]
    clock.advance(2_000)
    assert (await service.post(b"1\n" * 4_000)).status_code == 200
    clock.advance(1_000)
    rejected = await service.post(b"1\n")
    assert (rejected.status_code, rejected.headers["retry-after"]) == (429, "2")
    assert "max_records_per_second" in rejected.json()["detail"]


async def test_bulk_requests_are_served_first_come_first_served(producer: Any) -> None:
    """16 concurrent large bodies end about in their order, the first one long before all are
    received; a small request does not wait for them.
    """
    handed, ended, lines, most = 0, list[int](), b"1\n" * 2_000, 16

    async def body() -> AsyncIterator[bytes]:
        nonlocal handed
        for _ in range(25):
            yield lines
            handed += 1
            await asyncio.sleep(0)

    async def bulk(number: int) -> None:
        assert (await service.post(body())).json()["stored"] == 50_000
        ended.append(number)
        parts_handed.append(handed)

    service, parts_handed = Service(producer), list[int]()
    async with asyncio.TaskGroup() as tasks:
        for number in range(most):
            tasks.create_task(bulk(number))
        for _ in range(20):
            await asyncio.sleep(0)
        assert (await service.post(b"1\n")).status_code == 200
        assert len(ended) < most / 2
    assert parts_handed[0] < most * 25 / 2
    assert all(abs(index - number) < 4 for index, number in enumerate(ended)), ended


async def test_a_long_body_is_held_back_by_the_limit_in_flight(held_producer: Any) -> None:
    """A body is not read faster than records are acknowledged."""
    sent = 0

    async def chunks() -> AsyncIterator[bytes]:
        nonlocal sent
        for _ in range(100):
            sent += 10
            yield b"1\n" * 10

    service = Service(held_producer, max_in_flight_records=50)
    posting = asyncio.ensure_future(service.post(chunks()))
    for _ in range(200):
        await asyncio.sleep(0)
    assert held_producer.most == 60
    assert sent <= 80
    held_producer.release.set()
    assert (await posting).json()["stored"] == 1_000


async def test_a_stalled_body_is_answered(producer: Any) -> None:
    """After a stall the stored lines are reported with the line where reading stopped; a buffered body is a 408."""
    never = asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"1\n2\n"
        await never.wait()

    response = await Service(producer, body_timeout_ms=20).post(chunks())
    assert response.status_code == 207
    assert (response.json()["stored"], response.json()["stopped_at_line"]) == (2, 3)
    stalled = await Service(producer, body_timeout_ms=20).post(chunks(), JSON)
    assert stalled.status_code == 408


async def test_a_body_that_stalls_before_its_first_whole_line_is_408(producer: Any) -> None:
    """A body that stalls before its first complete line is a 408, even if single bytes keep coming."""

    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b"x"
            await let_pass(0.005)

    response = await Service(producer, body_timeout_ms=40).post(drip())
    assert (response.status_code, response.json()["error_code"]) == (408, "BODY_STALLED")
    whole = await Service(producer, whole_body_timeout_ms=40).post(drip(), JSON)
    assert (whole.status_code, whole.json()["error_code"]) == (408, "BODY_STALLED")
    assert producer.batches == []


async def test_latency_begins_at_the_last_byte(producer: Any) -> None:
    """The latency metric starts at the body's last byte."""

    async def slow() -> AsyncIterator[bytes]:
        yield b"1\n"
        await let_pass(0.5)
        yield b"2\n"

    service = Service(producer)
    assert (await service.post(slow())).status_code == 200
    seconds = service.registry.get_sample_value("penstock_ingest_request_seconds_sum", {"topic": "t"})
    assert seconds is not None
    assert seconds < 0.4


async def test_draining_answers_open_bodies_and_rejects_new_requests(producer: Any) -> None:
    """While draining, an open body is answered for its stored events after the grace period,
    and a new request is a 503.
    """
    never, started = asyncio.Event(), asyncio.Event()

    async def chunks() -> AsyncIterator[bytes]:
        yield b"1\n"
        started.set()
        await never.wait()

    service = Service(producer)
    posting = asyncio.ensure_future(service.post(chunks()))
    await started.wait()
    assert service.ingest.active == 1
    service.ingest.drain(grace_ms=20)
    rejected = await service.post(b"2\n")
    assert (rejected.status_code, rejected.json()["error_code"]) == (503, "SHUTTING_DOWN")
    response = await posting
    assert (response.status_code, response.json()["stored"]) == (207, 1)
    assert "shutting down" in response.json()["stop_reason"]
    assert service.ingest.active == 0
