"""Consumer interceptors see each record and each commit once. Their errors affect neither."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.clients import Consumer, ConsumerInterceptor, ConsumerSettings, Producer
from penstock.shared.clients.interceptors.interceptors import ConsumerInterceptors
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition
from penstock.shared.common.serialization import string_deserializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster

TP = TopicPartition("t", 0)


class Notes(ConsumerInterceptor):
    """Appends a letter to each value and records what it saw, or fails, or drops a record."""

    def __init__(self, suffix: str = "", *, fails: bool = False, drops: bool = False) -> None:
        self._suffix, self._fails, self._drops = suffix, fails, drops
        self.seen: list[str] = []
        self.committed: list[int] = []

    def on_consume(self, topic_partition: TopicPartition, records: Columns[Any, Any]) -> Columns[Any, Any]:
        self.seen += records.values
        if self._fails:
            raise RuntimeError
        if self._drops:
            return records[1:]
        return replace(records, values=[value + self._suffix for value in records.values])

    def on_commit(self, offsets: Mapping[TopicPartition, OffsetAndMetadata]) -> None:
        self.committed.append(offsets[TP].offset)
        if self._fails:
            raise RuntimeError


@pytest.fixture
async def kafka() -> AsyncIterator[KafkaSettings]:
    async with FakeCluster() as cluster:
        cluster.create_topic("t", partitions=1)
        settings = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Producer(settings) as producer:
            for value in (b"a", b"b", b"c"):
                await producer.send_and_wait("t", value)
        yield settings


async def test_each_record_is_seen_once_before_it_is_handed_out(kafka: KafkaSettings) -> None:
    """Iterations and polls pass each record through the interceptors once. Each interceptor gets the result of the
    previous one."""
    chain = [Notes("x"), Notes(fails=True), Notes(drops=True), Notes("y")]
    settings = ConsumerSettings(group_id="g", auto_offset_reset="earliest")
    async with Consumer(kafka, settings, value_deserializer=string_deserializer, interceptors=chain) as consumer:
        consumer.assign([TP])
        record = await anext(aiter(consumer))
        rest = await consumer.poll(5_000)
        assert [record.value, *rest[TP].values] == ["axy", "bxy", "cxy"]
        assert [interceptor.seen for interceptor in chain] == [["a", "b", "c"]] + 3 * [["ax", "bx", "cx"]]
        await consumer.commit()
        await consumer.commit({TP: 1})
    assert [interceptor.committed for interceptor in chain] == 4 * [[3, 1]]


def test_the_base_changes_nothing() -> None:
    """An interceptor that overrides nothing returns the records unchanged."""
    records = Columns("t", 0, [b"k"], [b"v"], np.array([1]), np.array([5]))
    chain = ConsumerInterceptors([ConsumerInterceptor()])
    assert chain.on_consume(TP, records) is records
    chain.on_commit({TP: OffsetAndMetadata(6)})
    assert chain
    assert not ConsumerInterceptors([])
