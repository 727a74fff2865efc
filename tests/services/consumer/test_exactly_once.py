"""Exactly-once processing by handlers that produce: transactions of their output and of offsets.

A fake broker loses, rejects and delays requests.
"""

from __future__ import annotations

import asyncio
import random
from collections import Counter, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.services.consumer import commits
from penstock.services.consumer.commits import TransactionalCommits
from penstock.services.consumer.executor import Executor
from penstock.services.consumer.handler_loop import HandlerLoop
from penstock.services.consumer.handlers import Handler
from penstock.services.consumer.retry_policy import RetryPolicy
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.consumer.transactor import FetchOffset, OutputRejected, OutputTransactor
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.dead_letters.dead_letter import parse_dead_letter
from penstock.shared.clients.parallel_consumer.key_scheduler import KeyScheduler
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    CommitFailed,
    FencedInstanceId,
    RetriableError,
    TransactionAborted,
)
from penstock.shared.common.records import (
    Columns,
    ConsumerRecord,
    GroupMetadata,
    OffsetAndMetadata,
    ProducerRecord,
    TopicPartition,
)
from penstock.shared.common.serialization import json_deserializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Action, Api, Close, Delay, Drop, ErrorCode, Fail, FakeCluster, Request

Handle = Callable[[ConsumerRecord], Awaitable[object]]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("in", partitions=4)
        cluster.create_topic("in-dlq")
        cluster.create_topic("out", configs={"max.message.bytes": "2000"})
        yield cluster


def kafka_of(cluster: FakeCluster) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers,
        request_timeout_ms=1_000,
        retry_backoff_ms=5,
        reconnect_backoff_ms=5,
    )


def count(registry: CollectorRegistry, name: str) -> float | None:
    return registry.get_sample_value(f"penstock_consumer_{name}_total", {"group": "g", "topic": "in"})


async def fill(cluster: FakeCluster, values: list[bytes], keys: int = 20) -> None:
    async with Producer(kafka_of(cluster)) as producer:
        records = [ProducerRecord("in", value, b"key-%d" % (i % keys)) for i, value in enumerate(values)]
        assert await (await producer.send_many(records)).first_error() is None


@asynccontextmanager
async def running(
    cluster: FakeCluster, handle: Handle, registry: CollectorRegistry | None = None, **changes: object
) -> AsyncIterator[HandlerLoop]:
    """Run a runner that writes output, dead letters and offsets in transactions, and stop it in order."""
    consumer = {
        "session_timeout_ms": 1_000, "heartbeat_interval_ms": 20, "auto_offset_reset": "earliest",
        "listener_timeout_ms": 7_000, "fetch_max_wait_ms": 20, **changes.pop("consumer", {}),  # type: ignore[dict-item]
    }  # fmt: skip
    settings = ConsumerServiceSettings(
        kafka=kafka_of(cluster), topics=("in",), group_id="g", handler="tests:handle", consumer=consumer,
        processing_guarantee="exactly_once", commit_interval_ms=10, retry={"backoff_ms": 1, "backoff_max_ms": 5},
        producer={"linger_ms": 0, "max_block_ms": 2_000, "transaction_timeout_ms": 1_000}, **changes,
    )  # fmt: skip
    metrics = RunnerMetrics(CollectorRegistry() if registry is None else registry, "g")
    producing, scheduler = settings.producer_settings(0), settings.scheduler(batch=False)
    executor = Executor(Handler("tests:handle", handle), settings.retry_policy(), None, metrics, group="g")
    async with Consumer(settings.kafka, settings.consumer_settings()) as reader:
        transactor = OutputTransactor(lambda: Producer(settings.kafka, producing), reader.committed)
        own = TransactionalCommits(
            transactor, reader.group_metadata, scheduler, executor.dead_letters_of_rejected, metrics
        )
        runner = HandlerLoop(reader, scheduler, executor, metrics, SYSTEM_CLOCK, settings.handler_loop_options(), own)
        runner.subscribe(["in"])
        try:
            async with asyncio.TaskGroup() as tasks:
                task = tasks.create_task(runner.run())
                yield runner
                task.cancel()
        finally:
            await runner.stop(2_000)


async def test_an_assignment_that_ends_after_the_stop_assigns_nothing(cluster: FakeCluster) -> None:
    """Otherwise its revocation would open a producer again, which nobody closes."""
    came, released = asyncio.Event(), asyncio.Event()

    async def hold(_: Request) -> None:
        came.set()
        await released.wait()

    async def handle(_: ConsumerRecord) -> None:
        """Nothing to do."""

    async with running(cluster, handle) as runner:
        cluster.control(Api.OFFSET_FETCH, hold)
        assigned = asyncio.create_task(runner.on_partitions_assigned(frozenset({TopicPartition("in", 9)})))
        await came.wait()
        await runner.stop(2_000)
        released.set()
        await assigned
        assert runner.scheduler.partitions == frozenset()


class Activity:
    """Lets a test wait for requests to the cluster, most of which are heartbeats."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._next = asyncio.Event()
        cluster.control(None, self._came)

    def _came(self, _: Request) -> None:
        self._next.set()
        self._next = asyncio.Event()

    async def next(self, requests: int = 1) -> None:
        for _ in range(requests):
            await self._next.wait()

    async def until(self, true: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not true():
                await self.next()


@pytest.fixture
async def activity(cluster: FakeCluster) -> Activity:
    return Activity(cluster)


def out(cluster: FakeCluster, topic: str = "out") -> list[bytes | None]:
    return [record.value for record in cluster.records(topic)]


def read_to(cluster: FakeCluster) -> int:
    return sum(at.offset for at in cluster.committed("g").values())


async def test_output_dead_letters_and_offsets_are_committed_once(cluster: FakeCluster, activity: Activity) -> None:
    """The handlers' output, the dead letters of failed records and the offsets are each committed once."""

    async def handle(record: ConsumerRecord) -> list[ProducerRecord]:
        if record.value == b"13":
            raise ValueError("unlucky")
        return [ProducerRecord("out", (record.value or b"") + part, record.key) for part in (b"a", b"b")]

    await fill(cluster, [b"%d" % i for i in range(50)])
    registry = CollectorRegistry()
    async with running(cluster, handle, registry, max_attempts=2):
        await activity.until(lambda: read_to(cluster) == 50)
    assert sorted(map(str, out(cluster))) == sorted(str(b"%d%c" % (i, c)) for i in range(50) if i != 13 for c in b"ab")
    (dead_letter,) = map(parse_dead_letter, cluster.records("in-dlq"))
    assert (dead_letter.record.value, dead_letter.attempts, dead_letter.stage) == (b"13", 2, "process")
    assert count(registry, "produced_records") == 98, "without the dead letter"


async def test_a_record_with_rejected_output_becomes_a_dead_letter(cluster: FakeCluster, activity: Activity) -> None:
    """If a topic rejects a record's output, the record becomes a dead letter of the stage
    `produce`, and other outputs are written.
    """

    async def handle(record: ConsumerRecord) -> ProducerRecord:
        return ProducerRecord("out", random.Random(1).randbytes(5_000) if record.value == b"7" else record.value)

    await fill(cluster, [b"%d" % i for i in range(20)])
    registry = CollectorRegistry()
    async with running(cluster, handle, registry):
        await activity.until(lambda: read_to(cluster) == 20)
    assert sorted(map(str, out(cluster))) == sorted(str(b"%d" % i) for i in range(20) if i != 7)
    assert count(registry, "produced_records") == 19
    (dead_letter,) = map(parse_dead_letter, cluster.records("in-dlq"))
    assert (dead_letter.record.value, dead_letter.stage, dead_letter.exception.rpartition(".")[2]) == (
        b"7",
        "produce",
        "RecordTooLarge",
    )


async def test_output_after_a_gap_is_not_written_again(cluster: FakeCluster, activity: Activity) -> None:
    """While one record is stuck, the output of later records is committed with their offsets,
    and a restart skips them.
    """
    free = asyncio.Event()

    async def handle(record: ConsumerRecord) -> ProducerRecord:
        if record.value == b"0":
            await free.wait()
        return ProducerRecord("out", record.value)

    await fill(cluster, [b"%d" % i for i in range(40)], keys=40)
    async with running(cluster, handle, consumer={"listener_timeout_ms": 6_000}) as runner:
        await activity.until(lambda: runner.finished == 39)
        await activity.until(lambda: len(out(cluster)) == 39)
        # Nothing more is finished, as after a kill of the process.
        runner.scheduler.revoke(runner.scheduler.partitions)
    free.set()
    async with running(cluster, handle):
        await activity.until(lambda: len(out(cluster)) == 40)
    assert sorted(map(str, out(cluster))) == sorted(str(b"%d" % i) for i in range(40))


async def test_a_full_buffer_of_output_stops_the_handlers(
    cluster: FakeCluster, activity: Activity, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While transactions fail, handlers stop above PENDING_RECORDS_MAX, and later all output is written."""
    monkeypatch.setattr(commits, "PENDING_RECORDS_MAX", 30)

    async def handle(record: ConsumerRecord) -> ProducerRecord:
        return ProducerRecord("out", record.value)

    await fill(cluster, [b"%d" % i for i in range(200)])
    fault = cluster.control(Api.TXN_OFFSET_COMMIT, Fail(ErrorCode.ILLEGAL_GENERATION))
    async with running(cluster, handle, max_concurrency=8) as runner:
        await activity.until(lambda: fault.acted > 5)
        assert 30 < runner.finished < 40
        assert out(cluster) == []
        fault.remove()
        await activity.until(lambda: read_to(cluster) == 200)
    assert sorted(map(str, out(cluster))) == sorted(str(b"%d" % i) for i in range(200))


PASSING = (ErrorCode.COORDINATOR_NOT_AVAILABLE, ErrorCode.NOT_COORDINATOR, ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)
CODES = {
    Api.ADD_PARTITIONS_TO_TXN: [ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.INVALID_PRODUCER_EPOCH],
    Api.ADD_OFFSETS_TO_TXN: [ErrorCode.CONCURRENT_TRANSACTIONS, ErrorCode.INVALID_TXN_STATE],
    Api.TXN_OFFSET_COMMIT: [ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID, ErrorCode.PRODUCER_FENCED],
    Api.END_TXN: [ErrorCode.INVALID_PRODUCER_EPOCH, ErrorCode.INVALID_TXN_STATE],
}


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_exactly_once_despite_failures(cluster: FakeCluster, activity: Activity, strategy: str) -> None:
    """Each input's output is written once and in order by key, although members come and go, handlers fail, and
    transactions' requests are lost, rejected or late.
    """
    rng, total = random.Random(8), 500
    requests = Counter[Api]()

    def fault(request: Request) -> Action | None:
        requests[request.api] += 1
        # The first two of each API in any case: large transactions have few requests.
        if requests[request.api] > 2 and rng.random() > 0.2:
            return None
        return rng.choice([Close(), Close(handled=True), Delay(30), Fail(rng.choice([*PASSING, *CODES[request.api]]))])

    faults = [cluster.control(api, fault) for api in CODES]

    async def handle(record: ConsumerRecord) -> ProducerRecord:
        await activity.next(rng.randint(0, 8))
        if rng.random() < 0.05:
            raise ConnectionError("try again")
        return ProducerRecord("out", record.value, record.key)

    given = {"max_attempts": 50, "max_concurrency": 5, "consumer": {"partition_assignment_strategy": strategy}}
    await fill(cluster, [b"%d" % i for i in range(total)])
    async with running(cluster, handle, **given) as first:
        await activity.until(lambda: first.finished > 50)
        async with running(cluster, handle, **given) as second:
            await activity.until(lambda: second.finished > 50)
            async with running(cluster, handle, **given) as third:
                await activity.until(lambda: third.finished > 20 or read_to(cluster) == total)
        await activity.until(lambda: read_to(cluster) == total)
        # A transaction that a fault left open hides later records until it times out.
        await activity.until(lambda: len(out(cluster)) >= total)
    assert all(control.acted >= 2 for control in faults)
    written: dict[bytes | None, list[int]] = defaultdict(list)
    for record in cluster.records("out"):
        written[record.key].append(int(record.value or b""))
    assert sorted(n for numbers in written.values() for n in numbers) == list(range(total))
    assert all(numbers == sorted(numbers) for numbers in written.values())
    assert all(at == OffsetAndMetadata(at.offset) for at in cluster.committed("g").values())
    assert set(cluster.committed("g")) == {TopicPartition("in", p) for p in range(4)}


IN = TopicPartition("in", 0)
GROUP = GroupMetadata("g")
OFFSETS = {IN: OffsetAndMetadata(3, "beyond")}
RECORDS = [ProducerRecord("out", b"%d" % i) for i in range(5)]


@asynccontextmanager
async def transactor(cluster: FakeCluster, committed: FetchOffset | None = None) -> AsyncIterator[OutputTransactor]:
    kafka = KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=500, retry_backoff_ms=5, reconnect_backoff_ms=5
    )
    settings = ProducerSettings(transactional_id="t", linger_ms=0, max_block_ms=2_000, delivery_timeout_ms=2_000)
    reading = ConsumerSettings(group_id="g", isolation_level="read_committed")
    async with Consumer(kafka, reading) as consumer:
        own = OutputTransactor(lambda: Producer(kafka, settings), committed or consumer.committed)
        try:
            yield own
        finally:
            await own.close()


async def until_committed(own: OutputTransactor) -> int:
    """Repeat the transaction while its error is temporary, and return the number of failures."""
    for failures in range(20):
        try:
            await own.transact(RECORDS, OFFSETS, GROUP)
        except (RetriableError, TransactionAborted):
            continue
        return failures
    pytest.fail("never committed")


async def test_a_producer_that_cannot_start_is_closed() -> None:
    """Each attempt has a new producer. None of them leaves its series in the registry."""
    registry = CollectorRegistry()
    kafka = KafkaSettings(bootstrap_servers="localhost:1", request_timeout_ms=20)
    settings = ProducerSettings(transactional_id="t")

    async def committed(_: TopicPartition) -> OffsetAndMetadata | None:
        return None

    own = OutputTransactor(lambda: Producer(kafka, settings, registry=registry), committed)
    for _ in range(2):
        with pytest.raises(BrokerNotAvailable):
            await own.start()
    samples = [sample for family in registry.collect() for sample in family.samples]
    assert not any("client_id" in sample.labels for sample in samples)


async def test_records_and_offsets_share_a_transaction(cluster: FakeCluster) -> None:
    """A transaction holds the output and the group's offsets with their metadata."""
    async with transactor(cluster) as own:
        await own.transact(RECORDS, OFFSETS, GROUP)
        await own.transact([], {IN: OffsetAndMetadata(4)}, GROUP)
    assert out(cluster) == [r.value for r in RECORDS]
    assert cluster.committed("g") == {IN: OffsetAndMetadata(4)}


@pytest.mark.parametrize("fault", [Close(), Close(handled=True), Drop(), Drop(handled=True)], ids=repr)
@pytest.mark.parametrize(
    "api",
    [
        Api.INIT_PRODUCER_ID,
        Api.ADD_PARTITIONS_TO_TXN,
        Api.PRODUCE,
        Api.ADD_OFFSETS_TO_TXN,
        Api.TXN_OFFSET_COMMIT,
        Api.END_TXN,
    ],
    ids=lambda api: api.name,
)
async def test_lost_requests_and_responses_cause_no_duplicates(cluster: FakeCluster, api: Api, fault: Action) -> None:
    """If a request or its response is lost twice, the output is written once, with the offsets."""
    control = cluster.control(api, fault, times=2)
    async with transactor(cluster) as own:
        await until_committed(own)
    assert control.acted == 2
    assert out(cluster) == [r.value for r in RECORDS]
    assert cluster.committed("g") == OFFSETS


@pytest.mark.parametrize(
    ("api", "code"),
    [
        (Api.ADD_PARTITIONS_TO_TXN, ErrorCode.INVALID_PRODUCER_EPOCH),
        (Api.ADD_OFFSETS_TO_TXN, ErrorCode.INVALID_TXN_STATE),
        (Api.TXN_OFFSET_COMMIT, ErrorCode.INVALID_PRODUCER_EPOCH),
        (Api.END_TXN, ErrorCode.INVALID_PRODUCER_EPOCH),
        (Api.END_TXN, ErrorCode.INVALID_TXN_STATE),
    ],
)
async def test_a_fenced_producer_is_replaced(cluster: FakeCluster, api: Api, code: ErrorCode) -> None:
    """A new producer replaces one that was fenced by its own timeout, and nothing of the transaction is visible."""
    cluster.control(api, Fail(code), times=1)
    async with transactor(cluster) as own:
        with pytest.raises(TransactionAborted, match="replaced"):
            await own.transact(RECORDS, OFFSETS, GROUP)
        assert (out(cluster), cluster.committed("g")) == ([], {})
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert out(cluster) == [r.value for r in RECORDS]
    assert cluster.committed("g") == OFFSETS


async def test_a_producer_that_is_fenced_as_it_renews_its_epoch_is_replaced(cluster: FakeCluster) -> None:
    """After a commit whose first response was lost, the next transaction begins with a request for a new epoch."""
    cluster.control(Api.END_TXN, Close(handled=True), times=1)
    async with transactor(cluster) as own:
        await own.transact(RECORDS, OFFSETS, GROUP)
        cluster.control(Api.INIT_PRODUCER_ID, Fail(ErrorCode.PRODUCER_FENCED), times=1)
        with pytest.raises(TransactionAborted, match="replaced"):
            await own.transact(RECORDS, OFFSETS, GROUP)
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert out(cluster) == [r.value for r in RECORDS] * 2


async def test_the_outcome_of_a_lost_commit_is_read_from_the_offsets(cluster: FakeCluster) -> None:
    """If the response to a commit is lost and the next request is fenced, the transaction
    counts as committed if the group has its offsets.
    """
    cluster.control(Api.END_TXN, Close(handled=True), times=1)
    cluster.control(Api.END_TXN, Fail(ErrorCode.INVALID_PRODUCER_EPOCH), times=1)
    async with transactor(cluster) as own:
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert out(cluster) == [r.value for r in RECORDS]


@pytest.mark.parametrize(("kept", "is_committed"), [(2, True), (1, False), (None, False)])
async def test_later_offsets_of_a_lost_partition_do_not_hide_a_commit(
    cluster: FakeCluster, kept: int | None, is_committed: bool
) -> None:
    """The new owner of a lost partition may commit later offsets before the offsets are read back. The transaction
    counts as committed if the group has its offset of the kept partition too.
    """
    lost, still_owned = IN, TopicPartition("in", 1)

    async def committed(tp: TopicPartition) -> OffsetAndMetadata | None:
        offset = 7 if tp == lost else kept
        return None if offset is None else OffsetAndMetadata(offset)

    cluster.control(Api.END_TXN, Fail(ErrorCode.INVALID_PRODUCER_EPOCH), times=1)
    async with transactor(cluster, committed) as own:
        writing = own.transact(RECORDS, OFFSETS | {still_owned: OffsetAndMetadata(2)}, GROUP)
        if is_committed:
            await writing
        else:
            with pytest.raises(TransactionAborted, match="not committed"):
                await writing


async def test_a_rejected_record_is_named(cluster: FakeCluster) -> None:
    """A record that is too large or for a missing topic is named, and the transaction is aborted."""
    async with transactor(cluster) as own:
        with pytest.raises(OutputRejected) as raised:
            await own.transact([RECORDS[0], ProducerRecord("out", b"x" * 5_000)], OFFSETS, GROUP)
        assert list(raised.value.errors) == [1]
        with pytest.raises(OutputRejected) as raised:
            await own.transact([ProducerRecord("nowhere", b""), RECORDS[0]], OFFSETS, GROUP)
        assert list(raised.value.errors) == [0]
        assert (out(cluster), cluster.committed("g")) == ([], {})
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert out(cluster) == [r.value for r in RECORDS]


@pytest.mark.parametrize("code", [ErrorCode.ILLEGAL_GENERATION, ErrorCode.UNKNOWN_MEMBER_ID])
async def test_a_member_outside_of_the_group_writes_nothing(cluster: FakeCluster, code: ErrorCode) -> None:
    """If the group rejects the offsets, the output is aborted and the producer stays usable."""
    cluster.control(Api.TXN_OFFSET_COMMIT, Fail(code), times=1)
    async with transactor(cluster) as own:
        with pytest.raises(CommitFailed):
            await own.transact(RECORDS, OFFSETS, GROUP)
        assert out(cluster) == []
        await own.transact(RECORDS, OFFSETS, GROUP)
    assert out(cluster) == [r.value for r in RECORDS]


async def test_a_fenced_instance_is_an_error(cluster: FakeCluster) -> None:
    """If another member has the instance id, that error is raised and nothing is written."""
    cluster.control(Api.TXN_OFFSET_COMMIT, Fail(ErrorCode.FENCED_INSTANCE_ID), times=1)
    async with transactor(cluster) as own:
        with pytest.raises(FencedInstanceId):
            await own.transact(RECORDS, OFFSETS, GROUP)
    assert out(cluster) == []


async def test_offsets_are_committed_with_their_generation(cluster: FakeCluster) -> None:
    """Group, generation and member are those of the time at which the caller took the offsets."""
    seen: list[Request] = []
    cluster.control(Api.TXN_OFFSET_COMMIT, seen.append)
    async with transactor(cluster) as own:
        with pytest.raises(CommitFailed):
            await own.transact(RECORDS, OFFSETS, GroupMetadata("g", 7, "m", "i"))
    body = seen[0].body
    assert (body.group_id, body.generation_id, body.member_id, body.group_instance_id) == ("g", 7, "m", "i")


async def handled(writer: OutputTransactor, handler: Handler, *values: bytes, **options: Any) -> TransactionalCommits:
    """Handle records of these values, and return the commits that have their output."""
    metrics, scheduler = RunnerMetrics(CollectorRegistry(), "g"), KeyScheduler(batch_records_max=len(values))
    executor = Executor(handler, RetryPolicy(max_attempts=1), None, metrics, group="g", **options)
    own = TransactionalCommits(writer, lambda: GROUP, scheduler, executor.dead_letters_of_rejected, metrics)
    scheduler.assign(IN, None)
    scheduler.deliver(Columns.of([ConsumerRecord(*IN, o, 0, b"k", value) for o, value in enumerate(values)]))
    execution = scheduler.take(0)
    assert execution is not None
    outcome = await executor.run(execution)
    scheduler.settle(execution, outcome.finished, outcome.retry, 0)
    own.settled(execution, outcome)
    return own


async def test_finished_records_are_pending_until_their_transaction_ends(cluster: FakeCluster) -> None:
    """Records are pending before and during their transaction, and are not pending once it is committed."""

    async def handle(record: ConsumerRecord) -> ProducerRecord:
        return ProducerRecord("out", record.value)

    async with transactor(cluster) as writer:
        own = await handled(writer, Handler("tests:handle", handle), b"1")
        assert own.pending_records == 1
        assert not await own.commit(timeout_ms=0)
        assert own.pending_records == 1
        assert await own.commit()
        assert own.pending_records == 0
    assert out(cluster) == [b"1"]


async def test_a_rejected_dead_letter_is_written_unchanged_later(cluster: FakeCluster) -> None:
    """If the dead-letter topic is missing, the dead letter waits for the topic and keeps the handler's error."""

    async def handle(record: ConsumerRecord) -> None:
        raise ValueError("the true reason")

    cluster.delete_topic("in-dlq")
    async with transactor(cluster) as writer:
        own = await handled(writer, Handler("tests:handle", handle), b"1")
        assert not await own.commit()
        cluster.create_topic("in-dlq")
        assert await own.commit()
    (dead_letter,) = map(parse_dead_letter, cluster.records("in-dlq"))
    assert (dead_letter.stage, dead_letter.message, dead_letter.attempts) == ("process", "the true reason", 1)


async def test_rejected_output_of_a_batch_does_not_replace_a_dead_letter(cluster: FakeCluster) -> None:
    """If Kafka rejects a batch's output, the handled records become dead letters of the stage `produce`. The dead
    letter of a record that could not be decoded is written unchanged.
    """

    async def handle(records: list[ConsumerRecord]) -> list[ProducerRecord]:
        return [ProducerRecord("out", b"x" * 5_000), *(ProducerRecord("out", record.key) for record in records)]

    async with transactor(cluster) as writer:
        batches = Handler("tests:handle", handle, batch=True)
        own = await handled(writer, batches, b"1", b"{", b"3", decode=json_deserializer)
        assert await own.commit()
    assert out(cluster) == []
    dead_letters = map(parse_dead_letter, cluster.records("in-dlq"))
    assert sorted((dead_letter.record.offset, dead_letter.stage) for dead_letter in dead_letters) == [
        (0, "produce"),
        (1, "deserialize"),
        (2, "produce"),
    ]
