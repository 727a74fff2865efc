"""Confluent REST Proxy's interfaces over a producer and an admin in memory: the shapes that its clients know."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from prometheus_client import CollectorRegistry

from api.app import create_app
from api.ingest import Ingest
from api.rest_produce import RestProducer
from api.rest_proxy import metadata_routers, produce_routers
from api.settings import IngestSettings
from shared.clients.admin import MemberDescription
from shared.common.errors import BrokerNotAvailable, KafkaTimeout, PenstockError
from tests.api.test_admin import F0, MemoryAdmin

V2_JSON = {"Content-Type": "application/vnd.kafka.json.v2+json"}
V2_BINARY = {"Content-Type": "application/vnd.kafka.binary.v2+json"}
V3 = "/v3/clusters/c-1/topics/t/records"
GROUP = "/v3/clusters/c-1/consumer-groups/banks"


SETTINGS = IngestSettings.model_validate({"topics": {"closed": {"allowed": False}}})


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def ingest(producer: Any, registry: CollectorRegistry) -> Ingest:
    return Ingest(producer, SETTINGS, registry)


@pytest.fixture
async def client(producer: Any, ingest: Ingest) -> AsyncIterator[httpx.AsyncClient]:
    admin = MemoryAdmin()
    admin.members = [MemberDescription("m-1", "client", "/host", None, frozenset({F0}))]
    rest = [*produce_routers(RestProducer(ingest, producer, SETTINGS), admin), *metadata_routers(admin)]
    transport = httpx.ASGITransport(create_app(rest_proxy=rest))
    async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
        yield client


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_v2_json_keeps_the_bytes(client: httpx.AsyncClient, producer: Any) -> None:
    """One row a record, in order; embedded JSON is stored as it was written, null is a tombstone."""
    body = b'{"records":[{"key":"ann","value":{"a": 1}},{"value":null,"key":{"k":2}}]}'
    answer = await client.post("/topics/t", content=body, headers=V2_JSON)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "application/vnd.kafka.v2+json"
    said = answer.json()
    assert (said["key_schema_id"], said["value_schema_id"]) == (None, None)
    assert [set(row) for row in said["offsets"]] == [{"partition", "offset", "error_code", "error"}] * 2
    assert {(r.key, r.value) for log in producer.logs["t"] for r in log} == {
        (b'"ann"', b'{"a": 1}'),
        (b'{"k":2}', None),
    }


async def test_v2_answers_200_with_errors_inside(client: httpx.AsyncClient, producer: Any) -> None:
    """1 where sending again cannot help, 2 where it can; the others are stored."""
    producer.refuse[b"down"] = BrokerNotAvailable("no broker")
    rows = [{"value": b64(b"1")}, {"value": "%%"}, {"value": b64(b"down")}, {"value": b64(b"2"), "partition": 9}]
    answer = await client.post("/topics/t", json={"records": rows}, headers=V2_BINARY)
    assert answer.status_code == 200
    assert [row["error_code"] for row in answer.json()["offsets"]] == [None, 1, 2, 1]
    assert answer.json()["offsets"][1]["error"] == "value is not base64"
    assert producer.values() == [b"1"]


@pytest.mark.parametrize(
    ("path", "headers", "content", "status", "code"),
    [
        ("/topics/none", V2_JSON, b'{"records":[{"value":1}]}', 404, 40401),
        ("/topics/t/partitions/7", V2_JSON, b'{"records":[{"value":1}]}', 404, 40402),
        ("/topics/closed", V2_JSON, b'{"records":[{"value":1}]}', 403, 40301),
        ("/topics/t", V2_JSON, b'{"records":[]}', 422, 422),
        ("/topics/t", V2_JSON, b"{", 422, 422),
        ("/topics/t", {"Content-Type": "application/vnd.kafka.avro.v2+json"}, b"{}", 415, 415),
    ],
)
async def test_v2_refuses_with_its_own_numbers(
    client: httpx.AsyncClient, path: str, headers: dict[str, str], content: bytes, status: int, code: int
) -> None:
    """`{error_code, message}`, and nothing is sent."""
    answer = await client.post(path, content=content, headers=headers)
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)
    assert set(answer.json()) == {"error_code", "message"}


async def test_v2_metadata(client: httpx.AsyncClient) -> None:
    """Names, a topic with its partitions, one partition, brokers."""
    assert (await client.get("/topics")).json() == ["flights", "other"]
    partition = {"partition": 1, "leader": 1, "replicas": [{"broker": 1, "leader": True, "in_sync": True}]}
    assert (await client.get("/topics/flights")).json()["partitions"][1] == partition
    assert (await client.get("/topics/flights/partitions")).json()[1] == partition
    assert (await client.get("/topics/flights/partitions/1")).json() == partition
    assert (await client.get("/brokers")).json() == {"brokers": [1]}
    assert (await client.get("/topics/none")).json()["error_code"] == 40401
    assert (await client.get("/topics/flights/partitions/5")).json()["error_code"] == 40402


async def test_v3_reports_a_record(client: httpx.AsyncClient, producer: Any) -> None:
    """Every type of data, headers and a timestamp; sizes are those of what was stored."""
    record = {
        "key": {"type": "STRING", "data": "ann"},
        "value": {"type": "BINARY", "data": b64(b"xyz")},
        "headers": [{"name": "h", "value": b64(b"1")}],
        "timestamp": "1970-01-01T00:00:05Z",
    }
    answer = await client.post(V3, json=record)
    said = answer.json()
    assert (answer.status_code, said["error_code"], said["cluster_id"], said["topic_name"]) == (200, 200, "c-1", "t")
    assert (said["key"], said["value"]) == ({"type": "STRING", "size": 3}, {"type": "BINARY", "size": 3})
    assert (said["partition_id"], said["offset"], said["timestamp"]) == (1, 0, "1970-01-01T00:00:05Z")
    (stored,) = [r for log in producer.logs["t"] for r in log]
    assert (stored.key, stored.value, stored.headers, stored.timestamp) == (b"ann", b"xyz", (("h", b"1"),), 5_000)


async def test_v3_streams_reports_in_order(client: httpx.AsyncClient) -> None:
    """Objects one after the other, cut anywhere; each has its own error_code, and a broken end is the last report."""

    async def body() -> AsyncIterator[bytes]:
        yield b'{"value":{"type":"JSON","data":1}}{"value":{"ty'
        yield b'pe":"NO","data":2}}\n{"value":{"type":"STRING","data":"22"}}'
        yield b"oops"

    answer = await client.post(V3, content=body(), headers={"Content-Type": "application/json"})
    codes = [json.loads(line)["error_code"] for line in answer.text.splitlines()]
    assert (answer.status_code, codes) == (200, [200, 422, 200, 400])


async def test_v3_batch_is_207_with_successes_and_failures(client: httpx.AsyncClient) -> None:
    """Each entry is found by its id."""
    entries = [{"id": "a", "value": {"type": "JSON", "data": 1}}, {"id": "b", "value": {"type": "?"}}]
    answer = await client.post(V3 + ":batch", json={"entries": entries})
    assert answer.status_code == 207
    assert [row["id"] for row in answer.json()["successes"]] == ["a"]
    assert [(row["id"], row["error_code"]) for row in answer.json()["failures"]] == [("b", 422)]
    assert (await client.post(V3 + ":batch", json={"entries": []})).status_code == 400


@pytest.mark.parametrize(
    ("path", "content", "status", "code"),
    [
        (V3.replace("/t/", "/none/"), b"{}", 404, 40403),
        (V3.replace("c-1", "c-2"), b"{}", 404, 404),
        (V3, b'{"value":{"type":"BINARY","data":"%"}}', 422, 422),
        (V3, b'{"partition_id":9}', 404, 40402),
        (V3, b"[1]", 400, 400),
    ],
)
async def test_v3_refuses_a_single_record_by_its_status(
    client: httpx.AsyncClient, path: str, content: bytes, status: int, code: int
) -> None:
    """A request with a length that holds one record says by its own status what is wrong."""
    answer = await client.post(path, content=content)
    assert (answer.status_code, answer.json()["error_code"]) == (status, code)


async def test_v3_resources_have_kind_and_metadata(client: httpx.AsyncClient) -> None:
    """Cluster, topics, partitions: lists have data, each resource its own address and name."""
    (cluster,) = (await client.get("/v3/clusters")).json()["data"]
    assert (cluster["kind"], cluster["cluster_id"]) == ("KafkaCluster", "c-1")
    assert (await client.get("/v3/clusters/c-1")).json() == cluster
    topics = (await client.get("/v3/clusters/c-1/topics")).json()
    assert topics["kind"] == "KafkaTopicList"
    assert [(t["topic_name"], t["partitions_count"]) for t in topics["data"]] == [("flights", 2), ("other", 1)]
    partitions = (await client.get(topics["data"][0]["partitions"]["related"])).json()["data"]
    assert [p["partition_id"] for p in partitions] == [0, 1]
    assert (await client.get(partitions[1]["metadata"]["self"])).json() == partitions[1]
    assert (await client.get("/v3/clusters/c-1/topics/none")).json()["error_code"] == 40403


async def test_v3_groups_and_lag(client: httpx.AsyncClient) -> None:
    """A group, its consumer with its partition, lag by partition with its owner, and the summary."""
    group = (await client.get(GROUP)).json()
    assert (group["kind"], group["state"], group["partition_assignor"]) == ("KafkaConsumerGroup", "STABLE", "range")
    assert [g["consumer_group_id"] for g in (await client.get(GROUP.rpartition("/")[0])).json()["data"]] == ["banks"]
    (consumer,) = (await client.get(group["consumers"]["related"])).json()["data"]
    (assignment,) = (await client.get(consumer["assignments"]["related"])).json()["data"]
    assert (assignment["topic_name"], assignment["partition_id"]) == ("flights", 0)
    lag = (await client.get(assignment["lag"]["related"])).json()
    assert (lag["current_offset"], lag["log_end_offset"], lag["lag"], lag["consumer_id"]) == (4, 10, 6, "m-1")
    assert len((await client.get(GROUP + "/lags")).json()["data"]) == 2
    summary = (await client.get(group["lag_summary"]["related"])).json()
    assert (summary["kind"], summary["max_lag"], summary["total_lag"]) == ("KafkaConsumerGroupLagSummary", 6, 12)
    assert summary["max_lag_consumer_id"] == "m-1"
    assert (await client.get(GROUP.replace("banks", "none"))).status_code == 404


@pytest.mark.parametrize("error", [BrokerNotAvailable("no broker"), KafkaTimeout("late")])
async def test_v3_says_of_a_single_record_that_kafka_failed(
    client: httpx.AsyncClient, producer: Any, error: PenstockError
) -> None:
    """503 or 504 with Retry-After, never a 500."""
    producer.fail_all = error
    answer = await client.post(V3, json={"value": {"type": "JSON", "data": 1}})
    assert answer.status_code == (504 if isinstance(error, KafkaTimeout) else 503)
    assert int(answer.headers["retry-after"]) > 0
    assert answer.json()["error_code"] == 50003


async def test_v3_wants_a_record(client: httpx.AsyncClient) -> None:
    """An empty body is a 400, with a length as without."""
    answer = await client.post(V3, content=b" ")
    assert (answer.status_code, answer.json()["error_code"]) == (400, 400)

    async def nothing() -> AsyncIterator[bytes]:
        yield b""

    streamed = await client.post(V3, content=nothing())
    assert streamed.json() == {"error_code": 400, "message": "the body holds no record"}


@pytest.mark.parametrize("path", ["/topics/t", V3, V3 + ":batch"])
async def test_rest_proxys_bodies_end_with_the_service(client: httpx.AsyncClient, ingest: Ingest, path: str) -> None:
    """A body that still comes when the service leaves is answered by the same deadline as an event's."""
    never, started = asyncio.Event(), asyncio.Event()

    async def endless() -> AsyncIterator[bytes]:
        yield b"{"
        started.set()
        await never.wait()

    posting = asyncio.ensure_future(client.post(path, content=endless(), headers=V2_JSON))
    await started.wait()
    ingest.drain(grace_ms=20)
    answer = await posting
    said = answer.json()["error_code"]
    assert (answer.status_code, said) in ((503, 50003), (200, 503))
    assert ingest.active == 0


async def test_rest_proxys_requests_are_counted(client: httpx.AsyncClient, registry: CollectorRegistry) -> None:
    """Answers, stored and refused records, and refused requests, as for events."""
    rows = [{"value": b64(b"1")}, {"value": "%%"}]
    assert (await client.post("/topics/t", json={"records": rows}, headers=V2_BINARY)).status_code == 200
    assert (await client.post("/topics/t", content=b"{", headers=V2_JSON)).status_code == 422
    read = registry.get_sample_value
    assert read("penstock_ingest_requests_total", {"topic": "t", "status": "200"}) == 1
    assert read("penstock_ingest_requests_total", {"topic": "t", "status": "422"}) == 1
    assert read("penstock_ingest_stored_records_total", {"topic": "t"}) == 1
    refused = {"topic": "t", "error_code": "INVALID_RECORD"}
    assert read("penstock_ingest_refused_records_total", refused) == 1
    assert read("penstock_ingest_request_seconds_count", {"topic": "t"}) == 1
