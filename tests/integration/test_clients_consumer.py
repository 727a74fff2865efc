"""The consumer against a real broker."""

from __future__ import annotations

import asyncio
import gc
import re
from collections.abc import Awaitable, Callable

import pytest
from prometheus_client import CollectorRegistry

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import (
    CommitFailed,
    IllegalState,
    KafkaTimeout,
    NoOffsetForPartition,
    OffsetOutOfRange,
)
from penstock.shared.common.records import Columns, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker


def settings_of(kafka: Broker) -> KafkaSettings:
    return KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)


def member(group: str, **more: object) -> ConsumerSettings:
    return ConsumerSettings.model_validate(
        {
            "group_id": group,
            "auto_offset_reset": "earliest",
            "heartbeat_interval_ms": 100,
            "session_timeout_ms": 6_000,
            **more,
        }
    )


async def fill(kafka: Broker, topic: str, partitions: int, each: int) -> None:
    """Create a topic with `each` records (values 0, 1, …; timestamps 1000, 1001, …) in every partition."""
    async with Admin(settings_of(kafka)) as admin, Producer(settings_of(kafka)) as producer:
        await admin.create_topics([NewTopic(topic, partitions)], exist_ok=True)
        records = [
            ProducerRecord(topic, b"%d" % i, partition=p, timestamp=1_000 + i)
            for i in range(each)
            for p in range(partitions)
        ]
        assert await (await producer.send_many(records)).first_error() is None


async def poll_until(*consumers: Consumer, until: Callable[[], bool]) -> list[Columns]:
    """Poll the consumers in turn until a condition holds, and return the records."""
    found: list[Columns] = []
    async with asyncio.timeout(40):
        while not until():
            for consumer in consumers:
                found += (await consumer.poll(100)).values()
    return found


async def eventually(read: Callable[[], Awaitable[object]], expected: object) -> None:
    """Call `ask` until it returns the expected value."""
    async with asyncio.timeout(10):
        while await read() != expected:  # noqa: ASYNC110 - the broker sends no event when it changes
            await asyncio.sleep(0.05)


class RecordingListener(RebalanceListener):
    """Records the calls of the listener."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, frozenset[TopicPartition]]] = []
        self.lost = asyncio.Event()

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("assigned", partitions))

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("revoked", partitions))

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        self.calls.append(("lost", partitions))
        self.lost.set()


async def test_commit_and_resume(kafka: Broker, topic_name: str) -> None:
    """A later member continues from the committed offset and reads the metadata that was committed with it."""
    await fill(kafka, topic_name, 1, 10)
    tp = TopicPartition(topic_name, 0)
    async with Consumer(settings_of(kafka), member(topic_name)) as consumer:
        consumer.subscribe([topic_name])
        assert await consumer.committed(tp) is None
        first = (await consumer.poll(20_000, max_records=4))[tp]
        assert first.offsets.tolist() == [0, 1, 2, 3]
        assert await consumer.position(tp) == 4
        await consumer.commit({tp: OffsetAndMetadata(3, "three")})
        assert await consumer.committed(tp) == OffsetAndMetadata(3, "three")
    async with Consumer(settings_of(kafka), member(topic_name)) as consumer:
        consumer.subscribe([topic_name])
        rest = (await consumer.poll(20_000))[tp]
        assert rest.offsets.tolist() == list(range(3, 10))
        await consumer.commit()
        committed = await consumer.committed(tp)
        assert committed == OffsetAndMetadata(10)
        assert committed is not None
        assert committed.leader_epoch == 0
        errors: list[Exception | None] = []
        consumer.commit_async({tp: 7}, lambda _, error: errors.append(error))
        consumer.commit_async({tp: 8})
        await consumer.commit({tp: 9})
        assert errors == [None]
        assert await consumer.committed(tp) == OffsetAndMetadata(9)


async def test_auto_commits_only_records_of_earlier_polls(kafka: Broker, topic_name: str) -> None:
    """Under auto, the records of the latest poll are not committed, neither by the interval nor when the block
    fails.
    """
    await fill(kafka, topic_name, 1, 10)
    tp = TopicPartition(topic_name, 0)
    settings = member(topic_name, commit_strategy="auto", auto_commit_interval_ms=1)

    async def fail_in_the_second_poll() -> None:
        async with Consumer(settings_of(kafka), settings) as consumer:
            consumer.subscribe([topic_name])
            assert len((await consumer.poll(20_000, max_records=4))[tp]) == 4
            assert len((await consumer.poll(20_000, max_records=3))[tp]) == 3
            raise RuntimeError("while the second poll's records are handled")

    with pytest.raises(RuntimeError, match="second poll"):
        await fail_in_the_second_poll()
    async with Admin(settings_of(kafka)) as admin:
        assert await admin.group_offsets(topic_name) == {tp: OffsetAndMetadata(4)}
        async with Consumer(settings_of(kafka), settings) as consumer:
            consumer.subscribe([topic_name])
            assert (await consumer.poll(20_000, max_records=4))[tp].offsets.tolist() == [4, 5, 6, 7]
        assert await admin.group_offsets(topic_name) == {tp: OffsetAndMetadata(8)}


@pytest.mark.parametrize("strategy", ["sync", "async"])
async def test_sync_and_async_commit_at_every_poll(kafka: Broker, topic_name: str, strategy: str) -> None:
    """sync and async commit, at every poll, the records of the polls before it."""
    await fill(kafka, topic_name, 1, 10)
    tp = TopicPartition(topic_name, 0)
    async with Consumer(settings_of(kafka), member(topic_name, commit_strategy=strategy)) as consumer:
        consumer.subscribe([topic_name])
        for expected in (None, 4, 8):
            await consumer.poll(20_000, max_records=4)
            await eventually(lambda: consumer.committed(tp), OffsetAndMetadata(expected) if expected else None)


async def test_two_members_share_the_partitions(kafka: Broker, topic_name: str) -> None:
    """A second member takes half of the partitions and gives them back; no record is missed."""
    await fill(kafka, topic_name, 4, 50)
    one, two, registry = RecordingListener(), RecordingListener(), CollectorRegistry()
    everything = frozenset(TopicPartition(topic_name, p) for p in range(4))
    settings = member(topic_name, commit_strategy="sync")
    async with Consumer(settings_of(kafka), settings, registry=registry) as first:
        first.subscribe([topic_name], one)
        found = await poll_until(first, until=lambda: first.assignment() == everything)
        async with Consumer(settings_of(kafka), settings) as second:
            second.subscribe([topic_name], two)
            found += await poll_until(
                first, second, until=lambda: len(first.assignment()) == 2 and len(second.assignment()) == 2
            )
            assert first.assignment() | second.assignment() == everything
            generation = second.group_metadata().generation_id
            async with Admin(settings_of(kafka)) as admin:
                described = await admin.describe_group(topic_name)
            assert {m.assignment for m in described.members} == {first.assignment(), second.assignment()}
            assert second.group_metadata().member_id in {m.member_id for m in described.members}
        found += await poll_until(first, until=lambda: first.assignment() == everything)
        assert first.group_metadata().generation_id > generation
        async with asyncio.timeout(30):
            while any((await first.lag()).values()):
                found += (await first.poll(100)).values()
    # Records of the last poll before a revocation are read again: at least once, not exactly once.
    assert {(c.partition, o) for c in found for o in c.offsets.tolist()} == {
        (p, o) for p in range(4) for o in range(50)
    }
    assert [name for name, _ in one.calls] == ["assigned", "revoked", "assigned", "revoked", "assigned", "revoked"]
    assert [name for name, _ in two.calls] == ["assigned", "revoked"]
    assert one.calls[0][1] == one.calls[1][1] == everything
    assert registry.get_sample_value("penstock_consumer_rebalances_total", {"group": topic_name}) == 3


async def test_max_poll_interval_loses_the_partitions(kafka: Broker, topic_name: str) -> None:
    """A member that does not poll within max_poll_interval_ms leaves the group, and its listener gets
    `on_partitions_lost`.
    """
    await fill(kafka, topic_name, 1, 5)
    heard = RecordingListener()
    async with Consumer(settings_of(kafka), member(topic_name, max_poll_interval_ms=500)) as consumer:
        consumer.subscribe([topic_name], heard)
        await poll_until(consumer, until=lambda: bool(consumer.assignment()))
        await asyncio.sleep(0.7)
        with pytest.raises(CommitFailed, match="max_poll_interval_ms=500"):
            await consumer.commit({TopicPartition(topic_name, 0): 1}, timeout_ms=500)
        assert [name for name, _ in heard.calls] == ["assigned"]  # only polls call the listener
        await poll_until(consumer, until=lambda: len(heard.calls) == 3)
        await consumer.commit({TopicPartition(topic_name, 0): 1})
    assert [name for name, _ in heard.calls] == ["assigned", "lost", "assigned", "revoked"]


async def test_a_listener_seeks_and_its_errors_surface(kafka: Broker, topic_name: str) -> None:
    """Reading starts where a listener seeks to; poll raises the listener's error, or KafkaTimeout if it is too slow."""
    await fill(kafka, topic_name, 1, 10)
    tp = TopicPartition(topic_name, 0)

    class Seeks(RebalanceListener):
        async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
            await asyncio.sleep(0.5)
            consumer.seek(tp, 6)
            raise ValueError("the listener's own")

    async with Consumer(settings_of(kafka), member(topic_name)) as consumer:
        consumer.subscribe([topic_name], Seeks())
        with pytest.raises(ValueError, match="the listener's own"):
            await poll_until(consumer, until=lambda: False)
        assert (await consumer.poll(10_000))[tp].offsets.tolist() == [6, 7, 8, 9]

    class Hangs(RebalanceListener):
        async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
            await asyncio.Event().wait()

    async with Consumer(settings_of(kafka), member(f"{topic_name}-2", listener_timeout_ms=500)) as consumer:
        consumer.subscribe([topic_name], Hangs())
        with pytest.raises(KafkaTimeout, match=r"on_partitions_assigned.*500 ms"):
            await poll_until(consumer, until=lambda: False)


async def test_seek_pause_and_lookups(kafka: Broker, topic_name: str) -> None:
    """Seeks set the position, a paused partition keeps its buffered records, and offsets are found by timestamp."""
    await fill(kafka, topic_name, 2, 10)
    zero, one = TopicPartition(topic_name, 0), TopicPartition(topic_name, 1)
    settings = ConsumerSettings(auto_offset_reset="earliest")
    async with Consumer(settings_of(kafka), settings) as consumer:
        with pytest.raises(IllegalState, match="subscription"):
            await consumer.poll(0)
        consumer.assign([zero, one])
        with pytest.raises(IllegalState, match="group_id"):
            await consumer.commit()
        with pytest.raises(IllegalState, match="not assigned"):
            consumer.seek(TopicPartition(topic_name, 5), 0)
        found = await poll_until(consumer, until=lambda: len(consumer.assignment()) == 2)
        async with asyncio.timeout(10):
            while sum(map(len, found)) < 20:
                found += (await consumer.poll(100)).values()
        consumer.seek(zero, 2)
        assert {tp: c.offsets.tolist() for tp, c in (await consumer.poll(10_000, max_records=3)).items()} == {
            zero: [2, 3, 4]
        }
        consumer.pause(zero)
        assert consumer.paused() == {zero}
        assert await consumer.poll(300) == {}
        consumer.resume(zero)
        assert (await consumer.poll(10_000))[zero].offsets.tolist() == [5, 6, 7, 8, 9]
        await consumer.seek_to_beginning(one)
        assert await consumer.position(one) == 0
        await consumer.seek_to_end()
        assert await consumer.position(one) == 10
        assert await consumer.offsets_for_times({zero: 1_004, one: 99_999}) == {zero: 4, one: None}
        assert await consumer.beginning_offsets([zero]) == {zero: 0}
        assert await consumer.end_offsets([zero, one]) == {zero: 10, one: 10}
        consumer.seek(one, 3)
        assert await consumer.lag() == {zero: 0, one: 7}


async def test_no_offset_reset(kafka: Broker, topic_name: str) -> None:
    """Under auto_offset_reset=none a missing or unreachable offset is an error."""
    await fill(kafka, topic_name, 1, 10)
    tp = TopicPartition(topic_name, 0)
    async with Admin(settings_of(kafka)) as admin:
        await admin.delete_records({tp: 4})
    async with Consumer(settings_of(kafka), member(topic_name, auto_offset_reset="none")) as consumer:
        consumer.subscribe([topic_name])
        with pytest.raises(NoOffsetForPartition, match=f"{topic_name}-0"):
            await poll_until(consumer, until=lambda: False)
        consumer.seek(tp, 2)
        with pytest.raises(OffsetOutOfRange, match=f"{topic_name}-0.*offset 2"):
            await poll_until(consumer, until=lambda: False)
        consumer.seek(tp, 4)
        assert (await consumer.poll(10_000))[tp].offsets.tolist() == list(range(4, 10))


async def test_iteration_pattern_and_a_topic_created_later(kafka: Broker, topic_name: str) -> None:
    """Records can be iterated one by one, and a subscribed topic is read once it exists."""
    async with Consumer(settings_of(kafka), member(topic_name)) as consumer:
        consumer.subscribe(re.compile(re.escape(topic_name)))
        assert await consumer.poll(300) == {}
    async with Consumer(settings_of(kafka), member(f"{topic_name}-2")) as consumer:
        consumer.subscribe([topic_name])
        assert await consumer.poll(300) == {}
        await fill(kafka, topic_name, 1, 3)
        values = []
        async with asyncio.timeout(30):
            async for record in consumer:
                values.append(record.value)
                if len(values) == 3:
                    break
        assert values == [b"0", b"1", b"2"]


async def test_static_membership(kafka: Broker, topic_name: str) -> None:
    """A group_instance_id is in the group's metadata, and the member can commit."""
    await fill(kafka, topic_name, 1, 3)
    tp = TopicPartition(topic_name, 0)
    async with Consumer(settings_of(kafka), member(topic_name, group_instance_id="instance-1")) as consumer:
        consumer.subscribe([topic_name])
        assert len((await consumer.poll(20_000))[tp]) == 3
        await consumer.commit()
        assert consumer.group_metadata().group_instance_id == "instance-1"
        async with Admin(settings_of(kafka)) as admin:
            (found,) = (await admin.describe_group(topic_name)).members
        assert found.group_instance_id == "instance-1"
        assert await consumer.committed(tp) == OffsetAndMetadata(3)


async def test_a_seek_leaves_no_unretrieved_exception(kafka: Broker, topic_name: str) -> None:
    """A seek that ends before the position is known leaves no exception that asyncio reports later."""
    left: list[dict[str, object]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
    await fill(kafka, topic_name, 1, 3)
    at = TopicPartition(topic_name, 0)
    async with Consumer(settings_of(kafka), ConsumerSettings(auto_offset_reset="none")) as consumer:
        consumer.assign([at])
        for _ in range(3):
            await consumer.seek_to_beginning(at)
            await consumer.seek_to_end(at)
        assert await consumer.position(at) == 3
    gc.collect()
    await asyncio.sleep(0)
    assert left == []
