"""The consumer yields to the event loop even if records are always available, and allows only one task at a time."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator
from functools import wraps
from typing import Any

import pytest

from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.common.errors import IllegalState, InvalidTopic, Wakeup
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, FakeCluster, Request
from tests.shared.clients.consumer.filled import filled, opened

A = TopicPartition("t", 0)
RECORDS = 2_000
HEARTBEATS = 6


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with filled(RECORDS) as cluster:
        yield cluster


def work(seconds: float) -> None:
    """Blocks without awaiting, as CPU-bound code does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        pass


@pytest.mark.parametrize("way", ["poll", "async for"])
async def test_heartbeats_go_out_while_records_are_at_hand(cluster: FakeCluster, way: str) -> None:
    """Code that works without awaiting holds up no heartbeat for longer than it works on a few records.

    The session is long, so that it does not depend on the machine whether it lasts. Each piece of work takes its time,
    so that more than 30 heartbeats fall due before the records are used up.
    """
    async with opened(cluster, max_poll_records=10, session_timeout_ms=20_000) as consumer:
        consumer.subscribe(["t"])
        while not consumer.assignment() or not consumer.known_lag(A):
            await consumer.poll(20, 1)
        heartbeats: list[Request] = []
        cluster.control(Api.HEARTBEAT, heartbeats.append)
        seen = 0
        if way == "poll":
            while seen < 1_500 and len(heartbeats) < HEARTBEATS:
                seen += sum(map(len, (await consumer.poll(20)).values()))
                work(0.005)
        else:
            async for _ in consumer:
                seen += 1
                work(0.0005)
                if seen == 1_500 or len(heartbeats) == HEARTBEATS:
                    break
        assert len(heartbeats) == HEARTBEATS


async def test_polls_without_time_join_the_group(cluster: FakeCluster) -> None:
    """A consumer that only polls with a timeout of 0 joins the group and gets records."""
    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        while not await consumer.poll(0):
            pass


async def test_a_concurrent_poll_is_rejected(cluster: FakeCluster) -> None:
    """A concurrent poll is rejected, because it would mark the records of the first poll as processed. The first poll
    continues."""
    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        first = asyncio.create_task(consumer.poll(10_000))
        await asyncio.sleep(0)
        with pytest.raises(IllegalState, match="in poll"):
            await consumer.poll(0)
        with pytest.raises(IllegalState, match="in poll"):
            await anext(consumer)
        assert await first
        assert await consumer.poll(1_000)


async def test_concurrent_iterations_are_rejected(cluster: FakeCluster) -> None:
    """A concurrent iteration is rejected, because it would mark the other task's current record as processed."""
    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        busy = asyncio.Event()

        async def iterate() -> None:
            async for _ in consumer:
                busy.set()
                await asyncio.sleep(0)

        first = asyncio.create_task(iterate())
        await busy.wait()
        second = asyncio.create_task(iterate())
        done, left = await asyncio.wait({first, second}, return_when=asyncio.FIRST_COMPLETED)
        (failed,) = done
        with pytest.raises(IllegalState, match="another task"):
            await failed
        for task in left:
            task.cancel()


async def test_an_iteration_may_continue_in_another_task(cluster: FakeCluster) -> None:
    """Another task may continue after the first has left its loop or ended. Each record may have its own task."""
    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        offsets = []
        async for record in consumer:
            offsets.append(record.offset)
            break

        async def iterate() -> None:
            async for record in consumer:
                offsets.append(record.offset)
                break

        await asyncio.create_task(iterate())
        records = aiter(consumer)
        offsets += [(await asyncio.wait_for(anext(records), 10)).offset for _ in range(2)]
        assert offsets == [0, 1, 2, 3]


@pytest.mark.parametrize("topics", [[], ["a b"], [""], ["t", "x" * 300], [7]], ids=str)
async def test_an_invalid_topic_name_is_rejected_at_once(cluster: FakeCluster, topics: list[str]) -> None:
    """An invalid topic name, or none at all, is rejected at once, before and after the start."""
    async with opened(cluster) as consumer:
        with pytest.raises(InvalidTopic):
            consumer.subscribe(topics)
        consumer.subscribe(["t"])
    with pytest.raises(InvalidTopic):
        Consumer(KafkaSettings(), ConsumerSettings(group_id="g")).subscribe(topics)


class Plain(RebalanceListener):
    def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:  # type: ignore[override]
        pass


class Generates(RebalanceListener):
    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> AsyncIterator[None]:  # type: ignore[override]
        yield


def traced(method: Any) -> Any:
    @wraps(method)
    def call(*arguments: Any) -> Any:
        return method(*arguments)

    return call


class Traced(RebalanceListener):
    on_partitions_revoked = traced(RebalanceListener.on_partitions_revoked)


def test_a_listener_may_have_decorated_methods() -> None:
    """A decorator may hide that a method is async."""
    Consumer(KafkaSettings(), ConsumerSettings(group_id="g")).subscribe(["t"], Traced())


@pytest.mark.parametrize(
    "listener", [Plain(), Generates(), RebalanceListener, print, 5], ids=lambda it: type(it).__name__
)
def test_an_invalid_listener_is_rejected_at_once(listener: Any) -> None:
    """A listener is an instance of a RebalanceListener with async methods. No rebalance has to call it to find out."""
    with pytest.raises(TypeError, match="listener"):
        Consumer(KafkaSettings(), ConsumerSettings(group_id="g")).subscribe(["t"], listener)


async def test_a_pattern_matches_whole_names(cluster: FakeCluster) -> None:
    """A pattern must match the whole topic name, as in Java."""
    cluster.create_topic("other-t")
    cluster.create_topic("t-other")
    async with opened(cluster) as consumer:
        consumer.subscribe(re.compile("t"))
        while not consumer.assignment():
            await consumer.poll(10)
        assert consumer.assignment() == {A}


@pytest.mark.parametrize("time_ms", [-1, -2, -5, True, "x"])
async def test_a_negative_time_is_rejected(cluster: FakeCluster, time_ms: int) -> None:
    """A negative timestamp is rejected. A broker would read it as a special offset or an unknown value."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        with pytest.raises((ValueError, TypeError), match="t-0"):
            await consumer.offsets_for_times({A: time_ms})


async def test_wakeup_ends_the_poll_under_way(cluster: FakeCluster) -> None:
    """A poll in progress raises Wakeup at once and consumes nothing. Later polls return every record."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        await consumer.seek_to_end(A)
        polling = asyncio.ensure_future(consumer.poll(60_000))
        while not consumer.is_at_end(A):
            await asyncio.wait([asyncio.ensure_future(consumer.position(A))])
        consumer.wakeup()
        with pytest.raises(Wakeup):
            await polling
        consumer.seek(A, RECORDS - 1)
        assert [len(columns) for columns in (await consumer.poll(5_000)).values()] == [1]


@pytest.mark.parametrize("way", ["poll", "async for"])
async def test_wakeup_ends_the_next_poll_where_none_is_under_way(cluster: FakeCluster, way: str) -> None:
    """Without a poll in progress, any number of wakeups ends the next poll once. Fetched records are kept."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        consumer.wakeup()
        consumer.wakeup()
        with pytest.raises(Wakeup):
            await (consumer.poll(5_000) if way == "poll" else anext(consumer))
        assert (await anext(consumer)).offset == 0


async def test_aiokafka_logs_nothing_for_a_consumer(cluster: FakeCluster, caplog: pytest.LogCaptureFixture) -> None:
    """aiokafka logs nothing, however often a member reconnects and its group rebalances."""
    caplog.set_level(logging.DEBUG)
    (node,) = cluster.nodes
    async with opened(cluster) as consumer:
        consumer.subscribe(["t"])
        await anext(consumer)
        await cluster.stop_node(node)
        consumer.ping()
        await consumer.poll(200, 1)
        await cluster.start_node(node)
        consumer.enforce_rebalance()
        while not await consumer.poll(20, 1):
            pass
    assert [record.getMessage() for record in caplog.records if record.name.startswith("aiokafka")] == []
