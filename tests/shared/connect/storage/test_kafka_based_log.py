"""A log's waits, with a slow Kafka."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import pytest

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import AuthorizationFailed, IllegalState, KafkaTimeout
from penstock.shared.common.records import ConsumerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.storage import kafka_based_log
from penstock.shared.connect.storage.kafka_based_log import KafkaBasedLog, LogTopic
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from tests import virtual_time

TP = TopicPartition("t", 0)


class SlowAdmin:
    """Returns an end offset after 750 ms."""

    async def list_offsets(self, *_args: object, **_more: object) -> Mapping[TopicPartition, int]:
        await virtual_time.let_pass(0.75)
        return {TP: 1}


class StuckConsumer:
    """Reads nothing."""

    def known_position(self, _tp: TopicPartition) -> int:
        return 0


def test_read_to_end_takes_no_longer_than_its_timeout() -> None:
    """The lookup of the end offsets and the wait for the records share one timeout."""

    async def scenario() -> float:
        admin: Any = SlowAdmin()
        producer: Any = None
        consumer: Any = StuckConsumer()
        log = KafkaBasedLog(KafkaSettings(), admin, producer, LogTopic("t", 1), lambda _record: None)
        log._consumer = consumer
        with pytest.raises(KafkaTimeout):
            await log.read_to_end(timeout_ms=1_000)
        return asyncio.get_running_loop().time()

    assert virtual_time.run(scenario()) == pytest.approx(1.0)


@asynccontextmanager
async def followed(on_record: Callable[[ConsumerRecord], None]) -> AsyncIterator[KafkaBasedLog]:
    """A log that follows a topic of a fake cluster."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin, Producer(kafka) as producer:
            log = KafkaBasedLog(kafka, admin, producer, LogTopic("t", 1), on_record)
            await log.start()
            try:
                yield log
            finally:
                await log.stop()


async def test_a_worker_that_may_not_describe_configs_follows_the_topic() -> None:
    """As in Kafka Connect, a topic is followed whose configs the worker may not describe."""
    async with FakeCluster() as cluster:
        cluster.control(Api.DESCRIBE_CONFIGS, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED))
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin, Producer(kafka) as producer:
            log = KafkaBasedLog(kafka, admin, producer, LogTopic("t", 1, is_single=True), lambda _record: None)
            await log.start()
            await log.read_past([await log.send(b"a", b"1")])
            await log.stop()


async def test_the_end_is_beyond_an_open_transaction() -> None:
    """`read_to_end` waits for another writer's open transaction, and returns after the records behind it were read: an
    exactly-once task must not miss its own last offset."""
    seen: list[bytes | None] = []
    listed = asyncio.Event()
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        transactional = ProducerSettings(transactional_id="other")
        async with Admin(kafka) as admin, Producer(kafka) as producer, Producer(kafka, transactional) as other:
            log = KafkaBasedLog(kafka, admin, producer, LogTopic("t", 1), lambda record: seen.append(record.value))
            await log.start()
            await log.read_past([await log.send(b"a", b"1")])
            await other.init_transactions()
            await other.begin_transaction()
            await log.send(b"b", b"other's", other)
            await log.send(b"a", b"2")
            cluster.control(Api.LIST_OFFSETS, lambda _: listed.set())

            async def read() -> list[bytes | None]:
                await log.read_to_end()
                return list(seen)

            reading = asyncio.ensure_future(read())
            await listed.wait()
            await other.commit_transaction()
            assert await reading == [b"1", b"other's", b"2"]
            await log.stop()


async def test_an_error_of_the_callback_reaches_every_caller() -> None:
    """An error of `on_record` ends the reading, and later calls raise it at once instead of waiting."""

    def fail(record: ConsumerRecord) -> None:
        raise ValueError("ill")

    async with followed(fail) as log:
        written = await log.send(b"a", b"1")
        for _ in range(2):
            with pytest.raises(ValueError, match="ill"):
                await log.read_past([written])


async def test_a_topic_is_followed_again_once_it_may_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """While the right to read is missing, callers get the error. Afterwards the topic is followed as before."""
    monkeypatch.setattr(kafka_based_log, "RETRY_MS", 0)
    read = asyncio.Event()
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin, Producer(kafka) as producer:
            log = KafkaBasedLog(kafka, admin, producer, LogTopic("t", 1), lambda _record: read.set())
            await log.start()
            with cluster.control(Api.FETCH, Fail(ErrorCode.TOPIC_AUTHORIZATION_FAILED)):
                written = await log.send(b"a", b"1")
                with pytest.raises(AuthorizationFailed):
                    await log.read_past([written])
            async with asyncio.timeout(10):
                await read.wait()
            await log.read_past([written])
            await log.stop()


async def test_a_stop_ends_waiting_calls() -> None:
    """A call that waits for records when the log is stopped raises IllegalState, and does not wait for its timeout."""
    async with followed(lambda _record: None) as log:
        written = await log.send(b"a", b"1")
        waiting = asyncio.ensure_future(log.read_past([msgspec.structs.replace(written, offset=written.offset + 1)]))
        await asyncio.sleep(0)
        await log.stop()
        with pytest.raises(IllegalState):
            async with asyncio.timeout(10):
                await waiting
