"""The examples and statements in docs/producer.md are correct."""

from __future__ import annotations

import re

import penstock.errors
import penstock.otel
from penstock import KafkaSettings, Producer, ProducerSettings, TopicPartition
from penstock.clients import GroupMetadata, OffsetAndMetadata
from penstock.testing import FakeCluster
from tests.documents import DOCS, names_of

DOCUMENT = DOCS / "producer.md"


async def test_the_document_runs() -> None:
    """Each function in the document works as described."""
    shown = names_of(DOCUMENT)
    async with FakeCluster() as cluster:
        for topic in ("orders", "brewed"):
            cluster.create_topic(topic)
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(kafka) as producer:
            assert await shown["order"](producer) == 0
            assert await shown["orders"](producer, [b"1", b"2"]) == 2
            assert await shown["orders_in_columns"](producer, [b"ann", b"bob"], [b"1", b"2"], [5, 6])
            assert await shown["in_time"](producer)
        tp = TopicPartition("orders", 0)
        async with Producer(kafka, ProducerSettings(transactional_id="brewer")) as producer:
            await producer.init_transactions()
            await shown["brew"](producer, [b"a", b"b"], {tp: OffsetAndMetadata(4)}, GroupMetadata("brewers"))
        assert [record.value for record in cluster.records("brewed")] == [b"a", b"b"]
        assert cluster.committed("brewers")[tp].offset == 4


def test_names_in_the_document_exist() -> None:
    """Errors and methods have the names that the document uses."""
    text = DOCUMENT.read_text(encoding="utf-8")
    others = {"KafkaSettings", "ProducerRecord", "RecordMetadata", "Columns", "ResourceWarning", "SecretStr", "Admin"}
    errors = set(re.findall(r"`([A-Z][a-z]\w+)`", text)) - others - {*penstock.otel.__all__}
    assert len(errors) > 10
    assert [name for name in errors if not hasattr(penstock.errors, name)] == []
    methods = set(re.findall(r"`(?:await producer\.)?([a-z]\w+)\(", text)) - {"group_metadata"}
    assert len(methods) > 5
    assert [name for name in methods if not hasattr(Producer, name)] == []


def test_documented_defaults_are_those_of_the_settings() -> None:
    """Each row of the table of settings has the setting's default."""
    rows = re.findall(r"^\| `([a-z_]+)` \| `?([^|`]+)`? \|", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    defaults = ProducerSettings()
    assert len(rows) >= 9
    for name, value in rows:
        assert str(getattr(defaults, name) or "none") == value.replace(",", ""), name
