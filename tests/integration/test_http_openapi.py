"""The REST interfaces against their own OpenAPI document, and a real CloudEvents SDK against them, on a real broker."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from services.local.gateway import GatewayDaemon, GatewaySettings
from services.local.kafka import EmbeddedKafka
from shared.clients.admin import Admin, event_time_topic
from shared.common.records import TopicPartition
from shared.common.settings import KafkaSettings

TOPIC, GROUP = "openapi", "openapi-readers"


@pytest.fixture(scope="module")
def gateway(kafka: EmbeddedKafka) -> Iterator[str]:
    """The address of a gateway, served on a loop of its own in another thread."""
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
        async with httpx.AsyncClient(base_url=daemon.server.url, trust_env=False) as client, asyncio.timeout(30):
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


def pinned(document: dict[str, Any], names: dict[str, str]) -> dict[str, Any]:
    """The document with these path parameters fixed: a made-up topic never lets a body be looked at."""
    for operations in document["paths"].values():
        for operation in operations.values():
            for parameter in operation.get("parameters", []):
                if parameter["in"] == "path" and parameter["name"] in names:
                    parameter["schema"] = {"type": "string", "enum": [names[parameter["name"]]]}
    return document


def hold_to_the_schema(
    url: str, examples: int, names: dict[str, str], only: Callable[[str, str], bool] = lambda method, path: True
) -> dict[str, Counter[int]]:
    """Call operations with made-up input; the statuses that came, by operation. A 500 fails."""
    document = pinned(httpx.get(f"{url}/openapi.json", trust_env=False).json(), names)
    schema = schemathesis.openapi.from_dict(document)
    statuses: dict[str, Counter[int]] = {}
    for result in schema.get_all_operations():
        operation = result.ok()
        if only(operation.method, operation.path):
            statuses[f"{operation.method.upper()} {operation.path}"] = call_it(url, operation, examples)
    return statuses


def call_it(url: str, operation: Any, examples: int) -> Counter[int]:
    """Call one operation so many times; the statuses that came."""
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
        answer = case.call(base_url=url, timeout=30)
        came[answer.status_code] += 1
        assert answer.status_code != 500, f"{case.method} {case.path}: {answer.text}"

    call()
    return came


def known(url: str) -> dict[str, str]:
    """Names of what there is."""
    clusters = httpx.get(f"{url}/v3/clusters", trust_env=False).json()["data"]
    return {"topic": TOPIC, "cluster_id": clusters[0]["cluster_id"], "group": GROUP}


STORING = ("/events", "/records", "/records:batch", "/topics/{topic}", "/partitions/{partition}")


def stores(method: str, path: str) -> bool:
    return method == "post" and path.endswith(STORING)


def test_no_made_up_request_ends_in_a_500(gateway: str) -> None:
    """Whatever the schema allows is answered, for names that there are and for others; what is wrong is a 4xx."""
    statuses = hold_to_the_schema(gateway, 2, {})
    assert len(statuses) > 60
    statuses = hold_to_the_schema(gateway, 2, known(gateway), lambda method, path: not stores(method, path))
    assert sum(came[200] > 0 for came in statuses.values()) >= 25
    storing = hold_to_the_schema(gateway, 10, known(gateway), stores)
    assert len(storing) == 5
    for operation, came in storing.items():
        assert came[200] + came[207] + came[202] > 0, (operation, came)


@pytest.mark.soak
def test_no_made_up_request_ends_in_a_500_however_many(gateway: str) -> None:
    """The same with hundreds of requests for each operation."""
    for names in ({}, known(gateway)):
        hold_to_the_schema(gateway, 500, names)


async def test_a_cloudevents_sdk_posts_in_every_mode(gateway: str) -> None:
    """What CNCF's own SDK for Python makes of an event is stored, structured, binary and in a batch."""
    http = pytest.importorskip("cloudevents.core.bindings.http", reason="needs the package cloudevents (>= 2)")
    from cloudevents.core.formats.json import JSONFormat
    from cloudevents.core.v1.event import CloudEvent

    moment = datetime(2013, 1, 1, tzinfo=UTC)
    attributes = {"type": "t", "source": "/sdk", "id": "1", "specversion": "1.0", "time": moment, "partitionkey": "ann"}
    event = CloudEvent(attributes, {"message": "häl lo"})
    messages = [http.to_structured_event(event), http.to_binary_event(event)]
    sent = [(message.headers, message.body) for message in messages]
    one = JSONFormat().write(event)
    sent.append(({"content-type": "application/cloudevents-batch+json"}, b"[" + one + b"," + one + b"]"))
    async with httpx.AsyncClient(base_url=gateway, trust_env=False) as client:
        for headers, body in sent:
            answer = await client.post(f"/v1/topics/{TOPIC}/events", content=body, headers=headers)
            assert answer.status_code == 200, answer.text
        assert answer.json()["stored"] == 2
