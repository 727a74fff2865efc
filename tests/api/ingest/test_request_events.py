"""Events of a body: keys and times from headers, schemas, rates, and ack=none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx

from penstock.shared.testing.manual_clock import ManualClock
from tests.api.ingest.test_routes import NDJSON, URL, Service


async def test_key_and_time_come_from_headers_where_the_event_has_none(producer: Any) -> None:
    """The topic's settings name the headers. A key or time in the event takes precedence."""
    service = Service(producer, topics={"t": {"key_header": "X-Key", "time_header": "X-Time"}})
    response = await service.post(b"1\n2\n", NDJSON | {"X-Key": "ann", "X-Time": "2024-06-03T10:00:00Z"})
    assert response.status_code == 200
    assert {(r.key, r.timestamp) for log in producer.logs["t"] for r in log} == {(b"ann", 1_717_408_800_000)}


async def test_a_time_header_has_the_topics_unit_and_earliest_time(producer: Any) -> None:
    """Seconds are accepted only for a topic in seconds. Otherwise the response names the likely unit."""
    service = Service(
        producer, topics={"t": {"time_header": "X-Time"}, "u": {"time_header": "X-Time", "time_unit": "s"}}
    )
    producer.logs["u"] = [[], []]
    seconds = NDJSON | {"X-Time": "1717408800"}
    response = await service.post(b"1\n", seconds)
    assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_TIMESTAMP")
    assert "the header X-Time" in response.json()["detail"]
    assert "looks like seconds" in response.json()["detail"]
    assert (await service.client.post("/v1/topics/u/events", content=b"1\n", headers=seconds)).status_code == 200
    assert [r.timestamp for log in producer.logs["u"] for r in log] == [1_717_408_800_000]


async def test_a_key_from_a_header_is_the_bytes_that_were_sent(producer: Any) -> None:
    """A key that is not ASCII is stored as UTF-8, like an event's own key."""
    service = Service(producer, topics={"t": {"key_header": "X-Key"}})
    request = service.client.build_request("POST", URL, content=b"1\n", headers=NDJSON)
    request.headers = httpx.Headers([*request.headers.raw, (b"x-key", "Zoë".encode())])
    assert (await service.client.send(request)).status_code == 200
    assert [r.key for log in producer.logs["t"] for r in log] == ["Zoë".encode()]


async def test_an_invalid_time_header_rejects_the_request(producer: Any) -> None:
    """A time header that is no time or too far ahead is a 400."""
    service = Service(producer, topics={"t": {"time_header": "X-Time"}})
    for text in ("soon", str(2**62)):
        response = await service.post(b"1\n", NDJSON | {"X-Time": text})
        assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_TIMESTAMP")
    assert producer.batches == []


async def test_a_schema_rejects_single_events(producer: Any, tmp_path: Path) -> None:
    """An event that violates the topic's JSON Schema is rejected, and the others are stored."""
    path = tmp_path / "s.json"
    path.write_text(json.dumps({"required": ["id"]}))
    response = await Service(producer, topics={"t": {"json_schema": str(path)}}).post(b'{"id":1}\n{}\n')
    assert (response.status_code, response.json()["stored"]) == (207, 1)
    assert response.json()["errors"][0]["error_code"] == "SCHEMA_VIOLATED"


async def test_unacknowledged_events_are_answered_with_202(producer: Any, held_producer: Any) -> None:
    """With ack=none the response is a 202 that lists the invalid events, or a 429 if the producer has no room."""
    service = Service(held_producer)
    response = await service.post(b"1\noops\n2\n", url=URL + "?ack=none")
    assert (response.status_code, response.json()["accepted"]) == (202, 2)
    assert "nothing was acknowledged" in response.json()["promise"]
    assert "stored" not in response.json()
    assert [e["line"] for e in response.json()["errors"]] == [2]
    held_producer.release.set()
    producer.is_full = True
    full = await Service(producer).post(b"1\n", url=URL + "?ack=none")
    assert (full.status_code, full.headers["retry-after"], producer.batches) == (429, "1", [])


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
