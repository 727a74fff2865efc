"""The ingest endpoint over HTTP, with producers in memory."""

from __future__ import annotations

import asyncio
import gzip
import tracemalloc
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.http.content_encoding import zstd
from penstock.api.http.health import CheckResult
from penstock.api.ingest.routes import Ingest
from penstock.api.settings import IngestSettings
from penstock.shared.common import errors
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from tests.api.conftest import after

NDJSON = {"Content-Type": "application/x-ndjson"}
JSON = {"Content-Type": "application/json"}
URL = "/v1/topics/t/events"
COMPRESS: dict[str, Any] = {"gzip": gzip.compress, "zstd": zstd.compress}


class Service:
    """An ingest app with a client for it."""

    def __init__(self, producer: Any, kafka: Any = None, clock: Clock = SYSTEM_CLOCK, **settings: Any) -> None:
        self.registry = CollectorRegistry()
        taken = IngestSettings.model_validate(settings)
        self.ingest = Ingest(producer, taken, self.registry, kafka=kafka, clock=clock)
        transport = httpx.ASGITransport(create_app(ingest=self.ingest.router))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")

    async def post(self, content: Any, headers: dict[str, str] = NDJSON, url: str = URL) -> httpx.Response:
        return await self.client.post(url, content=content, headers=headers)

    def metric(self, name: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(f"penstock_ingest_{name}_total", {"topic": "t", **labels})


async def test_good_lines_are_stored_and_counted(producer: Any) -> None:
    """Valid lines are stored, and the response has their number and the last offset of each partition."""
    service = Service(producer)
    response = await service.post(b'{"a":1}\r\n\n{"a":22}')
    assert response.status_code == 200
    assert response.json() == {"stored": 2, "last_offsets": {"0": 0, "1": 0}}
    assert sorted(producer.values()) == [b'{"a":1}', b'{"a":22}']
    assert service.metric("stored_records") == 2
    assert service.metric("requests", status="200") == 1


async def test_offsets_are_returned_on_request(producer: Any) -> None:
    """`?offsets=true` returns every record's partition and offset."""
    response = await Service(producer).post(b"1\n22\n333\n", url=URL + "?offsets=true")
    assert response.json()["offsets"] == [
        {"line": 1, "partition": 1, "offset": 0},
        {"line": 2, "partition": 0, "offset": 0},
        {"line": 3, "partition": 1, "offset": 1},
    ]


async def test_a_bad_line_fails_alone(producer: Any) -> None:
    """An invalid line is reported with line and column in a 207, and the others are stored."""
    service = Service(producer)
    response = await service.post(b'{"a":1}\n{"a":oops}\n{"a":3}\n')
    assert response.status_code == 207
    assert response.json()["stored"] == 2
    assert response.json()["errors"] == [
        {
            "line": 2,
            "column": 6,
            "error_code": "MALFORMED_JSON",
            "message": "not JSON: invalid character",
            "outcome": "not_stored",
        }
    ]
    assert service.metric("rejected_records", error_code="MALFORMED_JSON") == 1


async def test_no_good_line_is_a_problem(producer: Any) -> None:
    """A body without a valid line is a 400 problem with the errors, and nothing is sent."""
    response = await Service(producer).post(b"oops\n{\n")
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["status"], body["error_code"], body["stored"]) == (400, "MALFORMED_JSON", 0)
    assert body["detail"].startswith("line 1, column 1: not JSON")
    assert [e["line"] for e in body["errors"]] == [1, 2]
    assert producer.batches == []


async def test_key_and_time_come_from_the_topics_settings(producer: Any) -> None:
    """Records have the key and time that the topic's pointers address; a missing one is an error with the pointer."""
    service = Service(producer, topics={"t": {"key": ["/c", "/o"], "time": "/at"}})
    at = 1_717_408_800_000
    response = await service.post(b'{"c":"UA","o":"EWR","at":%d}\n{"c":"UA","at":%d}\n' % (at, at))
    assert response.status_code == 207
    (record,) = [record for log in producer.logs["t"] for record in log]
    assert (record.key, record.timestamp) == (b"UA-EWR", at)
    assert response.json()["errors"][0]["message"] == "key: nothing at /o"


async def test_a_json_array_is_stored_by_index(producer: Any) -> None:
    """The elements' original bytes are the values, and errors have the index."""
    service = Service(producer, topics={"t": {"key": ["/k"]}})
    response = await service.post(b'[ {"k": 1}, {"x":2} , {"k":3}]', JSON)
    assert response.status_code == 207
    assert sorted(producer.values()) == [b'{"k": 1}', b'{"k":3}']
    (error,) = response.json()["errors"]
    assert (error["index"], error["error_code"], error["message"]) == (1, "INVALID_KEY", "key: nothing at /k")


@pytest.mark.parametrize("body", [b'{"k": 1}', b' \r\n\t{"k": 1}\n'])
async def test_a_json_object_is_one_event(producer: Any, body: bytes) -> None:
    """A JSON object is one event, stored without surrounding whitespace; errors are as for an array of one."""
    service = Service(producer, topics={"t": {"key": ["/k"]}})
    response = await service.post(body, JSON)
    assert (response.status_code, response.json()["stored"]) == (200, 1)
    ((key, value),) = [(r.key, r.value) for log in producer.logs["t"] for r in log]
    assert (key, value) == (b"1", b'{"k": 1}')
    wrong = await service.post(b'{"x": 1}', JSON)
    assert (wrong.status_code, wrong.json()["errors"][0]["index"]) == (400, 0)
    assert "nothing at /k" in wrong.json()["detail"]


async def test_an_invalid_json_body_is_rejected(producer: Any) -> None:
    """Malformed JSON is a 400 with line and column, an event over the limit a 413, and a scalar a 400."""
    service = Service(producer, max_line_bytes=20)
    malformed = await service.post(b'{"a":1,\n "b":}', JSON)
    assert (malformed.status_code, malformed.json()["error_code"]) == (400, "MALFORMED_JSON")
    assert (malformed.json()["line"], malformed.json()["column"]) == (2, 6)
    assert (await service.post(b'{"a":"%s"}' % (b"x" * 20), JSON)).status_code == 413
    for body in (b"17", b'"text"', b"null"):
        response = await service.post(body, JSON)
        assert (response.status_code, response.json()["error_code"]) == (400, "NOT_AN_OBJECT_OR_ARRAY")
    assert producer.batches == []


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_compressed_body_is_stored_as_its_data(producer: Any, encoding: str) -> None:
    """Compressed lines, arrays, objects and CloudEvents are stored decompressed."""
    service, named = Service(producer), {"Content-Encoding": encoding}
    for content, headers, stored in (
        (b"1\n22\n", NDJSON, [b"1", b"22"]),
        (b"[1,22]", JSON, [b"1", b"22"]),
        (b'{"a":1}', JSON, [b'{"a":1}']),
        (b'{"a":2}', JSON | {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}, [b'{"a":2}']),
    ):
        producer.logs["t"] = [[], []]
        response = await service.post(COMPRESS[encoding](content), headers | named)
        assert response.status_code == 200, response.text
        assert sorted(producer.values()) == stored


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_limits_apply_to_decompressed_data(producer: Any, encoding: str) -> None:
    """Limits apply to the decompressed data, which is not buffered beyond them.

    A body that is larger compressed than decompressed is accepted.
    """
    service, named = Service(producer, max_line_bytes=1_000), {"Content-Encoding": encoding}
    space, line = COMPRESS[encoding](b" " * 67_108_864), COMPRESS[encoding](b"x" * 67_108_864)
    tracemalloc.start()
    try:
        whole = await service.post(space, JSON | named)
        lines = await service.post(line, NDJSON | named)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (whole.status_code, whole.json()["error_code"]) == (413, "BODY_TOO_LARGE")
    assert (lines.status_code, lines.json()["errors"][0]["error_code"]) == (413, "MESSAGE_TOO_LARGE")
    assert peak < 16_777_216
    small = Service(producer, max_body_bytes=3, max_line_bytes=3)
    assert (await small.post(COMPRESS[encoding](b"[1]"), JSON | named)).status_code == 200
    events = await Service(producer, max_body_events=2).post(COMPRESS[encoding](b"[1,2,3]"), JSON | named)
    assert (events.status_code, events.json()["error_code"]) == (413, "TOO_MANY_EVENTS")


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_corrupt_compressed_body_is_a_400(producer: Any, encoding: str) -> None:
    """A corrupt body is a 400 and nothing is stored; of lines those before the damage are
    stored, and the response says where reading stopped.
    """
    service, named = Service(producer), {"Content-Encoding": encoding}
    for content in (b"{}", COMPRESS[encoding](b"[1,2,3]")[:-4]):
        response = await service.post(content, JSON | named)
        assert (response.status_code, response.json()["error_code"]) == (400, "CORRUPT_BODY")
        assert "Content-Encoding" in response.json()["detail"]
        assert "retry-after" not in response.headers
    none = await service.post(b"1\n", NDJSON | named)
    assert (none.status_code, none.json()["error_code"], none.json()["stored"]) == (400, "CORRUPT_BODY", 0)
    assert "retry-after" not in none.headers
    assert producer.batches == []
    some = await service.post(COMPRESS[encoding](b"1\n2\n") + b"damage", NDJSON | named)
    assert (some.status_code, some.json()["stored"], some.json()["stopped_at_line"]) == (207, 2, 3)
    assert "Content-Encoding" in some.json()["stop_reason"]
    atomic = await service.post(b"1\n", NDJSON | named, URL + "?ack=none")
    assert (atomic.status_code, atomic.json()["error_code"]) == (400, "CORRUPT_BODY")


async def test_an_unknown_encoding_is_a_415(producer: Any) -> None:
    """An unknown encoding is a 415 with Accept-Encoding, as in RFC 9110."""
    response = await Service(producer).post(b"1\n", NDJSON | {"Content-Encoding": "br"})
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, zstd")


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


async def test_a_malformed_array_is_located(producer: Any) -> None:
    """A malformed array is a 400 with line and column, and nothing is sent."""
    response = await Service(producer).post(b'[{"a":1},\n {"a":,}]', JSON)
    assert response.status_code == 400
    assert (response.json()["line"], response.json()["column"]) == (2, 7)
    assert producer.batches == []


async def test_an_array_over_the_limit_is_413(producer: Any) -> None:
    """An array over max_body_bytes is a 413, by its declared or its real length."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"[1,2,3,4,5,6,"

    service = Service(producer, max_body_bytes=50)
    for content in (b"[" + b"1," * 50 + b"1]", chunks()):
        response = await service.post(content, JSON)
        assert response.status_code == 413
        assert "max_body_bytes=50" in response.json()["detail"]


async def test_a_line_over_the_limit_fails_alone(producer: Any) -> None:
    """A line over the limit is reported and the others are stored; if no line fits, the status is 413."""
    service = Service(producer, max_line_bytes=5)
    assert (await service.post(b"123456\n1\n")).status_code == 207
    assert (await service.post(b"123456\n")).status_code == 413


@pytest.mark.parametrize(
    ("url", "headers", "status", "code"),
    [
        ("/v1/topics/none/events", NDJSON, 404, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("/v1/topics/a%20b/events", NDJSON, 400, "INVALID_TOPIC"),
        ("/v1/topics/../events", NDJSON, 404, "HTTP_404"),
        ("/v1/topics/closed/events", NDJSON, 403, "TOPIC_NOT_ALLOWED"),
        ("/v1/topics/__consumer_offsets/events", NDJSON, 403, "TOPIC_NOT_ALLOWED"),
        ("/v1/topics/app-changelog/events", NDJSON, 403, "TOPIC_NOT_ALLOWED"),
        (URL, {"Content-Type": "text/plain"}, 415, "UNSUPPORTED_MEDIA_TYPE"),
        (URL, {}, 415, "UNSUPPORTED_MEDIA_TYPE"),
        (URL, NDJSON | {"Content-Encoding": "br"}, 415, "UNSUPPORTED_CONTENT_ENCODING"),
        (URL, NDJSON | {"Content-Encoding": "gzip, zstd"}, 415, "UNSUPPORTED_CONTENT_ENCODING"),
        (URL + "?offsets=maybe", NDJSON, 400, "INVALID_REQUEST"),
    ],
)
async def test_an_invalid_request_is_a_4xx(
    producer: Any, url: str, headers: dict[str, str], status: int, code: str
) -> None:
    """Unknown and forbidden topics and unsupported bodies are rejected before the body is read."""
    producer.logs["__consumer_offsets"] = [[]]
    producer.logs["app-changelog"] = [[]]
    response = await Service(producer, topics={"closed": {"allowed": False}}).post(b"1\n", headers, url)
    assert (response.status_code, response.json()["error_code"]) == (status, code)
    assert producer.batches == []


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.BrokerNotAvailable("no broker"), 503),
        (errors.NotEnoughReplicas("1 of 2"), 503),
        (errors.KafkaTimeout("no response"), 504),
        (errors.DeliveryTimeout("25 s"), 504),
        (errors.BufferExhausted("full"), 429),
    ],
)
async def test_kafka_errors_are_never_a_2xx(producer: Any, error: Exception, status: int) -> None:
    """A Kafka error has its status with Retry-After and is never a 2xx."""
    producer.errors_by_value = {b"1": error}
    response = await Service(producer).post(b"1\n")
    assert response.status_code == status
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["stored"] == 0


async def test_during_an_outage_requests_are_a_503_immediately(producer: Any) -> None:
    """During a known outage a request is a 503 immediately, and nothing reaches the producer."""
    response = await Service(producer, kafka=lambda: CheckResult(False, "no broker")).post(b"1\n")
    assert (response.status_code, response.json()["error_code"]) == (503, "BROKER_NOT_AVAILABLE")
    assert "retry-after" in response.headers
    assert producer.batches == []


async def test_unknown_outcomes_are_a_504_during_an_outage(held_producer: Any) -> None:
    """Records that may be stored are a 504 even during an outage, since a 503 means that nothing is stored."""
    checks = [CheckResult(True), CheckResult(False, "no broker")]
    away = Service(held_producer, kafka=lambda: checks.pop(0) if checks else CheckResult(False), ack_timeout_ms=1)
    response = await away.post(b"1\noops\n")
    body = response.json()
    assert (response.status_code, body["error_code"]) == (504, "REQUEST_TIMED_OUT")
    assert body["title"] == "Events may or may not be stored"
    assert (body["stored"], body["not_stored"], body["unknown"]) == (0, 1, 1)
    assert [(e["line"], e["outcome"]) for e in body["errors"]] == [(1, "unknown"), (2, "not_stored")]
    assert away.metric("unknown_records", error_code="REQUEST_TIMED_OUT") == 1
    assert away.metric("rejected_records", error_code="MALFORMED_JSON") == 1


async def test_a_timeout_without_a_write_is_a_503(producer: Any) -> None:
    """A timeout of records that were certainly not written is a 503."""
    error = errors.DeliveryTimeout("t-0: it was not written")
    error.maybe_written = False
    producer.errors_by_value = {b"1": error}
    response = await Service(producer).post(b"1\n")
    assert (response.status_code, response.json()["title"]) == (503, "No event was stored")
    assert response.json()["unknown"] == 0


async def test_a_topic_that_cannot_be_looked_up_in_time_is_503(producer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout of the topic's metadata is a 503, and nothing is sent."""

    async def late(topic: str) -> list[int]:
        raise errors.KafkaTimeout(f"{topic}: no metadata")

    monkeypatch.setattr(producer, "partitions_for", late)
    assert (await Service(producer).post(b"1\n")).status_code == 503
    assert producer.batches == []


async def test_a_lost_broker_stops_reading(producer: Any) -> None:
    """After a broker error reading stops, and the response names the first unread line."""
    read = []

    async def chunks() -> AsyncIterator[bytes]:
        for i in range(1, 101):
            read.append(i)
            yield b"%d\n" % i
            await asyncio.sleep(0)

    producer.errors_by_value = {b"10": errors.BrokerNotAvailable("no broker")}
    response = await Service(producer).post(chunks())
    body = response.json()
    assert response.status_code == 207
    assert body["stopped_at_line"] == body["stored"] + len(body["errors"]) + 1
    assert 11 <= body["stopped_at_line"] < 20
    assert response.headers["retry-after"] == "5"
    assert len(producer.values()) == body["stored"]


async def test_too_many_bad_lines_end_the_request(producer: Any) -> None:
    """max_errors invalid lines end the request, and the response names the first unread line."""
    response = await Service(producer, max_errors=3).post(b"1\n" + b"x\n" * 10 + b"2\n")
    assert response.status_code == 207
    assert len(response.json()["errors"]) == 3
    assert response.json()["stopped_at_line"] == 5
    assert producer.values() == [b"1"]


async def test_an_event_too_far_ahead_is_rejected_alone(producer: Any) -> None:
    """An event too far in the future is rejected alone, since the broker would reject its whole batch."""
    service = Service(producer, topics={"t": {"time": "/t"}})
    response = await service.post(b'{"t":1717408800000}\n{"t":99999999999999}\n')
    assert (response.status_code, response.json()["stored"]) == (207, 1)
    assert "max_future_ms" in response.json()["errors"][0]["message"]


async def test_seconds_taken_for_ms_are_rejected_alone(producer: Any) -> None:
    """Seconds in a topic of ms are rejected with the likely unit; a topic with `time_unit = "s"` accepts them."""
    body = b'{"t":1717408800}\n{"t":0}\n{"t":"1970-01-20T21:03:28Z"}\n{"t":"2024-06-03T10:00:00Z"}\n'
    response = await Service(producer, topics={"t": {"time": "/t"}}).post(body)
    assert (response.status_code, response.json()["stored"]) == (207, 1)
    errors = response.json()["errors"]
    assert [(e["line"], e["error_code"], e["outcome"]) for e in errors] == [
        (line, "INVALID_TIMESTAMP", "not_stored") for line in (1, 2, 3)
    ]
    assert ["looks like seconds" in e["message"] for e in errors] == [True, False, False]
    assert all("min_event_time=2000-01-01" in e["message"] for e in errors)
    seconds = Service(producer, topics={"t": {"time": "/t", "time_unit": "s"}})
    assert (await seconds.post(b'{"t":1717408801}\n')).status_code == 200
    stored = sorted(r.timestamp or 0 for log in producer.logs["t"] for r in log)
    assert stored == [1_717_408_800_000, 1_717_408_801_000]


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
            await after(0.005)

    response = await Service(producer, body_timeout_ms=40).post(drip())
    assert (response.status_code, response.json()["error_code"]) == (408, "BODY_STALLED")
    whole = await Service(producer, whole_body_timeout_ms=40).post(drip(), JSON)
    assert (whole.status_code, whole.json()["error_code"]) == (408, "BODY_STALLED")
    assert producer.batches == []


async def test_latency_begins_at_the_last_byte(producer: Any) -> None:
    """The latency metric starts at the body's last byte."""

    async def slow() -> AsyncIterator[bytes]:
        yield b"1\n"
        await after(0.5)
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


async def test_an_empty_body_stores_nothing(producer: Any) -> None:
    """A body without events is a 200 with zero stored."""
    for content, headers in ((b"", NDJSON), (b"\n\r\n", NDJSON), (b"[]", JSON)):
        response = await Service(producer).post(content, headers)
        assert (response.status_code, response.json()) == (200, {"stored": 0, "last_offsets": {}})
