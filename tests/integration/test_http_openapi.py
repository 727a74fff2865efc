"""The REST interfaces against their own OpenAPI document, and a real CloudEvents SDK against them, on a real broker."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import httpx
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings

from services.local.gateway import GatewayDaemon, GatewaySettings
from services.local.kafka import EmbeddedKafka
from shared.clients.admin import Admin, event_time_topic
from shared.common.settings import KafkaSettings

TOPIC = "openapi"


@pytest.fixture(scope="module")
def gateway(kafka: EmbeddedKafka) -> Iterator[str]:
    """The address of a gateway, served on a loop of its own in another thread."""
    started, ended = threading.Event(), threading.Event()
    where: dict[str, Any] = {}

    async def serve() -> None:
        kafka_settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
        async with Admin(kafka_settings) as admin:
            await admin.create_topics([event_time_topic(TOPIC, 2)], exist_ok=True)
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


def hold_to_the_schema(url: str, examples: int) -> dict[int, int]:
    """Call every operation with made-up input; the statuses that came. A 500 fails."""
    schema = schemathesis.openapi.from_dict(httpx.get(f"{url}/openapi.json", trust_env=False).json())
    statuses: dict[int, int] = {}
    for result in schema.get_all_operations():
        operation = result.ok()

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
            statuses[answer.status_code] = statuses.get(answer.status_code, 0) + 1
            assert answer.status_code != 500, f"{case.method} {case.path}: {answer.text}"

        call()
    return statuses


def test_no_made_up_request_ends_in_a_500(gateway: str) -> None:
    """Whatever the schema allows is answered; what is wrong with it is said as a 4xx."""
    statuses = hold_to_the_schema(gateway, examples=8)
    assert sum(statuses.values()) > 100
    assert statuses[200] >= 5


@pytest.mark.soak
def test_no_made_up_request_ends_in_a_500_however_many(gateway: str) -> None:
    """The same with a thousand requests for each operation."""
    hold_to_the_schema(gateway, examples=1_000)


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
