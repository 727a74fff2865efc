"""The examples and lists of docs/fake-broker.md."""

from __future__ import annotations

import asyncio
import re

import pytest

import penstock.testing
from penstock.clients import KafkaSettings, Producer
from penstock.shared.common.records import TopicPartition
from penstock.shared.testing import fake_broker
from penstock.shared.testing.fake_broker import Api, FakeCluster
from penstock.shared.testing.fake_broker.configs import BROKER_CONFIGS
from tests.documents import DOCS, blocks, names_of

DOCUMENT = DOCS / "fake-broker.md"


@pytest.mark.parametrize("block", blocks(DOCUMENT), ids=lambda block: block.splitlines()[0])
def test_the_document_runs(block: str) -> None:
    """Each Python block of the document runs."""
    names_of(DOCUMENT, block)


async def test_the_documents_hooks_work() -> None:
    """The two hooks in the document work as described."""
    names = names_of(DOCUMENT, blocks(DOCUMENT)[1])
    async with FakeCluster(2) as cluster:
        cluster.create_topic("t")
        other = 3 - (cluster.leader("t") or 0)
        names["lead_elsewhere"](cluster, TopicPartition("t", 0), other)
        gate, held = asyncio.Event(), asyncio.Event()
        cluster.control(Api.PRODUCE, lambda _: held.set())
        names["wait_for"](gate, cluster)
        producing = asyncio.create_task(produced(cluster))
        await held.wait()
        assert (cluster.leader("t"), cluster.end_offset("t")) == (other, 0)
        gate.set()
        await producing
        assert cluster.end_offset("t") == 1


async def produced(cluster: FakeCluster) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=10)) as producer:
        await (await producer.send("t", b"v"))


def test_everything_is_documented() -> None:
    """Every API, broker config and public method is in the document."""
    text = DOCUMENT.read_text(encoding="utf-8")
    words = set(re.findall(r"\w+", text))
    assert {"".join(part.capitalize() for part in api.name.split("_")) for api in Api} <= words
    assert all(f"`{name}`" in text for name in BROKER_CONFIGS)
    assert {name for name in vars(FakeCluster) if not name.startswith("_")} - {"start", "stop"} <= words


def test_the_facade_has_it_all() -> None:
    """The fake broker's public names are importable from `penstock.testing`."""
    assert set(fake_broker.__all__) <= set(penstock.testing.__all__)
