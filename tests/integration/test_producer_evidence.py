"""The guarantees of the idempotent producer with 200,000 records, while the broker is paused, stopped or killed.

Longer runs are soak tests; shorter ones use a fifth of the records.

Each record's value is its number. Afterwards the log is compared with the deliveries: acknowledged records are at their
offsets, no record is there twice, the numbers of each partition ascend, and records reported as not written are
missing.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from itertools import pairwise

import pytest

from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Deliveries, Producer, ProducerSettings
from penstock.shared.common.errors import DeliveryTimeout
from penstock.shared.common.records import ProducerRecord, RecordMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker

RECORDS = 200_000
CHUNK = 500
PARTITIONS = 4
KEYS = [b"key-%d" % i for i in range(64)]
FAULT_AT = 5
"""The fault begins after this fraction of the chunks, when records are in flight and most are still to come."""
FEW = 40_000
"""The number of records for tests that are no soak tests."""

Log = dict[int, list[tuple[int, int]]]


def settings_of(kafka: Broker, request_timeout_ms: int) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, request_timeout_ms=request_timeout_ms)


async def load(
    producer: Producer, topic: str, count: int, load_ms: int, fault: Callable[[], Awaitable[None]]
) -> Sequence[RecordMetadata | Exception]:
    """Send all records, spread over `load_ms`, while the fault runs, and return each record's result in order."""
    sent: list[Deliveries] = []
    running: asyncio.Future[None] | None = None
    started = time.monotonic()
    chunks = count // CHUNK
    for chunk in range(chunks):
        first = chunk * CHUNK
        records = [ProducerRecord(topic, b"%d" % i, KEYS[i % len(KEYS)]) for i in range(first, first + CHUNK)]
        sent.append(await producer.send_many(records))
        if chunk == chunks // FAULT_AT:
            running = asyncio.ensure_future(fault())
        await asyncio.sleep(max(0.0, started + load_ms / 1000 * chunk / chunks - time.monotonic()))
    assert running is not None
    await running
    return [fate for deliveries in sent for fate in await deliveries]


async def log_of(kafka: Broker, topic: str) -> Log:
    """The offset and number of every record in the log, by partition."""
    settings = ConsumerSettings(auto_offset_reset="earliest", max_poll_records=None)
    partitions = [TopicPartition(topic, i) for i in range(PARTITIONS)]
    found: Log = {tp.partition: [] for tp in partitions}
    async with Consumer(settings_of(kafka, 10_000), settings) as consumer, asyncio.timeout(30):
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        while any([await consumer.position(tp) < ends[tp] for tp in partitions]):
            for tp, columns in (await consumer.poll(200)).items():
                numbers = [int(value or b"") for value in columns.values]
                found[tp.partition] += zip(columns.offsets.tolist(), numbers, strict=True)
    return found


def check(fates: Sequence[RecordMetadata | Exception], log: Log) -> dict[str, int]:
    """Compare the log with the results, and count the records by result."""
    for entries in log.values():
        numbers = [number for _, number in entries]
        assert all(a < b for a, b in pairwise(numbers)), "a partition's order is not kept"
    where = {number: (partition, offset) for partition, entries in log.items() for offset, number in entries}
    assert len(where) == sum(map(len, log.values())), "a record is there twice"
    counts = {"acknowledged": 0, "not written": 0, "in doubt": 0, "in doubt, written": 0}
    for number, fate in enumerate(fates):
        if isinstance(fate, RecordMetadata):
            counts["acknowledged"] += 1
            assert where.get(number) == (fate.partition, fate.offset), f"{number} was acknowledged"
        else:
            assert isinstance(fate, DeliveryTimeout), repr(fate)
            if "it was not written" in str(fate):
                counts["not written"] += 1
                assert number not in where, f"{number}: {fate}"
            else:
                assert "it may still be written" in str(fate)
                counts["in doubt"] += 1
                counts["in doubt, written"] += number in where
    assert counts["acknowledged"] + counts["in doubt, written"] == len(where)
    return counts


async def run(
    kafka: Broker,
    topic: str,
    settings: ProducerSettings,
    request_timeout_ms: int,
    load_ms: int,
    fault: Callable[[], Awaitable[None]],
    count: int,
) -> tuple[dict[str, int], float]:
    """Run one load with one fault, and return the counts of results and the number of retried batches."""
    async with Admin(settings_of(kafka, 10_000)) as admin:
        await admin.create_topics([NewTopic(topic, PARTITIONS)])
    async with Producer(settings_of(kafka, request_timeout_ms), settings) as producer:
        fates = await load(producer, topic, count, load_ms, fault)
        assert len(fates) == count
        retries = producer.metrics()["batch_retry_total"]
        metadata = await (await producer.send(topic, b"%d" % count))
    log = await log_of(kafka, topic)
    assert log[metadata.partition].pop() == (metadata.offset, count)
    return check(fates, log), retries


async def freeze(kafka: EmbeddedKafka, for_ms: int) -> None:
    kafka.pause()
    await asyncio.sleep(for_ms / 1000)
    kafka.resume()


@pytest.mark.parametrize("count", [FEW, pytest.param(RECORDS, marks=pytest.mark.soak)])
async def test_a_pause_shorter_than_the_delivery_timeout(
    stoppable_kafka: EmbeddedKafka, topic_name: str, count: int
) -> None:
    """Requests time out and are retried while the broker still holds the first attempts: every record is written
    once.
    """
    settings = ProducerSettings(delivery_timeout_ms=20_000)
    counts, retries = await run(
        stoppable_kafka, topic_name, settings, 700, 4_000, lambda: freeze(stoppable_kafka, 2_000), count
    )
    assert counts["acknowledged"] == count
    assert retries > 0


@pytest.mark.parametrize("count", [FEW, pytest.param(RECORDS, marks=pytest.mark.soak)])
async def test_a_pause_longer_than_the_delivery_timeout(
    stoppable_kafka: EmbeddedKafka, topic_name: str, count: int
) -> None:
    """Records end in DeliveryTimeout, most as not written and a few in doubt; all others are written once, in order."""
    settings = ProducerSettings(delivery_timeout_ms=1_500)
    load_ms, freeze_ms = (8_000, 3_500) if count == RECORDS else (4_000, 2_500)
    counts, _ = await run(
        stoppable_kafka, topic_name, settings, 700, load_ms, lambda: freeze(stoppable_kafka, freeze_ms), count
    )
    assert counts["not written"] > count // 200
    assert 0 < counts["in doubt"] < counts["not written"]
    assert counts["acknowledged"] > count // 4


@pytest.mark.parametrize(
    ("crash", "count"),
    [
        pytest.param(True, FEW, id="SIGKILL, few"),
        pytest.param(False, RECORDS, id="SIGTERM", marks=pytest.mark.soak),
        pytest.param(True, RECORDS, id="SIGKILL", marks=pytest.mark.soak),
    ],
)
async def test_a_restart_under_load(stoppable_kafka: EmbeddedKafka, topic_name: str, crash: bool, count: int) -> None:
    """The broker stops or is killed and restarts while records are sent: every record is written once, in order."""

    async def fault() -> None:
        await (stoppable_kafka.kill() if crash else stoppable_kafka.stop())
        await stoppable_kafka.start()

    settings = ProducerSettings(delivery_timeout_ms=60_000)
    counts, retries = await run(stoppable_kafka, topic_name, settings, 2_000, 4_000, fault, count)
    assert counts["acknowledged"] == count
    assert retries > 0
