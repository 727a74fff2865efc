"""A consumer reads transactions, timestamps, compacted logs, large batches and compressed records from a real
broker.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence

import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.connection import Connection
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.clients.protocol.fetch import FetchRequest
from penstock.shared.common.errors import OffsetOutOfRange
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker


class GaveUp(Exception):
    """Aborts a transaction."""


Read = list[tuple[int, bytes | None]]


def settings_of(kafka: Broker) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)


async def send(producer: Producer, records: Sequence[ProducerRecord]) -> None:
    assert await (await producer.send_many(list(records))).first_error() is None


async def read_to(consumer: Consumer, tp: TopicPartition, end: int, limit: int | None = None) -> Read:
    """Poll until the position is at `end`, and return offsets and values."""
    found: Read = []
    async with asyncio.timeout(30):
        while await consumer.position(tp) < end:
            for columns in (await consumer.poll(200, limit)).values():
                found += zip(columns.offsets.tolist(), columns.values, strict=True)
    return found


async def test_only_committed_transactions_are_read(kafka: Broker, topic_name: str) -> None:
    """Under read_committed neither aborted records nor records after an open transaction are read; otherwise all are
    read.
    """
    tp = TopicPartition(topic_name, 0)
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    transactional = ProducerSettings(transactional_id=topic_name, linger_ms=0)
    expected: Read = []
    async with Producer(settings_of(kafka), transactional) as producer, Producer(settings_of(kafka)) as plain:
        await producer.init_transactions()
        at = 0
        for turn in range(6):
            aborted = turn % 2 == 0
            with contextlib.suppress(GaveUp):
                async with producer.transaction():
                    for part in range(3):
                        await send(producer, [ProducerRecord(topic_name, b"%d" % (10 * part + turn), partition=0)])
                        await send(plain, [ProducerRecord(topic_name, b"plain", partition=0)])
                        expected += [] if aborted else [(at, b"%d" % (10 * part + turn))]
                        expected.append((at + 1, b"plain"))
                        at += 2
                    if aborted:
                        raise GaveUp
            at += 1  # the marker
        committed = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed")
        for limit in (None, 1, 4):
            async with Consumer(settings_of(kafka), committed) as consumer:
                consumer.assign([tp])
                await _stable(consumer, tp, at)
                assert await read_to(consumer, tp, at, limit) == expected
        async with Consumer(settings_of(kafka), ConsumerSettings(auto_offset_reset="earliest")) as consumer:
            consumer.assign([tp])
            assert len(await read_to(consumer, tp, at)) == 6 * 6
        async with Consumer(settings_of(kafka), committed) as consumer:
            consumer.assign([tp])
            consumer.seek(tp, at)
            async with producer.transaction():
                await send(producer, [ProducerRecord(topic_name, b"open", partition=0)])
                await send(plain, [ProducerRecord(topic_name, b"behind", partition=0)])
                assert await consumer.poll(600) == {}
                assert await consumer.end_offsets([tp]) == {tp: at}
            assert await read_to(consumer, tp, at + 3) == [(at, b"open"), (at + 1, b"behind")]


async def _stable(consumer: Consumer, tp: TopicPartition, offset: int) -> None:
    """Wait until the last stable offset is at least this: a commit is answered before its markers are written."""
    async with asyncio.timeout(10):
        while (await consumer.end_offsets([tp]))[tp] < offset:  # noqa: ASYNC110 - there is no event to wait for
            await asyncio.sleep(0.02)


async def test_reading_begins_a_duration_ago(kafka: Broker, topic_name: str) -> None:
    """by_duration starts at the first record that is not older, or at the end if all are older."""
    now_ms = time.time_ns() // 1_000_000
    one, two = TopicPartition(topic_name, 0), TopicPartition(topic_name, 1)
    async with Admin(settings_of(kafka)) as admin, Producer(settings_of(kafka)) as producer:
        await admin.create_topics([NewTopic(topic_name, 2, configs={"retention.ms": "-1"})])
        ages_h = {one: [30, 20, 10, 5], two: [40, 30]}
        for tp, ages in ages_h.items():
            for age_h in ages:
                stamp = now_ms - age_h * 3_600_000
                await send(
                    producer, [ProducerRecord(topic_name, b"%d" % age_h, partition=tp.partition, timestamp=stamp)]
                )
    settings = ConsumerSettings(auto_offset_reset="by_duration:PT15H", group_id=topic_name)
    async with Consumer(settings_of(kafka), settings) as consumer:
        consumer.assign([one, two])
        assert (await consumer.position(one), await consumer.position(two)) == (2, 2)
        assert await read_to(consumer, one, 4) == [(2, b"10"), (3, b"5")]


async def test_a_compacted_log_has_holes(kafka: Broker, topic_name: str) -> None:
    """A compacted log is read with its offsets, and the position passes the removed records."""
    tp = TopicPartition(topic_name, 0)
    configs = {
        "cleanup.policy": "compact",
        "segment.ms": "50",
        "min.cleanable.dirty.ratio": "0.01",
        "max.compaction.lag.ms": "100",
    }
    async with Admin(settings_of(kafka)) as admin, Producer(settings_of(kafka)) as producer:
        await admin.create_topics([NewTopic(topic_name, 1, configs=configs)])
        for turn in range(4):
            records = [
                ProducerRecord(topic_name, b"%d-%d" % (turn, i), b"%d" % (i % 5 if turn < 3 else i), partition=0)
                for i in range(20)
            ]
            await send(producer, records)
            await asyncio.sleep(0.1)
        settings = ConsumerSettings(auto_offset_reset="earliest")
        async with asyncio.timeout(60):
            turn = 0
            while True:
                turn += 1
                # A segment is cleaned once a later one exists.
                await send(producer, [ProducerRecord(topic_name, b"last", b"last", partition=0)])
                async with Consumer(settings_of(kafka), settings) as consumer:
                    consumer.assign([tp])
                    end = (await consumer.end_offsets([tp]))[tp]
                    found = await read_to(consumer, tp, end, limit=7)
                if len(found) < 60:
                    break
                await asyncio.sleep(0.3)
    offsets = [offset for offset, _ in found]
    assert offsets == sorted(set(offsets))
    assert {value for _, value in found} >= {b"3-%d" % i for i in range(20)} | {b"last"}
    assert end == 80 + turn
    assert all(value == b"last" or value == b"%d-%d" % divmod(offset, 20) for offset, value in found)


@pytest.mark.parametrize("compression", ["none", "gzip", "lz4", "zstd"])
async def test_batches_larger_than_every_limit(kafka: Broker, topic_name: str, compression: str) -> None:
    """Batches larger than the limits of one byte are read with every compression, with headers and nulls."""
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics([NewTopic(topic_name, 2)])
    settings = ProducerSettings.model_validate({"compression_type": compression, "batch_size": 50_000})
    records = [
        ProducerRecord(
            topic_name, b"v" * 2_000 if i % 3 else None, b"k", (("n", b"%d" % i), ("x", None)), partition=i % 2
        )
        for i in range(200)
    ]
    async with Producer(settings_of(kafka), settings) as producer:
        await send(producer, records)
    limits = ConsumerSettings(
        auto_offset_reset="earliest", fetch_max_bytes=1, max_partition_fetch_bytes=1, fetch_buffer_bytes=1_024
    )
    seen: dict[int, list[tuple[bytes | None, object]]] = {0: [], 1: []}
    async with Consumer(settings_of(kafka), limits) as consumer:
        consumer.assign([TopicPartition(topic_name, p) for p in seen])
        async with asyncio.timeout(30):
            while sum(map(len, seen.values())) < len(records):
                for tp, columns in (await consumer.poll(1_000, 30)).items():
                    seen[tp.partition] += [(r.value, r.headers) for r in columns.records()]
    assert seen == {p: [(r.value, r.headers) for r in records[p::2]] for p in seen}


@pytest.mark.parametrize("policy", ["earliest", "none"])
async def test_a_recreated_shorter_topic(kafka: Broker, topic_name: str, policy: str) -> None:
    """After a topic is recreated and is shorter, auto_offset_reset decides where to continue; with none it is an
    error.
    """
    tp, settings = TopicPartition(topic_name, 0), settings_of(kafka)
    old = [ProducerRecord(topic_name, b"old %d" % i) for i in range(10)]
    new = [ProducerRecord(topic_name, b"new %d" % i) for i in range(4)]
    async with Admin(settings) as admin, Consumer(settings, ConsumerSettings(auto_offset_reset=policy)) as consumer:
        await admin.create_topics([NewTopic(topic_name, 1)])
        async with Producer(settings) as producer:
            await send(producer, old)
        consumer.assign([tp])
        consumer.seek(tp, 0)
        assert len(await read_to(consumer, tp, 10)) == 10
        await admin.delete_topics([topic_name])
        async with asyncio.timeout(20):
            while topic_name in await admin.list_topics():
                pass
        await admin.create_topics([NewTopic(topic_name, 1)])
        async with Producer(settings) as producer:
            await send(producer, new)
        if policy == "none":
            with pytest.raises(OffsetOutOfRange, match=f"{topic_name}-0"):
                await read_to(consumer, tp, 11)
        else:
            found: list[bytes | None] = []
            async with asyncio.timeout(20):
                while len(found) < 4:
                    found += [v for columns in (await consumer.poll(200)).values() for v in columns.values]
            assert found == [record.value for record in new]


async def test_a_broker_reports_where_its_log_diverges(kafka: Broker, topic_name: str) -> None:
    """A fetch with the epoch of the last read record reports the end of that epoch if the reader is past it."""
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics([NewTopic(topic_name, 1)])
    async with Producer(settings_of(kafka)) as producer:
        await send(producer, [ProducerRecord(topic_name, b"x")] * 7)
    connection = Connection(settings_of(kafka))
    await connection.open()
    try:
        connection.watch(topic_name)
        await connection.wait_for_topic(topic_name, 10_000)
        node = connection.any_node()
        for offset, epoch, expected in ((7, 0, None), (9, 0, 7), (3, 0, None)):
            request = FetchRequest(0, 1, 1 << 20, False, [(topic_name, [(0, offset, epoch, 1 << 20)])])
            response = (await connection.fetch(node, request, "fetch")).partitions[topic_name, 0]
            assert (response.error_code, response.diverged_at, response.high_watermark) == (0, expected, 7)
    finally:
        await connection.close()
