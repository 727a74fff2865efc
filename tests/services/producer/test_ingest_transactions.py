"""How the transactions of ingest end when the service shuts down."""

from __future__ import annotations

import asyncio
import time

import pytest

from penstock.api.ingest.atomic import IdempotencyKey, StoredResponse
from penstock.api.settings import IngestSettings
from penstock.services.producer.ingest_transactions import KafkaTransactor
from penstock.services.producer.settings import DEFAULT_KAFKA, DEFAULT_PRODUCER
from penstock.shared.clients.admin import Admin
from penstock.shared.common.records import ProducerRecord
from penstock.shared.testing.fake_broker import Api, Drop, FakeCluster

CLOSE_MS = 600
RECORDS = [ProducerRecord("clicks", b"{}")]


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
