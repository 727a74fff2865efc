"""The consumer's commits and positions against a fake broker that loses, rejects and delays requests."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerError,
    CommitFailed,
    ConfigError,
    FencedInstanceId,
    IllegalState,
    InvalidRequest,
    KafkaTimeout,
    LogTruncation,
    NoOffsetForPartition,
    PenstockError,
    RebalanceInProgress,
    SerializationError,
    UnknownMember,
)
from penstock.shared.common.records import GroupMetadata, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.serialization import json_deserializer, string_deserializer
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Action, Api, Close, Delay, Drop, ErrorCode, Fail, FakeCluster, Request

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
RECORDS = 10


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t", partitions=2)
        async with Producer(kafka_of(cluster)) as producer:
            records = [ProducerRecord("t", b"%d" % i, partition=p) for i in range(RECORDS) for p in (0, 1)]
            assert await (await producer.send_many(records)).first_error() is None
        yield cluster


def kafka_of(cluster: FakeCluster, request_timeout_ms: int = 10_000) -> KafkaSettings:
    """Return settings whose timeout also bounds the start, which may be slow on a busy machine."""
    return KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=request_timeout_ms, retry_backoff_ms=5,
        reconnect_backoff_ms=5,
    )  # fmt: skip


@asynccontextmanager
async def opened(cluster: FakeCluster, *, request_timeout_ms: int = 10_000, **given: object) -> AsyncIterator[Consumer]:
    defaults = {"group_id": "g", "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20}
    settings = ConsumerSettings.model_validate({**defaults, **given})
    async with Consumer(kafka_of(cluster, request_timeout_ms), settings) as consumer:
        yield consumer


async def read(consumer: Consumer, records: int) -> None:
    """Polls until the given number of records has arrived."""
    async with asyncio.timeout(10):
        while records > 0:
            records -= sum(map(len, (await consumer.poll(20, records)).values()))


async def until(consumer: Consumer, true: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not true():
            await consumer.poll(10, 1)


def commits(cluster: FakeCluster) -> list[Request]:
    """Collects the commits from now on."""
    seen: list[Request] = []
    cluster.control(Api.OFFSET_COMMIT, seen.append)
    return seen


async def commit_error(consumer: Consumer, offsets: dict[TopicPartition, int]) -> Exception | None:
    """Commits asynchronously and returns the error that the callback gets, if any."""
    future: asyncio.Future[Exception | None] = asyncio.get_running_loop().create_future()
    consumer.commit_async(offsets, lambda _, error: future.set_result(error))
    return await asyncio.wait_for(future, 5)


async def test_offsets_are_committed_with_their_metadata(cluster: FakeCluster) -> None:
    """For manually assigned partitions, sync and async commits store the offset and its metadata, and `committed`
    returns them."""
    async with opened(cluster) as consumer:
        consumer.assign([A, B])
        await consumer.commit({A: OffsetAndMetadata(3, "hello")})
        assert await commit_error(consumer, {B: 4}) is None
        assert await consumer.committed(A) == OffsetAndMetadata(3, "hello")
    assert cluster.committed("g") == {A: OffsetAndMetadata(3, "hello"), B: OffsetAndMetadata(4)}


async def test_committed_takes_several_partitions(cluster: FakeCluster) -> None:
    """`committed` fetches several partitions in one request, with None for a partition without a commit. A single
    partition returns its own commit."""
    async with opened(cluster) as consumer:
        consumer.assign([A, B])
        await consumer.commit({A: 3})
        requests: list[Request] = []
        cluster.control(Api.OFFSET_FETCH, requests.append)
        assert await consumer.committed([A, B]) == {A: OffsetAndMetadata(3), B: None}
        assert len(requests) == 1
        assert await consumer.committed(iter([A])) == {A: OffsetAndMetadata(3)}
        assert await consumer.committed([]) == {}
        assert await consumer.committed(A) == OffsetAndMetadata(3)
        assert await consumer.committed(B) is None


@pytest.mark.parametrize("is_managed", [True, False])
async def test_auto_commits_wait_for_their_interval(cluster: FakeCluster, is_managed: bool) -> None:
    """Auto-commit sends nothing before its interval ends, then the positions of earlier polls. While a commit is in
    flight no other is sent."""
    seen = commits(cluster)
    async with opened(cluster, commit_strategy="auto", auto_commit_interval_ms=150) as consumer:
        if is_managed:
            consumer.subscribe(["t"])
        else:
            consumer.assign([A, B])
        started = time.monotonic()
        await read(consumer, 4)
        await until(consumer, lambda: seen)
        assert time.monotonic() - started > 0.1
        assert sum(row.offset for topic in seen[0].body.topics for row in topic.partitions) >= 4
        assert len(seen) == 1
    assert sum(at.offset for at in cluster.committed("g").values()) <= 2 * RECORDS


async def test_without_a_commit_strategy_nothing_is_committed(cluster: FakeCluster) -> None:
    """Without a commit strategy, neither a rebalance nor `close` commits positions."""
    seen = commits(cluster)
    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        await read(consumer, RECORDS)
        before = consumer.group_metadata().generation_id
        consumer.enforce_rebalance()
        await until(consumer, lambda: consumer.group_metadata().generation_id > before)
    assert seen == []


async def test_an_auto_commit_is_retried(cluster: FakeCluster) -> None:
    """A failed or unanswered auto-commit is retried with backoff until it succeeds."""
    faults: list[Action] = [Fail(ErrorCode.NOT_COORDINATOR), Close(), Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS)]
    cluster.control(Api.OFFSET_COMMIT, lambda _: faults.pop(0) if faults else None)
    async with opened(cluster, commit_strategy="auto", auto_commit_interval_ms=10) as consumer:
        consumer.assign([A])
        await read(consumer, 5)
        await until(consumer, lambda: A in cluster.committed("g") and cluster.committed("g")[A].offset >= 5)
    assert not faults


async def test_nothing_is_committed_before_the_group_has_assigned(cluster: FakeCluster) -> None:
    """Before the first assignment nothing is auto-committed, and an explicit commit is rejected."""
    seen = commits(cluster)
    cluster.control(Api.JOIN_GROUP, Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
    async with opened(cluster, commit_strategy="auto", auto_commit_interval_ms=1) as consumer:
        assert consumer.group_metadata() == GroupMetadata("g", -1, "")
        consumer.subscribe(["t"])
        for _ in range(3):
            assert await consumer.poll(10) == {}
        with pytest.raises(UnknownMember, match="not assigned anything"):
            await consumer.commit({A: 1})
    assert seen == []


@pytest.mark.parametrize(
    ("code", "error"),
    [
        (ErrorCode.OFFSET_METADATA_TOO_LARGE, InvalidRequest),
        (ErrorCode.UNKNOWN_SERVER_ERROR, BrokerError),
        (ErrorCode.GROUP_AUTHORIZATION_FAILED, AuthorizationFailed),
        (ErrorCode.REBALANCE_IN_PROGRESS, RebalanceInProgress),
        (ErrorCode.FENCED_INSTANCE_ID, FencedInstanceId),
    ],
)
async def test_permanent_commit_errors_are_reported_at_once(
    cluster: FakeCluster, code: ErrorCode, error: type[PenstockError]
) -> None:
    """Sync commits raise a permanent error at once, and async commits pass it to their callbacks."""
    control = cluster.control(Api.OFFSET_COMMIT, Fail(code))
    async with opened(cluster, group_instance_id="i") as consumer:
        consumer.assign([A])
        with pytest.raises(error, match=r"OffsetCommit.*group g.*instance i.*t-0"):
            await consumer.commit({A: 1})
        assert type(await commit_error(consumer, {A: 2})) is error
        control.remove()


async def test_a_manual_assignment_commits_without_member_ids(cluster: FakeCluster) -> None:
    """A commit of manually assigned partitions has neither a member id nor an instance id."""
    seen = commits(cluster)
    async with opened(cluster, group_instance_id="i") as consumer:
        consumer.assign([A])
        await consumer.commit({A: 1})
    body = seen[0].body
    assert (body.member_id, body.group_instance_id) == ("", None)


@pytest.mark.parametrize(
    "fault",
    [
        Fail(ErrorCode.NOT_COORDINATOR),
        Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE),
        Fail(ErrorCode.UNKNOWN_TOPIC_OR_PARTITION),
        Close(),
        Close(handled=True),
        Drop(),
    ],
    ids=repr,
)
async def test_retriable_commit_errors_are_retried(cluster: FakeCluster, fault: Action) -> None:
    """Sync and async commits look up the coordinator again and succeed in the end."""
    control = cluster.control(Api.OFFSET_COMMIT, fault, times=2)
    async with opened(cluster, request_timeout_ms=1_500) as consumer:
        consumer.assign([A])
        await consumer.commit({A: 1})
        assert control.acted == 2
        cluster.control(Api.OFFSET_COMMIT, fault, times=1)
        assert await commit_error(consumer, {A: 2}) is None
    assert cluster.committed("g") == {A: OffsetAndMetadata(2)}


async def test_a_commit_with_timeout_0_does_not_wait(cluster: FakeCluster) -> None:
    """A commit with a timeout of 0 raises KafkaTimeout. It may still be applied."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        with pytest.raises(KafkaTimeout, match="within 0 ms"):
            await consumer.commit({A: 1}, timeout_ms=0)


@pytest.mark.parametrize(
    "fault",
    [
        Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS),
        Fail(ErrorCode.NOT_COORDINATOR),
        Fail(ErrorCode.UNSTABLE_OFFSET_COMMIT),
        Close(),
    ],
    ids=repr,
)
async def test_the_fetch_of_committed_offsets_is_retried(cluster: FakeCluster, fault: Action) -> None:
    """Reading starts at the committed offset, even if the coordinator fails to return it several times."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        await consumer.commit({A: 7})
    control = cluster.control(Api.OFFSET_FETCH, fault, times=2)
    async with opened(cluster, isolation_level="read_committed") as consumer:
        consumer.assign([A])
        assert await consumer.position(A) == 7
    assert control.acted == 2


async def test_missing_permission_to_fetch_offsets_is_raised(cluster: FakeCluster) -> None:
    """AuthorizationFailed is raised by `poll` and by `committed`."""
    cluster.control(Api.OFFSET_FETCH, Fail(ErrorCode.GROUP_AUTHORIZATION_FAILED))
    async with opened(cluster) as consumer:
        consumer.assign([A])
        with pytest.raises(AuthorizationFailed):
            await consumer.committed(A)
        with pytest.raises(AuthorizationFailed):
            await until(consumer, lambda: False)


async def test_known_positions_need_no_coordinator(cluster: FakeCluster) -> None:
    """After a seek, no committed offset is fetched. A partition without an offset and without a reset policy is an
    error."""
    requests: list[Request] = []
    cluster.control(Api.OFFSET_FETCH, requests.append)
    async with opened(cluster) as consumer:
        consumer.assign([A])
        consumer.seek(A, 5)
        assert await consumer.position(A) == 5
        await consumer.seek_to_beginning(A)
        assert await consumer.position(A) == 0
    async with opened(cluster, auto_offset_reset="none") as consumer:
        consumer.assign([A])
        with pytest.raises(NoOffsetForPartition, match="t-0"):
            await until(consumer, lambda: False)


async def close_in_ms(consumer: Consumer, timeout_ms: float | None) -> float:
    started = time.monotonic()
    await consumer.close(timeout_ms)
    return (time.monotonic() - started) * 1_000


@pytest.mark.parametrize("is_managed", [True, False])
async def test_close_commits_what_was_polled(cluster: FakeCluster, is_managed: bool) -> None:
    """At `close` the records of the last poll count as processed. A manual assignment sends no LeaveGroup."""
    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)
    async with opened(cluster, commit_strategy="auto") as consumer:
        if is_managed:
            consumer.subscribe(["t"])
        else:
            consumer.assign([A, B])
        await read(consumer, 2 * RECORDS)
    assert cluster.committed("g") == {A: OffsetAndMetadata(RECORDS), B: OffsetAndMetadata(RECORDS)}
    assert len(left) == is_managed


@pytest.mark.parametrize("api", [Api.OFFSET_COMMIT, Api.LEAVE_GROUP], ids=lambda api: api.name)
@pytest.mark.parametrize("fault", [Drop(), Fail(ErrorCode.COORDINATOR_NOT_AVAILABLE)], ids=repr)
async def test_close_keeps_its_time(cluster: FakeCluster, api: Api, fault: Action) -> None:
    """`close` ends by its timeout if requests are not answered, with a timeout of 0 too."""
    kafka = kafka_of(cluster)
    for timeout_ms in (0, 200):
        consumer = Consumer(
            kafka,
            ConsumerSettings(group_id="g", auto_offset_reset="earliest", commit_strategy="auto", session_timeout_ms=300,
                             heartbeat_interval_ms=20),
        )  # fmt: skip
        await consumer.start()
        consumer.subscribe(["t"])
        await read(consumer, 2)
        with cluster.control(api, fault):
            assert await close_in_ms(consumer, timeout_ms) < kafka.request_timeout_ms / 2
        with pytest.raises(IllegalState):
            await consumer.poll(0)


async def test_sync_raises_in_poll(cluster: FakeCluster) -> None:
    """With the strategy `sync`, `poll` raises the error of its commit. The positions are kept."""
    async with opened(cluster, commit_strategy="sync", commit_timeout_ms=300) as consumer:
        consumer.assign([A])
        await read(consumer, 3)
        fault = cluster.control(Api.OFFSET_COMMIT, Fail(ErrorCode.COORDINATOR_LOAD_IN_PROGRESS))
        with pytest.raises(KafkaTimeout):
            await consumer.poll(20, 1)
        fault.remove()
    assert cluster.committed("g")[A].offset == 3


async def test_offsets_of_an_open_transaction_are_waited_for(cluster: FakeCluster) -> None:
    """A new owner waits for pending transactional offsets and reads from their final value, whatever its isolation
    level."""
    kafka = kafka_of(cluster)
    async with Producer(kafka, ProducerSettings(transactional_id="x")) as producer:
        await producer.init_transactions()
        await producer.begin_transaction()
        await producer.send_offsets_to_transaction({A: OffsetAndMetadata(6)}, GroupMetadata("g"))
        async with opened(cluster) as consumer:
            consumer.assign([A])
            assert await consumer.poll(50) == {}
            await producer.commit_transaction()
            assert await consumer.position(A) == 6


async def test_deserializers_and_what_they_cannot_read(cluster: FakeCluster) -> None:
    """Columns contain the deserialized values. A record that cannot be decoded raises an error with its coordinates
    until a seek past it."""
    async with Producer(kafka_of(cluster)) as producer:
        for value in (b"x", b"11"):
            await (await producer.send("t", value, key=b"k", partition=0))
    settings = ConsumerSettings(auto_offset_reset="earliest", fetch_max_wait_ms=20)
    async with Consumer(
        kafka_of(cluster), settings, key_deserializer=string_deserializer, value_deserializer=json_deserializer
    ) as consumer:
        consumer.assign([A])
        values: list[object] = []
        async with asyncio.timeout(10):
            while len(values) < RECORDS:
                for columns in (await consumer.poll(20)).values():
                    values += columns.values
            assert values == list(range(RECORDS))
            for _ in range(3):
                with pytest.raises(SerializationError, match=r"t-0.*offset 10: value"):
                    await until(consumer, lambda: False)
            assert await consumer.position(A) == RECORDS
            consumer.seek(A, RECORDS + 1)
            while not (taken := await consumer.poll(20)):
                pass
        assert (taken[A].keys, taken[A].values) == (["k"], [11])


async def test_lookups_do_not_wait_for_a_fetch(cluster: FakeCluster) -> None:
    """Offsets are looked up at once, even while the broker holds an empty fetch."""
    settings = ConsumerSettings(auto_offset_reset="latest", fetch_max_wait_ms=3_000)
    async with Consumer(kafka_of(cluster), settings) as consumer:
        consumer.assign([A])
        assert await consumer.position(A) == RECORDS
        assert await consumer.poll(50) == {}
        started = time.monotonic()
        assert await consumer.end_offsets([A]) == {A: RECORDS}
        assert await consumer.offsets_for_times({A: 0}) == {A: 0}
        assert time.monotonic() - started < 1


async def test_rebalances_are_counted_and_timed(cluster: FakeCluster) -> None:
    """Rebalances are counted, and timed from the join to the return of the listener."""
    registry = CollectorRegistry()
    cluster.control(Api.JOIN_GROUP, Delay(30))
    async with Consumer(kafka_of(cluster), ConsumerSettings(group_id="g"), registry=registry) as consumer:
        consumer.subscribe(["t"])
        await until(consumer, consumer.assignment)
        await until(consumer, lambda: registry.get_sample_value("penstock_consumer_rebalance_seconds_count"))
    assert registry.get_sample_value("penstock_consumer_rebalances_total", {"group": "g"}) == 1
    length = registry.get_sample_value("penstock_consumer_rebalance_seconds_sum")
    assert length is not None
    assert 0.05 < length < 5


async def test_commits_after_max_poll_interval_explain_their_failure(cluster: FakeCluster) -> None:
    """After `max_poll_interval_ms` the member leaves, and a commit of its old partitions states the reason. The next
    poll joins again."""
    left: asyncio.Event = asyncio.Event()
    cluster.control(Api.LEAVE_GROUP, lambda _: left.set())
    async with opened(cluster, max_poll_interval_ms=60) as consumer:
        consumer.subscribe(["t"])
        await read(consumer, 3)
        before = consumer.group_metadata().generation_id
        await asyncio.wait_for(left.wait(), 5)
        with pytest.raises(CommitFailed, match=r"left.*max_poll_interval_ms=60"):
            await consumer.commit({A: 1})
        await until(consumer, lambda: consumer.group_metadata().generation_id > before)
        await consumer.commit({A: 2})


async def test_a_blocked_event_loop_is_named_as_the_cause(cluster: FakeCluster) -> None:
    """While code blocks the event loop no heartbeat is sent, and the group removes the member. The error names that
    cause."""
    lost: list[frozenset[TopicPartition]] = []

    class Listener(RebalanceListener):
        async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
            lost.append(partitions)
            with pytest.raises(CommitFailed, match=r"event loop.* ms"):
                await consumer.commit({A: 1})

    async with opened(cluster, session_timeout_ms=100) as consumer:
        consumer.subscribe(["t"], Listener())
        await read(consumer, 3)
        until_s = time.monotonic() + 0.4
        while time.monotonic() < until_s:  # as a handler does that never awaits
            pass
        await until(consumer, lambda: lost)
        await until(consumer, consumer.assignment)
    assert lost == [frozenset({A, B})]


async def test_a_log_that_was_truncated_before_the_next_start(cluster: FakeCluster) -> None:
    """A commit has the leader epoch of the records, so the next owner detects that the log was truncated."""
    cluster.move_leader(A, 1)
    async with Producer(kafka_of(cluster)) as producer:
        await (await producer.send("t", b"of epoch 1", partition=0))
    async with opened(cluster) as consumer:
        consumer.assign([A])
        await read(consumer, RECORDS + 1)
        await consumer.commit()
    assert cluster.committed("g")[A].leader_epoch == 1
    cluster.lose_records(A, 5)
    lost_from = cluster.end_offset("t")
    assert lost_from < RECORDS
    async with Producer(kafka_of(cluster)) as producer:
        records = [ProducerRecord("t", b"new", partition=0)] * 2 * RECORDS
        assert await (await producer.send_many(records)).first_error() is None
    async with opened(cluster, auto_offset_reset="none") as consumer:
        consumer.assign([A])
        with pytest.raises(LogTruncation, match=f"offset {lost_from}"):
            await until(consumer, lambda: False)
        consumer.seek(A, lost_from)
        await read(consumer, 1)
    async with opened(cluster) as consumer:
        consumer.assign([A])
        await until(consumer, lambda: consumer.known_position(A) == lost_from + 1)


async def test_an_intact_log_is_read_on(cluster: FakeCluster) -> None:
    """An intact log is read on under a later leader epoch too, even if the position itself has no leader epoch."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        await read(consumer, RECORDS)
        await consumer.commit({A: OffsetAndMetadata(3, "", 0)})
    cluster.move_leader(A, 1)
    async with opened(cluster, auto_offset_reset="none") as consumer:
        consumer.assign([A])
        await read(consumer, RECORDS - 3)
        assert consumer.known_position(A) == RECORDS


async def test_bootstrap_servers_are_settings_enough(cluster: FakeCluster) -> None:
    """Each client accepts the bootstrap servers as text instead of KafkaSettings."""
    servers = cluster.bootstrap_servers
    async with Producer(servers) as producer, Consumer(servers) as consumer, Admin(servers) as admin:
        assert await producer.partitions_for("t") == [0, 1]
        assert await consumer.end_offsets([A]) == {A: RECORDS}
        assert "t" in await admin.list_topics()


@pytest.mark.parametrize("client", [Producer, Consumer, Admin])
@pytest.mark.parametrize("odd", ["host", {"bootstrap_servers": "host:9092"}, ["host:9092"]])
def test_invalid_bootstrap_servers_are_a_config_error(client: Any, odd: object) -> None:
    """A text that is not host:port, or a value that is neither text nor KafkaSettings, is a ConfigError."""
    with pytest.raises(ConfigError, match="host"):
        client(odd)
