"""The settings of the producers with which ingest stores requests atomically."""

from __future__ import annotations

import asyncio

import pytest

from penstock.api.settings import IngestSettings
from penstock.services.producer.ingest_transactions import KafkaTransactor
from penstock.services.producer.settings import DEFAULT_KAFKA
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import ProducerSettings
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from penstock.shared.testing.fake_broker import Api, FakeCluster, Request

ACKS_ALL = -1


@pytest.mark.parametrize(
    "settings",
    [
        ProducerSettings(acks=1),
        ProducerSettings(enable_idempotence=False),
        ProducerSettings(retries=0),
        ProducerSettings(max_in_flight_requests_per_connection=9),
    ],
    ids=["acks", "enable_idempotence", "retries", "max_in_flight"],
)
async def test_atomic_requests_are_idempotent_under_any_settings(settings: ProducerSettings) -> None:
    """Settings that switch idempotence off for other requests do not apply to transactions, which need it."""
    acks: list[int] = []

    def note(request: Request) -> None:
        acks.append(request.body.acks)

    async with FakeCluster() as cluster, asyncio.timeout(30):
        cluster.create_topic("clicks")
        cluster.control(Api.PRODUCE, note)
        kafka = DEFAULT_KAFKA.model_copy(update={"bootstrap_servers": cluster.bootstrap_servers})
        async with Admin(kafka) as admin:
            transactor = KafkaTransactor(kafka, settings, IngestSettings(), admin)
            outcomes = await transactor.send_atomic([ProducerRecord("clicks", b"{}")])
            await transactor.close(20_000)
    assert [type(outcome) for outcome in outcomes] == [RecordMetadata]
    assert acks == [ACKS_ALL]
