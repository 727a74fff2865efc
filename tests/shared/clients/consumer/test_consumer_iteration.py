"""`async for` over a consumer: which records count as processed, and the effects of seek, pause and rebalance."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from penstock.shared.clients.consumer import Consumer, RebalanceListener
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import IllegalState
from penstock.shared.common.records import OffsetAndMetadata, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster
from tests.shared.clients.consumer.filled import filled, opened

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
RECORDS = 10


@pytest.fixture
async def cluster() -> AsyncIterator[FakeCluster]:
    async with filled(RECORDS, partitions=2) as cluster:
        yield cluster


async def offsets_of(consumer: Consumer, count: int) -> list[int]:
    """Return the offsets of the next n records."""
    found: list[int] = []
    async for record in consumer:
        found.append(record.offset)
        if len(found) == count:
            break
    return found


def committed(cluster: FakeCluster) -> int:
    return cluster.committed("g").get(A, OffsetAndMetadata(0)).offset


@pytest.mark.parametrize("ends_by", ["break", "exception", "close"])
async def test_auto_commit_leaves_out_the_record_in_the_body(cluster: FakeCluster, ends_by: str) -> None:
    """However the loop ends, auto-commit covers only the records before the current one, and no unseen record of the
    batch."""
    try:
        async with opened(cluster, commit_strategy="auto") as consumer:
            consumer.assign([A])
            async for record in consumer:
                if record.offset == 3:
                    if ends_by == "exception":
                        raise LookupError
                    if ends_by == "close":
                        await consumer.close()
                    break
    except LookupError:
        pass
    assert committed(cluster) == 3


async def test_auto_commit_does_not_wait_for_the_end_of_a_batch(cluster: FakeCluster) -> None:
    """A batch may last for many times `auto_commit_interval_ms`."""
    async with opened(cluster, commit_strategy="auto") as consumer:
        consumer.assign([A])
        async for record in consumer:
            assert committed(cluster) <= record.offset
            async with asyncio.timeout(5):
                while committed(cluster) < record.offset:  # noqa: ASYNC110 - the cluster has no event for it
                    await asyncio.sleep(0)
            if record.offset == 5:
                break
            consumer._next_commit_ms = 0  # the interval has passed


async def test_an_explicit_commit_includes_the_current_record(cluster: FakeCluster) -> None:
    """An explicit commit covers the current record and no later one of its batch. The position is that of the next
    record."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        async for record in consumer:
            await consumer.commit()
            assert committed(cluster) == record.offset + 1
            assert await consumer.position(A) == record.offset + 1 == consumer.known_position(A)
            if record.offset == 2:
                break
        assert await offsets_of(consumer, 1) == [3]


async def test_the_known_lag_counts_the_rest_of_the_batch(cluster: FakeCluster) -> None:
    """The lag and the end are those of the position, which is after the current record and not after its batch."""
    began_ms = SYSTEM_CLOCK.monotonic_ms()
    async with opened(cluster) as consumer:
        consumer.assign([A])
        async for record in consumer:
            left = RECORDS - 1 - record.offset
            assert (consumer.known_lag(A), consumer.is_at_end(A)) == (left, left == 0)
            assert await consumer.lag() == {A: left}
            age_ms = consumer.end_age_ms(A)
            assert age_ms is None if left else age_ms in range(SYSTEM_CLOCK.monotonic_ms() - began_ms + 1)
            if not left:
                break


async def test_a_later_loop_or_poll_continues_after_the_last_record(cluster: FakeCluster) -> None:
    """No record of a batch is lost or returned twice. A poll marks all earlier records as processed."""
    async with opened(cluster, commit_strategy="sync") as consumer:
        consumer.assign([A])
        assert await offsets_of(consumer, 2) == [0, 1]
        assert await offsets_of(consumer, 2) == [2, 3]
        assert (await consumer.poll(100, 3))[A].offsets.tolist() == [4, 5, 6]
        assert committed(cluster) == 4
        assert await offsets_of(consumer, 3) == [7, 8, 9]


async def test_a_seek_in_the_body_holds_for_the_next_record(cluster: FakeCluster) -> None:
    """A seek, also to the beginning, drops the rest of the batch."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        assert await offsets_of(consumer, 2) == [0, 1]
        consumer.seek(A, 8)
        assert await offsets_of(consumer, 2) == [8, 9]
        await consumer.seek_to_beginning(A)
        assert await offsets_of(consumer, 2) == [0, 1]


async def test_a_seek_that_fails_keeps_the_unread_records(cluster: FakeCluster) -> None:
    """If one of the partitions is not assigned, a seek to an end raises IllegalState and moves none of them."""
    async with opened(cluster) as consumer:
        consumer.assign([A])
        assert await offsets_of(consumer, 2) == [0, 1]
        for seek in (consumer.seek_to_beginning, consumer.seek_to_end):
            with pytest.raises(IllegalState, match="t-1: not assigned"):
                await seek(A, B)
        assert await offsets_of(consumer, 2) == [2, 3]


async def test_a_subscription_in_the_body_holds_for_the_next_record() -> None:
    """Without a group too, a new subscription drops the unread records of topics that it does not have."""
    async with filled(RECORDS) as cluster, opened(cluster, group_id=None) as consumer:
        cluster.create_topic("other")
        consumer.subscribe(["t"])
        assert await offsets_of(consumer, 1) == [0]
        consumer.subscribe(["other"])
        async with Producer(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)) as producer:
            await producer.send("other", b"v")
        assert (await anext(consumer)).topic == "other"


async def test_a_pause_in_the_body_holds_for_the_next_record(cluster: FakeCluster) -> None:
    """After `resume` the rest of the paused partition is returned in order."""
    async with opened(cluster) as consumer:
        consumer.assign([A, B])
        found: list[tuple[TopicPartition, int]] = []
        async for record in consumer:
            if not found:
                first = record.topic_partition
                consumer.pause(first)
            found.append((record.topic_partition, record.offset))
            if len(found) == RECORDS + 1:
                break
        assert [offset for tp, offset in found[1:] if tp != first] == list(range(RECORDS))
        consumer.resume(first)
        assert await offsets_of(consumer, RECORDS - 1) == list(range(1, RECORDS))


async def test_a_record_does_not_visit_all_partitions(cluster: FakeCluster) -> None:
    """Otherwise the time of each record would grow with the number of assigned partitions."""

    class Counting(dict[TopicPartition, Any]):
        visits = 0

        def items(self) -> Any:
            self.visits += 1
            return super().items()

        def __iter__(self) -> Any:
            self.visits += 1
            return super().__iter__()

    async with opened(cluster) as consumer:
        consumer.assign([A])
        await offsets_of(consumer, 1)
        partitions = consumer._fetcher._partitions = Counting(consumer._fetcher._partitions)
        await offsets_of(consumer, RECORDS - 1)
        # A fetch in the background may visit them.
        assert partitions.visits < RECORDS // 2


async def test_a_rebalance_in_the_body_returns_each_record_once(cluster: FakeCluster) -> None:
    """The next record waits for the rebalance. Every record is returned exactly once."""
    async with opened(cluster, commit_strategy="auto", max_poll_records=None) as consumer:
        consumer.subscribe(["t"])
        found, generations = [], []
        async for record in consumer:
            found.append((record.partition, record.offset))
            generations.append(consumer.group_metadata().generation_id)
            if len(found) == 4:
                consumer.enforce_rebalance()
                while not consumer._coordinator.is_listener_due:  # noqa: ASYNC110 - beside the user's code
                    await asyncio.sleep(0)
            if len(found) == 2 * RECORDS:
                break
    assert generations[-1] > generations[0]
    assert len(set(found)) == 2 * RECORDS


async def test_a_close_beside_an_iteration_ends_it(cluster: FakeCluster) -> None:
    """A concurrent `close` ends the iteration while it waits for the next record."""
    async with opened(cluster, commit_strategy="auto") as consumer:
        consumer.assign([A])
        assert await offsets_of(consumer, 2) == [0, 1]
        consumer._yielded_ms = 0  # the next record lets the event loop run first
        closing = asyncio.create_task(consumer.close())
        with pytest.raises(IllegalState):
            await offsets_of(consumer, 1)
        await closing
    assert committed(cluster) == 1


async def test_an_iteration_can_be_started_again_after_an_error(cluster: FakeCluster) -> None:
    """An error of a poll ends one loop. The next loop reads on, until the consumer is closed."""

    class Fails(RebalanceListener):
        async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
            raise ValueError("boom")

    async with opened(cluster) as consumer:
        consumer.subscribe(["t"], Fails())
        with pytest.raises(ValueError, match="boom"):
            await offsets_of(consumer, 1)
        assert await offsets_of(consumer, 3) == [0, 1, 2]
    with pytest.raises(IllegalState):
        await offsets_of(consumer, 1)
