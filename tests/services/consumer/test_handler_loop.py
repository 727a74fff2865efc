"""The handler loop against a fake broker: commits, lost partitions and drains."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.services.consumer.commits import OffsetCommits
from penstock.services.consumer.executor import Executor
from penstock.services.consumer.handler_loop import HandlerLoop, HandlerLoopOptions
from penstock.services.consumer.handlers import Handler
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.parallel_consumer.commit_metadata import encode_finished
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import KafkaTimeout
from penstock.shared.common.records import Columns, ConsumerRecord, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, ErrorCode, Fail, FakeCluster
from penstock.shared.testing.manual_clock import ManualClock

T = TopicPartition("t", 0)
RECORDS = 40


async def no_dead_letters(records: Sequence[ProducerRecord]) -> Sequence[Exception | None]:
    pytest.fail(f"dead letters: {records}")


async def until(true: Callable[[], object]) -> None:
    while True:
        if true():
            return
        await asyncio.sleep(0)


@asynccontextmanager
async def serving(
    cluster: FakeCluster, handle: Callable[[ConsumerRecord], Awaitable[object]], **given: object
) -> AsyncIterator[HandlerLoop]:
    """Run a runner and stop it at the end like a daemon."""
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=5)
    reading = {"heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20, "session_timeout_ms": 300}
    settings = ConsumerServiceSettings.model_validate(
        {"kafka": kafka, "topics": ("t",), "group_id": "g", "handler": "tests:handle", "commit_interval_ms": 10}
        | {"consumer": reading | given.pop("consumer", {})} | given  # type: ignore[operator]
    )  # fmt: skip
    metrics = RunnerMetrics(CollectorRegistry(), "g")
    executor = Executor(Handler("tests:handle", handle), settings.retry_policy(), no_dead_letters, metrics, group="g")
    async with asyncio.timeout(20), Consumer(kafka, settings.consumer_settings()) as consumer:
        scheduler = settings.scheduler(batch=False)
        runner = HandlerLoop(consumer, scheduler, executor, metrics, SYSTEM_CLOCK, settings.handler_loop_options())
        runner.subscribe(["t"])
        running = asyncio.create_task(runner.run())
        yield runner
        running.cancel()
        await asyncio.wait([running])
        await runner.stop(1_000)


@asynccontextmanager
async def broker(records: int) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t")
        await send(cluster, records)
        yield cluster


async def send(cluster: FakeCluster, count: int) -> None:
    async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
        records = [ProducerRecord("t", b"%d" % i, b"%d" % i) for i in range(count)]
        assert not records or await (await producer.send_many(records)).first_error() is None


@pytest.mark.parametrize("commit_interval_ms", [10, 60_000])
async def test_the_position_in_an_idle_topic_is_committed(commit_interval_ms: int) -> None:
    """The position is committed immediately, so a record sent while no member runs is handled,
    although the policy is `latest`.
    """
    handled: list[int] = []

    async def handle(record: ConsumerRecord) -> None:
        handled.append(record.offset)

    async with broker(0) as cluster:
        async with serving(cluster, handle, commit_interval_ms=commit_interval_ms):
            await until(lambda: cluster.committed("g") == {T: OffsetAndMetadata(0)})
        await send(cluster, RECORDS)
        async with serving(cluster, handle):
            await until(lambda: len(handled) == RECORDS)


class QuietConsumer(Consumer):
    """Reads no records. Its commits wait for `let_commit`."""

    def __init__(self) -> None:
        super().__init__("localhost:9092", ConsumerSettings(group_id="g"))
        self.positions: dict[TopicPartition, int] = {}
        self.poll_limits_ms: list[float] = []
        self.commits: list[set[TopicPartition]] = []
        self.let_commit = asyncio.Event()

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self.positions)

    def known_position(self, tp: TopicPartition) -> int | None:
        return self.positions.get(tp)

    def known_lag(self, tp: TopicPartition) -> int | None:
        return None

    async def end_offsets(self, partitions: object) -> dict[TopicPartition, int]:
        return {}

    async def poll(self, timeout_ms: float, max_records: int | None = None) -> dict[TopicPartition, Columns]:
        self.poll_limits_ms.append(timeout_ms)
        await asyncio.sleep(0)
        return {}

    async def commit(self, offsets: Any = None, timeout_ms: float | None = None) -> None:
        self.commits.append(set(offsets))
        await self.let_commit.wait()


def idle_loop(consumer: QuietConsumer, *partitions: TopicPartition, commit_interval_ms: int) -> HandlerLoop:
    """Return a loop whose time stands still, with partitions that have no committed offset."""
    kafka = KafkaSettings(bootstrap_servers="localhost:9092")
    settings = ConsumerServiceSettings(kafka=kafka, topics=("t",), group_id="g", handler="tests:handle")
    metrics = RunnerMetrics(CollectorRegistry(), "g")
    handler = Handler("tests:handle", no_dead_letters)
    executor = Executor(handler, settings.retry_policy(), no_dead_letters, metrics, group="g")
    scheduler = settings.scheduler(batch=False)
    for partition in partitions:
        scheduler.assign(partition, None)
    options = HandlerLoopOptions(commit_interval_ms=commit_interval_ms)
    return HandlerLoop(consumer, scheduler, executor, metrics, ManualClock(), options)


async def test_a_first_position_that_comes_during_a_commit_is_committed_after_it() -> None:
    """It does not wait for `commit_interval_ms`. After a crash, `latest` would skip the records since then."""
    consumer = QuietConsumer()
    runner = idle_loop(consumer, T, other := TopicPartition("t", 1), commit_interval_ms=60_000)
    for tp in (T, other):
        consumer.positions[tp] = 0
        await runner.run_once()
    assert consumer.commits == [{T}]
    consumer.let_commit.set()
    for _ in range(3):
        await runner.run_once()
    assert consumer.commits == [{T}, {other}]


async def test_a_poll_during_a_commit_is_not_longer_than_the_commit_interval() -> None:
    """Otherwise a quiet topic's next commit would be late."""
    consumer = QuietConsumer()
    runner = idle_loop(consumer, T, commit_interval_ms=20)
    consumer.positions[T] = 0
    for _ in range(2):
        await runner.run_once()
    assert len(consumer.commits) == 1
    assert consumer.poll_limits_ms == [20, 20]


class LateOffsets(QuietConsumer):
    """The first request for committed offsets times out."""

    timeouts = 0

    async def committed(self, partitions: Any) -> Any:
        if not self.timeouts:
            self.timeouts += 1
            raise KafkaTimeout("the offsets are unstable")
        return dict.fromkeys(partitions, OffsetAndMetadata(5))


async def test_committed_offsets_may_be_unknown_for_longer_than_a_request() -> None:
    """A transaction of the previous owner may be open for longer. An error would end the consumer."""
    consumer = LateOffsets()
    runner = idle_loop(consumer, commit_interval_ms=60_000)
    await runner.on_partitions_assigned(frozenset({T}))
    assert (consumer.timeouts, runner.scheduler.partitions) == (1, {T})


async def test_lag_is_known_without_end_offsets(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the end offsets cannot be read, the lag comes from the last known ones, so a stuck
    handler is still detected.
    """
    monkeypatch.setattr("penstock.services.consumer.handler_loop.LAG_TIMEOUT_MS", 20)

    async def handle(_: ConsumerRecord) -> None:
        await asyncio.Event().wait()

    async with broker(RECORDS) as cluster:
        given = {"lag_interval_ms": 20, "stuck_after_ms": 50, "max_concurrency": 1}
        cluster.control(Api.LIST_OFFSETS, Fail(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION))
        await alter(cluster, 0)
        async with serving(cluster, handle, **given) as runner:
            await until(
                lambda: f"t-0: {RECORDS} records behind" in runner.progress.trouble(SYSTEM_CLOCK.monotonic_ms())
            )


async def alter(cluster: FakeCluster, offset: int) -> None:
    async with Admin(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as admin:
        await admin.alter_group_offsets("g", {T: offset})


async def test_a_handler_that_blocks_the_loop_loses_its_partitions(caplog: pytest.LogCaptureFixture) -> None:
    """The group removes a member whose handler blocks the loop; it logs the reason, rejoins,
    and handles uncommitted records again.
    """
    calls: list[int] = []

    async def handle(record: ConsumerRecord) -> None:
        calls.append(record.offset)
        if len(calls) == 5:
            end = time.monotonic() + 1.6
            while time.monotonic() < end:
                pass
            # The fake broker was blocked too, and may count an earlier heartbeat as new.
            cluster.control(Api.HEARTBEAT, Fail(ErrorCode.UNKNOWN_MEMBER_ID), times=1)

    async with broker(RECORDS) as cluster:
        consumer = {"auto_offset_reset": "earliest", "session_timeout_ms": 1_000}
        async with serving(cluster, handle, consumer=consumer, max_concurrency=1):
            await until(lambda: cluster.committed("g").get(T) == OffsetAndMetadata(RECORDS))
    assert "no heartbeat" in caplog.text
    assert "lost partitions=['t-0']" in caplog.text
    assert set(calls) == set(range(RECORDS))


@pytest.mark.parametrize("way", ["rebalance", "stop"])
async def test_a_drain_ends_after_its_own_limit(way: str) -> None:
    """A hanging handler is cancelled after `drain_timeout_ms`, not before, and long before the listener's limit."""
    drain_timeout_ms = 400
    begun, cancelled = asyncio.Event(), asyncio.Event()
    calls: list[int] = []

    async def handle(record: ConsumerRecord) -> None:
        calls.append(record.offset)
        if calls.count(0) == 1 and record.offset == 0:
            begun.set()
            try:
                await asyncio.Event().wait()
            finally:
                cancelled.set()

    async with broker(RECORDS) as cluster:
        # This is longer than the test may take.
        consumer = {"auto_offset_reset": "earliest", "listener_timeout_ms": 60_000}
        async with serving(cluster, handle, consumer=consumer) as runner:
            await begun.wait()
            runner.options = HandlerLoopOptions(commit_interval_ms=10, drain_timeout_ms=drain_timeout_ms)
            started = time.monotonic()
            if way == "rebalance":
                runner._consumer.enforce_rebalance()
            else:
                stopping = asyncio.create_task(runner.stop(drain_timeout_ms))
            await cancelled.wait()
            assert time.monotonic() - started > drain_timeout_ms / 1000 - 0.05
            if way == "rebalance":  # The same member gets the partition again.
                await until(lambda: cluster.committed("g").get(T) == OffsetAndMetadata(RECORDS))
            else:
                await stopping
    assert calls.count(0) == (2 if way == "rebalance" else 1)


async def test_a_drain_waits_for_handlers_that_end() -> None:
    """Within the drain's limit no handler is cancelled, and finished records are committed
    before the partition is released.
    """
    begun, free = asyncio.Event(), asyncio.Event()
    calls: list[int] = []

    async def handle(record: ConsumerRecord) -> None:
        calls.append(record.offset)
        if record.offset == RECORDS - 1:
            begun.set()
            await free.wait()

    async with broker(RECORDS) as cluster:
        consumer = {"auto_offset_reset": "earliest", "listener_timeout_ms": 60_000}
        async with serving(cluster, handle, consumer=consumer, max_concurrency=RECORDS) as runner:
            await begun.wait()
            await until(lambda: runner.finished == RECORDS - 1)
            runner._consumer.enforce_rebalance()
            await until(lambda: runner.scheduler._partitions[T].draining)
            for _ in range(100):
                await asyncio.sleep(0)
            free.set()
            await until(lambda: cluster.committed("g").get(T) == OffsetAndMetadata(RECORDS))
    assert sorted(calls) == list(range(RECORDS))


async def test_a_stop_while_the_partitions_are_lost() -> None:
    """If the partitions are lost during a stop, nothing more is committed, and the stop ends without an error."""
    begun = asyncio.Event()

    async def handle(_: ConsumerRecord) -> None:
        begun.set()
        await asyncio.Event().wait()

    async with broker(RECORDS) as cluster:
        async with serving(cluster, handle, consumer={"auto_offset_reset": "earliest"}) as runner:
            await begun.wait()
            await until(lambda: cluster.committed("g") == {T: OffsetAndMetadata(0)})
            stopping = asyncio.create_task(runner.stop(10_000))
            await asyncio.sleep(0)
            await runner.on_partitions_lost(frozenset({T}))
            await stopping
        assert cluster.committed("g") == {T: OffsetAndMetadata(0)}


async def test_a_paused_partition_may_be_lost() -> None:
    """If the group removes a member while a partition is paused and its handlers run, the
    member rejoins and continues.
    """
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t")
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, retry_backoff_ms=5)
        async with Producer(kafka) as producer:
            records = [ProducerRecord("t", b"%d" % i, b"%d" % i) for i in range(RECORDS)]
            assert await (await producer.send_many(records)).first_error() is None
        settings = ConsumerServiceSettings(
            kafka=kafka, topics=("t",), group_id="g", handler="tests:handle", buffered_records_max=10,
            max_concurrency=4, commit_interval_ms=10,
            consumer={
                "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20,
                "session_timeout_ms": 300,
            },
        )  # fmt: skip
        free, let_go, cancelled, turns = asyncio.Event(), asyncio.Event(), 0, 0

        async def handle(_: ConsumerRecord) -> None:
            nonlocal cancelled
            try:
                await free.wait()
            except asyncio.CancelledError:
                cancelled += 1
                await let_go.wait()
                raise

        metrics = RunnerMetrics(CollectorRegistry(), "g")
        executor = Executor(
            Handler("tests:handle", handle), settings.retry_policy(), no_dead_letters, metrics, group="g"
        )
        async with Consumer(kafka, settings.consumer_settings()) as consumer:
            runner = HandlerLoop(
                consumer,
                settings.scheduler(batch=False),
                executor,
                metrics,
                SYSTEM_CLOCK,
                settings.handler_loop_options(),
            )
            runner.subscribe(["t"])
            async with asyncio.timeout(20), asyncio.TaskGroup() as tasks:

                async def run() -> None:
                    nonlocal turns
                    while True:
                        await runner.run_once()
                        turns += 1

                running = tasks.create_task(run())
                await until(consumer.paused)
                cluster.control(Api.HEARTBEAT, Fail(ErrorCode.UNKNOWN_MEMBER_ID), times=1)
                await until(lambda: cancelled == 4)
                seen = turns
                await until(lambda: turns > seen + 1)  # Turns continue while the cancelled handlers still run.
                let_go.set()
                free.set()
                await until(lambda: cluster.committed("g") == {T: OffsetAndMetadata(RECORDS)})
                running.cancel()
            await runner.stop(1_000)
        assert cancelled == 4
        assert runner.finished == RECORDS


async def test_a_due_retry_waits_for_the_commit_of_the_output() -> None:
    """While no handler may start before the next commit, no timer is set for a retry that is due. After the commit the
    retry starts.
    """

    async def handle(_: ConsumerRecord) -> None:
        return None

    kafka = KafkaSettings(bootstrap_servers="localhost:9092")
    settings = ConsumerServiceSettings(kafka=kafka, topics=("t",), group_id="g", handler="tests:handle")
    metrics = RunnerMetrics(CollectorRegistry(), "g")
    executor = Executor(Handler("tests:handle", handle), settings.retry_policy(), no_dead_letters, metrics, group="g")
    consumer, scheduler = Consumer(kafka, settings.consumer_settings()), settings.scheduler(batch=False)
    scheduler.assign(T, None)
    scheduler.deliver(Columns.of([ConsumerRecord("t", 0, 0, 0, b"k", b"v")]))
    failed = scheduler.take(0)
    assert failed is not None
    scheduler.settle(failed, retry=failed.works, due_ms=0)
    commits = OffsetCommits(consumer, scheduler, metrics)
    commits.is_full = True
    runner = HandlerLoop(consumer, scheduler, executor, metrics, SYSTEM_CLOCK, commits=commits)
    runner._start_executions()
    assert runner._retry_timer is None
    commits.is_full = False
    runner._start_executions()
    await asyncio.wait(set(runner._tasks.values()))
    assert runner.finished == 1


async def test_a_truncated_log_loses_no_unfinished_record() -> None:
    """The unfinished records before the truncation are still in the log, and are read again."""
    gate = asyncio.Event()
    handled: list[int] = []

    async def handle(record: ConsumerRecord) -> None:
        await gate.wait()
        handled.append(record.offset)

    async with broker(0) as cluster:
        async with serving(cluster, handle, max_concurrency=2) as runner:
            await until(lambda: T in runner._consumer.assignment() and runner._consumer.known_position(T) == 0)
            for _ in range(10):
                await send(cluster, 1)
            await until(lambda: runner.scheduler.unfinished(T) == 10)
            cluster.lose_records(T, 6)
            await send(cluster, 2)
            await until(lambda: runner._consumer.known_position(T) == 8)
            gate.set()
            await until(lambda: T in cluster.committed("g") and cluster.committed("g")[T].offset == 8)
        assert set(handled) == set(range(8))


async def test_records_that_an_earlier_owner_has_finished_are_counted() -> None:
    """The metric counts the records that the commit's metadata marks as finished. Records that come during a drain are
    not counted: the next owner handles them.
    """

    async def handle(_: ConsumerRecord) -> None:
        return None

    registry = CollectorRegistry()
    kafka = KafkaSettings(bootstrap_servers="localhost:9092")
    settings = ConsumerServiceSettings(kafka=kafka, topics=("t",), group_id="g", handler="tests:handle")
    metrics = RunnerMetrics(registry, "g")
    executor = Executor(Handler("tests:handle", handle), settings.retry_policy(), no_dead_letters, metrics, group="g")
    consumer, scheduler = Consumer(kafka, settings.consumer_settings()), settings.scheduler(batch=False)
    runner = HandlerLoop(consumer, scheduler, executor, metrics, SYSTEM_CLOCK)
    scheduler.assign(T, OffsetAndMetadata(0, encode_finished(0, [(1, 3), (5, 9)])))
    runner._deliver_to_scheduler(Columns.of([ConsumerRecord("t", 0, offset, 0, b"k", b"v") for offset in range(7)]))
    scheduler.revoke([T])
    runner._deliver_to_scheduler(Columns.of([ConsumerRecord("t", 0, offset, 0, b"k", b"v") for offset in range(7, 12)]))
    assert registry.get_sample_value("penstock_consumer_skipped_records_total", {"group": "g", "topic": "t"}) == 5
