"""Records that are sent over REST Proxy's API, in v2 and in v3."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from pydantic import SecretStr
from structlog.testing import capture_logs

from penstock.api.http.app import create_app
from penstock.api.http.body import BodyReader
from penstock.api.http.health import CheckResult
from penstock.api.http.turns import Turn
from penstock.api.http.unread_response import CONNECTION
from penstock.api.ingest.routes import Ingest
from penstock.api.rest_proxy.rest_producer import RestProducer
from penstock.api.rest_proxy.routes import metadata_routers, produce_routers
from penstock.api.rest_proxy.v3_records import NotAnObject, RecordStreamSplitter
from penstock.api.settings import Credential, IngestSettings
from penstock.shared.clients.admin.types import ClusterDescription
from penstock.shared.common.errors import AuthorizationFailed, BrokerNotAvailable, KafkaTimeout, PenstockError
from penstock.shared.common.records import ProducerRecord
from penstock.shared.testing.manual_clock import ManualClock
from tests.api.admin.test_administration import MemoryAdmin
from tests.api.conftest import MemoryProducer, Outcome
from tests.api.ingest.service import COMPRESS
from tests.api.rest_proxy.conftest import SETTINGS
from tests.virtual_time import run

V2_JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
V2_BINARY = {"Content-Type": "application/vnd.kafka.binary.v2+json"}
RECORD = b'{"value":{"type":"JSON","data":1}}'
V3 = "/v3/clusters/c-1/topics/t/records"
KEYED = IngestSettings.model_validate({"topics": {"t": {"key": ["/id"], "time": "/at"}}})


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_v2_json_keeps_the_bytes(client: httpx.AsyncClient, producer: Any) -> None:
    """v2 JSON is stored as its original bytes with one row for each record, and null is a tombstone."""
    body = b'{"records":[{"key":"ann","value":{"a": 1}},{"value":null,"key":{"k":2}}]}'
    response = await client.post("/topics/t", content=body, headers=V2_JSON)
    assert response.status_code == 200
    assert response.headers["content-type"] == "application/vnd.kafka.v2+json"
    response_body = response.json()
    assert (response_body["key_schema_id"], response_body["value_schema_id"]) == (None, None)
    assert [set(row) for row in response_body["offsets"]] == [{"partition", "offset", "error_code", "error"}] * 2
    assert {(r.key, r.value) for log in producer.logs["t"] for r in log} == {
        (b'"ann"', b'{"a": 1}'),
        (b'{"k":2}', None),
    }


async def test_json_that_is_not_utf8_is_rejected(client: httpx.AsyncClient, producer: Any) -> None:
    """A key or a value of the type JSON must be UTF-8 in v2 and in v3. The other records are stored."""
    latin = '"Müller"'.encode("latin-1")
    v2 = await client.post("/topics/t", content=b'{"records":[{"value":%b},{"value":1}]}' % latin, headers=V2_JSON)
    assert [row["error"] for row in v2.json()["offsets"]] == ["value is not UTF-8", None]
    for name in (b"key", b"value"):
        body = b'{"%b":{"type":"JSON","data":{"name":%b}}}' % (name, latin)
        v3 = await client.post(V3, content=body)
        assert (v3.status_code, v3.json()["message"]) == (422, f"{name.decode()} is not UTF-8")
    assert producer.values() == [b"1"]


async def test_v2_answers_200_with_errors_inside(client: httpx.AsyncClient, producer: Any) -> None:
    """v2 answers 200 with error code 1 for permanent and 2 for retriable errors, and the other records are stored."""
    producer.errors_by_value[b"down"] = BrokerNotAvailable("no broker")
    rows = [{"value": b64(b"1")}, {"value": "%%"}, {"value": b64(b"down")}, {"value": b64(b"2"), "partition": 9}]
    response = await client.post("/topics/t", json={"records": rows}, headers=V2_BINARY)
    assert response.status_code == 200
    assert [row["error_code"] for row in response.json()["offsets"]] == [None, 1, 2, 1]
    assert response.json()["offsets"][1]["error"] == "value is not base64"
    assert producer.values() == [b"1"]


async def test_an_unexpected_error_of_records_is_logged_once(client: httpx.AsyncClient, producer: Any) -> None:
    """The response does not have the text of a programming error, so the log does."""
    producer.errors_by_value[b"odd"] = TypeError("a secret")
    with capture_logs() as logged:
        response = await client.post("/topics/t", json={"records": [{"value": b64(b"odd")}] * 3}, headers=V2_BINARY)
    assert [row["error"] for row in response.json()["offsets"]] == ["unexpected error"] * 3
    assert [str(one["exc_info"]) for one in logged if "exc_info" in one] == ["a secret"]


@pytest.mark.parametrize(
    ("path", "headers", "content", "status", "code"),
    [
        ("/topics/none", V2_JSON, b'{"records":[{"value":1}]}', 404, 40401),
        ("/topics/t/partitions/7", V2_JSON, b'{"records":[{"value":1}]}', 404, 40402),
        ("/topics/closed", V2_JSON, b'{"records":[{"value":1}]}', 403, 40301),
        ("/topics/t", V2_JSON, b'{"records":[]}', 422, 422),
        ("/topics/t", V2_JSON, b"{", 422, 422),
        ("/topics/t", V2_JSON, b'{"records":[{"my_field":1}]}', 422, 422),
        ("/topics/t", V2_JSON, b'{"receiver":1,"records":[{"value":1}]}', 422, 422),
        ("/topics/t", {"Content-Type": "application/vnd.kafka.avro.v2+json"}, b"{}", 415, 415),
    ],
)
async def test_v2_errors_have_rest_proxys_codes(
    client: httpx.AsyncClient, path: str, headers: dict[str, str], content: bytes, status: int, code: int
) -> None:
    """v2 errors have REST Proxy's codes and form, and nothing is sent."""
    response = await client.post(path, content=content, headers=headers)
    assert (response.status_code, response.json()["error_code"]) == (status, code)
    assert set(response.json()) == {"error_code", "message"}


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_compressed_bodies_are_accepted(client: httpx.AsyncClient, producer: Any, encoding: str) -> None:
    """Every kind of produce request may be compressed; a corrupt body and an unknown encoding
    are errors in REST Proxy's form.
    """
    pack, named = COMPRESS[encoding], {"Content-Encoding": encoding}
    v2 = await client.post("/topics/t", content=pack(b'{"records":[{"value":1}]}'), headers=V2_JSON | named)
    assert (v2.status_code, v2.json()["offsets"][0]["error_code"]) == (200, None)
    one = b'{"value":{"type":"JSON","data":2}}'

    async def chunks() -> AsyncIterator[bytes]:
        yield pack(one + b"\n" + one)

    for body in (pack(one), chunks()):
        v3 = await client.post(V3, content=body, headers={"Content-Type": "application/json"} | named)
        assert {json.loads(line)["error_code"] for line in v3.text.splitlines()} == {200}
    entries = pack(b'{"entries":[{"id":"a","value":{"type":"JSON","data":3}}]}')
    batch = await client.post(V3 + ":batch", content=entries, headers={"Content-Type": "application/json"} | named)
    assert len(batch.json()["successes"]) == 1
    assert sorted(producer.values()) == [b"1", b"2", b"2", b"2", b"3"]
    wrong = await client.post("/topics/t", content=pack(b"{}")[:-1], headers=V2_JSON | named)
    assert (wrong.status_code, wrong.json()["error_code"]) == (400, 400)

    async def damaged() -> AsyncIterator[bytes]:
        yield pack(one) + b"damage"

    lines = (await client.post(V3, content=damaged(), headers={"Content-Type": "application/json"} | named)).text
    assert [json.loads(line)["error_code"] for line in lines.splitlines()] == [200, 400]
    unknown = await client.post("/topics/t", content=b"x", headers=V2_JSON | {"Content-Encoding": "br"})
    assert (unknown.status_code, unknown.headers["accept-encoding"]) == (415, "gzip, zstd")


async def test_v3_reports_a_record(client: httpx.AsyncClient, producer: Any) -> None:
    """v3 reports the stored record's coordinates, timestamp and sizes, for every type of data."""
    record = {
        "key": {"type": "STRING", "data": "ann"},
        "value": {"type": "BINARY", "data": b64(b"xyz")},
        "headers": [{"name": "h", "value": b64(b"1")}],
        "timestamp": "2024-06-03T10:00:00Z",
    }
    response = await client.post(V3, json=record)
    body = response.json()
    assert (response.status_code, body["error_code"], body["cluster_id"], body["topic_name"]) == (200, 200, "c-1", "t")
    assert (body["key"], body["value"]) == ({"type": "STRING", "size": 3}, {"type": "BINARY", "size": 3})
    assert (body["partition_id"], body["offset"], body["timestamp"]) == (1, 0, "2024-06-03T10:00:00Z")
    (stored,) = [r for log in producer.logs["t"] for r in log]
    assert (stored.key, stored.value, stored.headers) == (b"ann", b"xyz", (("h", b"1"),))
    assert stored.timestamp == 1_717_408_800_000


async def test_v3_takes_null_headers(client: httpx.AsyncClient, producer: Any) -> None:
    """As in REST Proxy, null is the same as no headers."""
    record = {"headers": None, "value": {"type": "JSON", "data": 1}}
    assert (await client.post(V3, json=record)).json()["error_code"] == 200
    batch = await client.post(V3 + ":batch", json={"entries": [{"id": "a", **record}]})
    assert len(batch.json()["successes"]) == 1
    assert [r.headers for log in producer.logs["t"] for r in log] == [(), ()]


async def test_v3_rejects_a_timestamp_before_the_earliest(client: httpx.AsyncClient, producer: Any) -> None:
    """An explicit timestamp before min_event_time is an error of its record alone, also in a batch."""
    record = {"value": {"type": "JSON", "data": 1}, "timestamp": "1970-01-20T21:03:28Z"}
    alone = (await client.post(V3, json=record)).json()
    assert (alone["error_code"], "min_event_time=2000-01-01" in alone["message"]) == (422, True)
    entries = [{"id": "a"} | record, {"id": "b", "value": {"type": "JSON", "data": 2}}]
    batch = (await client.post(V3 + ":batch", json={"entries": entries})).json()
    assert [row["id"] for row in batch["successes"]] == ["b"]
    assert "min_event_time" in batch["failures"][0]["message"]
    assert producer.values() == [b"2"]


async def test_v3_streams_reports_in_order(client: httpx.AsyncClient) -> None:
    """A stream of objects, split anywhere, gets one report each in order; a broken end is the last report."""

    async def body() -> AsyncIterator[bytes]:
        yield b'{"value":{"type":"JSON","data":1}}{"value":{"ty'
        yield b'pe":"NO","data":2}}\n{"value":{"type":"STRING","data":"22"}}'
        yield b"oops"

    response = await client.post(V3, content=body(), headers={"Content-Type": "application/json"})
    codes = [json.loads(line)["error_code"] for line in response.text.splitlines()]
    assert (response.status_code, codes) == (200, [200, 400, 200, 400])


class FullProducer(MemoryProducer):
    """Takes one record in each iteration of the event loop, like a producer whose buffer is full."""

    async def send_many(self, records: Iterable[ProducerRecord]) -> Awaitable[Sequence[Outcome]]:
        outcomes = []
        for record in records:
            await asyncio.sleep(0)
            outcomes.append(self._append(record))
        return self._acknowledged(outcomes)


async def test_v3_stores_a_stream_in_order_while_the_buffer_is_full() -> None:
    """The records of a later chunk wait for those of an earlier one."""
    producer = FullProducer(partitions=1)
    numbers = range(10, 40)

    async def body() -> AsyncIterator[bytes]:
        for start in range(10, 40, 10):
            yield b"".join(b'{"value":{"type":"JSON","data":%d}}' % n for n in range(start, start + 10))

    rest = produce_routers(
        RestProducer(Ingest(producer, SETTINGS, CollectorRegistry()), producer, SETTINGS), MemoryAdmin()
    )
    transport = httpx.ASGITransport(create_app(rest_proxy=rest))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(V3, content=body())
    assert [json.loads(line)["offset"] for line in response.text.splitlines()] == list(range(30))
    assert producer.values() == [b"%d" % n for n in numbers]


async def test_v3_batch_is_207_with_successes_and_failures(client: httpx.AsyncClient) -> None:
    """A v3 batch is a 207 with successes and failures by id."""
    value = {"type": "JSON", "data": 1}
    entries = [{"id": "a", "value": value}, {"id": "b", "value": {"type": "BINARY", "data": "%"}}]
    entries.append({"id": "c", "vaule": value})
    response = await client.post(V3 + ":batch", json={"entries": entries})
    assert response.status_code == 207
    assert [row["id"] for row in response.json()["successes"]] == ["a"]
    assert [(row["id"], row["error_code"]) for row in response.json()["failures"]] == [("b", 422), ("c", 400)]
    assert (await client.post(V3 + ":batch", json={"entries": []})).status_code == 400


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        (V3.replace("/t/", "/none/"), b"{}", 404, 40403),
        (V3.replace("c-1", "c-2"), b"{}", 404, 404),
        (V3, b'{"value":{"type":"BINARY","data":"%"}}', 422, 422),
        (V3, b'{"partition_id":9}', 404, 40402),
        (V3, b'{"records":[{"key":"abc","value":"a record of v2"}]}', 400, 400),
        (V3, b'{"value":{"type":"JSON","data":1,"schema_id":1}}', 400, 400),
        (V3, b'{"value":{"type":"JSON"}}', 400, 400),
        (f"{V3}:batch", b'{"entries":[{"id":"a"}],"topic":"t"}', 400, 400),
        (V3, b"[1]", 400, 400),
    ],
)
async def test_v3_errors_of_a_single_record_have_their_status(
    client: httpx.AsyncClient, producer: Any, path: str, content: bytes, status: int, code: int
) -> None:
    """The error of a single record with a Content-Length is the response's status, and nothing is stored."""
    response = await client.post(path, content=content)
    assert (response.status_code, response.json()["error_code"]) == (status, code)
    assert producer.values() == []


async def test_fields_for_schemas_are_known(client: httpx.AsyncClient, producer: Any) -> None:
    """They are ignored in v2, whatever their value, and may be null in v3."""
    schemas = {"key_schema": None, "key_schema_id": "1", "value_schema": {"type": "int"}, "value_schema_id": [True]}
    v2 = await client.post("/topics/t", json=schemas | {"records": [{"value": 1}]}, headers=V2_JSON)
    assert v2.json()["offsets"][0]["error_code"] is None
    nulls = dict.fromkeys(("subject", "subject_name_strategy", "schema_id", "schema_version", "schema"))
    assert (await client.post(V3, json={"value": {"type": "JSON", "data": 2} | nulls})).status_code == 200
    assert sorted(producer.values()) == [b"1", b"2"]


@pytest.mark.parametrize("error", [BrokerNotAvailable("no broker"), KafkaTimeout("late")])
async def test_v3_kafka_errors_of_a_single_record(
    client: httpx.AsyncClient, producer: Any, error: PenstockError
) -> None:
    """A Kafka error of a single record is a 503 or 504 with Retry-After."""
    producer.fail_all = error
    response = await client.post(V3, json={"value": {"type": "JSON", "data": 1}})
    assert response.status_code == (504 if isinstance(error, KafkaTimeout) else 503)
    assert int(response.headers["retry-after"]) > 0
    assert response.json()["error_code"] == 50003


async def test_v3_has_rest_proxys_code_for_a_record_that_kafka_does_not_allow(
    client: httpx.AsyncClient, producer: Any
) -> None:
    """A record without the permission in Kafka is a 403 with the code 40301, unless Kafka may hold it."""
    producer.fail_all = AuthorizationFailed("t: not authorized")
    response = await client.post(V3, content=RECORD)
    assert (response.status_code, response.json()["error_code"]) == (403, 40301)
    producer.fail_all.maybe_written = True
    response = await client.post(V3, content=RECORD)
    assert (response.status_code, response.json()["error_code"]) == (504, 50003)


async def test_v3_requires_a_record(client: httpx.AsyncClient) -> None:
    """An empty body is a 400, with and without a Content-Length."""
    response = await client.post(V3, content=b" ")
    assert (response.status_code, response.json()["error_code"]) == (400, 400)

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    streamed = await client.post(V3, content=nothing())
    assert streamed.json() == {"error_code": 400, "message": "the body holds no record"}


@pytest.mark.parametrize("path", ["/topics/t", V3, V3 + ":batch"])
async def test_rest_proxys_bodies_end_with_the_service(client: httpx.AsyncClient, ingest: Ingest, path: str) -> None:
    """An open body is answered by the drain's deadline, as for events."""
    never, started = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        started.set()
        await never.wait()

    posting = asyncio.ensure_future(client.post(path, content=endless(), headers=V2_JSON))
    await started.wait()
    ingest.drain(grace_ms=20)
    response = await posting
    error_code = response.json()["error_code"]
    assert (response.status_code, error_code) in ((503, 50003), (200, 503))
    assert ingest.active == 0


@pytest.mark.parametrize("path", [V3, f"{V3}:batch"])
@pytest.mark.parametrize("is_known", [True, False])
async def test_v3_answers_503_while_kafka_cannot_be_reached(producer: Any, path: str, is_known: bool) -> None:
    """Nothing was sent, so the status is not 504. If the probe has failed already, Kafka is not asked at all."""
    asked = list[str]()

    class Unreachable(MemoryAdmin):
        async def cluster(self) -> ClusterDescription:
            asked.append("cluster")
            raise KafkaTimeout("metadata: not done after 60000 ms")

    probe = CheckResult(not is_known, "down")
    ingest = Ingest(producer, SETTINGS, CollectorRegistry(), kafka=lambda: probe)
    rest = produce_routers(RestProducer(ingest, producer, SETTINGS), Unreachable())
    transport = httpx.ASGITransport(create_app(rest_proxy=rest))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post(path, content=RECORD)
    assert (response.status_code, response.json()["error_code"]) == (503, 50003)
    assert asked == ([] if is_known else ["cluster"])


async def test_rest_proxys_requests_are_counted(client: httpx.AsyncClient, registry: CollectorRegistry) -> None:
    """Requests, stored records and rejected records are counted as for events."""
    rows = [{"value": b64(b"1")}, {"value": "%%"}]
    assert (await client.post("/topics/t", json={"records": rows}, headers=V2_BINARY)).status_code == 200
    assert (await client.post("/topics/t", content=b"{", headers=V2_JSON)).status_code == 422
    read = registry.get_sample_value
    assert read("penstock_ingest_requests_total", {"topic": "t", "status": "200"}) == 1
    assert read("penstock_ingest_requests_total", {"topic": "t", "status": "422"}) == 1
    assert read("penstock_ingest_stored_records_total", {"topic": "t"}) == 1
    labels = {"topic": "t", "error_code": "INVALID_RECORD"}
    assert read("penstock_ingest_rejected_records_total", labels) == 1
    assert read("penstock_ingest_request_seconds_count", {"topic": "t"}) == 1


async def test_errors_of_every_layer_have_numbers(producer: Any) -> None:
    """Errors of authentication, scopes, cross-site checks, methods, limits and failures have REST Proxy's form."""
    settings = SETTINGS.model_copy(update={"max_body_bytes": 10, "max_requests_per_second": 1})
    few = Ingest(producer, settings, CollectorRegistry(), clock=ManualClock(1_700_000_000_000))
    admin = MemoryAdmin()
    credentials = {
        name: Credential(secret=SecretStr(f"{name:x<16}"), scopes=(scope,))
        for name, scope in (("reader", "read"), ("writer", "ingest"), ("owner", "admin"))
    }
    rest = [*produce_routers(RestProducer(few, producer, settings), admin), *metadata_routers(admin)]
    app = create_app(rest_proxy=rest, credentials=credentials)
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)

    def headers_of(role: str, **more: str) -> dict[str, str]:
        return {"Authorization": f"Bearer {role:x<16}", **more}

    long = b'{"value":{"type":"JSON","data":"' + b"x" * 100 + b'"}}'
    rejected: list[tuple[str, str, dict[str, str], bytes | None, int, int]] = [
        ("GET", "/v3/clusters", {}, None, 401, 40101),
        ("GET", "/consumers", {}, None, 401, 40101),
        ("POST", V3, headers_of("reader"), b"{}", 403, 40301),
        ("POST", "/consumers/g", headers_of("writer"), b"{}", 403, 40301),
        ("POST", V3, headers_of("writer", Origin="https://evil.example"), b"{}", 403, 403),
        ("DELETE", "/v3/clusters", headers_of("owner"), None, 405, 405),
        ("POST", "/consumers/g", headers_of("owner"), b"{}", 404, 404),
        ("POST", V3, headers_of("writer"), long, 413, 413),
        ("POST", V3, headers_of("writer"), b"{}", 429, 429),
    ]
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        for method, path, headers, body, status, code in rejected:
            response = await client.request(method, path, headers=headers, content=body)
            response_body = response.json()
            assert (response.status_code, response_body["error_code"], set(response_body)) == (
                status,
                code,
                {"error_code", "message"},
            )
        admin.cluster = None  # type: ignore[assignment,method-assign]  # an internal error
        failed = await client.get("/v3/clusters/c-1", headers=headers_of("owner"))
        assert (failed.status_code, failed.json()["error_code"]) == (500, 50002)


def post_v2(**record: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    return "/topics/t", V2_JSON, {"records": [record]}


def post_v3(**record: Any) -> tuple[str, dict[str, str], dict[str, Any]]:
    data = {name: {"type": "JSON", "data": record[name]} for name in ("key", "value") if name in record}
    return V3, {}, record | data


@pytest.mark.parametrize("post", [post_v2, post_v3])
async def test_an_explicit_key_needs_no_pointer(producer: Any, registry: CollectorRegistry, post: Any) -> None:
    """A record with its own key or timestamp does not need the topic's pointers to find one."""
    ingest = Ingest(producer, KEYED, registry)
    app = create_app(rest_proxy=produce_routers(RestProducer(ingest, producer, KEYED), MemoryAdmin()))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:

        async def code_of(**record: Any) -> int | None:
            path, headers, body = post(**record)
            response = (await client.post(path, json=body, headers=headers)).json()
            code: int | None = response["offsets"][0]["error_code"] if "offsets" in response else response["error_code"]
            return code

        at, stored = 1_700_000_000_000, (None, 200)
        assert await code_of(key="ann", value={"at": at}) in stored
        assert await code_of(value={"id": "bob", "at": at}) in stored
        assert await code_of(key="cid", value={"id": "other", "at": at}) in stored
        assert await code_of(value={"at": at}) not in stored
        assert await code_of(key="dan", value={"id": 1}) not in stored  # no time
        if post is post_v3:
            moment = "2023-11-14T22:13:20Z"
            assert await code_of(value={"id": "eve"}, timestamp=moment) in stored
            assert await code_of(key="fay", value="no object", timestamp=moment) in stored
    kept = sorted((r.key, r.timestamp) for log in producer.logs["t"] for r in log)
    own = [b'"ann"', b'"cid"', *([b'"fay"'] if post is post_v3 else []), b"bob", *([b"eve"] if post is post_v3 else [])]
    assert kept == [(key, at) for key in own]


async def test_a_schema_file_is_read_once(producer: Any, tmp_path: Path) -> None:
    """A new schema file counts from the next start on, for records with and without keys of their own."""
    path = tmp_path / "s.json"
    path.write_text('{"required": ["id"]}')
    settings = IngestSettings.model_validate({"topics": {"t": {"json_schema": str(path)}}})
    rest = produce_routers(
        RestProducer(Ingest(producer, settings, CollectorRegistry()), producer, settings), MemoryAdmin()
    )
    path.unlink()
    body = {"records": [{"value": {}}, {"key": 1, "value": {}}, {"value": {"id": 1}}, {"key": 1, "value": {"id": 1}}]}
    transport = httpx.ASGITransport(create_app(rest_proxy=rest))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        response = await client.post("/topics/t", json=body, headers=V2_JSON)
    assert [row["error_code"] for row in response.json()["offsets"]] == [1, 1, None, None]


text = st.text(alphabet='a"{}\\,\n[]é', max_size=6)
objects = st.lists(
    st.dictionaries(text, st.recursive(text, lambda c: st.dictionaries(text, c, max_size=2))), max_size=4
)


@given(objects, st.sampled_from(["", "\n", ", ", " \r\n"]), st.data())
def test_the_objects_do_not_depend_on_the_chunks(values: list[Any], between: str, data: Any) -> None:
    """Braces and backslashes within strings are text. A chunk may end anywhere, also within a character."""
    body = between.join(json.dumps(value, ensure_ascii=False) for value in values).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=5)) | {0, len(body)})
    splitter = RecordStreamSplitter(10_000)
    split = [object_ for start, end in pairwise(cuts) for object_ in splitter.feed(body[start:end])]
    splitter.close()
    assert [json.loads(object_) for object_ in split] == values


TOO_LONG = b'{"a":' + b"1" * 100


@pytest.mark.parametrize("body", [b"[1]", b'{"a":1} 7', b"x", TOO_LONG, TOO_LONG + b"}", b"{}" + TOO_LONG + b"}{}"])
def test_other_data_ends_the_stream(body: bytes) -> None:
    """Data between objects that is not whitespace or a comma, and an object that is too long."""
    splitter = RecordStreamSplitter(100)
    splitter.feed(body)
    assert splitter.feed(b"{}") == []
    with pytest.raises(NotAnObject):
        splitter.close()


def test_objects_before_other_data_do_not_depend_on_the_chunks() -> None:
    """The objects before the other data are returned, whether or not it arrives in the same chunk."""
    for chunks in ((b'{"a":1} x',), (b'{"a":1}', b" x"), (b'{"a":1} ', b"x", b"{}")):
        splitter = RecordStreamSplitter(100)
        assert [object_ for chunk in chunks for object_ in splitter.feed(chunk)] == [b'{"a":1}']
        with pytest.raises(NotAnObject, match="got b'x'"):
            splitter.close()


@pytest.mark.parametrize("chunks", [(RECORD + b" x",), (RECORD, b" x"), (RECORD + b" x", RECORD)])
async def test_v3_stores_the_records_before_other_data(
    client: httpx.AsyncClient, producer: Any, chunks: tuple[bytes, ...]
) -> None:
    """A stream's records before other data are stored, whether or not it arrives in the same chunk."""

    async def body() -> AsyncIterator[bytes]:
        for chunk in chunks:
            yield chunk

    response = await client.post(V3, content=body())
    assert [json.loads(line)["error_code"] for line in response.text.splitlines()] == [200, 400]
    assert producer.values() == [b"1"]


async def test_v3_counts_all_records_of_a_stream_as_bulk(
    client: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The turn for a group of a stream depends on all records of the stream so far, not on the group alone."""
    events: list[int] = []
    wait_for_turn = BodyReader.wait_for_turn

    async def recording(reader: BodyReader, count: int) -> Turn:
        events.append(count)
        return await wait_for_turn(reader, count)

    monkeypatch.setattr(BodyReader, "wait_for_turn", recording)

    async def body() -> AsyncIterator[bytes]:
        for _ in range(3):
            yield RECORD * 600

    assert len((await client.post(V3, content=body())).text.splitlines()) == 1800
    assert events == [600, 1200, 1800]


def test_v3_disconnects_a_client_that_does_not_read_its_reports(producer: Any) -> None:
    """A client that sends records and does not read their reports is disconnected after body_timeout_ms."""
    aborted = asyncio.Event()

    async def receive() -> Any:
        return {"type": "http.request", "body": RECORD, "more_body": True}

    async def send(message: Any) -> None:
        if message["type"] == "http.response.body":
            await asyncio.Event().wait()

    async def exchange() -> None:
        settings = IngestSettings(body_timeout_ms=1_000)
        registry = CollectorRegistry()
        ingest = Ingest(producer, settings, registry)
        app = create_app(rest_proxy=produce_routers(RestProducer(ingest, producer, settings), MemoryAdmin()))
        scope = {"type": "http", "http_version": "1.1", "method": "POST", "scheme": "http", "root_path": ""}
        scope |= {"path": V3, "raw_path": V3.encode(), "query_string": b"", "headers": [(b"host", b"localhost")]}
        scope["extensions"] = {CONNECTION: {"abort": aborted.set}}
        async with asyncio.timeout(60):
            await app(scope, receive, send)
        assert asyncio.get_running_loop().time() == 1
        assert aborted.is_set()
        assert ingest.active == 0
        assert registry.get_sample_value("penstock_ingest_requests_total", {"topic": "t", "status": "499"}) == 1

    run(exchange())


def test_an_incomplete_object_is_an_error() -> None:
    """It is detected at the end of the body."""
    splitter = RecordStreamSplitter(100)
    assert splitter.feed(b'{"a":1}{"b') == [b'{"a":1}']
    with pytest.raises(NotAnObject, match="within an object"):
        splitter.close()
