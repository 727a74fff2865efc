"""The REST APIs on a real broker, tested with requests generated from their OpenAPI document, the CloudEvents SDK, and
requests of REST Proxy's clients.
"""

from __future__ import annotations

import asyncio
import base64
import json
import threading
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings

from penstock.services.local.gateway import GatewayDaemon
from penstock.services.local.settings import GatewaySettings
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.http_client import http_client
from tests.integration.test_http_ingest import read_all
from tests.shared_broker import Broker

TOPIC, GROUP = "openapi", "openapi-readers"


@pytest.fixture(scope="module")
def gateway(kafka: Broker) -> Iterator[str]:
    """The address of a gateway, which runs on an event loop in another thread."""
    started, ended = threading.Event(), threading.Event()
    where: dict[str, Any] = {}

    async def serve() -> None:
        kafka_settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        async with Admin(kafka_settings) as admin:
            await admin.create_topics([event_time_topic(TOPIC, 2)], exist_ok=True)
            await admin.reset_group_offsets(GROUP, "latest", [TopicPartition(TOPIC, 0)])
        given = {"kafka": {"bootstrap_servers": kafka.bootstrap_servers}, "http": {"port": 0}}
        daemon = GatewayDaemon(GatewaySettings.model_validate(given))
        await daemon.startup()
        working = asyncio.create_task(daemon.main_loop())
        async with http_client(base_url=daemon.server.url) as client, asyncio.timeout(30):
            while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 - another loop is polled
                await asyncio.sleep(0.1)
        where["url"] = daemon.server.url
        started.set()
        await asyncio.to_thread(ended.wait)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        await daemon.shutdown()

    thread = threading.Thread(target=lambda: asyncio.run(serve()), daemon=True)
    thread.start()
    assert started.wait(60)
    yield where["url"]
    ended.set()
    thread.join(60)


def with_fixed_parameters(document: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The document with these path parameters fixed, since requests for generated names never reach the body's
    validation.
    """
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path" and parameter["name"] in names:
                    parameter["schema"] = {"type": "string", "enum": [names[parameter["name"]]]}
    return document


def call_operations(
    url: str, examples: int, names: dict[str, str], only: Callable[[str, str], bool] = lambda method, path: True
) -> dict[str, Counter[int]]:
    """Call operations with generated requests, and count the statuses by operation. A 500 fails."""
    import schemathesis  # here, because each process of scripts/test imports all modules of tests

    document = with_fixed_parameters(httpx.get(f"{url}/openapi.json", trust_env=False).json(), names)
    schema = schemathesis.openapi.from_dict(document)
    statuses: dict[str, Counter[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if only(operation.method, operation.path):
            statuses[f"{operation.method.upper()} {operation.path}"] = call_operation(url, operation, examples)
    return statuses


def call_operation(url: str, operation: Any, examples: int) -> Counter[int]:
    """Call one operation `examples` times, and count the statuses. A response that violates the schema fails."""
    came = Counter[int]()

    @settings(
        max_examples=examples,
        deadline=None,
        database=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy())
    def call(case: Any) -> None:
        response = case.call(base_url=url, timeout=30)
        came[response.status_code] += 1
        assert response.status_code != 500, f"{case.method} {case.path}: {response.text}"
        if response.content:
            operation.validate_response(response)

    call()
    return came


def known(url: str) -> dict[str, str]:
    """Names that exist, for the path parameters."""
    clusters = httpx.get(f"{url}/v3/clusters", trust_env=False).json()["data"]
    return {"topic": TOPIC, "cluster_id": clusters[0]["cluster_id"], "group": GROUP}


STORING = ("/events", "/records", "/records:batch", "/topics/{topic}", "/partitions/{partition}")


def stores(method: str, path: str) -> bool:
    return method == "post" and path.endswith(STORING)


def test_no_generated_request_ends_in_a_500(gateway: str) -> None:
    """Generated requests, for existing and other names, never get a 500, and responses match the schema."""
    statuses = call_operations(gateway, 2, {})
    assert len(statuses) > 60
    statuses = call_operations(gateway, 2, known(gateway), lambda method, path: not stores(method, path))
    assert sum(came[200] > 0 for came in statuses.values()) >= 25
    storing = call_operations(gateway, 10, known(gateway), stores)
    assert len(storing) == 5
    for operation, came in storing.items():
        assert came[200] + came[207] + came[202] > 0, (operation, came)


@pytest.mark.soak
def test_no_generated_request_of_many_ends_in_a_500(gateway: str) -> None:
    """Hundreds of generated requests for each operation never get a 500."""
    for names in ({}, known(gateway)):
        call_operations(gateway, 500, names)


async def test_a_cloudevents_sdk_posts_in_every_mode(gateway: str, kafka: Broker) -> None:
    """Events that CNCF's Python SDK posts as structured, binary and batch requests are stored alike, in the form that
    the SDK reads from Kafka.
    """
    http = pytest.importorskip("cloudevents.core.bindings.http", reason="needs the package cloudevents (>= 2)")
    from cloudevents.core.bindings import kafka as kafka_binding
    from cloudevents.core.formats.json import JSONFormat
    from cloudevents.core.v1.event import CloudEvent

    moment = datetime(2013, 1, 1, tzinfo=UTC)
    attributes = {"type": "t", "source": "/sdk", "id": "1", "specversion": "1.0", "time": moment, "partitionkey": "ann"}
    event = CloudEvent(attributes, {"message": "häl lo"})
    messages = [http.to_structured_event(event), http.to_binary_event(event)]
    sent = [(message.headers, message.body) for message in messages]
    one = JSONFormat().write(event)
    sent.append(({"content-type": "application/cloudevents-batch+json"}, b"[" + one + b"," + one + b"]"))
    topic = await make_topic(kafka, f"sdk-{uuid.uuid4().hex[:8]}")
    async with http_client(base_url=gateway) as client:
        for headers, body in sent:
            response = await client.post(f"/v1/topics/{topic}/events", content=body, headers=headers)
            assert response.status_code == 200, response.text
        assert response.json()["stored"] == 2
    structured, binary, *batch = await read_all(kafka.bootstrap_servers, topic, 1)
    for record in (structured, binary, *batch):
        assert (record.key, record.timestamp) == (b"ann", int(moment.timestamp() * 1000))
    assert len(batch) == 2
    for record in (structured, binary, *batch):
        assert json.loads(record.value or b"") == {"message": "häl lo"}
        named = dict(record.headers)
        assert named.pop("ce_time") is not None
        assert named == {
            "content-type": b"application/json",
            "ce_id": b"1",
            "ce_type": b"t",
            "ce_source": b"/sdk",
            "ce_specversion": b"1.0",
            "ce_partitionkey": b"ann",
        }
    message = kafka_binding.KafkaMessage(dict(structured.headers), structured.key, structured.value or b"")
    read = kafka_binding.from_kafka_event(message)
    assert (read.get_id(), read.get_time(), read.get_data()) == ("1", moment, {"message": "häl lo"})


async def make_topic(kafka: Broker, name: str, partitions: int = 1) -> str:
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        await admin.create_topics([event_time_topic(name, partitions)])
    return name


def b64(data: bytes) -> str:
    return base64.b64encode(data).decode()


async def test_rest_proxys_clients_store_and_read_back(gateway: str, kafka: Broker) -> None:
    """v2 requests in JSON and binary, and v3 requests alone, streamed and in a batch, report what the broker stores."""
    topic = await make_topic(kafka, f"rest-{uuid.uuid4().hex[:8]}", 2)
    at = "2013-01-01T05:15:00Z"
    async with http_client(base_url=gateway) as client:
        cluster = (await client.get("/v3/clusters")).json()["data"][0]["cluster_id"]
        url = f"/v3/clusters/{cluster}/topics/{topic}/records"
        types = {"Content-Type": "application/vnd.kafka.json.v2+json"}
        body: Any = {"records": [{"key": "a", "value": {"n": 1}, "partition": 1}, {"value": None, "partition": 7}]}
        v2 = (await client.post(f"/topics/{topic}", json=body, headers=types)).json()["offsets"]
        binary = {"records": [{"key": b64(b"b"), "value": b64(b"\x00\x01")}]}
        types = {"Content-Type": "application/vnd.kafka.binary.v2+json"}
        produced = await client.post(f"/topics/{topic}/partitions/1", json=binary, headers=types)
        one = {"key": {"type": "STRING", "data": "c"}, "value": {"type": "JSON", "data": {"n": 3}}, "timestamp": at}
        one |= {"partition_id": 1, "headers": [{"name": "h", "value": b64(b"1")}]}
        v3 = await client.post(url, json=one)

        async def stream() -> AsyncIterator[bytes]:
            for n in (4, 5):
                yield b'{"partition_id":1,"value":{"type":"BINARY","data":"%s"}}' % b64(b"%d" % n).encode()

        streamed = await client.post(url, content=stream())
        entries = [{"id": "x", "partition_id": 1, "value": {"type": "STRING", "data": "6"}}, {"id": "y", "value": 1}]
        batch = (await client.post(f"{url}:batch", json={"entries": entries})).json()
        partitions = (await client.get(f"/topics/{topic}/partitions")).json()
        group = f"/v3/clusters/{cluster}/consumer-groups/{topic}-readers"
        async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
            await admin.reset_group_offsets(f"{topic}-readers", "earliest", [TopicPartition(topic, 1)])
        lag = (await client.get(f"{group}/lags/{topic}/partitions/1")).json()
        await client.post(f"/v1/groups/{topic}-readers/offsets", json={"to": {"shift_by": 4}})
        summary = (await client.get(f"{group}/lag-summary")).json()
    assert [(row["partition"], row["offset"], row["error_code"]) for row in v2] == [(1, 0, None), (None, None, 1)]
    assert produced.json()["offsets"][0]["offset"] == 1
    assert (v3.status_code, v3.json()["offset"], v3.json()["timestamp"]) == (200, 2, at)
    assert [json.loads(line)["offset"] for line in streamed.text.splitlines()] == [3, 4]
    assert [(row["id"], row["offset"]) for row in batch["successes"]] == [("x", 5)]
    assert [row["id"] for row in batch["failures"]] == ["y"]
    assert [row["partition"] for row in partitions] == [0, 1]
    assert (lag["log_end_offset"], lag["lag"]) == (6, 6)
    assert (summary["total_lag"], summary["max_lag_topic_name"]) == (2, topic)
    records = await read_all(kafka.bootstrap_servers, topic, 2)
    assert [(r.partition, r.key, r.value) for r in records] == [
        (1, b'"a"', b'{"n":1}'),
        (1, b"b", b"\x00\x01"),
        (1, b"c", b'{"n":3}'),
        (1, None, b"4"),
        (1, None, b"5"),
        (1, None, b"6"),
    ]
    assert (records[2].headers, records[2].timestamp) == ((("h", b"1"),), 1_357_017_300_000)
