"""The producer service's shutdown: the end of transactions, and the last flush."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from penstock.api.ingest.atomic import IdempotencyKey, StoredResponse
from penstock.api.settings import IngestSettings
from penstock.services.producer.daemon import ProducerDaemon
from penstock.services.producer.ingest_transactions import KafkaTransactor
from penstock.services.producer.settings import DEFAULT_KAFKA, DEFAULT_PRODUCER, ProducerServiceSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import HttpSettings
from penstock.shared.testing.fake_broker import Api, Drop, ErrorCode, Fail, FakeCluster

CLOSE_MS = 600
RECORDS = [ProducerRecord("clicks", b"{}")]


def daemon_of(cluster: FakeCluster, producer: Mapping[str, object] = {}, **given: Any) -> ProducerDaemon:
    kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
    producing = DEFAULT_PRODUCER.model_copy(update=producer)
    return ProducerDaemon(ProducerServiceSettings(kafka=kafka, http=HttpSettings(port=0), producer=producing, **given))


@asynccontextmanager
async def serving(daemon: ProducerDaemon) -> AsyncIterator[httpx.AsyncClient]:
    """Run the daemon's startup and main loop, with a client of it."""
    await daemon.startup()
    working = asyncio.create_task(daemon.main_loop())
    headers = {"content-type": "application/x-ndjson"}
    async with httpx.AsyncClient(base_url=daemon.server.url, trust_env=False, headers=headers) as http:
        while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110 - asked over HTTP
            await asyncio.sleep(0)
        yield http
    working.cancel()
    await asyncio.wait({working})


@pytest.mark.parametrize("at", [Api.END_TXN, Api.INIT_PRODUCER_ID, Api.LIST_OFFSETS])
async def test_a_transaction_that_hangs_does_not_outlast_the_limit_of_close(at: Api) -> None:
    """Wherever transactions hang, all their producers are closed within the limit."""
    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, DEFAULT_PRODUCER, IngestSettings(), admin)
            await transactor.send_atomic(RECORDS)  # its producer is idle, unless the next one is to use it
            hung = cluster.control(at, Drop())
            key = IdempotencyKey(bytes(32), bytes(32))
            sending = [
                asyncio.ensure_future(transactor.send_atomic(RECORDS)),
                asyncio.ensure_future(transactor.send_keyed(key, RECORDS, lambda outcomes: StoredResponse(200, b""))),
            ]
            while not hung.acted:  # noqa: ASYNC110 - the cluster is another task
                await asyncio.sleep(0)
            began = time.monotonic()
            await transactor.close(CLOSE_MS)
            assert time.monotonic() - began < 2 * CLOSE_MS / 1000
            assert {producer._state for producer in transactor._producers} == {"closed"}
            assert not transactor._running
            await asyncio.wait(sending)
            [task.cancelled() or task.exception() for task in sending]


async def test_a_transaction_that_ends_in_time_is_committed() -> None:
    """Close waits for a transaction in progress."""
    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, DEFAULT_PRODUCER, IngestSettings(), admin)
            sending = asyncio.ensure_future(transactor.send_atomic(RECORDS))
            await asyncio.sleep(0)
            await transactor.close(20_000)
            assert len(await sending) == 1


async def test_the_last_flush_does_not_wait_for_a_transaction_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a transaction never ends, the shutdown still sends the records that `?ack=none` accepted."""

    async def hang(_: KafkaTransactor, timeout_ms: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(KafkaTransactor, "close", hang)
    async with FakeCluster() as cluster, asyncio.timeout(20):
        cluster.create_topic("clicks")
        daemon = daemon_of(cluster, producer={"linger_ms": 60_000, "delivery_timeout_ms": 120_000})
        async with serving(daemon) as http:
            accepted = await http.post("/v1/topics/clicks/events?ack=none", content=b"1\n")
        assert accepted.status_code == 202
        assert cluster.records("clicks") == []
        stopping = asyncio.create_task(daemon.shutdown())
        while not cluster.records("clicks"):  # noqa: ASYNC110 - the cluster is another task
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})


@pytest.mark.parametrize("is_atomic", [False, True])
async def test_a_shutdown_answers_requests_that_wait_for_kafka(is_atomic: bool) -> None:
    """The response has the outcome of each event, and nothing is stored after it."""
    async with FakeCluster() as cluster, asyncio.timeout(20):
        cluster.create_topic("clicks", partitions=2)
        daemon = daemon_of(cluster, shutdown_timeout_ms=500, ingest=IngestSettings(topics={"clicks": {"key": ["/k"]}}))
        slow = cluster.control(Api.PRODUCE, Fail(ErrorCode.NOT_ENOUGH_REPLICAS, [TopicPartition("clicks", 0)]))
        async with serving(daemon) as http:
            events = b"".join(b'{"k":"%d"}\n' % i for i in range(20))
            posting = asyncio.create_task(http.post(f"/v1/topics/clicks/events?atomic={is_atomic}", content=events))
            while not slow.acted:  # noqa: ASYNC110 - the cluster is another task
                await asyncio.sleep(0)
            stopping = asyncio.create_task(daemon.shutdown())
            response = await posting
        slow.remove()
        await stopping
        body = response.json()
        stored = len(cluster.records("clicks"))
        if is_atomic:
            assert (response.status_code, body["outcome"], stored) == (504, "unknown", 0)
        else:
            assert (response.status_code, body["stored"], body["not_stored"]) == (207, stored, 20 - stored)
