"""Commits and listeners while the group rebalances, polls that come too late, and the time a close has."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest

from shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from shared.clients.producer import Producer
from shared.common.errors import CommitFailed, IllegalState, KafkaTimeout
from shared.common.records import ProducerRecord, TopicPartition
from shared.common.settings import KafkaSettings
from shared.testing.fake_broker import Api, Delay, Drop, FakeCluster, Request

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
RECORDS = 400

Partitions = frozenset[TopicPartition]


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t", partitions=2)
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
            records = [ProducerRecord("t", b"%d" % i, partition=p) for i in range(RECORDS) for p in (0, 1)]
            assert await (await producer.send_many(records)).first_error() is None
        yield cluster


def member(cluster: FakeCluster, **given: object) -> Consumer:
    kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=2_000, retry_backoff_ms=5)
    settings = {"group_id": "g", "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20}
    return Consumer(kafka, ConsumerSettings.model_validate({"max_poll_records": 3, **settings, **given}))


@asynccontextmanager
async def opened(cluster: FakeCluster, **given: object) -> AsyncIterator[Consumer]:
    async with asyncio.timeout(20), member(cluster, **given) as consumer:
        yield consumer


async def until(consumer: Consumer, true: Callable[[], object]) -> int:
    """Poll until it is true; how many records came."""
    records = 0
    while not true():
        records += sum(map(len, (await consumer.poll(10)).values()))
    return records


@pytest.mark.parametrize("strategy", ["range", "cooperative-sticky"])
async def test_members_that_come_and_go_do_not_end_a_plain_loop(cluster: FakeCluster, strategy: str) -> None:
    """Under `sync` no poll raises for an ordinary rebalance, no committed offset goes backwards, and all are read."""
    cluster.control(Api.SYNC_GROUP, Delay(20))
    committed: dict[TopicPartition, int] = defaultdict(int)
    seen: set[tuple[int, int]] = set()
    joined = asyncio.Event()

    def note(_: Request) -> None:
        for tp, at in cluster.committed("g").items():
            assert at.offset >= committed[tp]
            committed[tp] = at.offset

    cluster.control(Api.OFFSET_COMMIT, note)

    async def read(consumer: Consumer, is_over: Callable[[], object]) -> None:
        while not is_over():
            for tp, columns in (await consumer.poll(10)).items():
                seen.update((tp.partition, offset) for offset in columns.offsets.tolist())
            await asyncio.wait_for(asyncio.shield(consumer.committed(A)), 5)  # as one that works on them

    given = {"commit_strategy": "sync", "partition_assignment_strategy": strategy}
    async with opened(cluster, **given) as first:
        first.subscribe(["t"])

        async def come_and_go() -> None:
            for _ in range(3):
                async with opened(cluster, **given) as second:
                    second.subscribe(["t"])
                    before = len(seen)
                    await read(second, lambda s=second, b=before: s.assignment() and len(seen) > b + 12)
            joined.set()

        coming = asyncio.create_task(come_and_go())
        await read(first, lambda: coming.done() and len(seen) == 2 * RECORDS)
        await coming
    assert joined.is_set()
    assert {tp: at.offset for tp, at in cluster.committed("g").items()} == {A: RECORDS, B: RECORDS}


async def test_a_listener_that_lets_a_cancellation_through_is_told_by_poll(cluster: FakeCluster) -> None:
    """It is an error like any other: poll raises it once, and the member reads on."""

    class Cancels(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            worker = asyncio.create_task(asyncio.Event().wait())
            worker.cancel()
            await worker

    async with opened(cluster) as consumer:
        consumer.subscribe(["t"], Cancels())
        records = [0]

        def has_records() -> bool:
            return records[0] > 0

        while not has_records():
            records[0] += sum(map(len, (await consumer.poll(10)).values()))
        consumer.enforce_rebalance()
        with pytest.raises(IllegalState, match=r"client .*, group g, generation .*on_partitions_revoked let a cancel"):
            await until(consumer, lambda: False)
        before = consumer.group_metadata().generation_id
        records[0] = 0
        while not has_records():
            records[0] += sum(map(len, (await consumer.poll(10)).values()))
        assert consumer.group_metadata().generation_id >= before
        assert consumer.assignment() == {A, B}
        with pytest.raises(IllegalState):
            await consumer.close()  # its revocation fails in the same way


def hold_up(seconds: float) -> None:
    """As code does that never awaits."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("then", ["poll", "commit", "poll without commits"])
async def test_a_poll_that_comes_too_late_is_noticed_whatever_blocked(cluster: FakeCluster, then: str) -> None:
    """The member has left by then: what it had is lost, its commit fails and says why, and it joins anew."""
    lost: list[Partitions] = []

    class Listener(RebalanceListener):
        async def on_partitions_lost(self, partitions: Partitions) -> None:
            lost.append(partitions)

    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)
    strategy = "sync" if then == "poll" else "none"
    async with opened(cluster, max_poll_interval_ms=150, commit_strategy=strategy) as consumer:
        consumer.subscribe(["t"], Listener())
        while not await consumer.poll(50):
            pass
        before = consumer.group_metadata().generation_id
        hold_up(0.3)
        if then == "poll without commits":
            await consumer.poll(10)
        else:
            with pytest.raises(CommitFailed, match="left the group: no poll within max_poll_interval_ms=150"):
                await (consumer.poll(10) if then == "poll" else consumer.commit())
        await until(consumer, lambda: lost and consumer.group_metadata().generation_id > before)
        assert lost == [frozenset({A, B})]
        assert len(left) == 1
        await until(consumer, consumer.assignment)
        await consumer.commit()
    assert len(lost) == 1


async def test_a_static_member_that_polls_too_late_is_told_why(cluster: FakeCluster) -> None:
    """The group is told nothing, since its place is kept; its commit says what it was that came too late."""
    async with opened(cluster, max_poll_interval_ms=150, group_instance_id="i") as consumer:
        consumer.subscribe(["t"])
        while not await consumer.poll(50):
            pass
        hold_up(0.3)
        with pytest.raises(CommitFailed, match="kept for a session: no poll within max_poll_interval_ms=150"):
            await consumer.commit()


async def test_a_close_has_one_deadline_and_the_group_is_told(cluster: FakeCluster) -> None:
    """Listener, commit and leave share it; however long the listener hangs, LeaveGroup is sent."""

    class Hangs(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await asyncio.Event().wait()

    left: list[Request] = []
    cluster.control(Api.LEAVE_GROUP, left.append)
    for timeout_ms, left_so_far in ((600, 1), (0, 2)):
        consumer = member(cluster, commit_strategy="auto")
        await consumer.start()
        consumer.subscribe(["t"], Hangs())
        async with asyncio.timeout(10):
            while not await consumer.poll(20):
                pass
        started = time.monotonic()
        with pytest.raises(KafkaTimeout, match=r"client .*, group g, generation .*on_partitions_revoked: not done"):
            await consumer.close(timeout_ms)
        assert (time.monotonic() - started) * 1_000 < timeout_ms + 1_000
        assert len(left) == left_so_far


async def test_a_revocation_stays_within_the_rebalance_timeout(cluster: FakeCluster) -> None:
    """Listener and commit together, so that the group does not give the member up meanwhile."""

    class Hangs(RebalanceListener):
        async def on_partitions_revoked(self, partitions: Partitions) -> None:
            await asyncio.Event().wait()

    joins: list[float] = []
    consumer = member(cluster, rebalance_timeout_ms=600)
    await consumer.start()
    consumer.subscribe(["t"], Hangs())
    async with asyncio.timeout(10):
        while not await consumer.poll(20):
            pass
        with cluster.control(Api.OFFSET_COMMIT, Drop()):
            cluster.control(Api.JOIN_GROUP, lambda _: joins.append(time.monotonic()))
            consumer.commit_async()  # gets no answer, so that the revocation waits for it as well
            started = time.monotonic()
            consumer.enforce_rebalance()
            with pytest.raises(KafkaTimeout, match="on_partitions_revoked: not done within 600 ms"):
                await until(consumer, lambda: False)
            while not joins:
                await consumer.poll(10)
        assert 0.5 < joins[0] - started < 1.15
        with contextlib.suppress(KafkaTimeout):
            await consumer.close()
