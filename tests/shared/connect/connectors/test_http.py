"""The HTTP connectors against a server on this machine."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from decimal import Decimal

import httpx
import pytest
import structlog

from penstock.shared.common.errors import ConfigError, DataError, RetriableError
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.connectors.http import (
    REPLY_BYTES_MAX,
    HttpSinkConnector,
    HttpSinkTask,
    HttpSourceConnector,
    HttpSourceTask,
    pointed,
)
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Offset, Partition, SinkRecord
from penstock.shared.connect.runtime.abstract_source_task import WorkerSourceTaskContext
from penstock.shared.connect.runtime.offset_backing_store import StoredOffsetReader
from penstock.shared.connect.schema import Field, Schema, decimal_schema
from tests import virtual_time
from tests.shared.connect.connectors.http_server import Request, Response, serving
from tests.shared.connect.connectors.sink_context import JSON, A, B, Context, Reporter, produce, records
from tests.shared.connect.harness import Store, running

OK: Response = (200, {}, b"")


def numbers(requests: list[Request]) -> list[int]:
    return [item["n"] for request in requests for item in json.loads(request.body)]


async def test_records_are_posted_in_batches() -> None:
    """The sink posts JSON arrays with the configured credentials and headers to a URL that may contain the topic."""
    async with serving(lambda _request: OK) as server, running() as run:
        await produce(run, *[{"n": n} for n in range(5)])
        settings = {"http_url": f"{server.url}/in/${{topic}}", "batch_max_size": "2", "http_headers": "X-Team:a"}
        auth = {"http_auth_type": "basic", "http_auth_user": "ann", "http_auth_password": "s3cret"}
        await run.run(HttpSinkConnector, topics="t", **settings, **auth, **JSON)
        await run.until(lambda: len(numbers(server.requests)) == 5)
        assert numbers(server.requests) == [0, 1, 2, 3, 4]
        first = server.requests[0]
        assert (first.method, first.path, first.headers["x-team"]) == ("POST", "/in/t", "a")
        assert first.headers["authorization"] == "Basic YW5uOnMzY3JldA=="
        await run.until(lambda: run.cluster.committed("connect-c") and not run.listener.traces)


async def test_retriable_failures_are_retried() -> None:
    """Only the failed batch is sent again, and after `max.retries` the task fails."""
    failures = [503, 429]

    def respond(request: Request) -> Response:
        return (failures.pop(), {}, b"later") if failures and b'"n":2' in request.body else OK

    async with serving(respond) as server, running() as run:
        await produce(run, *[{"n": n} for n in range(4)])
        settings = {"http_url": server.url, "batch_max_size": "2", "retry_backoff_ms": "5"}
        id = await run.run(HttpSinkConnector, topics="t", **settings, **JSON)
        await run.until(lambda: len(server.requests) >= 4)
        assert numbers(server.requests) == [0, 1, 2, 3, 2, 3, 2, 3]
        assert run.listener.of(id) == ["startup"]
    async with serving(lambda _request: (500, {}, b"no")) as server, running() as run:
        await produce(run, {"n": 1})
        settings = {"http_url": server.url, "max_retries": "2", "retry_backoff_ms": "5"}
        id = await run.run(HttpSinkConnector, topics="t", **settings, **JSON)
        await run.until(lambda: "failure" in run.listener.of(id))
        assert "2 retries: HTTP 500" in run.listener.traces[0]
        assert len(server.requests) == 3


class Answers(httpx.AsyncBaseTransport):
    """Answers each request of a client by a function, without a network, and records the requests."""

    def __init__(self, respond: Callable[[Request], Response]) -> None:
        self._respond = respond
        self.requests: list[Request] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body = await request.aread()
        self.requests.append(Request(request.method, request.url.path, dict(request.headers), body))
        status, headers, content = self._respond(self.requests[-1])
        return httpx.Response(status, headers=headers, stream=httpx.ByteStream(content))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ({}, "application/json"),
        ({"batch.format": "ndjson"}, "application/x-ndjson"),
        ({"http.headers": "content-type:application/vnd.api+json"}, "application/vnd.api+json"),
    ],
)
async def test_the_content_type_is_that_of_the_format_or_of_the_headers(settings: dict[str, str], kind: str) -> None:
    """A `Content-Type` in `http.headers` replaces the type of `batch.format`."""
    async with serving(lambda _request: OK) as server:
        task = HttpSinkTask()
        task.initialize(Context())
        await task.start({"http.url": server.url, **settings})
        await task.put(records(A, 0, 1))
        assert server.requests[0].headers["content-type"] == kind
        await task.stop()


@pytest.mark.parametrize(
    ("batch_format", "body"), [("array", b'[{"n":1.23}]'), ("ndjson", b'{"n":1.23}\n'), ("single", b'{"n":1.23}')]
)
async def test_decimals_may_be_numbers(batch_format: str, body: bytes) -> None:
    """With `decimal.format=NUMERIC` decimals are JSON numbers in each `batch.format`."""
    transport = Answers(lambda _request: OK)
    task = await started_sink(transport, Context(), **{"decimal.format": "NUMERIC", "batch.format": batch_format})
    schema = Schema.struct(None, Field("n", decimal_schema(2)))
    await task.put([SinkRecord("t", 0, None, None, schema, {"n": Decimal("1.23")}, kafka_offset=0)])
    assert transport.requests[0].body == body
    await task.stop()


async def started_sink(transport: httpx.AsyncBaseTransport, context: Context, **settings: str) -> HttpSinkTask:
    task = HttpSinkTask()
    task.initialize(context)
    await task.start({"http.url": "http://host/", "retry.backoff.ms": "3000", **settings})
    task._client = httpx.AsyncClient(transport=transport)
    return task


def test_no_request_is_sent_before_retry_after() -> None:
    """A delivery before the end of `Retry-After` sends no request and uses up no retry. It sets the rest as timeout."""
    statuses = [429, 503, 200]

    async def deliver_early() -> None:
        server = Answers(lambda _request: (statuses.pop(0), {"Retry-After": "10"}, b""))
        task = await started_sink(server, context := Context(), **{"max.retries": "2"})
        for sent in (1, 2):
            with pytest.raises(RetriableError):
                await task.put(records(A, 0, 1))
            for _ in range(2):
                await virtual_time.let_pass(4)
                with pytest.raises(RetriableError):
                    await task.put(records(A, 0, 1))
            await task.put([])  # the records' partition may be revoked
            assert len(server.requests) == sent
            await virtual_time.let_pass(2)
        await task.put(records(A, 0, 1))
        assert numbers(server.requests) == [0, 0, 0]
        assert context.timeouts == [10_000, 6_000, 2_000] * 2

    virtual_time.run(deliver_early())


def test_retries_are_counted_from_the_last_posted_record() -> None:
    """A server that often limits the rate fails no task: the retries count only since the last posted record."""
    responses = 0

    def respond(_request: Request) -> Response:
        nonlocal responses
        responses += 1
        return (429, {}, b"later") if responses % 3 == 0 else OK

    async def deliver_again() -> list[int]:
        task = await started_sink(server := Answers(respond), Context(), **{"batch.max.size": "1", "max.retries": "1"})
        for _ in range(4):
            with pytest.raises(RetriableError):
                await task.put(records(A, 0, 10))
            await virtual_time.let_pass(3)
        await task.put(records(A, 0, 10))
        return numbers(server.requests)

    assert virtual_time.run(deliver_again()) == [0, 1, 2, 2, 3, 4, 4, 5, 6, 6, 7, 8, 8, 9]


def test_posted_records_are_tracked_by_partition_and_offset() -> None:
    """If a partition is revoked between two deliveries of a batch, another partition's posted
    records are still not posted again.
    """
    rejected = [b'"p":1']

    def respond(request: Request) -> Response:
        return (503, {}, b"") if any(mark in request.body for mark in rejected) else OK

    async def deliver_again() -> None:
        task = await started_sink(server := Answers(respond), Context(), **{"batch.max.size": "5"})
        await task.open(frozenset({A, B}))
        with pytest.raises(RetriableError):
            await task.put([*records(A, 0, 5), *records(B, 0, 10)])
        await virtual_time.let_pass(3)
        await task.close(frozenset({A}))
        server.requests.clear()
        rejected[:] = [b'"n":8']
        with pytest.raises(RetriableError):
            await task.put(records(B, 0, 10))
        await virtual_time.let_pass(3)
        rejected.clear()
        await task.put(records(B, 0, 10))
        assert numbers(server.requests) == [0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 5, 6, 7, 8, 9]
        rejected[:] = [b'"n":15']
        with pytest.raises(RetriableError):
            await task.put(records(B, 10, 20))
        await virtual_time.let_pass(3)
        await task.close(frozenset({B}))
        await task.open(frozenset({B}))  # assigned again, at the last committed offset
        server.requests.clear()
        rejected.clear()
        await task.put(records(B, 10, 20))
        assert numbers(server.requests) == list(range(10, 20))

    virtual_time.run(deliver_again())


async def test_a_rejected_record_is_a_dead_letter() -> None:
    """A rejected batch is sent record by record, and only the rejected record is reported."""

    def respond(request: Request) -> Response:
        return (422, {}, b"bad") if b'"n":1' in request.body else OK

    async with serving(respond) as server, running() as run:
        await produce(run, *[{"n": n} for n in range(3)])
        dlq = {"errors_tolerance": "all", "errors_deadletterqueue_topic_name": "dlq"}
        dlq |= {"errors_deadletterqueue_topic_replication_factor": "1"}
        await run.run(HttpSinkConnector, topics="t", http_url=server.url, **dlq, **JSON)
        await run.until(lambda: run.cluster.records("dlq") if "dlq" in run.cluster._state.topics else None)
        assert [record.value for record in run.cluster.records("dlq")] == [b'{"n": 1}']
        await run.until(lambda: len(server.requests) == 4)
        assert [numbers([request]) for request in server.requests] == [[0, 1, 2], [0], [1], [2]]


@pytest.mark.parametrize(
    ("tolerance", "sent"), [({}, [[0, 1, 2]]), ({"errors.tolerance": " ALL "}, [[0, 1, 2], [0], [1], [2]])]
)
async def test_a_rejected_batch_is_sent_record_by_record_only_if_errors_are_tolerated(
    tolerance: dict[str, str], sent: list[list[int]]
) -> None:
    """An error that is only logged fails the task. Records that were posted before it would be posted again by each
    new task."""
    server = Answers(lambda request: (422, {}, b"bad") if b'"n":1' in request.body else OK)
    task = await started_sink(server, Context(reporter := Reporter()), **tolerance)
    with contextlib.nullcontext() if tolerance else pytest.raises(ConnectError, match=r"t-0@0 to t-0@2\b.*422: bad"):
        await task.put(records(A, 0, 3))
    assert [numbers([request]) for request in server.requests] == sent
    assert reporter.reported == ([(A, 1)] if tolerance else [])


@pytest.mark.parametrize("status", [301, 307, 401, 403, 405, 407])
def test_an_error_of_the_endpoint_is_not_an_error_of_the_records(status: int) -> None:
    """If the endpoint takes no record, for example because the credentials are wrong, the task fails at once. No record
    is reported, and the error has no secret of the URL."""

    async def put_records() -> None:
        server = Answers(lambda _request: (status, {"Location": "/login"}, b"no"))
        url = "http://ann:s3cret@host/in?token=t0ken"
        task = await started_sink(server, Context(reporter := Reporter()), **{"http.url": url})
        with pytest.raises(ConnectError, match=rf"{status}.*ann:\[hidden\]@host/in\?token=\[hidden\]"):
            await task.put(records(A, 0, 2))
        assert len(server.requests) == 1
        assert reporter.reported == []

    virtual_time.run(put_records())


@pytest.mark.parametrize("encoding", ["", "gzip, gzip", "gzip"])
async def test_a_response_that_is_not_read_has_its_status(encoding: str) -> None:
    """The sink reads a response that is large, corrupt or in an unsupported encoding only as far as needed. The records
    of a successful request are posted, and an error is reported with its status."""
    statuses = [200, 422]
    headers = {"Content-Encoding": encoding}
    server = Answers(lambda _request: (statuses.pop(0), headers, bytes(REPLY_BYTES_MAX + 1)))
    task = await started_sink(server, Context())
    await task.put(records(A, 0, 1))
    with pytest.raises(ConnectError, match=r"HTTP 422: the response (has more than|has the|is not gzip)"):
        await task.put(records(A, 1, 2))


@pytest.mark.parametrize("body", [b"{", b'"\xff"', b"[" * 100_000])
def test_a_response_that_is_not_json_is_an_error(body: bytes) -> None:
    """A response that is not JSON, or nested too deeply, is a ConnectError."""
    task = HttpSourceTask()
    task._values = {"records.pointer": ""}
    with pytest.raises(ConnectError, match="does not match the settings"):
        task._records_of_response(httpx.Response(200, content=body))


async def test_a_response_that_is_compressed_twice_is_an_error() -> None:
    """A few bytes that are compressed twice may be gigabytes: they fail the task before they use up memory."""
    body = gzip.compress(gzip.compress(b"[1]"))
    async with serving(lambda _request: (200, {"Content-Encoding": "gzip, gzip"}, body)) as server:
        task = HttpSourceTask()
        task.context = WorkerSourceTaskContext({}, AllowedFiles(), StoredOffsetReader(Store(), "c"))
        await task.start({"http.url": server.url, "topic": "t"})
        with pytest.raises(ConnectError, match="Content-Encoding"):
            await task.poll()
        assert server.requests[0].headers["accept-encoding"] == "gzip"
        await task.stop()


@pytest.mark.parametrize("offset_pointer", ["", "/id"])
def test_null_in_place_of_the_records_is_no_record(offset_pointer: str) -> None:
    """A server may write an array without elements as null."""
    task = HttpSourceTask()
    task._values = {"records.pointer": "/items", "http.offset.pointer": offset_pointer, "key.pointer": "", "topic": "t"}
    task._partition, task._offset, task._written_now = {}, "0", set()
    assert task._records_of_response(httpx.Response(200, content=b'{"items":null}')) == []


@pytest.mark.parametrize("offset", [None, {"at": 1}, []])
def test_an_offset_that_is_null_or_no_plain_value_is_an_error(offset: object) -> None:
    """It is not stored: each later request would contain it, also after restarts."""
    task = HttpSourceTask()
    task._values = {"records.pointer": "", "http.offset.pointer": "/at", "key.pointer": "", "topic": "t"}
    task._partition, task._offset, task._written, task._written_now = {}, "0", frozenset(), set()
    with pytest.raises(DataError, match="there is no offset at /at"):
        task._records_of_response(httpx.Response(200, json=[{"at": 1}, {"at": offset}]))
    assert task._offset == 1


async def test_an_altered_offset_of_the_source_is_a_plain_value() -> None:
    """Any other offset or partition is an error, since the source would not continue at it. An offset of another
    connector can be deleted."""
    connector, partition = HttpSourceConnector(), {"url": "http://ann:[hidden]@host/?since=${offset}"}
    deleted = ({"filename": "in"}, None)
    for offset in (5, "a", ""):
        assert await connector.alter_offsets({}, [(partition, {"offset": offset}), deleted])
    invalid: list[dict[str, object]] = [{}, {"offset": None}, {"id": 5}, {"offset": [1]}, {"offset": 5, "id": 5}]
    for wrong in invalid:
        with pytest.raises(ConnectError, match="is not an offset"):
            await connector.alter_offsets({}, [(partition, wrong)])
    for other in ({"http.url": "http://host/"}, {"url": "http://ann:s3cret@host/?since=${offset}"}, {"url": 5}):
        with pytest.raises(ConnectError, match="a partition is"):
            await connector.alter_offsets({}, [(other, {"offset": 5})])


async def test_an_address_is_polled_page_by_page() -> None:
    """The source's next request contains the offset of the last record, also after a failure,
    and the offset is stored.
    """
    failures = [503]

    def respond(request: Request) -> Response:
        if failures:
            return failures.pop(), {}, b""
        after = int(request.path.partition("=")[2])
        page = [{"id": n, "user": f"u{n}"} for n in range(after + 1, min(after + 3, 6))]
        return 200, {}, json.dumps({"data": {"items": page}}).encode()

    settings = {
        "topic": "t",
        "poll_interval_ms": "10",
        "retry_backoff_ms": "5",
        "records_pointer": "/data/items",
        "http_offset_pointer": "/id",
        "http_offset_initial": "0",
        "key_pointer": "/user",
    }
    async with serving(respond) as server, running() as run:
        await run.run(HttpSourceConnector, http_url=f"{server.url}/?after=${{offset}}", **settings, **JSON)
        await run.until(lambda: len(run.cluster.records("t")) == 5)
        assert [record.key for record in run.cluster.records("t")] == [b"u1", b"u2", b"u3", b"u4", b"u5"]
        await run.until(lambda: any(b'"offset":5' in value for value in run.store.data.values()))
        assert [request.path for request in server.requests[:4]] == ["/?after=0", "/?after=0", "/?after=2", "/?after=4"]


async def test_the_source_partition_has_no_secret() -> None:
    """The source partition is the URL without its secrets, so a source with a new secret continues at its offset."""

    def respond(request: Request) -> Response:
        return 200, {}, b'[{"id":%d}]' % (int(request.path.rpartition("=")[2]) + 1)

    async with serving(respond) as server, running() as run:
        host = server.url.removeprefix("http://")
        settings = {"topic": "t", "http_offset_pointer": "/id", "http_offset_initial": "0", **JSON}
        first = f"http://ann:s3cret@{host}/?api_key=k3y&after=${{offset}}"
        id = await run.run(HttpSourceConnector, http_url=first, **settings)
        await run.until(lambda: run.cluster.records("t"))
        await run.worker.stop_tasks([id])
        (key,) = run.store.data
        assert f"http://ann:[hidden]@{host}/?api_key=[hidden]&after=${{offset}}".encode() in key
        stored = len(server.requests)
        await run.run(HttpSourceConnector, http_url=first.replace("k3y", "n3w"), **settings)
        await run.until(lambda: len(server.requests) > stored)
        assert int(server.requests[stored].path.rpartition("=")[2]) > 0


@pytest.mark.parametrize(("stored", "lines"), [({"offset": 7}, 0), (None, 1)])
async def test_a_start_without_an_offset_of_the_url_is_logged(stored: Offset | None, lines: int) -> None:
    """After a change of `http.url` the source begins at `http.offset.initial`."""

    class Offsets(StoredOffsetReader):
        async def offset(self, partition: Partition) -> Offset | None:
            return stored

    task = HttpSourceTask()
    task.context = WorkerSourceTaskContext({}, AllowedFiles(), Offsets(Store(), "c"))
    with structlog.testing.capture_logs() as logged:
        await task.start({"http.url": "http://host/?since=${offset}", "topic": "t", "http.offset.pointer": "/id"})
    await task.stop()
    assert sum("http.offset.initial" in line["event"] for line in logged) == lines


async def test_an_inclusive_offset_writes_each_record_once() -> None:
    """If responses include records at the requested offset, records written before are skipped and new ones are not.

    Equal records of one response are each written. If the offset does not change, the next
    request waits for the interval.
    """
    items = [{"id": n, "at": at} for n, at in ((1, 10), (2, 20), (3, 20), (3, 20))]

    def respond(request: Request) -> Response:
        since = int(request.path.partition("=")[2])
        return 200, {}, json.dumps([item for item in items if item["at"] >= since]).encode()

    async with serving(respond) as server:
        task = HttpSourceTask()
        task.context = WorkerSourceTaskContext({}, AllowedFiles(), StoredOffsetReader(Store(), "c"))
        url = f"{server.url}/?since=${{offset}}"
        await task.start(
            {"http.url": url, "topic": "t", "http.offset.pointer": "/at", "http.offset.initial": "0",
             "poll.interval.ms": "40"}
        )  # fmt: skip

        async def polled() -> list[int]:
            return [record.value["id"] for record in await task.poll() or ()]

        assert [await polled() for _ in range(2)] == [[1, 2, 3, 3], []]
        loop = asyncio.get_running_loop()
        items.append({"id": 4, "at": 20})
        before_s = loop.time()
        assert [await polled() for _ in range(2)] == [[4], []]
        assert loop.time() - before_s >= 0.075  # both waited for the interval
        items.append({"id": 5, "at": 30})
        assert [await polled() for _ in range(2)] == [[5], []]
        await task.stop()


def test_a_poll_waits_at_most_a_second() -> None:
    """The wait for the next request is longer than a poll: each poll returns after a second at most, without records.

    So a pause, or the end of a transaction, does not wait for the whole interval.
    """

    async def poll_until_next_request() -> None:
        task = HttpSourceTask()
        task.context = WorkerSourceTaskContext({}, AllowedFiles(), StoredOffsetReader(Store(), "c"))
        await task.start({"http.url": "http://127.0.0.1:1/", "topic": "t", "retry.backoff.ms": "2500"})
        with pytest.raises(RetriableError):
            await task.poll()  # nothing listens there
        loop = asyncio.get_running_loop()
        for _ in range(2):
            before_s = loop.time()
            assert await task.poll() is None
            assert loop.time() - before_s == 1
        with pytest.raises(RetriableError):
            await task.poll()
        await task.stop()

    virtual_time.run(poll_until_next_request())


class Trickle(httpx.AsyncBaseTransport, httpx.AsyncByteStream):
    """Answers each request with a byte every 300 ms, ten in all."""

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, stream=self)

    async def __aiter__(self) -> AsyncIterator[bytes]:
        for _ in range(10):
            await virtual_time.let_pass(0.3)
            yield b"1"


def test_a_request_ends_after_its_timeout() -> None:
    """`request.timeout.ms` limits the whole request, also if the server sends a little from time to time."""

    async def failed_after_s(call: Callable[[], Awaitable[object]]) -> float:
        before_s = asyncio.get_running_loop().time()
        with pytest.raises(RetriableError, match="1000 ms"):
            await call()
        return asyncio.get_running_loop().time() - before_s

    async def read_and_post() -> list[float]:
        source = HttpSourceTask()
        source.context = WorkerSourceTaskContext({}, AllowedFiles(), StoredOffsetReader(Store(), "c"))
        await source.start({"http.url": "http://host/", "topic": "t", "request.timeout.ms": "1000"})
        source._client = httpx.AsyncClient(transport=Trickle())
        sink = await started_sink(Trickle(), Context(), **{"request.timeout.ms": "1000"})
        return [await failed_after_s(source.poll), await failed_after_s(lambda: sink.put(records(A, 0, 1)))]

    assert virtual_time.run(read_and_post()) == [1, 1]


async def test_an_unchanged_response_is_not_written_again() -> None:
    """The next request contains the ETag, and a 304 writes no records."""

    def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == '"1"':
            return 304, {}, b""
        return 200, {"ETag": '"1"'}, b'[{"n":1}]'

    async with serving(respond) as server, running() as run:
        await run.run(HttpSourceConnector, http_url=server.url, topic="t", poll_interval_ms="5", **JSON)
        await run.until(lambda: len(server.requests) >= 4)
        assert len(run.cluster.records("t")) == 1


async def test_an_etag_is_sent_only_for_its_own_address() -> None:
    """A server may give all pages one ETag: the first request of a page has none, so each page is read."""

    def respond(request: Request) -> Response:
        if request.headers.get("if-none-match") == '"1"':
            return 304, {}, b""
        after = int(request.path.partition("=")[2])
        page = [{"id": n} for n in range(after + 1, min(after + 3, 4))]
        return 200, {"ETag": '"1"'}, json.dumps(page).encode()

    async with serving(respond) as server:
        task = HttpSourceTask()
        task.context = WorkerSourceTaskContext({}, AllowedFiles(), StoredOffsetReader(Store(), "c"))
        await task.start(
            {"http.url": f"{server.url}/?after=${{offset}}", "topic": "t", "http.offset.pointer": "/id",
             "http.offset.initial": "0", "poll.interval.ms": "1"}
        )  # fmt: skip
        polled = [[record.value["id"] for record in await task.poll() or ()] for _ in range(4)]
        assert polled == [[1, 2], [3], [], []]
        sent = [(request.path, request.headers.get("if-none-match")) for request in server.requests]
        assert sent == [("/?after=0", None), ("/?after=2", None), ("/?after=3", None), ("/?after=3", '"1"')]
        await task.stop()


@pytest.mark.parametrize("setting", ["records.pointer", "key.pointer", "http.offset.pointer"])
def test_an_invalid_pointer_is_a_configuration_error(setting: str) -> None:
    """A JSON pointer is empty or begins with a slash, and has `~` only before 0 or 1."""
    props = {"http.url": "http://host/", "topic": "t"}
    for pointer in ("items", "items/0", "#/items", "/a~", "/a~2b"):
        with pytest.raises(ConfigError, match=f"for configuration {setting}"):
            HttpSourceConnector.config().parse({**props, setting: pointer})
    for pointer in ("", "/", "/items", "/a~0b~1c/0", "/a\nb"):
        assert HttpSourceConnector.config().parse({**props, setting: pointer})[setting] == pointer


def test_a_pointer_without_a_target_is_an_error() -> None:
    """A JSON pointer without a target is an error that names the pointer."""
    assert pointed({"a": [1]}, "") == {"a": [1]}
    for pointer in ("/b", "/a/1", "/a/x"):
        with pytest.raises(DataError, match=pointer):
            pointed({"a": [1]}, pointer)
