"""The service and the broker are killed with SIGKILL under load: records acknowledged with a 2xx are in the topic.

Each client posts its own ids and repeats a request until the response is 200. With an Idempotency-Key each id is stored
exactly once, without one at least once.
"""

from __future__ import annotations

import asyncio
import os
import sys
import uuid
from collections import Counter
from collections.abc import Awaitable, Callable

import httpx
import pytest

from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import event_time_topic
from tests.http_client import http_client
from tests.integration.test_http_ingest import ENTRY, NDJSON, address, create, healthy
from tests.integration.test_http_transactions import committed
from tests.shared_broker import Broker

CLIENTS, EVENTS = 4, 5
LOAD_BEFORE_A_KILL = 100


class Load:
    """Clients that repeat each request until the response is 200; `done` counts the ids known to be stored."""

    def __init__(self, topic: str, keyed: bool) -> None:
        self._topic, self._keyed = topic, keyed
        self.url = ""
        self.done: Counter[int] = Counter()
        self.retried = 0
        self._ended = asyncio.Event()

    async def client(self, number: int) -> None:
        """Run one client until the load ends."""
        request = 0
        async with http_client(timeout=15) as client:
            while not self._ended.is_set():
                ids = [number * 1_000_000 + request * EVENTS + i for i in range(EVENTS)]
                while not await self._post(client, ids, f"{number}-{request}"):
                    self.retried += 1
                    await asyncio.sleep(0.05)
                self.done.update(ids)
                request += 1

    async def _post(self, client: httpx.AsyncClient, ids: list[int], key: str) -> bool:
        headers = NDJSON | ({"Idempotency-Key": key} if self._keyed else {})
        body = b"".join(b'{"id":%d}\n' % i for i in ids)
        try:
            response = await client.post(f"{self.url}/v1/topics/{self._topic}/events", content=body, headers=headers)
        except httpx.TransportError:
            return False
        assert response.status_code in (200, 207, 429, 503, 504), response.text
        return response.status_code == 200

    async def run(self, kills: int, kill: Callable[[], Awaitable[None]]) -> None:
        """Kill `kills` times, each under load."""
        clients = [asyncio.create_task(self.client(number)) for number in range(CLIENTS)]
        try:
            for _ in range(kills):
                await self._until(self.done.total() + LOAD_BEFORE_A_KILL)
                await kill()
            await self._until(self.done.total() + LOAD_BEFORE_A_KILL)
            self._ended.set()
            async with asyncio.timeout(90):
                await asyncio.gather(*clients)
        finally:
            for task in clients:
                task.cancel()
            await asyncio.gather(*clients, return_exceptions=True)

    async def check(self, bootstrap_servers: str) -> None:
        """Compare the topic with the responses."""
        assert self.retried > 0
        found = Counter(value["id"] for value in await committed(bootstrap_servers, self._topic, 2))
        assert set(self.done) <= set(found)
        if self._keyed:
            assert set(found) == set(self.done)
            assert set(found.values()) == {1}

    async def _until(self, events: int) -> None:
        async with asyncio.timeout(90):
            while self.done.total() < events:  # noqa: ASYNC110 - several clients count
                await asyncio.sleep(0.02)


class Service:
    """The producer service as a separate process."""

    def __init__(self, bootstrap_servers: str, load: Load) -> None:
        self._load = load
        self._environ = os.environ | {
            "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
            "PENSTOCK_KAFKA__REQUEST_TIMEOUT_MS": "3000",
            "PENSTOCK_PRODUCER__DELIVERY_TIMEOUT_MS": "5000",
            "PENSTOCK_LOG__FORMAT": "json",
            "PENSTOCK_HTTP__PORT": "0",
            "PENSTOCK_INGEST__IDEMPOTENCY_TOPIC": f"keys-{uuid.uuid4().hex[:8]}",
            "PENSTOCK_INGEST__IDEMPOTENCY_PARTITIONS": "2",
        }

    async def start(self) -> None:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", ENTRY, env=self._environ, stderr=asyncio.subprocess.PIPE
        )
        self._load.url = await address(self._process)
        self._draining = asyncio.create_task(self._process.communicate())
        async with http_client(base_url=self._load.url) as client:
            await healthy(client, 200)

    async def kill(self) -> None:
        self._process.kill()
        await self._draining

    async def kill_and_start(self) -> None:
        await self.kill()
        await self.start()


@pytest.mark.parametrize(
    ("keyed", "kills"),
    [(True, 1), pytest.param(True, 6, marks=pytest.mark.soak), pytest.param(False, 3, marks=pytest.mark.soak)],
)
async def test_a_killed_service_has_stored_what_it_acknowledged(
    kafka: Broker, topic_name: str, keyed: bool, kills: int
) -> None:
    """After kills of the service each id is stored exactly once with a key, and at least once without."""
    await create(kafka.bootstrap_servers, event_time_topic(topic_name, 2))
    load = Load(topic_name, keyed)
    service = Service(kafka.bootstrap_servers, load)
    await service.start()
    try:
        await load.run(kills, service.kill_and_start)
    finally:
        await service.kill()
    await load.check(kafka.bootstrap_servers)


@pytest.mark.soak
@pytest.mark.parametrize("keyed", [True, False])
async def test_a_killed_broker_has_all_acknowledged_records(
    own_kafka: EmbeddedKafka, topic_name: str, keyed: bool
) -> None:
    """After three kills of the broker each id is stored exactly once with a key, and at least once without."""
    await create(own_kafka.bootstrap_servers, event_time_topic(topic_name, 2))
    load = Load(topic_name, keyed)
    service = Service(own_kafka.bootstrap_servers, load)
    await service.start()

    async def kill_broker() -> None:
        await own_kafka.kill()
        await own_kafka.restart()

    try:
        await load.run(3, kill_broker)
    finally:
        await service.kill()
    await load.check(own_kafka.bootstrap_servers)
