"""Size limits of the stream worker, and source topics with different numbers of partitions."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest

from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import ConfigError, ProcessingFailed
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Aggregate, Count, CountDistinct, Mean
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.record import Record
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import (
    GAP_MS,
    WAIT_SECONDS,
    Chain,
    chain_of,
    running,
    settings_of,
    until,
    until_position,
)
from tests.shared_broker import Broker

LARGE_KEY = b"k" * 600_000
LARGE, LARGE_RECORDS, LARGE_RECORD_S = 100_000, 60, 0.02
LARGEST_KEY = b"k" * ((1024 * 1024 - 16 * 1024) // 2 - 2)  # twice as JSON, with quotes
WIDE = ProducerSettings(linger_ms=0, max_request_size=2 * 1024 * 1024)


def visits(topic: str, emit: str) -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(GAP_MS)
    table = windows.aggregate("visits", n=Count(), ms=Mean("ms"), pages=CountDistinct("page"))
    getattr(table, emit)().to(f"{topic}-out")
    return builder.build()


@pytest.mark.parametrize("emit", ["on_close", "on_update"])
async def test_a_key_that_is_too_large_is_a_dead_letter(kafka: Broker, topic_name: str, emit: str) -> None:
    """A key too large for any result becomes a dead letter; a window of the largest allowed key is restored and
    closed.
    """
    build = visits(topic_name, emit)
    async with chain_of(kafka, topic_name, 1) as chain:
        async with Producer(chain.kafka, WIDE) as producer:
            for key, at in ((LARGE_KEY, 0), (LARGEST_KEY + b"k", 1), (LARGEST_KEY, 2), (b"ann", 3)):
                await (await producer.send(topic_name, b'{"ms":5,"page":"/"}', key=key, partition=0, timestamp=at))
            async with running(worker := chain.worker(build)):
                await until_position(worker, chain, 4)
            await (await producer.send(topic_name, b'{"ms":5,"page":"/"}', key=b"bob", partition=0, timestamp=10_000))
            async with running(worker := chain.worker(build)):
                await until_position(worker, chain, 5)
        dead_letters = [parse_dead_letter(record) for record in await chain.read(f"{topic_name}-dlq")]
        assert [
            (dead_letter.record.offset, dead_letter.record.key, dead_letter.stage) for dead_letter in dead_letters
        ] == [
            (0, LARGE_KEY, "process"),
            (1, LARGEST_KEY + b"k", "process"),
        ]
        assert "takes 1200004 bytes" in dead_letters[0].message
        assert "key_bytes_max=1032192" in dead_letters[0].message
        expected = b'{"key":"%s","start":2,"end":2,"n":1,"ms":5.0,"pages":1}' % LARGEST_KEY
        assert expected in await chain.values("out")


async def test_records_larger_than_max_request_size(kafka: Broker, topic_name: str) -> None:
    """Invalid and late records are written as they came, even if they are larger than `max_request_size`."""
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
        wide = str(3 * 1024 * 1024)
        await admin.create_topics([event_time_topic(topic_name, 1, max_message_bytes=wide)])
    chain = Chain(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), topic_name, 1)
    broken, late = b"{" * 2_500_000, b'{"ms":5,"page":"%s"}' % (b"/" * 2_500_000)
    async with Producer(chain.kafka, ProducerSettings(linger_ms=0, max_request_size=3 * 1024 * 1024)) as producer:
        for value, at in ((b'{"ms":5,"page":"/"}', 10_000), (broken, 10_001), (late, 0)):
            await (await producer.send(topic_name, value, key=b"k", partition=0, timestamp=at))
    async with running(worker := chain.worker(visits(topic_name, "on_close"))):
        await until_position(worker, chain, 3)
    assert [record.value for record in await chain.read(f"{topic_name}-dlq")] == [broken]
    assert [record.value for record in await chain.read(f"{topic_name}-late")] == [late]


async def test_a_state_beyond_the_limit_is_an_error(kafka: Broker, topic_name: str) -> None:
    """With `fail` an error names a window whose result is too large; a larger limit lets the result be written."""
    builder = StreamsBuilder()
    every = Aggregate(str, lambda state, value: state + value, lambda a, b: a + b)
    windows = builder.stream(topic_name).group_by_key().session_window(GAP_MS).aggregate("s", all=every)
    windows.on_close().map_values(lambda result: result.results["all"] * 3).to(f"{topic_name}-out")
    async with chain_of(kafka, topic_name, 1) as chain:
        async with Producer(chain.kafka) as producer:
            for key, at, value in ((b"large", 0, b"x" * 200), (b"large", 7, b"x" * 200), (b"innocent", 1_000, b"y")):
                await (await producer.send(topic_name, b'"%s"' % value, key=key, partition=0, timestamp=at))
        message = rf"{topic_name}-0@2, .*'s', key 'large', window 0 to 7: RecordTooLarge: .*max_request_size=1050"
        strict: dict[str, Any] = {"max_request_size": 1_050, "production_exception_handler": "fail"}
        for _ in range(2):
            with pytest.raises(ProcessingFailed, match=message):
                async with running(chain.worker(builder.build(), **strict)) as loop:
                    await asyncio.wait_for(loop, WAIT_SECONDS)
        async with running(worker := chain.worker(builder.build(), max_request_size=10_000)):
            await until_position(worker, chain, 3)
        assert await chain.values("out") == [b'"%s"' % (b"x" * 1_200)]


async def test_sources_with_different_numbers_of_partitions_are_an_error(kafka: Broker, topic_name: str) -> None:
    """Two source topics with different numbers of partitions end the start, and the error names topics and numbers."""
    builder = StreamsBuilder()
    first, second = f"{topic_name}-a", f"{topic_name}-b"
    builder.stream(first).merge(builder.stream(second)).to(f"{topic_name}-out")
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with Admin(settings) as admin:
        await admin.create_topics([event_time_topic(first, 4), event_time_topic(second, 2)])
    worker = StreamWorker(settings, settings_of(topic_name), builder.build())
    with pytest.raises(ConfigError, match=rf"\({first}: 4, {second}: 2\)"):
        async with running(worker):
            pass
    async with Admin(settings) as admin:
        assert f"{topic_name}-out" not in await admin.list_topics()


async def test_large_records_wait_at_the_broker(kafka: Broker, topic_name: str) -> None:
    """No more records are fetched while the buffer holds input_buffer_max_bytes, and all are processed in the end."""
    held: list[int] = []

    def slow(record: Record) -> None:
        time.sleep(LARGE_RECORD_S)

    builder = StreamsBuilder()
    builder.stream(topic_name, value=bytes).peek(slow).foreach(lambda record: None)
    async with chain_of(kafka, topic_name, 1) as chain:
        async with Producer(chain.kafka, WIDE) as producer:
            values = [ProducerRecord(topic_name, b"x" * LARGE, None, (), 0, i) for i in range(LARGE_RECORDS)]
            assert await (await producer.send_many(values)).first_error() is None
        async with running(worker := chain.worker(builder.build(), input_buffer_max_bytes=LARGE)):

            async def done() -> bool:
                own = [owned for owned in worker.tasks().values() if owned.task is not None]
                held.extend(owned.running.inputs.bytes for owned in own if owned.running is not None)
                return [owned.task.sources.get(topic_name) for owned in own if owned.task] == [LARGE_RECORDS]

            await until(done)
    assert LARGE < max(held) < LARGE * LARGE_RECORDS / 3
