"""Explicit commits and auto-commits together, against a fake broker that records every commit."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.shared.clients.admin import Admin
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import UnknownTopicOrPartition
from penstock.shared.common.records import OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import Api, FakeCluster, Request
from tests.property_tests import examples

A, B = TopicPartition("t", 0), TopicPartition("t", 1)
RECORDS = 12


def kafka_of(cluster: FakeCluster) -> KafkaSettings:
    return KafkaSettings(
        bootstrap_servers=cluster.bootstrap_servers, request_timeout_ms=2_000, retry_backoff_ms=5, client_id="c"
    )


@asynccontextmanager
async def running(partitions: int = 2, records: int = RECORDS) -> AsyncIterator[FakeCluster]:
    async with FakeCluster(configs={"group.min.session.timeout.ms": "10"}) as cluster:
        cluster.create_topic("t", partitions=partitions)
        await send(cluster, records, partitions)
        yield cluster


async def send(cluster: FakeCluster, count: int, partitions: int = 1, **given: object) -> None:
    async with Producer(kafka_of(cluster), ProducerSettings.model_validate(given)) as producer:
        records = [ProducerRecord("t", b"%d" % i, partition=p) for i in range(count) for p in range(partitions)]
        assert not records or await (await producer.send_many(records)).first_error() is None


@asynccontextmanager
async def opened(cluster: FakeCluster, **given: object) -> AsyncIterator[Consumer]:
    defaults = {"group_id": "g", "auto_offset_reset": "earliest", "heartbeat_interval_ms": 20, "fetch_max_wait_ms": 20}
    async with Consumer(kafka_of(cluster), ConsumerSettings.model_validate({**defaults, **given})) as consumer:
        yield consumer


def offsets_of(cluster: FakeCluster) -> dict[TopicPartition, int]:
    return {tp: at.offset for tp, at in cluster.committed("g").items()}


class Watch:
    """Records every commit and all returned records."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.seen: dict[TopicPartition, int] = {A: 0, B: 0}
        self.returned: dict[TopicPartition, int] = {A: 0, B: 0}
        self.faults: list[str] = []
        cluster.control(Api.OFFSET_COMMIT, self.look)

    def look(self, _: Request | None = None) -> None:
        for tp, offset in offsets_of(self._cluster).items():
            if not self.seen[tp] <= offset <= self.returned[tp]:
                self.faults.append(f"{tp}: {self.seen[tp]} -> {offset}, returned to {self.returned[tp]}")
            self.seen[tp] = offset


STEPS = st.sampled_from(["poll 1", "poll 3", "next", "next", "commit", "commit_async", "commit_given", "rebalance"])


async def take_steps(strategy: str, steps: list[str]) -> list[str]:
    async with asyncio.timeout(20), running() as cluster:
        watch = Watch(cluster)
        async with opened(cluster, commit_strategy=strategy, auto_commit_interval_ms=1) as consumer:
            consumer.subscribe(["t"])
            for step in steps:
                await take_step(consumer, step, watch)
                watch.look()
        watch.look()
        return watch.faults


async def take_step(consumer: Consumer, step: str, watch: Watch) -> None:
    match step.split():
        case ["poll", count]:
            for tp, columns in (await consumer.poll(200, int(count))).items():
                watch.returned[tp] = max(watch.returned[tp], columns.offsets.item(-1) + 1)
        case ["next"] if min(watch.returned.values()) < RECORDS:
            record = await anext(consumer)
            tp = record.topic_partition
            watch.returned[tp] = max(watch.returned[tp], record.offset + 1)
        case ["commit"]:
            await consumer.commit()
        case ["commit_async"]:
            consumer.commit_async()
        case ["commit_given"]:
            at = {tp: consumer.known_position(tp) for tp in consumer.assignment()}
            await consumer.commit({tp: position for tp, position in at.items() if position is not None})
        case ["rebalance"] if consumer.assignment():
            before = consumer.group_metadata().generation_id
            consumer.enforce_rebalance()
            while consumer.group_metadata().generation_id == before:
                for tp, columns in (await consumer.poll(5, 1)).items():
                    watch.returned[tp] = max(watch.returned[tp], columns.offsets.item(-1) + 1)


@settings(max_examples=examples(40), deadline=None)
@given(st.sampled_from(["auto", "sync", "async"]), st.lists(STEPS, max_size=12))
@example("auto", ["next", "next", "next", "commit"])
@example("auto", ["poll 3", "poll 3", "poll 3", "poll 3", "commit", "rebalance"])
@example("async", ["poll 3", "poll 3", "commit_given", "rebalance"])
def test_commits_never_go_backwards_nor_ahead(strategy: str, steps: list[str]) -> None:
    """Through any polls, iterations, explicit commits, auto-commits and rebalances, up to `close`, commits never go
    backwards or beyond processed records."""
    faults = asyncio.run(take_steps(strategy, steps))
    assert not faults, (strategy, steps, faults)


@pytest.mark.parametrize("way", ["close", "rebalance", "killed"])
async def test_a_position_found_at_the_end_is_committed_before_any_record_came(way: str) -> None:
    """A position reset to the end is committed before any record arrives, so later records are not skipped."""
    async with asyncio.timeout(20), running(1, 0) as cluster:
        interval_ms = 10 if way == "close" else 60_000
        given = {"commit_strategy": "auto", "auto_offset_reset": "latest", "auto_commit_interval_ms": interval_ms}
        async with opened(cluster, **given) as idle:
            idle.subscribe(["t"])
            while not idle.assignment() or idle.known_position(A) is None:
                await idle.poll(10)
            if way == "killed":
                while not cluster.committed("g"):
                    await idle.poll(10)
            if way == "rebalance":
                idle.enforce_rebalance()
                while not cluster.committed("g"):
                    await idle.poll(10)
        assert offsets_of(cluster) == {A: 0}
        await send(cluster, 10)
        async with opened(cluster, **given) as later:
            later.subscribe(["t"])
            records = 0
            while records < 10:
                records += sum(map(len, (await later.poll(50)).values()))


async def test_a_position_found_at_the_end_is_committed_despite_a_commit_of_another_partition() -> None:
    """A user's commit of one partition does not delay the commit of another one's position, found at the end."""
    async with asyncio.timeout(20), running(2, 0) as cluster:
        given = {"commit_strategy": "auto", "auto_offset_reset": "latest", "auto_commit_interval_ms": 60_000}
        async with opened(cluster, **given) as consumer:
            consumer.assign([A, B])
            assert [await consumer.position(tp) for tp in (A, B)] == [0, 0]
            await consumer.commit({A: 0})
            while B not in offsets_of(cluster):
                await consumer.poll(10)


@pytest.mark.parametrize("strategy", ["none", "auto", "async", "sync"])
async def test_offsets_of_partitions_that_assign_leaves_are_committed(strategy: str) -> None:
    """A pending `commit_async` is sent although `assign` leaves its partition. Under a commit strategy, the records
    that were returned of this partition are committed too."""
    async with asyncio.timeout(20), running() as cluster:
        async with opened(cluster, commit_strategy=strategy, auto_commit_interval_ms=60_000) as consumer:
            consumer.assign([A])
            while not await consumer.poll(100, 3):
                pass
            if strategy == "none":
                consumer.commit_async()
            consumer.assign([B])
            await consumer.commit({})
        assert offsets_of(cluster)[A] == 3


async def test_assign_commits_no_record_of_an_iteration_that_may_be_unprocessed() -> None:
    """`assign` in the body of an `async for` does not commit the record of this turn, if it leaves its partition."""
    async with asyncio.timeout(20), running() as cluster:
        async with opened(cluster, commit_strategy="async") as consumer:
            consumer.assign([A])
            assert [(await anext(consumer)).offset for _ in range(3)] == [0, 1, 2]
            consumer.assign([B])
        assert offsets_of(cluster)[A] == 2


async def test_commits_skip_transaction_markers() -> None:
    """A group that has read all of a transactional topic has no lag."""
    async with asyncio.timeout(20), running(1, 0) as cluster:
        async with Producer(kafka_of(cluster), ProducerSettings(transactional_id="x")) as producer:
            await producer.init_transactions()
            for value in (b"1", b"2"):
                async with producer.transaction():
                    await producer.send("t", value)
        async with opened(cluster, commit_strategy="async", isolation_level="read_committed") as consumer:
            consumer.subscribe(["t"])
            while offsets_of(cluster) != {A: 4}:
                await consumer.poll(10)
        async with Admin(kafka_of(cluster)) as admin:
            assert [each.lag for each in await admin.group_lag("g")] == [0]


async def test_a_position_outside_of_the_log_is_logged_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    """Deleted offsets that were not read are skipped, logged and counted. The new position is committed."""
    registry = CollectorRegistry()
    async with asyncio.timeout(20), running(1, 10) as cluster:
        async with Admin(kafka_of(cluster)) as admin:
            await admin.alter_group_offsets("g", {A: 2})
            await admin.delete_records({A: 10})
        settings = ConsumerSettings(
            group_id="g", auto_offset_reset="earliest", commit_strategy="async", fetch_max_wait_ms=20
        )
        async with Consumer(kafka_of(cluster), settings, registry=registry) as consumer:
            consumer.subscribe(["t"])
            while cluster.committed("g")[A] != OffsetAndMetadata(10):
                await consumer.poll(10)
    labels = {"group": "g", "topic": "t"}
    assert registry.get_sample_value("penstock_consumer_position_resets_total", labels) == 1
    assert registry.get_sample_value("penstock_consumer_offsets_skipped_total", labels) == 8
    assert "left=2 to=10" in caplog.text


async def test_a_deleted_topic_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """With `sync`, the failed commit of a deleted topic is raised once. Later polls continue with the other topic."""
    monkeypatch.setattr("penstock.shared.clients.consumer.commit_request_manager.REJECTED_RETRY_MS", 20)
    async with asyncio.timeout(20), running(1, 3) as cluster:
        cluster.create_topic("u")
        other = TopicPartition("u", 0)
        async with opened(cluster, commit_strategy="sync") as consumer:
            consumer.assign([A, other])
            records = 0
            while records < 3:
                records += sum(map(len, (await consumer.poll(100)).values()))
            cluster.delete_topic("t")
            raised = 0
            for _ in range(5):
                try:
                    await consumer.poll(0)
                except UnknownTopicOrPartition:
                    raised += 1
            assert raised == 1
            async with Producer(kafka_of(cluster)) as producer:
                await producer.send("u", b"1")
            while offsets_of(cluster).get(other) != 1:
                await consumer.poll(10)
            await consumer.close()
