"""The producer service's shutdown."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from penstock.services.producer.daemon import ProducerDaemon
from penstock.services.producer.ingest_transactions import KafkaTransactor
from penstock.services.producer.settings import DEFAULT_PRODUCER, ProducerServiceSettings
from penstock.shared.common.settings import HttpSettings, KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster


async def test_the_last_flush_does_not_wait_for_a_transaction_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a transaction never ends, the shutdown still sends the records that `?ack=none` accepted."""

    async def hang(_: KafkaTransactor, timeout_ms: float) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(KafkaTransactor, "close", hang)
    async with FakeCluster() as cluster, asyncio.timeout(20):
        cluster.create_topic("clicks")
        settings = ProducerServiceSettings(
            kafka=KafkaSettings(bootstrap_servers=cluster.bootstrap_servers),
            http=HttpSettings(port=0),
            producer=DEFAULT_PRODUCER.model_copy(update={"linger_ms": 60_000, "delivery_timeout_ms": 120_000}),
        )
        daemon = ProducerDaemon(settings)
        await daemon.startup()
        working = asyncio.create_task(daemon.main_loop())
        async with httpx.AsyncClient(base_url=daemon.server.url, trust_env=False) as http:
            while (await http.get("/health")).status_code != 200:  # noqa: ASYNC110 - asked over HTTP
                await asyncio.sleep(0)
            headers = {"content-type": "application/x-ndjson"}
            accepted = await http.post("/v1/topics/clicks/events?ack=none", content=b"1\n", headers=headers)
        assert accepted.status_code == 202
        assert cluster.records("clicks") == []
        working.cancel()
        await asyncio.wait({working})
        stopping = asyncio.create_task(daemon.shutdown())
        while not cluster.records("clicks"):  # noqa: ASYNC110 - the cluster is another task
            await asyncio.sleep(0)
        stopping.cancel()
        await asyncio.wait({stopping})
