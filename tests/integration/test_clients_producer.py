"""The producer against a real broker."""

from __future__ import annotations

import asyncio
import time

import pytest
from prometheus_client import CollectorRegistry

from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.interceptors import ProducerInterceptor
from penstock.shared.clients.producer import Deliveries, Producer, ProducerSettings
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    BufferExhausted,
    ConfigError,
    DeliveryTimeout,
    IllegalGeneration,
    IllegalState,
    InvalidTimestamp,
    PenstockError,
    ProducerFenced,
    RecordTooLarge,
    SerializationError,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import (
    Columns,
    ConsumerRecord,
    GroupMetadata,
    Headers,
    OffsetAndMetadata,
    ProducerRecord,
    RecordMetadata,
    TopicPartition,
)
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker


def settings_of(kafka: Broker, **more: int) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers, **more)


async def create(kafka: Broker, topic: str, partitions: int = 1, **configs: str) -> None:
    async with Admin(settings_of(kafka)) as admin:
        await admin.create_topics(
            [NewTopic(topic, partitions, configs={k.replace("_", "."): v for k, v in configs.items()})]
        )


async def read_all(kafka: Broker, topic: str, isolation_level: str = "read_uncommitted") -> list[ConsumerRecord]:
    """Read all records of a topic, ordered by partition and offset."""
    settings = ConsumerSettings(isolation_level=isolation_level, auto_offset_reset="earliest", max_poll_records=None)
    async with Admin(settings_of(kafka)) as admin, Consumer(settings_of(kafka), settings) as consumer:
        partitions = [
            TopicPartition(topic, p.partition) for p in (await admin.describe_topics([topic]))[topic].partitions
        ]
        consumer.assign(partitions)
        ends = await consumer.end_offsets(partitions)
        found: list[Columns] = []
        async with asyncio.timeout(30):
            while any([await consumer.position(tp) < ends[tp] for tp in partitions]):
                found += (await consumer.poll(200)).values()
    return sorted((r for c in found for r in c.records()), key=lambda r: (r.partition, r.offset))


async def freeze(kafka: EmbeddedKafka) -> None:
    """Pause the broker, and wait until its last thread has stopped."""
    kafka.pause()
    await asyncio.sleep(0.3)


async def test_round_trip(kafka: Broker, topic_name: str) -> None:
    """Keys, values, headers and timestamps are read as they were sent, and None differs from empty."""
    await create(kafka, topic_name)
    async with Producer(settings_of(kafka)) as producer:
        headers = (("a", b"1"), ("b", None), ("a", b""))
        first = await (await producer.send(topic_name, b"v", key=b"k", headers=headers, timestamp=1_357_000_000_000))
        await (await producer.send(topic_name, None, key=b"k"))
        await (await producer.send(topic_name, b""))
        last = await (await producer.send(topic_name, None))
    assert first == RecordMetadata(topic_name, 0, 0, 1_357_000_000_000, 1, 1)
    assert (last.offset, last.serialized_key_size, last.serialized_value_size) == (3, -1, -1)
    records = await read_all(kafka, topic_name)
    assert records[0] == ConsumerRecord(topic_name, 0, 0, 1_357_000_000_000, b"k", b"v", headers)
    assert [(r.key, r.value, r.headers) for r in records[1:]] == [(b"k", None, ()), (None, b"", ()), (None, None, ())]
    assert abs(records[-1].timestamp - time.time() * 1000) < 60_000


@pytest.mark.parametrize("compression", ["none", "gzip", "snappy", "lz4", "zstd"])
async def test_compression(kafka: Broker, topic_name: str, compression: str) -> None:
    """Records are read as they were sent with every codec."""
    await create(kafka, topic_name)
    values = [b"value %d " % i * 20 for i in range(300)]
    async with Producer(settings_of(kafka), ProducerSettings(compression_type=compression)) as producer:
        assert await (await producer.send_many([ProducerRecord(topic_name, v) for v in values])).first_error() is None
    assert [r.value for r in await read_all(kafka, topic_name)] == values


async def test_send_many_keeps_the_order_of_each_partition(kafka: Broker, topic_name: str) -> None:
    """Records of one partition keep their order, and each delivery returns its record's partition and offset."""
    await create(kafka, topic_name, 3)
    records = [ProducerRecord(topic_name, b"%d" % i, b"k%d" % (i % 17)) for i in range(20_000)]
    async with Producer(settings_of(kafka), ProducerSettings(batch_size=2_000)) as producer:
        results = await (await producer.send_many(iter(records)))
    assert all(isinstance(r, RecordMetadata) for r in results)
    stored = {(r.partition, r.offset): r.value for r in await read_all(kafka, topic_name)}
    assert [stored[r.partition, r.offset] for r in results if isinstance(r, RecordMetadata)] == [
        r.value for r in records
    ]
    for partition in range(3):
        numbers = [int(v) for (p, _), v in sorted(stored.items()) if p == partition and v is not None]
        assert numbers == sorted(numbers)


async def test_errors_before_anything_is_enqueued(kafka: Broker, topic_name: str) -> None:
    """An invalid record raises an error that names the problem; in `send_many` it is that record's result alone."""
    await create(kafka, topic_name)
    unknown = f"{topic_name}-unknown"
    async with Producer(settings_of(kafka), ProducerSettings(max_block_ms=500, max_request_size=10_000)) as producer:
        with pytest.raises(UnknownTopicOrPartition, match=unknown):
            await producer.send(unknown, b"")
        with pytest.raises(UnknownTopicOrPartition, match=r"partition 7.*1 partitions"):
            await producer.send(topic_name, b"", partition=7)
        with pytest.raises(RecordTooLarge, match="max_request_size=10000"):
            await producer.send(topic_name, b"x" * 10_000)
        with pytest.raises(SerializationError, match="expected bytes, got str"):
            await producer.send(topic_name, "text")
        with pytest.raises(InvalidTimestamp):
            await producer.send(topic_name, b"", timestamp=-5)
        with pytest.raises(UnknownTopicOrPartition, match=unknown):
            await producer.partitions_for(unknown)
        assert await producer.partitions_for(topic_name) == [0]
        bulk = [
            ProducerRecord(topic_name, b"good"),
            ProducerRecord(topic_name, b"x" * 10_000),
            ProducerRecord(unknown, b""),
        ]
        deliveries = await producer.send_many([*bulk, ProducerRecord(unknown, b""), bulk[0]])
        kinds = [type(r).__name__ for r in await deliveries]
        assert isinstance(await deliveries.first_error(), RecordTooLarge)
    assert kinds == [
        "RecordMetadata",
        "RecordTooLarge",
        "UnknownTopicOrPartition",
        "UnknownTopicOrPartition",
        "RecordMetadata",
    ]
    assert len(await read_all(kafka, topic_name)) == 2
    with pytest.raises(IllegalState, match="closed"):
        await producer.send(topic_name, b"")


async def test_a_rejected_batch_uses_no_sequence_number(kafka: Broker, topic_name: str) -> None:
    """After the broker rejects a batch, it accepts the partition's next batch: no sequence number is used up."""
    await create(kafka, topic_name, message_timestamp_after_max_ms="3600000")
    async with Producer(settings_of(kafka), ProducerSettings(linger_ms=0)) as producer:
        await (await producer.send(topic_name, b"first"))
        with pytest.raises(InvalidTimestamp, match=f"{topic_name}-0"):
            await (await producer.send(topic_name, b"ahead", timestamp=int(time.time() * 1000) + 2 * 3_600_000))
        await (await producer.send(topic_name, b"second"))
    assert [r.value for r in await read_all(kafka, topic_name)] == [b"first", b"second"]


async def test_callbacks_interceptors_and_metrics(kafka: Broker, topic_name: str) -> None:
    """Callbacks and interceptors are called once for each record, their errors change nothing, and metrics count the
    record.
    """

    class Recorder(ProducerInterceptor):
        def __init__(self) -> None:
            self.heard: list[object] = []

        def on_send(self, record: ProducerRecord) -> ProducerRecord:
            return ProducerRecord(record.topic, record.value, key=b"intercepted", headers=(("number", b"1"),))

        def on_acknowledgement(
            self, metadata: RecordMetadata | None, error: Exception | None, headers: Headers
        ) -> None:
            self.heard += [metadata or error, headers]
            raise RuntimeError("an interceptor's own trouble")

    await create(kafka, topic_name)
    recorder, registry, outcomes = Recorder(), CollectorRegistry(), []
    async with Producer(settings_of(kafka), interceptors=[recorder], registry=registry) as producer:
        delivery = await producer.send(
            topic_name, b"v", on_delivery=lambda metadata, error: outcomes.append((metadata, error))
        )
        metadata = await delivery
        await producer.flush()
        assert producer.metrics()["record_send_total"] == 1
        assert producer.metrics()["buffer_available_bytes"] == ProducerSettings().buffer_memory
    assert outcomes == [(metadata, None)]
    assert recorder.heard == [metadata, (("number", b"1"),)]
    assert registry.get_sample_value("penstock_producer_record_send_total", {"topic": topic_name}) == 1
    assert [r.key for r in await read_all(kafka, topic_name)] == [b"intercepted"]


async def test_acks_zero(kafka: Broker, topic_name: str) -> None:
    """Under acks=0 a delivery ends without an offset once the record is written to the socket."""
    await create(kafka, topic_name)
    async with Producer(settings_of(kafka), ProducerSettings(acks=0)) as producer:
        assert (await (await producer.send(topic_name, b"v"))).offset == -1
        async with asyncio.timeout(10):
            while not await read_all(kafka, topic_name):
                pass


async def test_unreachable_broker_ends_within_the_deadline() -> None:
    """A start without a broker raises BrokerNotAvailable with the address within the deadline."""
    started = time.monotonic()
    with pytest.raises(BrokerNotAvailable, match=r"127\.0\.0\.1:1: .*refused|127\.0\.0\.1:1"):
        async with Producer(KafkaSettings(bootstrap_servers="127.0.0.1:1", request_timeout_ms=500)):
            pass
    assert time.monotonic() - started < 5


async def test_delivery_timeout(stoppable_kafka: EmbeddedKafka, topic_name: str) -> None:
    """If the broker is paused for longer than delivery_timeout_ms, the delivery and its callback get DeliveryTimeout.

    After that, sending works again.
    """
    await create(stoppable_kafka, topic_name)
    kafka = settings_of(stoppable_kafka, request_timeout_ms=1_000)
    outcomes: list[Exception | None] = []
    async with Producer(kafka, ProducerSettings(delivery_timeout_ms=1_500, linger_ms=0)) as producer:
        await (await producer.send(topic_name, b"before"))
        await freeze(stoppable_kafka)
        started = time.monotonic()
        delivery = await producer.send(topic_name, b"lost", on_delivery=lambda _, error: outcomes.append(error))
        with pytest.raises(DeliveryTimeout, match="may still be written") as failed:
            await delivery
        assert failed.value.maybe_written
        assert 1.4 < time.monotonic() - started < 4
        assert len(outcomes) == 1
        assert isinstance(outcomes[0], DeliveryTimeout)
        stoppable_kafka.resume()
        async with asyncio.timeout(30):
            while True:
                try:
                    await (await producer.send(topic_name, b"after"))
                except DeliveryTimeout:
                    continue
                break
    values = [r.value for r in await read_all(stoppable_kafka, topic_name)]
    assert values[0] == b"before"
    assert values[-1] == b"after"
    assert values.count(b"lost") <= 1


async def test_a_short_pause_loses_and_repeats_no_record(stoppable_kafka: EmbeddedKafka, topic_name: str) -> None:
    """A pause shorter than the delivery timeout makes requests time out and retry: every record is written once, in
    order.
    """
    await create(stoppable_kafka, topic_name, 2)
    kafka = settings_of(stoppable_kafka, request_timeout_ms=700)
    async with Producer(kafka, ProducerSettings(delivery_timeout_ms=60_000, batch_size=1_000)) as producer:
        sent = []
        for i in range(6_000):
            sent.append(await producer.send(topic_name, b"%d" % i, key=b"%d" % (i % 7)))
            if i == 3_000:
                await freeze(stoppable_kafka)
                asyncio.get_running_loop().call_later(2, stoppable_kafka.resume)
            if i % 100 == 0:
                await asyncio.sleep(0.01)
        async with asyncio.timeout(60):
            for delivery in sent:
                await delivery
        assert producer.metrics()["batch_retry_total"] > 0
    records = await read_all(stoppable_kafka, topic_name)
    assert sorted(int(r.value or b"") for r in records) == list(range(6_000))
    for partition in (0, 1):
        numbers = [int(r.value or b"") for r in records if r.partition == partition]
        assert numbers == sorted(numbers)


async def test_buffer_memory(stoppable_kafka: EmbeddedKafka, topic_name: str) -> None:
    """If the buffer is full, send raises BufferExhausted after max_block_ms; in `send_many` all later records get it
    too.
    """
    await create(stoppable_kafka, topic_name)
    settings = ProducerSettings(buffer_memory=10_000, batch_size=1_000, max_block_ms=400)
    async with Producer(settings_of(stoppable_kafka), settings) as producer:
        await (await producer.send(topic_name, b"first"))
        await freeze(stoppable_kafka)
        started = time.monotonic()
        deliveries = await producer.send_many([ProducerRecord(topic_name, b"x" * 500) for _ in range(50)])
        assert time.monotonic() - started < 3
        with pytest.raises(BufferExhausted, match="buffer_memory=10000"):
            await producer.send(topic_name, b"x" * 500)
        assert producer.metrics()["buffer_available_bytes"] < 600
        stoppable_kafka.resume()
        results = await deliveries
        assert producer.metrics()["buffer_available_bytes"] == 10_000
    stored = sum(isinstance(r, RecordMetadata) for r in results)
    assert stored == 10  # each takes a batch of 1,000 bytes: two do not fit into one
    assert all(isinstance(r, BufferExhausted) for r in results[stored:])


async def test_close_with_a_timeout(stoppable_kafka: EmbeddedKafka, topic_name: str) -> None:
    """close(timeout_ms) abandons records that are not acknowledged by then, and their deliveries raise IllegalState."""
    await create(stoppable_kafka, topic_name)
    producer = Producer(settings_of(stoppable_kafka))
    await producer.start()
    await (await producer.send(topic_name, b"first"))
    await freeze(stoppable_kafka)
    delivery = await producer.send(topic_name, b"late")
    started = time.monotonic()
    await producer.close(timeout_ms=300)
    assert time.monotonic() - started < 3
    with pytest.raises(IllegalState, match="closed before"):
        await delivery
    stoppable_kafka.resume()


def test_delivery_timeout_must_cover_the_request_timeout() -> None:
    """A delivery_timeout_ms below linger plus request timeout is a ConfigError."""
    with pytest.raises(ConfigError, match="delivery_timeout_ms=1000"):
        Producer(KafkaSettings(), ProducerSettings(delivery_timeout_ms=1_000))


async def test_transactions_by_isolation_level(kafka: Broker, topic_name: str) -> None:
    """read_committed reads committed transactions alone; read_uncommitted reads the aborted and the open one too."""
    await create(kafka, topic_name, 2)
    async with Producer(settings_of(kafka), ProducerSettings(transactional_id=topic_name)) as producer:
        with pytest.raises(IllegalState, match="open transaction"):
            await producer.send(topic_name, b"outside")
        await producer.init_transactions()
        async with producer.transaction():
            for i in range(10):
                await producer.send(topic_name, b"c%d" % i, key=b"%d" % i)

        async def fail_after_sending() -> None:
            async with producer.transaction():
                deliveries.append(
                    await producer.send_many([ProducerRecord(topic_name, b"a", b"%d" % i) for i in range(10)])
                )
                await producer.flush()
                raise RuntimeError("the block's own")

        deliveries: list[Deliveries] = []
        with pytest.raises(RuntimeError, match="the block's own"):
            await fail_after_sending()
        assert await deliveries[0].first_error() is None
        async with producer.transaction():
            await producer.send(topic_name, b"d")
        async with producer.transaction():
            pass
        await producer.begin_transaction()
        open_delivery = await producer.send(topic_name, b"open", partition=0)
        await open_delivery
        committed = await read_all(kafka, topic_name, "read_committed")
        everything = await read_all(kafka, topic_name)
        await producer.abort_transaction()
    assert sorted(r.value or b"" for r in committed) == sorted([*(b"c%d" % i for i in range(10)), b"d"])
    assert len(everything) == 22


async def test_a_transaction_is_repeated_after_a_lost_batch(stoppable_kafka: EmbeddedKafka, topic_name: str) -> None:
    """A batch with an unknown outcome makes its transaction fail; aborted and repeated, its records are read once."""
    await create(stoppable_kafka, topic_name)
    settings = ProducerSettings(transactional_id=topic_name, delivery_timeout_ms=1_500, linger_ms=0)
    async with Producer(settings_of(stoppable_kafka, request_timeout_ms=1_000), settings) as producer:
        await producer.init_transactions()
        async with producer.transaction():
            await producer.send(topic_name, b"before")
        await producer.begin_transaction()
        await (await producer.send(topic_name, b"in doubt"))
        await freeze(stoppable_kafka)
        with pytest.raises(DeliveryTimeout):
            await (await producer.send(topic_name, b"lost"))
        with pytest.raises(TransactionAborted, match="not acknowledged"):
            await producer.commit_transaction()
        stoppable_kafka.resume()
        await producer.abort_transaction()
        async with producer.transaction():
            await producer.send_many([ProducerRecord(topic_name, value) for value in (b"in doubt", b"again")])
    records = await read_all(stoppable_kafka, topic_name, "read_committed")
    assert [r.value for r in records] == [b"before", b"in doubt", b"again"]


async def test_abort_drops_buffered_records(kafka: Broker, topic_name: str) -> None:
    """An abort drops buffered records, and their deliveries raise TransactionAborted."""
    await create(kafka, topic_name)
    settings = ProducerSettings(transactional_id=topic_name, linger_ms=20_000)
    async with Producer(settings_of(kafka), settings) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        delivery = await producer.send(topic_name, b"buffered")
        await producer.abort_transaction()
        with pytest.raises(TransactionAborted):
            await delivery
        async with producer.transaction():
            await producer.send(topic_name, b"kept")
    assert [r.value for r in await read_all(kafka, topic_name)] == [b"kept"]


async def test_fencing(kafka: Broker, topic_name: str) -> None:
    """A second producer with the same transactional id fences the first one for all further calls."""
    await create(kafka, topic_name)
    settings = ProducerSettings(transactional_id=topic_name)
    async with (
        Producer(settings_of(kafka), settings) as first,
        Producer(settings_of(kafka), settings) as second,
        Producer(settings_of(kafka), settings) as third,
    ):
        await first.init_transactions()
        await first.begin_transaction()
        await (await first.send(topic_name, b"zombie"))
        await second.init_transactions()
        with pytest.raises(ProducerFenced, match=topic_name):
            await first.commit_transaction()
        with pytest.raises(ProducerFenced):
            await first.begin_transaction()
        await second.begin_transaction()
        await (await second.send(topic_name, b"second"))
        await third.init_transactions()
        with pytest.raises(ProducerFenced, match=topic_name):
            await (await second.send(topic_name, b"after"))
        with pytest.raises(PenstockError):
            await second.abort_transaction()
        async with third.transaction():
            await third.send(topic_name, b"third")
    assert [r.value for r in await read_all(kafka, topic_name, "read_committed")] == [b"third"]


async def test_offsets_in_a_transaction(kafka: Broker, topic_name: str) -> None:
    """Offsets are committed with their transaction or not at all, and an older generation raises IllegalGeneration."""
    await create(kafka, topic_name)
    tp, group = TopicPartition(topic_name, 0), topic_name
    consumer_settings = ConsumerSettings(group_id=group, isolation_level="read_committed", auto_offset_reset="earliest")
    async with (
        Producer(settings_of(kafka), ProducerSettings(transactional_id=topic_name)) as producer,
        Consumer(settings_of(kafka), consumer_settings) as consumer,
    ):
        consumer.subscribe([topic_name])
        async with asyncio.timeout(20):
            while not consumer.assignment():
                await consumer.poll(100)
        member = consumer.group_metadata()
        assert member.generation_id >= 1
        await producer.init_transactions()
        async with producer.transaction():
            await producer.send(topic_name, b"v")
            await producer.send_offsets_to_transaction({tp: OffsetAndMetadata(41, "note")}, member)
        assert await consumer.committed(tp) == OffsetAndMetadata(41, "note")
        await producer.begin_transaction()
        await producer.send_offsets_to_transaction({tp: OffsetAndMetadata(50)}, member)
        await producer.abort_transaction()
        stale = GroupMetadata(group, member.generation_id - 1, member.member_id)
        with pytest.raises(IllegalGeneration, match=group):
            async with producer.transaction():
                await producer.send_offsets_to_transaction({tp: OffsetAndMetadata(60)}, stale)
        assert await consumer.committed(tp) == OffsetAndMetadata(41, "note")
        async with producer.transaction():
            await producer.send_offsets_to_transaction({tp: OffsetAndMetadata(42)}, member)
        assert await consumer.committed(tp) == OffsetAndMetadata(42)
