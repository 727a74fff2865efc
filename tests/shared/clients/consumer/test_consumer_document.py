"""The examples and statements about the consumer, handlers and dead letters in docs/consumer.md are correct."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import penstock.errors
from penstock import Consumer, ConsumerRecord, ConsumerSettings, KafkaSettings, Producer, ProducerRecord, TopicPartition
from penstock.services.consumer.handlers import load_handler
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.shared.clients.dead_letters.dead_letter import CHANGELOG_ID, CUT, HEADERS
from penstock.testing import FakeCluster
from tests.documents import DOCS, block, names_of

DOCUMENT = DOCS / "consumer.md"
TEXT = DOCUMENT.read_text(encoding="utf-8")


async def test_the_clients_code_runs() -> None:
    """Each function in the document works as described, and commits the records it read."""
    shown = names_of(DOCUMENT)
    async with FakeCluster() as cluster:
        cluster.create_topic("orders")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka) as producer:
            assert await (await producer.send_many([ProducerRecord("orders", b"tea")] * 3)).first_error() is None
        for group, name, outcome in (("a", "count", 3), ("b", "values", [b"tea"] * 3), ("c", "process", [b"tea"] * 3)):
            async with Consumer(kafka, ConsumerSettings(group_id=group, auto_offset_reset="earliest")) as consumer:
                assert await shown[name](consumer, 3) == outcome
            assert cluster.committed(group)[TopicPartition("orders", 0)].offset == 3


async def test_example_handlers_are_valid(tmp_path: Path, monkeypatch: Any) -> None:
    """One example handler takes a record, the other a batch. Both return the records to produce."""
    (tmp_path / "shown_handlers.py").write_text(block(DOCUMENT, "python", "def handle("))
    monkeypatch.syspath_prepend(tmp_path)
    one, many = (load_handler(f"shown_handlers:{name}") for name in ("handle", "handle_batch"))
    assert (one.batch, many.batch) == (False, True)
    record = ConsumerRecord("orders", 0, 1, 5, b"ann", {"cups": 2})
    assert await one.function(record) == ProducerRecord("brewed", b"tea", b"ann")
    assert await many.function([record]) == [ProducerRecord("brewed", b"tea", b"ann")]


def test_names_in_the_document_exist() -> None:
    """Errors, settings, strategies, orderings and headers have the names that the document uses."""
    errors = set(re.findall(r"`([A-Z][a-z]\w+[A-Z]\w+)`", TEXT)) - {
        "RebalanceListener",
        "ConsumerInterceptor",
        "PackedBytes",
        "ProducerRecord",
    }
    assert len(errors) > 5
    assert [name for name in errors if not hasattr(penstock.errors, name)] == []
    own, client = ConsumerServiceSettings.model_fields, ConsumerSettings.model_fields
    others = {
        "client_id",
        "correlation_id",
        "on_consume",
        "on_partitions_lost",
        "on_partitions_revoked",
        "not_retriable",
        "penstock_consumer_offsets_skipped_total",
    }
    settings = set(re.findall(r"`([a-z]+_[a-z_]+)`", TEXT)) - others
    assert len(settings) > 10
    assert [name for name in settings if name not in own | client and not hasattr(Consumer, name)] == []
    assert set(re.findall(r"penstock\.dlq\.\w+", TEXT)) == {*HEADERS, CHANGELOG_ID, CUT}
    for field, names in (
        (client["commit_strategy"], "none auto sync async"),
        (own["ordering"], "key partition unordered"),
    ):
        assert all(f"| `{name}` |" in TEXT and name in str(field.annotation) for name in names.split())
