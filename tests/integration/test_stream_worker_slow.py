"""A record that takes longer than the group waits: it is refused after its attempts, and nothing else suffers."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from penstock.services.local.kafka import EmbeddedKafka
from penstock.shared.clients.consumer.dead_letters import parse_dead_letter
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ProcessingFailed
from penstock.shared.common.records import ProducerRecord
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.task.vectorized_executor import COLUMNS_MIN
from penstock.shared.streams.topology import Topology
from tests.integration.test_stream_worker import WAIT_SECONDS, Chain, chain_of, running, until

SESSION_MS, STEP_SECONDS, ATTEMPTS_MAX = 1_000, 1.6, 2
QUICK = {"session_timeout_ms": SESSION_MS, "heartbeat_interval_ms": 100, "slow_record_attempts_max": ATTEMPTS_MAX}


def slow_at(topic: str, tries: list[bytes]) -> Topology:
    """Passes records on; the one with `slow` in it takes longer than the session, each time it is tried."""

    def take(record: Record) -> None:
        if record.value["n"] == "slow":
            tries.append(b"slow")
            time.sleep(STEP_SECONDS)

    builder = StreamsBuilder()
    builder.stream(topic).peek(take).to(f"{topic}-out")
    return builder.build()


async def send(chain: Chain) -> None:
    async with Producer(chain.kafka) as producer:
        values = [b'{"n":1}', b'{"n":2}', b'{"n":"slow"}', b'{"n":3}']
        await (await producer.send_many([ProducerRecord(chain.topic, value, b"a") for value in values]))


async def test_a_record_that_is_too_slow_becomes_a_dead_letter(kafka: EmbeddedKafka, topic_name: str) -> None:
    """It costs the partition as often as its limit says, then it is a dead letter, and the rest goes on."""
    tries: list[bytes] = []
    async with chain_of(kafka, topic_name, 1) as chain:
        await send(chain)
        worker = chain.worker(slow_at(topic_name, tries), **QUICK)

        async def done() -> bool:
            return len(await chain.values("out")) == 3

        async with running(worker):
            await until(done)
        assert await chain.values("out") == [b'{"n":1}', b'{"n":2}', b'{"n":3}']
        assert len(tries) == ATTEMPTS_MAX
        (letter,) = await chain.read(f"{topic_name}-dlq")
        dead = parse_dead_letter(letter)
        assert (dead.record.offset, dead.stage, dead.record.value) == (2, "process", b'{"n":"slow"}')
        assert f"{topic_name}-0@2 took " in dead.message
        assert "2 times in a row the group gave the instance up before a commit (slow_record" in dead.message


async def test_a_slow_record_among_columns_is_the_one_that_becomes_a_dead_letter(
    kafka: EmbeddedKafka, topic_name: str
) -> None:
    """The batch costs the partition once more; then its records are taken one by one, and the others are counted."""
    tries: list[bytes | None] = []

    def decode(topic: str, value: bytes | None) -> bytes | None:
        if value == b"slow":
            tries.append(value)
            time.sleep(STEP_SECONDS)
        return value

    builder = StreamsBuilder()
    windows = builder.stream(topic_name, value=decode).group_by_key().tumbling_window(60_000)
    windows.aggregate("s", n=Count()).on_update().to(f"{topic_name}-out")
    values = [b"slow" if i == 10 else b"x" for i in range(2 * COLUMNS_MIN)]
    async with chain_of(kafka, topic_name, 1) as chain:
        async with Producer(chain.kafka) as producer:
            given = [ProducerRecord(chain.topic, value, b"a", timestamp=1_000) for value in values]
            await (await producer.send_many(given))

        async def done() -> bool:
            return bool(await chain.values("out"))

        async with running(chain.worker(builder.build(), **QUICK)):
            await until(done)
        assert [msgspec.json.decode(value)["n"] for value in await chain.values("out")] == [len(values) - 1]
        assert len(tries) == 1 + ATTEMPTS_MAX
        (letter,) = await chain.read(f"{topic_name}-dlq")
        assert parse_dead_letter(letter).record.offset == 10


async def test_under_fail_a_record_that_is_too_slow_ends_the_worker(kafka: EmbeddedKafka, topic_name: str) -> None:
    """The error names topic, partition, offset, the handler and both limits."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await send(chain)
        given = {**QUICK, "processing_exception_handler": "fail"}
        says = rf"{topic_name}-0@2 \(processing_exception_handler is fail\).* took .*slow_record_attempts_max=2"
        with pytest.raises(ProcessingFailed, match=says):
            async with running(chain.worker(slow_at(topic_name, []), **given)) as loop:
                await asyncio.wait_for(loop, WAIT_SECONDS)


async def test_a_punctuation_that_is_too_slow_ends_the_worker(kafka: EmbeddedKafka, topic_name: str) -> None:
    """There is no record to refuse: the error names the punctuation's partition and the limits."""

    class Slow(Processor):
        """Its one wall-clock call takes longer than the session."""

        def init(self, context: ProcessorContext) -> None:
            super().init(context)
            context.schedule(10, PunctuationType.WALL_CLOCK_TIME, lambda now: time.sleep(STEP_SECONDS), name="slow")

        def process(self, record: Record) -> None:
            """Nothing."""

    builder = StreamsBuilder()
    builder.stream(topic_name).process(Slow)
    says = r"a WALL_CLOCK_TIME punctuation of partition 0 took \d+ ms .* 2 times in a row"
    async with chain_of(kafka, topic_name, 1) as chain:
        with pytest.raises(ProcessingFailed, match=says):
            async with running(chain.worker(builder.build(), **QUICK)) as loop:
                await asyncio.wait_for(loop, WAIT_SECONDS)
