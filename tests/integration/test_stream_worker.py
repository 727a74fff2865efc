"""The stream worker on a real broker: both guarantees, crashes, rebalances, fencing and errors at the start."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest

from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common import log
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    ChangelogHole,
    PenstockError,
    ProcessingFailed,
    ProducerFenced,
    SchemaMismatch,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import Columns, ConsumerRecord, GroupMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings, LogSettings
from penstock.shared.streams.aggregations.aggregation import Aggregate, Aggregation, Count, Sum
from penstock.shared.streams.changelog.changelog_reader import ChangelogReader, ignore_changes
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.error_handlers import ErrorHandlers
from penstock.shared.streams.processor import Processor, ProcessorContext
from penstock.shared.streams.punctuation import PunctuationType
from penstock.shared.streams.record import Record
from penstock.shared.streams.runtime.application_topics import prepare_topics
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.source_positions import AheadPartition, GroupAhead
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.local_state import LocalState
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.integration.stream_worker_child import WorkerProcess
from tests.shared_broker import Broker

GUARANTEES = ("exactly_once", "at_least_once")
GAP_MS, GRACE_MS = 100, 50
WAIT_SECONDS = 30.0
KEYS = [f"key-{i}".encode() for i in range(7)]

Event = tuple[int, bytes, int, int]
"""Partition, key, timestamp, number."""


def topology(topic: str, **more: Aggregation[Any]) -> Topology:
    builder = StreamsBuilder()
    windows = builder.stream(topic).group_by_key().session_window(GAP_MS, GRACE_MS)
    windows.aggregate("s", **{"n": Count(), "sum": Sum("id"), **more}).on_close().to(f"{topic}-out")
    return builder.build()


def events(number: int, partitions: int, first: int = 0) -> list[Event]:
    """Events whose sessions merge, close and come late, in each partition; numbered from `first`."""
    out = []
    for i in range(first, first + number):
        back = 90 if i % 7 == 0 else 400 if i % 31 == 0 else 0
        out.append((i % partitions, KEYS[i * 5 % 7], max(0, i * 13 - back), i))
    return out


def uninterrupted(
    topic: str, given: list[Event], partition: int = 0, build: Topology | None = None
) -> TopologyTestDriver:
    """A driver that has processed a partition's events as one batch. The default topology has sessions.

    One batch is faster by far than a commit for each record, and has the same results (`batches_beside_records`).
    """
    driver = TopologyTestDriver(build or topology(topic), partition=partition, errors=ErrorHandlers())
    driver.pipe_columns(topic, [(key, b'{"id":%d}' % i, at) for p, key, at, i in given if p == partition])
    return driver


def offline(
    topic: str, given: list[Event], build: Topology | None = None, **more: Aggregation[Any]
) -> tuple[list[bytes], list[bytes]]:
    """Closed windows and late records of an uninterrupted run over each partition, sorted.

    The default topology has sessions.
    """
    closed: list[bytes] = []
    late: list[bytes] = []
    for partition in {event[0] for event in given}:
        driver = uninterrupted(topic, given, partition, build or topology(topic, **more))
        closed += [record.value or b"" for record in driver.read(f"{topic}-out")]
        late += [record.value or b"" for record in driver.read(f"{topic}-late")]
    return sorted(closed), sorted(late)


def kafka_of(broker: EmbeddedKafka) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=broker.bootstrap_servers)


def settings_of(application: str, **given: Any) -> StreamsSettings:
    quick = {
        "commit_interval_ms": 50,
        "poll_ms": 50,
        "session_timeout_ms": 3_000,
        "heartbeat_interval_ms": 200,
        "topic_wait_ms": 5_000,
    }
    return StreamsSettings(**{"application_id": application, **quick, **given})


@dataclass
class Chain:
    """A source topic, with methods that send to it and read the topics of its application."""

    kafka: KafkaSettings
    topic: str
    partitions: int
    sent: list[Event] = field(default_factory=list)

    def settings(self, **given: Any) -> StreamsSettings:
        return settings_of(self.topic, **given)

    async def send(self, number: int) -> None:
        """Send `number` more events, each to its partition."""
        new = events(number, self.partitions, first=len(self.sent))
        records = [ProducerRecord(self.topic, b'{"id":%d}' % i, key, (), p, at) for p, key, at, i in new]
        async with Producer(self.kafka, ProducerSettings(linger_ms=0)) as producer:
            results = await (await producer.send_many(records))
        assert not [r for r in results if isinstance(r, BaseException)]
        self.sent += new

    def worker(self, build: Topology | None = None, **given: Any) -> StreamWorker:
        return StreamWorker(self.kafka, self.settings(**given), build or topology(self.topic))

    async def read(self, topic: str) -> list[ConsumerRecord]:
        """Read all committed records of a topic.

        A commit is answered before its markers are written: for some ms the last stable offset is before the committed
        records. So this reads to the end offset, not to the last stable offset.
        """
        settings = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="none")
        out: list[ConsumerRecord] = []
        at = [TopicPartition(topic, p) for p in range(self.partitions)]
        async with Consumer(self.kafka, settings) as consumer, Consumer(self.kafka) as uncommitted:
            consumer.assign(at)
            ends = await uncommitted.end_offsets(at)
            await consumer.seek_to_beginning(*at)
            for partition in at:
                while await consumer.position(partition) < ends[partition]:
                    for columns in (await consumer.poll(500)).values():
                        out += columns.records()
        return out

    async def values(self, suffix: str) -> list[bytes]:
        return sorted(record.value or b"" for record in await self.read(f"{self.topic}-{suffix}"))

    async def confirmed(self, partition: int) -> ChangelogReader:
        """A reader that has read the whole changelog partition."""
        reader = ChangelogReader(ignore_changes)
        for record in await self.read(f"{self.topic}-changelog"):
            if record.partition == partition:
                reader.feed_record(record.offset, record.key, record.value)
        return reader

    async def wait_processed(self, *workers: StreamWorker) -> None:
        """Wait until the committed positions of all workers together have reached the ends of the source."""
        wanted = {p: sum(1 for e in self.sent if e[0] == p) for p in range(self.partitions)}

        async def done() -> bool:
            got: dict[int, int] = {}
            for worker in workers:
                for partition, owned in worker.tasks().items():
                    if owned.task is not None and not owned.task.needs_commit:
                        got[partition] = owned.task.sources.get(self.topic, 0)
            return all(got.get(p, 0) >= n for p, n in wanted.items())

        await until(done)


async def until(done: Callable[[], Awaitable[bool]], seconds: float = WAIT_SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not await done():
        assert time.monotonic() < deadline, "it did not come about in time"
        await asyncio.sleep(0.02)


async def _loop(worker: StreamWorker) -> None:
    while True:
        await worker.run_once()


@asynccontextmanager
async def running(worker: StreamWorker) -> AsyncIterator[asyncio.Task[None]]:
    """Run the worker's loop, and shut the worker down on exit; an error of the loop is raised there."""
    await worker.startup()
    loop = asyncio.create_task(_loop(worker))
    try:
        yield loop
    finally:
        loop.cancel()
        try:
            with contextlib.suppress(asyncio.CancelledError):
                await loop
        finally:
            await worker.shutdown()


async def wait_or_raise(loop: asyncio.Task[None], coming: Coroutine[Any, Any, None]) -> None:
    """Wait for a coroutine, or raise the error of the loop if it ends first."""
    waiting = asyncio.create_task(coming)
    try:
        await asyncio.wait([waiting, loop], return_when=asyncio.FIRST_COMPLETED)
        await (waiting if waiting.done() else loop)
    finally:
        waiting.cancel()


@asynccontextmanager
async def chain_of(broker: EmbeddedKafka, topic: str, partitions: int = 2) -> AsyncIterator[Chain]:
    kafka = kafka_of(broker)
    async with Admin(kafka) as admin:
        await admin.create_topics([event_time_topic(topic, partitions)])
    yield Chain(kafka, topic, partitions)


@asynccontextmanager
async def child(
    chain: Chain, guarantee: str, build: str = "sessions", dies_after: tuple[str, int] | None = None, **given: Any
) -> AsyncIterator[WorkerProcess]:
    """Run a worker with the named topology in a separate process.

    It is killed on exit, or kills itself after a number of calls at one of its POINTS.
    """
    config = {
        "kafka": chain.kafka.bootstrap_servers,
        "topic": chain.topic,
        "build": build,
        "settings": chain.settings(processing_guarantee=guarantee, **given).model_dump(),
    } | ({"dies_after": dies_after} if dies_after else {})
    process = WorkerProcess(msgspec.json.encode(config))
    try:
        yield process
    finally:
        process.kill()
        await process.wait()


# --- sessions end to end ---


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_sessions_end_to_end(kafka: Broker, topic_name: str, guarantee: str) -> None:
    """Closed sessions and late records equal those of an offline run, and the group's offsets are committed."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(300)
        worker = chain.worker(processing_guarantee=guarantee)
        async with running(worker):
            await chain.wait_processed(worker)
            await chain.send(300)
            await chain.wait_processed(worker)
            described = worker.describe()
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
        assert described["processing_guarantee"] == guarantee
        assert [(t["partition"], t["state"], t["records"]) for t in described["tasks"]] == [
            (0, "running", 300),
            (1, "running", 300),
        ]
        async with Admin(chain.kafka) as admin:
            offsets = await admin.group_offsets(topic_name)
        assert {at.partition: to.offset for at, to in offsets.items()} == {0: 300, 1: 300}


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_a_commit_of_progress_alone(kafka: Broker, topic_name: str, guarantee: str) -> None:
    """The positions of records without output or state changes are committed."""
    builder = StreamsBuilder()
    builder.stream(topic_name).filter(lambda record: False).to(f"{topic_name}-out")
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(10)
        async with running(worker := chain.worker(builder.build(), processing_guarantee=guarantee)):
            await chain.wait_processed(worker)
        progress = [(await chain.confirmed(p)).progress for p in (0, 1)]
        assert [one.sources if one else None for one in progress] == [{topic_name: 5}] * 2


async def test_a_restarted_worker_continues(kafka: Broker, topic_name: str) -> None:
    """After a clean shutdown the next worker has the open sessions and repeats no output."""
    async with chain_of(kafka, topic_name) as chain:
        for _ in range(3):
            await chain.send(100)
            worker = chain.worker()
            async with running(worker):
                await chain.wait_processed(worker)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
        assert [(await chain.confirmed(p)).epoch for p in range(2)] == [3, 3]


async def test_wall_clock_punctuation_runs_and_its_grid_survives(kafka: Broker, topic_name: str) -> None:
    """A wall-clock schedule fires while no record is read, and a restarted worker keeps the committed grid."""
    grids: list[int] = []

    class Ticking(Processor):
        """Records when its schedule is first due."""

        def init(self, context: ProcessorContext) -> None:
            self.fired = 0
            schedule = context.schedule(200, PunctuationType.WALL_CLOCK_TIME, self._tick, name="tick")
            grids.append(schedule.due_ms)

        def process(self, record: Record) -> None:
            pass

        def _tick(self, now_ms: int) -> None:
            self.fired += 1

    async with chain_of(kafka, topic_name, partitions=1) as chain:
        builder = StreamsBuilder()
        builder.stream(topic_name).process(Ticking)
        for _ in range(2):
            worker = chain.worker(builder.build())

            async def fired(worker: StreamWorker = worker) -> bool:
                tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
                return any(p.fired >= 2 for task in tasks for p in task._processors.values())  # type: ignore[attr-defined]

            async with running(worker):
                await until(fired)
                await chain.send(1)  # a firing without effect is committed with the next record
                await chain.wait_processed(worker)
        assert grids[1] > grids[0]
        assert (grids[1] - grids[0]) % 200 == 0


# --- killed workers, and several workers ---


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_a_killed_worker_is_continued_exactly(kafka: Broker, topic_name: str, guarantee: str) -> None:
    """After SIGKILL under load, output (exactly_once) or state (both guarantees) equals that of an uninterrupted
    run.
    """
    async with chain_of(kafka, topic_name, partitions=1) as chain:
        await chain.send(3_000)
        async with child(chain, guarantee) as process:
            assert await process.has_committed(WAIT_SECONDS)
            os.kill(process.pid, signal.SIGKILL)
        progress = (await chain.confirmed(0)).progress
        assert progress is not None
        assert 0 < progress.sources[topic_name] < 3_000
        await chain.send(200)
        worker = chain.worker(processing_guarantee=guarantee)
        async with running(worker):
            await chain.wait_processed(worker)
            (owned,) = worker.tasks().values()
            assert owned.task is not None
            assert owned.task.epoch == 2
            live = {(s.key, s.start, s.end, *s.states) for s in owned.task.stores["s"].rows()}
        driver = uninterrupted(topic_name, chain.sent)
        assert live == {(s.key, s.start, s.end, *s.states) for s in driver.task.stores["s"].rows()}
        closed, late = offline(topic_name, chain.sent)
        got = await chain.values("out"), await chain.values("late")
        if guarantee == "exactly_once":
            assert got == (closed, late)
        else:  # results may come twice, but none is wrong or missing
            assert (set(got[0]), set(got[1])) == (set(closed), set(late))


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_two_workers_share_and_rebalance(kafka: Broker, topic_name: str, strategy: str) -> None:
    """While partitions move to a second worker and back, no session is lost, repeated or split."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(200)
        first, second = (chain.worker(partition_assignment_strategy=strategy) for _ in range(2))

        async def shared() -> bool:
            return [len(w.tasks()) for w in (first, second)] == [1, 1]

        async with running(first):
            await chain.wait_processed(first)
            async with running(second):
                await chain.send(200)
                await until(shared)
                await chain.send(200)
                await chain.wait_processed(first, second)
            await chain.send(200)
            await chain.wait_processed(first)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def test_a_rebalance_during_a_poll_loses_no_record(kafka: Broker, topic_name: str) -> None:
    """If partitions are revoked and assigned again during a poll, the records of that poll are processed."""
    async with chain_of(kafka, topic_name) as chain:
        await chain.send(100)
        worker = chain.worker(poll_ms=1_000)
        async with running(worker) as loop:
            await chain.wait_processed(worker)
            loop.cancel()
            await asyncio.wait([loop])
            both = frozenset(TopicPartition(topic_name, p) for p in range(2))
            await worker.on_partitions_revoked(both)
            turn = asyncio.create_task(worker.run_once())
            await asyncio.sleep(0)
            await worker.on_partitions_assigned(both)
            await chain.send(100)
            await asyncio.wait_for(turn, WAIT_SECONDS)
            again = asyncio.create_task(_loop(worker))
            await chain.wait_processed(worker)
            again.cancel()
            await asyncio.wait([again])
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


# --- records that cannot be processed or written ---


async def test_a_tombstone_does_not_stop_the_worker(kafka: Broker, topic_name: str) -> None:
    """A tombstone for which user code raises becomes a dead letter with its offset, and the worker continues."""
    builder = StreamsBuilder()
    stream = builder.stream(topic_name).filter(lambda record: record.value["id"] >= 0)
    stream.group_by_key().session_window(GAP_MS, GRACE_MS).aggregate("s", n=Count(), sum=Sum("id")).on_close().to(
        f"{topic_name}-out"
    )
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        async with Producer(chain.kafka) as producer:
            await (await producer.send(topic_name, None, key=b"key-1", partition=0, timestamp=1_300))
        worker = chain.worker(builder.build())
        async with running(worker):
            await until_position(worker, chain, 101)
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)
        (dead,) = await chain.read(f"{topic_name}-dlq")
        dead_letter = parse_dead_letter(dead)
        assert (dead_letter.record.offset, dead_letter.record.value, dead_letter.stage) == (100, None, "process")
        assert dead_letter.exception == "TypeError"
        assert (await chain.confirmed(0)).epoch == 1


async def test_the_largest_record_fits_into_the_dead_letter_topic(kafka: Broker, topic_name: str) -> None:
    """A record that just fits into its topic also fits into the dead-letter topic, with all its headers."""
    async with chain_of(kafka, topic_name, 1) as chain:
        value = b"{" * (1024 * 1024 - 200)
        async with Producer(chain.kafka) as producer:
            await (await producer.send(topic_name, value, key=b"k", partition=0))
        worker = chain.worker()
        async with running(worker):
            await until_position(worker, chain, 1)
        (dead,) = await chain.read(f"{topic_name}-dlq")
        assert dead.value == value


async def until_position(worker: StreamWorker, chain: Chain, position: int) -> None:
    async def done() -> bool:
        tasks = [owned.task for owned in worker.tasks().values()]
        return any(t is not None and not t.needs_commit and t.sources.get(chain.topic) == position for t in tasks)

    await until(done)


async def make_narrow(chain: Chain, topic: str) -> None:
    """Create a topic that accepts small records only."""
    async with Admin(chain.kafka) as admin:
        await admin.create_topics([NewTopic(topic, 1, configs={"max.message.bytes": "10000"})])


async def test_a_result_over_its_topics_limit_stops_the_worker(kafka: Broker, topic_name: str) -> None:
    """A result over its topic's limit stops the worker, and the error names partition, key, size and limit."""
    builder = StreamsBuilder()
    builder.stream(topic_name).map_values(lambda value: "x" * value["size"]).to(out := f"{topic_name}-out")
    async with chain_of(kafka, topic_name, 1) as chain:
        await make_narrow(chain, out)
        async with Producer(chain.kafka) as producer:
            for size in (5, 20_000, 6):
                await (await producer.send(topic_name, b'{"size":%d}' % size, key=b"k", partition=0))
        message = rf"{topic_name}-0@3: topic {out}, partition 0: .*key b'k'.*max_request_size=1048576"
        for _ in range(2):
            with pytest.raises(ProcessingFailed, match=message):
                async with running(chain.worker(builder.build())) as loop:
                    await asyncio.wait_for(loop, WAIT_SECONDS)
        async with running(worker := chain.worker(builder.build(), max_request_size=10_000)):
            await until_position(worker, chain, 3)
        assert [len(record.value or b"") - 2 for record in await chain.read(out)] == [5, 6]
        dead_letters = [parse_dead_letter(record) for record in await chain.read(f"{topic_name}-dlq")]
        assert [(dead_letter.record.offset, dead_letter.stage) for dead_letter in dead_letters] == [(1, "produce")]


async def test_a_record_that_makes_a_state_unencodable_is_a_dead_letter(kafka: Broker, topic_name: str) -> None:
    """A record that makes a state impossible to encode becomes a dead letter, and the window continues without it."""
    builder = StreamsBuilder()
    every = Aggregate(list, lambda state, value: [*state, value or object()], lambda a, b: a + b)
    windows = builder.stream(topic_name).group_by_key().session_window(GAP_MS, GRACE_MS)
    windows.aggregate("s", all=every).on_close().to(f"{topic_name}-out")
    async with chain_of(kafka, topic_name, 1) as chain:
        worker = chain.worker(builder.build())
        async with Producer(chain.kafka) as producer, running(worker):
            for at, value in ((0, b"1"), (1, b"0"), (2, b"2")):
                await (await producer.send(topic_name, value, key=b"k", partition=0, timestamp=at))
            await until_position(worker, chain, 3)
            await (await producer.send(topic_name, b"3", key=b"k", partition=0, timestamp=1_000))
            await until_position(worker, chain, 4)
        assert await chain.values("out") == [b'{"key":"k","start":0,"end":2,"all":[1,2]}']
        dead_letters = [parse_dead_letter(record) for record in await chain.read(f"{topic_name}-dlq")]
        assert [(dead_letter.record.offset, dead_letter.exception) for dead_letter in dead_letters] == [
            (1, "TypeError")
        ]


# --- shutting down ---


async def until_all_processed(worker: StreamWorker, chain: Chain) -> None:
    async def done() -> bool:
        tasks = [owned.task for owned in worker.tasks().values() if owned.task is not None]
        return sum(task.sources.get(chain.topic, 0) for task in tasks) == len(chain.sent)

    await until(done)


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_a_shutdown_commits_after_the_loop_is_cancelled(kafka: Broker, topic_name: str, guarantee: str) -> None:
    """If the loop is cancelled at any moment of a commit, the shutdown commits all records that were processed."""
    async with chain_of(kafka, topic_name, 1) as chain:
        for turn in range(6):
            await chain.send(50)
            worker = chain.worker(processing_guarantee=guarantee, commit_interval_ms=1)
            await worker.startup()
            loop = asyncio.create_task(_loop(worker))

            async def taken(worker: StreamWorker = worker) -> bool:
                return any(
                    owned.task is not None and owned.task.sources.get(topic_name, 0) >= len(chain.sent)
                    for owned in worker.tasks().values()
                )

            await until(taken)
            for _ in range(turn * 3):
                await asyncio.sleep(0)
            loop.cancel()
            await asyncio.wait([loop])
            await worker.shutdown()
            progress = (await chain.confirmed(0)).progress
            assert progress is not None
            assert progress.sources[topic_name] >= len(chain.sent)


@contextmanager
def unretrieved() -> Iterator[list[dict[str, Any]]]:
    """Within the context, keep what the event loop reports to its exception handler."""
    left: list[dict[str, Any]] = []
    loop = asyncio.get_running_loop()
    before = loop.get_exception_handler()
    loop.set_exception_handler(lambda _, context: left.append(context))
    try:
        yield left
    finally:
        loop.set_exception_handler(before)


@pytest.mark.parametrize("guarantee", GUARANTEES)
async def test_a_shutdown_without_kafka_keeps_its_limit(
    stoppable_kafka: EmbeddedKafka, topic_name: str, guarantee: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a broker that does not answer, the shutdown ends in time, logs the uncommitted partitions, and leaves no
    unretrieved exception.
    """
    log.configure(LogSettings(format="json"), "test")
    async with chain_of(stoppable_kafka, topic_name) as chain:
        worker = chain.worker(processing_guarantee=guarantee, commit_interval_ms=3_600_000)
        await worker.startup()
        loop = asyncio.create_task(_loop(worker))
        await chain.send(100)
        await until_all_processed(worker, chain)
        stoppable_kafka.pause()
        try:
            loop.cancel()
            await asyncio.wait([loop])
            started = time.monotonic()
            await worker.shutdown(4_000)
            assert time.monotonic() - started < 4.5
        finally:
            stoppable_kafka.resume()
        lines = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        (line,) = [line for line in lines if line["event"].startswith("the last commit failed")]
        assert (line["partitions"], line["level"]) == ([0, 1], "error")
        with unretrieved() as left:
            del worker, loop
            gc.collect()
            await asyncio.sleep(0)
        assert left == []
        again = chain.worker(processing_guarantee=guarantee)
        async with running(again):
            await chain.wait_processed(again)
        closed, late = offline(topic_name, chain.sent)
        assert (set(await chain.values("out")), set(await chain.values("late"))) == (set(closed), set(late))


# --- fencing ---


@asynccontextmanager
async def owner(
    chain: Chain, guarantee: str, local: LocalState | None = None
) -> AsyncIterator[tuple[ChangelogPartition, StreamTask]]:
    """Take over partition 0, and yield its changelog and task."""
    settings = chain.settings(processing_guarantee=guarantee)
    await prepare_topics(chain.kafka, settings, topology(chain.topic), SYSTEM_CLOCK)
    changelog = ChangelogPartition(chain.kafka, settings, 0, "test")

    def make() -> StreamTask:
        return StreamTask(topology(chain.topic), 0, application=chain.topic, guarantee=guarantee, local=local)  # type: ignore[arg-type]

    try:
        await changelog.open()
        task, _ = await changelog.take_over(make)
        task.initialize(0)
        yield changelog, task
    finally:
        await changelog.close()


def process_records(task: StreamTask, chain: Chain, *timestamps: int) -> None:
    """Process records of key a from the task's position on."""
    first = task.sources.get(chain.topic, 0)
    records = [ConsumerRecord(chain.topic, 0, first + i, at, b"a", b'{"id":1}') for i, at in enumerate(timestamps)]
    task.process(Columns.of(records), 0)


async def commit(changelog: ChangelogPartition, task: StreamTask, chain: Chain) -> None:
    task.commit_succeeded(await changelog.commit(task.prepare_commit(0), GroupMetadata(chain.topic)))


async def test_an_old_owner_is_fenced_under_exactly_once(kafka: Broker, topic_name: str) -> None:
    """The broker fences a commit of the old owner after a takeover, and no reader sees its records."""
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, "exactly_once") as (old, old_task):
        process_records(old_task, chain, 0, 10)
        await commit(old, old_task, chain)
        async with owner(chain, "exactly_once") as (new, new_task):
            process_records(old_task, chain, 1_000)
            with pytest.raises(PenstockError) as raised:
                await commit(old, old_task, chain)
            assert type(raised.value).__name__ == "ProducerFenced"
            process_records(new_task, chain, 20, 2_000)
            await commit(new, new_task, chain)
        reader = await chain.confirmed(0)
        assert (reader.epoch, reader.entries_ignored) == (2, 0)
        assert reader.progress is not None
        assert reader.progress.sources == {topic_name: 4}
        assert await chain.values("out") == [b'{"key":"a","start":0,"end":20,"n":3,"sum":3.0}']


async def test_an_old_owner_is_ignored_under_at_least_once(kafka: Broker, topic_name: str) -> None:
    """Without transactions an old owner can still write, but readers ignore its entries, and its commit fails."""
    async with chain_of(kafka, topic_name, 1) as chain, owner(chain, "at_least_once") as (old, old_task):
        process_records(old_task, chain, 0, 10)
        await commit(old, old_task, chain)
        async with owner(chain, "at_least_once") as (new, new_task):
            process_records(old_task, chain, 11, 12, 13)
            written = old_task.prepare_commit(0)
            with pytest.raises(ProducerFenced, match="offset 3"):
                await old.commit(written, GroupMetadata(topic_name))
            process_records(new_task, chain, 20)
            await commit(new, new_task, chain)
            with pytest.raises(ProducerFenced, match="offset 3"):
                await old.commit(written, GroupMetadata(topic_name))
        reader = await chain.confirmed(0)
        assert (reader.epoch, reader.entries_ignored) == (2, 4)
        async with owner(chain, "at_least_once") as (_, third):
            assert (third.epoch, third.sources) == (3, {topic_name: 3})
            (session,) = third.stores["s"].rows()
            assert (session.end, session.states[0]) == (20, 3)


@pytest.mark.parametrize("generations", [0, 1, 2])  # a static member may return in the same generation
async def test_a_task_is_kept_only_over_the_next_generation(kafka: Broker, topic_name: str, generations: int) -> None:
    """A member that missed a generation restores its task, since another member may have owned it meanwhile."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(10)
        worker = chain.worker(processing_guarantee="at_least_once")
        async with running(worker) as loop:
            await chain.wait_processed(worker)
            loop.cancel()
            await asyncio.wait([loop])
            mine = frozenset({TopicPartition(topic_name, 0)})
            before = worker.tasks()[0]
            await worker.on_partitions_revoked(mine)
            worker._revoked_in = worker.consumer.group_metadata().generation_id - generations
            await worker.on_partitions_assigned(mine)
            after = worker.tasks()[0]
            assert (after is before) == (generations < 2)
            while after.task is None:
                await worker.run_once()
            assert (after.task.epoch, after.task.sources) == (max(1, generations), {topic_name: 10})


async def test_concurrent_owners_have_different_epochs(kafka: Broker, topic_name: str) -> None:
    """Owners that take over at the same moment get different epochs: there is one writer at a time."""
    async with chain_of(kafka, topic_name, 1) as chain:
        settings = chain.settings(processing_guarantee="at_least_once")
        await prepare_topics(chain.kafka, settings, topology(topic_name), SYSTEM_CLOCK)

        async def epoch() -> int:
            async with owner(chain, "at_least_once") as (_, task):
                return task.epoch

        epochs = await asyncio.gather(*(epoch() for _ in range(4)))
        assert len(set(epochs)) == 4


# --- errors at the start ---


async def test_a_hole_in_the_changelog_is_an_error(kafka: Broker, topic_name: str) -> None:
    """If changelog records were deleted and no snapshot covers them, the worker ends and names the offsets."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
        async with Admin(chain.kafka) as admin:
            await admin.delete_records({TopicPartition(f"{topic_name}-changelog", 0): 3})
        with pytest.raises(ChangelogHole, match="offsets 0 to 2"):
            async with running(chain.worker()) as loop:
                await asyncio.wait_for(loop, WAIT_SECONDS)


async def delete_changelog(chain: Chain) -> None:
    """Delete the changelog topic but not the group's offsets; the next worker creates an empty one."""
    changelog = f"{chain.topic}-changelog"
    async with Admin(chain.kafka) as admin:
        await admin.delete_topics([changelog])

        async def gone() -> bool:
            return changelog not in await admin.list_topics()

        await until(gone)


async def test_an_empty_changelog_with_group_offsets_is_an_error(kafka: Broker, topic_name: str) -> None:
    """If the group has offsets and the changelog is empty, the worker ends and names the partition and both
    positions.
    """
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
        await delete_changelog(chain)
        with pytest.raises(GroupAhead, match="the state was lost") as raised:
            async with running(chain.worker()) as loop:
                await asyncio.wait_for(loop, WAIT_SECONDS)
        assert raised.value.ahead == (AheadPartition(TopicPartition(topic_name, 0), 100, None, True),)


async def test_start_from_group_offsets(kafka: Broker, topic_name: str) -> None:
    """With `start_from_group_offsets` a worker with an empty changelog starts with empty state at the group's offsets;
    later starts need no flag.
    """
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
        closed, late = offline(topic_name, chain.sent)
        await delete_changelog(chain)
        await chain.send(100)
        worker = chain.worker(start_from_group_offsets=True)
        async with running(worker):
            await chain.wait_processed(worker)
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
        closed_since, late_since = offline(topic_name, chain.sent[100:])
        assert (await chain.values("out"), await chain.values("late")) == (
            sorted(closed + closed_since),
            sorted(late + late_since),
        )


async def test_a_group_offset_that_was_set_back_is_ignored(
    kafka: Broker, topic_name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The changelog's position takes precedence over an older offset of the group, with a warning that names the
    partition.
    """
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
        at = TopicPartition(topic_name, 0)
        async with Admin(chain.kafka) as admin:
            await admin.alter_group_offsets(topic_name, {at: 40})
        log.configure(LogSettings(format="json"), "test")
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
            (owned,) = worker.tasks().values()
            assert owned.task is not None
            assert owned.task.metrics.records_total == 100
        lines = [msgspec.json.decode(line) for line in capsys.readouterr().err.splitlines() if line.startswith("{")]
        assert [
            line["topic_partition"] for line in lines if line["event"].startswith("the group's offset was set")
        ] == [str(at)]
        assert (await chain.values("out"), await chain.values("late")) == offline(topic_name, chain.sent)


async def test_a_topology_with_other_aggregations_is_an_error(kafka: Broker, topic_name: str) -> None:
    """State of a topology with other aggregations ends the worker with the difference, and the state is unchanged."""
    async with chain_of(kafka, topic_name, 1) as chain:
        await chain.send(100)
        worker = chain.worker()
        async with running(worker):
            await chain.wait_processed(worker)
        before = (await chain.confirmed(0)).epoch
        with pytest.raises(SchemaMismatch, match=r"'s'.*sum"):
            async with running(chain.worker(topology(topic_name, sum=Count()))) as loop:
                await asyncio.wait_for(loop, WAIT_SECONDS)
        assert (await chain.confirmed(0)).epoch == before


async def test_a_missing_source_topic_is_named(kafka: Broker, topic_name: str) -> None:
    """A source topic that is missing after `topic_wait_ms` ends the start with its name, and no topic is created."""
    settings = settings_of(topic_name, topic_wait_ms=300)
    worker = StreamWorker(kafka_of(kafka), settings, topology(topic_name))
    with pytest.raises(UnknownTopicOrPartition, match=f"{topic_name} .*300 ms"):
        await worker.startup()
    async with Admin(kafka_of(kafka)) as admin:
        assert not [name for name in await admin.list_topics() if name.startswith(topic_name)]
    await worker.shutdown()


async def test_a_source_topic_that_is_created_later(kafka: Broker, topic_name: str) -> None:
    """A worker waits for its source topic, and then creates its own topics with as many partitions."""
    settings = settings_of(topic_name)
    waiting = asyncio.create_task(prepare_topics(kafka_of(kafka), settings, topology(topic_name), SYSTEM_CLOCK))
    async with Admin(kafka_of(kafka)) as admin:
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await admin.create_topics([NewTopic(topic_name, 3)])
        await waiting
        names = [f"{topic_name}-{suffix}" for suffix in ("out", "late", "dlq", "changelog")]
        described = await admin.describe_topics(names)
        assert {len(topic.partitions) for topic in described.values()} == {3}
        configs = await admin.describe_configs(f"{topic_name}-changelog")
        assert (configs["cleanup.policy"], configs["retention.ms"]) == ("delete", "-1")
        assert configs["message.timestamp.type"] == "LogAppendTime"
