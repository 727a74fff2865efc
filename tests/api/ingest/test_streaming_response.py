"""Responses that are streamed while the body arrives."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any, Self
from urllib.parse import urlsplit

import httpx
import pytest
from prometheus_client import CollectorRegistry
from starlette.types import ASGIApp
from structlog.testing import capture_logs

from penstock.api.http.app import create_app
from penstock.api.http.server import HttpServer
from penstock.api.ingest.routes import Ingest
from penstock.api.rest_proxy.rest_producer import RestProducer
from penstock.api.rest_proxy.routes import produce_routers
from penstock.api.settings import IngestSettings
from penstock.shared.common.settings import HttpSettings
from penstock.shared.testing.manual_clock import ManualClock
from tests.api.admin.test_administration import MemoryAdmin
from tests.api.ingest.service import COMPRESS, NDJSON, URL, Service
from tests.api.ingest.test_atomic import Transactor
from tests.virtual_time import let_pass

STREAMED = NDJSON | {"Accept": "application/x-ndjson"}


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_the_last_line_has_the_totals(producer: Any) -> None:
    """A streamed response is a 207 that lists every invalid line, and its last line has the totals."""
    response = await Service(producer).post(b"1\noops\n3\n", STREAMED, URL + "?offsets=true")
    assert (response.status_code, response.headers["content-type"]) == (207, "application/x-ndjson")
    written = rows(response.text)
    last = written[-1]
    assert (last["status"], last["total"]) == (207, {"stored": 2, "not_stored": 1, "unknown": 0})
    assert [e["line"] for row in written for e in row.get("errors", [])] == [2]
    assert [o["line"] for row in written for o in row.get("offsets", [])] == [1, 3]


async def test_errors_are_written_as_they_occur_and_dropped(producer: Any) -> None:
    """More errors than max_errors do not stop the request: they are written, counted and dropped."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"oops\n" * 150 + b"1\n"

    service = Service(producer, max_errors=10)
    written = rows((await service.post(body(), STREAMED)).text)
    assert len(written) >= 20
    assert sum(len(row.get("errors", [])) for row in written) == 3_000
    assert written[-1]["total"] == {"stored": 20, "not_stored": 3_000, "unknown": 0}
    assert service.metric("rejected_records", error_code="MALFORMED_JSON") == 3_000


async def test_a_damaged_body_ends_the_stream_as_a_bad_request(producer: Any) -> None:
    """The events before the damage are stored. The last line names the first line that was not read."""
    body = COMPRESS["gzip"](b"1\n2\n") + b"damage"
    response = await Service(producer).post(body, STREAMED | {"Content-Encoding": "gzip"})
    last = rows(response.text)[-1]
    assert (last["status"], last["total"]["stored"], last["total"]["stopped_at_line"]) == (207, 2, 3)
    nothing = await Service(producer).post(b"damage", STREAMED | {"Content-Encoding": "gzip"})
    assert rows(nothing.text)[-1]["status"] == 400


async def test_a_lasting_failure_stops_the_stream_with_its_reason(producer: Any) -> None:
    """The last row names the first line that was not read."""
    from penstock.shared.common.errors import BrokerNotAvailable

    producer.fail_all = BrokerNotAvailable("no broker")
    last = rows((await Service(producer).post(b"1\n2\n", STREAMED)).text)[-1]
    assert last["status"] == 503
    assert last["total"]["stored"] == 0
    assert last["total"]["not_stored"] == 2


class Conversation:
    """A client on a real socket that reads each line's outcome before it sends the next line."""

    def __init__(self, url: str, headers: dict[str, str], path: str = URL) -> None:
        self._path = path
        self._host, self._port = urlsplit(url).hostname, urlsplit(url).port
        self._headers = headers

    async def __aenter__(self) -> Self:
        self._reader, self._writer = await asyncio.open_connection(self._host, self._port)
        head = f"POST {self._path} HTTP/1.1\r\nHost: localhost\r\nTransfer-Encoding: chunked\r\n"
        headers = "".join(f"{name}: {value}\r\n" for name, value in self._headers.items())
        self._writer.write(f"{head}{headers}\r\n".encode())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._writer.close()

    def send(self, data: bytes) -> None:
        self._writer.write(b"%x\r\n%b\r\n" % (len(data), data))

    async def send_forever(self, data: bytes) -> None:
        while True:
            self.send(data)
            await self._writer.drain()

    async def head(self) -> bytes:
        async with asyncio.timeout(20):
            return await self._reader.readuntil(b"\r\n\r\n")

    async def row(self) -> Any:
        return json.loads(await self.line())

    async def line(self) -> bytes:
        async with asyncio.timeout(20):
            size = int(await self._reader.readline(), 16)
            return (await self._reader.readexactly(size + 2))[:-2]


@pytest.fixture
async def served(producer: Any) -> AsyncIterator[tuple[str, Service]]:
    service = Service(producer, body_timeout_ms=30_000)
    server = HttpServer(create_app(ingest=service.ingest.router), HttpSettings())
    await server.start()
    yield server.url, service
    await server.stop(1_000)


async def test_a_line_is_answered_before_the_next_is_sent(served: tuple[str, Service], producer: Any) -> None:
    """Each row arrives while the body is open, and the last one after its end. The stored records of a row are then
    counted."""
    url, service = served
    async with Conversation(url, STREAMED) as client:
        client.send(b"1\n")
        assert b" 207 " in await client.head()
        assert await client.row() == {"through_line": 1, "stored": 1}
        assert service.metric("stored_records") == 1
        client.send(b"oops\n")
        row = await client.row()
        assert (row["through_line"], row["stored"], [error["line"] for error in row["errors"]]) == (2, 0, [2])
        client.send(b"3")
        client.send(b"3\n")
        assert (await client.row())["through_line"] == 3
        client.send(b"")
        assert (await client.row())["total"] == {"stored": 2, "not_stored": 1, "unknown": 0}
    assert sorted(producer.values()) == [b"1", b"33"]
    assert service.metric("stored_records") == 2


async def test_a_missing_acknowledgement_is_reported_while_the_body_is_open(held_producer: Any) -> None:
    """A missing acknowledgement is reported while the body is open, even if the client sends nothing more."""
    never = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"1\n"
        await never.wait()

    service = Service(held_producer, ack_timeout_ms=20, body_timeout_ms=300)
    *reports, last = rows((await service.post(body(), STREAMED)).text)
    assert [error["outcome"] for row in reports for error in row["errors"]] == ["unknown"]
    assert (last["status"], last["total"]["unknown"]) == (504, 1)


class ClockOfSteps(ManualClock):
    """A clock that advances by 600 ms at each reading of `monotonic_ms`."""

    def monotonic_ms(self) -> int:
        self.advance(600)
        return super().monotonic_ms()


async def test_a_report_that_becomes_due_before_the_wait_is_written(held_producer: Any) -> None:
    """It does not wait for Kafka: here the second ends between the check after a batch and the wait for the next."""
    service = Service(held_producer, clock=ClockOfSteps(), ack_timeout_ms=60_000, body_timeout_ms=60_000)
    server = HttpServer(create_app(ingest=service.ingest.router), HttpSettings())
    await server.start()
    try:
        async with Conversation(server.url, STREAMED) as client:
            client.send(b"1\n")
            await client.head()
            for _ in range(4):
                client.send(b"oops\n")
                assert len((await client.row())["errors"]) == 1
            held_producer.release.set()
    finally:
        await server.stop(1_000)


async def test_a_disconnect_is_counted_and_the_records_are_stored(producer: Any, served: tuple[str, Service]) -> None:
    """The accepted records are stored, and the request ends."""
    url, service = served
    async with Conversation(url, STREAMED) as client:
        client.send(b"1\n")
        await client.head()
        await client.row()
        assert service.ingest.active == 1
    async with asyncio.timeout(20):
        while service.ingest.active:
            await let_pass(0.005)
    assert producer.values() == [b"1"]
    assert service.metric("requests", status="499") == 1


class Disconnecting:
    """Calls an app with a part of a body, and then as if the client disconnected. Records what the app sends."""

    def __init__(self, error: type[BaseException] | None = None) -> None:
        self.sent: list[Any] = []
        self._error = error

    async def post(self, app: ASGIApp, url: str, headers: dict[str, str], body: bytes) -> None:
        path, _, query = url.partition("?")
        messages = iter([{"type": "http.request", "body": body, "more_body": True}])

        async def receive() -> Any:
            return next(messages, {"type": "http.disconnect"})

        async def send(message: Any) -> None:
            if self._error is not None:
                raise self._error
            self.sent.append(message)

        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "root_path": ""}
        scope |= {"path": path, "raw_path": path.encode(), "query_string": query.encode()}
        scope |= {"client": ("10.0.0.1", 1), "server": ("localhost", 80)}
        named = {"host": "localhost", **headers}
        scope["headers"] = [(name.lower().encode(), value.encode()) for name, value in named.items()]
        await app(scope, receive, send)


@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize(
    ("url", "headers"),
    [
        (URL, NDJSON),
        (URL, STREAMED),
        (URL + "?ack=none", NDJSON),
        (URL, {"Content-Type": "application/json"}),
        (URL + "?atomic=true", NDJSON),
        ("/topics/t", {"Content-Type": "application/vnd.kafka.json.v2+json"}),
        ("/v3/clusters/c-1/topics/t/records", {}),
        ("/v3/clusters/c-1/topics/t/records", {"Content-Length": "100"}),
        ("/v3/clusters/c-1/topics/t/records:batch", {}),
    ],
)
async def test_a_disconnect_within_the_body_is_no_failure(
    producer: Any, url: str, headers: dict[str, str], fast: bool
) -> None:
    """Every interface counts the request with the status 499, and neither as rejected nor as failed."""
    settings, registry = IngestSettings(), CollectorRegistry()
    ingest = Ingest(producer, settings, registry, transactor=Transactor())
    rest = produce_routers(RestProducer(ingest, producer, settings), MemoryAdmin())
    app = create_app(ingest=ingest.router, rest_proxy=rest, fast_path=ingest.fast_path if fast else None)
    with capture_logs() as logged:
        await Disconnecting().post(app, url, headers, b'{"records":[')
    requests = [
        (sample.labels["status"], sample.value)
        for metric in registry.collect()
        for sample in metric.samples
        if sample.name in ("penstock_ingest_requests_total", "penstock_ingest_rejected_requests_total")
    ]
    assert requests == [("499", 1)]
    assert "request failed" not in [line["event"] for line in logged]
    assert ingest.active == 0


@pytest.mark.parametrize(
    ("url", "headers", "stored"),
    [
        (URL, NDJSON, 2),
        (URL, STREAMED, 2),
        (URL + "?ack=none", NDJSON, None),
        ("/v3/clusters/c-1/topics/t/records", {}, 2),
    ],
)
async def test_records_that_were_sent_before_a_disconnect_are_counted_and_charged(
    producer: Any, url: str, headers: dict[str, str], stored: int | None
) -> None:
    """A client that closes the connection within its body does not evade max_records_per_second.

    Its stored records are counted, also those that were not acknowledged when it closed the connection.
    """
    settings, registry = IngestSettings(max_records_per_second=1), CollectorRegistry()
    ingest = Ingest(producer, settings, registry, clock=ManualClock())
    rest = produce_routers(RestProducer(ingest, producer, settings), MemoryAdmin())
    app = create_app(ingest=ingest.router, rest_proxy=rest)
    line = b'{"value":{"type":"JSON","data":1}}\n'
    await Disconnecting().post(app, url, headers, line * 2)
    assert len(producer.values()) == 2
    assert registry.get_sample_value("penstock_ingest_stored_records_total", {"topic": "t"}) == stored
    second = Disconnecting()
    await second.post(app, url, headers, line)
    assert second.sent[0]["status"] == 429


@pytest.mark.parametrize(
    ("url", "headers", "body"),
    [(URL, STREAMED, b"oops\n" * 4_000), ("/v3/clusters/c-1/topics/t/records", {}, b"{}" * 4_000)],
    ids=["events", "records"],
)
async def test_the_connection_of_a_client_that_does_not_read_is_aborted(
    producer: Any, url: str, headers: dict[str, str], body: bytes
) -> None:
    """The server does not wait until the client has read what is already sent, on a real socket."""
    settings = IngestSettings(body_timeout_ms=100)
    ingest = Ingest(producer, settings, CollectorRegistry())
    rest = produce_routers(RestProducer(ingest, producer, settings), MemoryAdmin())
    server = HttpServer(create_app(ingest=ingest.router, rest_proxy=rest), HttpSettings())
    await server.start()
    try:
        async with Conversation(server.url, headers, url) as client, asyncio.timeout(10):
            with pytest.raises(ConnectionError):
                await client.send_forever(body)
            while ingest.active:
                await let_pass(0.005)
    finally:
        await server.stop(1_000)


@pytest.mark.parametrize("error", [OSError, asyncio.CancelledError])
@pytest.mark.parametrize(
    ("url", "headers"), [(URL, STREAMED), ("/v3/clusters/c-1/topics/t/records", {})], ids=["events", "records"]
)
async def test_a_response_that_cannot_begin_is_counted(
    producer: Any, url: str, headers: dict[str, str], error: type[BaseException]
) -> None:
    """If the first part of a streamed response cannot be sent, the request ends and is counted all the same."""
    settings, registry = IngestSettings(), CollectorRegistry()
    ingest = Ingest(producer, settings, registry)
    rest = produce_routers(RestProducer(ingest, producer, settings), MemoryAdmin())
    app = create_app(ingest=ingest.router, rest_proxy=rest)
    with pytest.raises(error):
        await Disconnecting(error).post(app, url, headers, b"")
    assert ingest.active == 0
    assert registry.get_sample_value("penstock_ingest_requests_total", {"topic": "t", "status": "499"}) == 1


@pytest.mark.parametrize(
    ("url", "media_type"),
    [
        (URL, "application/x-ndjson"),
        (URL, "application/json"),
        (URL + "?atomic=true", "application/x-ndjson"),
        ("/topics/t", "application/vnd.kafka.json.v2+json"),
        ("/v3/clusters/c-1/topics/t/records", "application/json"),
        ("/v3/clusters/c-1/topics/t/records:batch", "application/json"),
    ],
)
async def test_slow_bodies_are_cut_off(producer: Any, url: str, media_type: str) -> None:
    """Single bytes at intervals do not extend the time limits, on a real socket. Others are served meanwhile."""
    settings = IngestSettings(body_timeout_ms=300, whole_body_timeout_ms=300)
    ingest = Ingest(producer, settings, CollectorRegistry(), transactor=Transactor())
    rest = produce_routers(RestProducer(ingest, producer, settings), MemoryAdmin())
    server = HttpServer(create_app(ingest=ingest.router, rest_proxy=rest), HttpSettings())
    await server.start()
    try:
        async with Conversation(server.url, {"Content-Type": media_type}, url) as slow, asyncio.timeout(20):
            answering = asyncio.ensure_future(slow.head())
            slow.send(b'{"records":[')
            while not answering.done():
                slow.send(b"1")
                await let_pass(0.02)
            assert b" 408 " in await answering or b"408" in await slow.line()
            async with httpx.AsyncClient(base_url=server.url, trust_env=False) as client:
                assert (await client.post(URL, content=b"1\n", headers=NDJSON)).status_code == 200
        assert ingest.active == 0
    finally:
        await server.stop(1_000)
