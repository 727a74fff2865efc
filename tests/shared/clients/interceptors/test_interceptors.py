"""Interceptors of producers and consumers are called in order, once for each record. Their errors affect neither
records nor commits."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.clients import Consumer, ConsumerInterceptor, ConsumerSettings, Producer
from penstock.shared.clients.interceptors.interceptors import (
    ConsumerInterceptors,
    ProducerInterceptor,
    ProducerInterceptors,
)
from penstock.shared.common.errors import DeliveryTimeout
from penstock.shared.common.records import (
    Columns,
    Headers,
    OffsetAndMetadata,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)
from penstock.shared.common.serialization import string_deserializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster


class Adds(ProducerInterceptor):
    def __init__(self, suffix: bytes, *, fails: bool = False) -> None:
        self._suffix, self._fails = suffix, fails
        self.heard: list[RecordMetadata | Exception | None] = []

    def on_send(self, record: ProducerRecord) -> ProducerRecord:
        if self._fails:
            raise RuntimeError
        return ProducerRecord(record.topic, (record.value or b"") + self._suffix)

    def on_acknowledgement(self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers) -> None:
        self.heard.append(metadata or error)
        self.headers = headers
        if self._fails:
            raise RuntimeError


def test_a_chain_goes_on_past_one_that_raises() -> None:
    """Each interceptor gets the previous one's result. One that raises is skipped."""
    chain = [Adds(b"a"), Adds(b"b", fails=True), Adds(b"c")]
    interceptors = ProducerInterceptors(chain)
    assert interceptors.on_send(ProducerRecord("t", b"")).value == b"ac"
    interceptors.on_acknowledgement(None, None, ())
    assert [len(i.heard) for i in chain] == [1, 1, 1]
    assert interceptors
    assert not ProducerInterceptors([])


def test_interceptors_are_called_before_the_callback() -> None:
    """Interceptors and callback get the same result. Interceptors are called without a callback too."""
    chain = [Adds(b"a", fails=True)]
    order: list[int] = []
    error = DeliveryTimeout("late")
    ProducerInterceptors(chain).observed(ProducerRecord("t", b""), lambda *_: order.append(len(chain[0].heard)))(
        None, error
    )
    ProducerInterceptors(chain).observed(ProducerRecord("t", b""), None)(RecordMetadata("t", 0, 5, 0), None)
    assert order == [1]
    assert chain[0].heard == [error, RecordMetadata("t", 0, 5, 0)]


def test_the_producer_interceptors_base_changes_nothing() -> None:
    """An interceptor that overrides nothing leaves records unchanged."""
    record = ProducerRecord("t", b"v")
    assert ProducerInterceptors([ProducerInterceptor()]).on_send(record) is record
    ProducerInterceptor().on_acknowledgement(None, None, ())


def test_acknowledgements_have_the_headers_of_the_record() -> None:
    """The acknowledgement has the headers that the record was sent with."""
    interceptor, headers = Adds(b"a"), (("number", b"1"),)
    ProducerInterceptors([interceptor]).observed(ProducerRecord("t", b"", headers=headers), None)(
        None, DeliveryTimeout("late")
    )
    assert interceptor.headers == headers


def test_an_interceptor_that_returns_no_record() -> None:
    """A missing return value is skipped like an error: the record is sent unchanged."""

    class Forgets(ProducerInterceptor):
        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return None  # type: ignore[return-value]

    assert ProducerInterceptors([Adds(b"a"), Forgets(), Adds(b"b")]).on_send(ProducerRecord("t", b"")).value == b"ab"


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


def test_the_consumer_interceptors_base_changes_nothing() -> None:
    """An interceptor that overrides nothing returns the records unchanged."""
    records = Columns("t", 0, [b"k"], [b"v"], np.array([1]), np.array([5]))
    chain = ConsumerInterceptors([ConsumerInterceptor()])
    assert chain.on_consume(TP, records) is records
    chain.on_commit({TP: OffsetAndMetadata(6)})
    assert chain
    assert not ConsumerInterceptors([])
