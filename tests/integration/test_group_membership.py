"""Members of a consumer group on a real broker: which partitions they revoke, static members, and groups with Java
members.
"""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from penstock.services.local.broker_config import KAFKA_JARS, QUICK_START, broker_archive_path
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import GroupNotEmpty
from penstock.shared.common.java.class_archive import archive_options
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars
from penstock.shared.common.records import ConsumerRecord, OffsetAndMetadata, ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.documents import DOCS, block, blocks, names_of
from tests.shared_broker import Broker

COOPERATIVE = "cooperative-sticky"
JAVA_ASSIGNORS = {
    "range": "RangeAssignor",
    "roundrobin": "RoundRobinAssignor",
    "sticky": "StickyAssignor",
    COOPERATIVE: "CooperativeStickyAssignor",
}
JAVA_MEMBER = """
import java.time.Duration;
import java.util.*;
import org.apache.kafka.clients.consumer.*;
import org.apache.kafka.common.serialization.ByteArrayDeserializer;

public class Member {
    public static void main(String[] a) {
        Properties p = new Properties();
        p.put("bootstrap.servers", a[0]);
        p.put("group.id", a[1]);
        if (a[2].isEmpty()) {
            p.put("group.protocol", "consumer");
        } else {
            p.put("partition.assignment.strategy", "org.apache.kafka.clients.consumer." + a[2]);
            p.put("heartbeat.interval.ms", "100");
        }
        p.put("key.deserializer", ByteArrayDeserializer.class.getName());
        p.put("value.deserializer", ByteArrayDeserializer.class.getName());
        try (KafkaConsumer<byte[], byte[]> consumer = new KafkaConsumer<>(p)) {
            consumer.subscribe(List.of(a[1]));
            String printed = "";
            while (true) {
                consumer.poll(Duration.ofMillis(50));
                TreeSet<Integer> mine = new TreeSet<>();
                consumer.assignment().forEach(tp -> mine.add(tp.partition()));
                if (!printed.equals(mine.toString())) {
                    printed = mine.toString();
                    System.out.println("ASSIGNED " + printed);
                    System.out.flush();
                }
            }
        }
    }
}
"""


class RecordingListener(RebalanceListener):
    """Records the listener's calls as (name, partition numbers), without empty ones."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []

    def _note(self, name: str, partitions: frozenset[TopicPartition]) -> None:
        if partitions:
            self.calls.append((name, sorted(tp.partition for tp in partitions)))

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        self._note("assigned", partitions)

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        self._note("revoked", partitions)

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        self._note("lost", partitions)


async def fill(kafka: Broker, topic: str, partitions: int, each: int) -> None:
    settings = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    async with Admin(settings) as admin, Producer(settings) as producer:
        await admin.create_topics([NewTopic(topic, partitions)])
        records = [ProducerRecord(topic, b"v", partition=p) for p in range(partitions)] * each
        assert await (await producer.send_many(records)).first_error() is None


@asynccontextmanager
async def member(
    kafka: Broker, topic: str, listener: RebalanceListener | None = None, **more: object
) -> AsyncIterator[Consumer]:
    common = {"group_id": topic, "auto_offset_reset": "earliest", "heartbeat_interval_ms": 100}
    settings = ConsumerSettings.model_validate({**common, "session_timeout_ms": 10_000, **more})
    async with Consumer(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), settings) as consumer:
        consumer.subscribe([topic], listener)
        yield consumer


async def poll_until(until: Callable[[], object], *consumers: Consumer) -> list[tuple[int, int]]:
    """Poll the consumers in turn until a condition holds, and return the partitions and offsets of the records."""
    found: list[tuple[int, int]] = []
    async with asyncio.timeout(60):
        while not until():
            for consumer in consumers:
                for tp, columns in (await consumer.poll(50)).items():
                    found += [(tp.partition, offset) for offset in columns.offsets.tolist()]
    return found


async def test_a_cooperative_rebalance_revokes_only_moved_partitions(kafka: Broker, topic_name: str) -> None:
    """When a second cooperative member joins, the first revokes only the moved partitions.

    It reads the others on, each record once, and can commit.
    """
    await fill(kafka, topic_name, 4, 100)
    everything = frozenset(TopicPartition(topic_name, p) for p in range(4))
    one, two = RecordingListener(), RecordingListener()
    settings = {"partition_assignment_strategy": COOPERATIVE, "max_poll_records": 7}
    async with member(kafka, topic_name, one, **settings) as first:
        found = await poll_until(lambda: first.assignment() == everything, first)
        async with member(kafka, topic_name, two, commit_strategy="sync", **settings) as second:
            found += await poll_until(lambda: len(first.assignment()) == len(second.assignment()) == 2, first, second)
            kept, moved = first.assignment(), second.assignment()
            assert kept | moved == everything
            await first.commit({tp: OffsetAndMetadata(1) for tp in kept})
        found += await poll_until(lambda: first.assignment() == everything, first)
        found += await poll_until(lambda: all(first.known_position(tp) == 100 for tp in everything), first)
    numbers = sorted(tp.partition for tp in moved)
    assert one.calls == [
        ("assigned", [0, 1, 2, 3]), ("revoked", numbers), ("assigned", numbers), ("revoked", [0, 1, 2, 3])
    ]  # fmt: skip
    assert two.calls == [("assigned", numbers), ("revoked", numbers)]
    of_kept = sorted(at for at in found if TopicPartition(topic_name, at[0]) in kept)
    assert of_kept == [(tp.partition, offset) for tp in sorted(kept) for offset in range(100)]
    assert set(found) == {(p, o) for p in range(4) for o in range(100)}


async def process(consumer: Consumer, topic: str, work: Callable[[ConsumerRecord], Awaitable[None]]) -> None:
    """Run the example of a committing listener in docs/consumer.md without end, with `work` for each record."""
    document = DOCS / "consumer.md"
    shown = block(document, "python", "class CommitFirst(")
    for of_document, ours in (('["orders"]', repr([topic])), ("done.append(record.value)", "await work(record)")):
        assert shown.count(of_document) == 1
        shown = shown.replace(of_document, ours)
    names = names_of(document, blocks(document)[0], shown)
    names["work"] = work
    await names["process"](consumer, 1)


@pytest.mark.parametrize("strategy", ["range", COOPERATIVE])
@pytest.mark.parametrize("crash", ["before the next poll", "after the rebalance"])
async def test_the_documented_listener_loses_no_record_in_a_crash(
    kafka: Broker, topic_name: str, crash: str, strategy: str
) -> None:
    """With the documented listener, a member that crashes during or after a rebalance loses no record."""
    partitions, each = 4, 50
    await fill(kafka, topic_name, partitions, each)
    processed: dict[str, set[tuple[int, int]]] = {"first": set(), "second": set()}
    has_crashed = asyncio.Event()
    settings = {"partition_assignment_strategy": strategy, "session_timeout_ms": 2_000, "max_poll_records": 40}

    async def work_of_first(record: ConsumerRecord) -> None:
        if len(processed["first"]) == 10:
            coming.set()
            while not (first._coordinator.is_listener_due or processed["second"]):  # noqa: ASYNC110 - beside the members
                await asyncio.sleep(0.01)
        if coming.is_set() and (crash == "before the next poll" or len(first.assignment()) < partitions):
            while crash == "after the rebalance" and not processed["second"]:  # noqa: ASYNC110 - beside the members
                await asyncio.sleep(0.01)
            has_crashed.set()
            await first._connection.close()  # as if the process were killed
            await asyncio.Event().wait()
        processed["first"].add((record.partition, record.offset))

    async def work_of_second(record: ConsumerRecord) -> None:
        processed["second"].add((record.partition, record.offset))
        if crash == "after the rebalance":
            await has_crashed.wait()

    coming = asyncio.Event()
    first = Consumer(
        KafkaSettings(bootstrap_servers=kafka.bootstrap_servers),
        ConsumerSettings.model_validate(
            {"group_id": topic_name, "auto_offset_reset": "earliest", "heartbeat_interval_ms": 100, **settings}
        ),
    )
    await first.start()
    processing = asyncio.create_task(process(first, topic_name, work_of_first))
    async with asyncio.timeout(60):
        await coming.wait()
        async with member(kafka, topic_name, **settings) as second:
            joined = asyncio.create_task(process(second, topic_name, work_of_second))
            everything = {(p, offset) for p in range(partitions) for offset in range(each)}
            while processed["first"] | processed["second"] != everything or not has_crashed.is_set():  # noqa: ASYNC110 - beside the members
                await asyncio.sleep(0.05)
            for task in (joined, processing):
                task.cancel()
            await asyncio.wait({joined, processing})
    with contextlib.suppress(Exception):
        await first.close(100)


@pytest.mark.parametrize("assignor", ["range", COOPERATIVE])
async def test_a_static_member_restarts_without_a_rebalance(kafka: Broker, topic_name: str, assignor: str) -> None:
    """A static member that restarts within its session gets its partitions back without a rebalance."""
    await fill(kafka, topic_name, 4, 1)
    other = RecordingListener()
    settings = {"partition_assignment_strategy": assignor}
    async with member(kafka, topic_name, other, group_instance_id="stays", **settings) as stays:
        async with member(kafka, topic_name, group_instance_id="restarts", **settings) as restarts:
            await poll_until(lambda: len(stays.assignment()) == len(restarts.assignment()) == 2, stays, restarts)
            had, generation = restarts.assignment(), restarts.group_metadata().generation_id
            calls = list(other.calls)
        async with member(kafka, topic_name, group_instance_id="restarts", **settings) as restarts:
            await poll_until(lambda: restarts.assignment() == had, stays, restarts)
            assert restarts.group_metadata().generation_id == generation
            for _ in range(5):  # some heartbeats
                await stays.poll(100)
            await restarts.commit(dict.fromkeys(had, 1))
        assert other.calls == calls


@asynccontextmanager
async def java_member(kafka: Broker, topic: str, assignor: str, folder: Path) -> AsyncIterator[list[list[int]]]:
    """Run Kafka's Java consumer as a member of the group, and yield its assignments, latest first. It needs a JDK.

    Without an assignor it uses the new consumer group protocol (KIP-848).
    """
    java = find_java()
    listing = [java.executable, "--list-modules"]
    modules = (await asyncio.to_thread(subprocess.run, listing, capture_output=True, text=True, check=True)).stdout
    if "jdk.compiler" not in modules:
        pytest.skip("a JDK is needed to compile a Java member")
    source = folder / "Member.java"
    source.write_text(JAVA_MEMBER)
    jars = await fetch_jars(KAFKA_JARS)
    command = [
        java.executable,
        "-Xmx128m",
        *QUICK_START,
        *archive_options(broker_archive_path(java, jars)),
        "-cp",
        f"{jars}/*",
        source,
        kafka.bootstrap_servers,
        topic,
        JAVA_ASSIGNORS.get(assignor, ""),
    ]
    process = await asyncio.create_subprocess_exec(
        *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.DEVNULL
    )
    assignments: list[list[int]] = []

    async def read() -> None:
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b"ASSIGNED "):
                assignments.insert(0, [int(number) for number in line[len("ASSIGNED [") : -2].split(b", ") if number])

    reading = asyncio.create_task(read())
    try:
        yield assignments
    finally:
        process.kill()
        await process.wait()
        await reading


@pytest.mark.parametrize("assignor", JAVA_ASSIGNORS)
async def test_a_group_with_a_java_member(kafka: Broker, topic_name: str, tmp_path: Path, assignor: str) -> None:
    """A Java consumer and a Penstock consumer share the partitions, whichever of them leads the group."""
    await fill(kafka, topic_name, 4, 1)
    heard, settings = RecordingListener(), {"partition_assignment_strategy": assignor, "session_timeout_ms": 6_000}
    async with member(kafka, topic_name, heard, **settings) as first:  # this client leads
        await poll_until(lambda: len(first.assignment()) == 4, first)
        async with java_member(kafka, topic_name, assignor, tmp_path) as theirs:

            def shared_out(*members: Consumer) -> bool:
                ours = sorted(tp.partition for one in members for tp in one.assignment())
                return bool(theirs) and bool(theirs[0]) and sorted(ours + theirs[0]) == [0, 1, 2, 3]

            await poll_until(lambda: shared_out(first), first)
            assert len(theirs[0]) == 2
            if assignor == COOPERATIVE:
                assert heard.calls == [("assigned", [0, 1, 2, 3]), ("revoked", theirs[0])]
            async with member(kafka, topic_name, **settings) as second:
                await poll_until(lambda: shared_out(first, second) and second.assignment(), first, second)
                kept = first.assignment()
                await first.commit(dict.fromkeys(kept, 1))
            await poll_until(lambda: shared_out(first) and len(first.assignment()) == 2, first)
            await first.close()  # the Java client leads
            async with member(kafka, topic_name, **settings) as third:
                await poll_until(lambda: shared_out(third) and len(third.assignment()) == 2, third)


async def test_a_group_of_the_new_protocol_is_described(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """A group of the new protocol is described with its members; while it has members, changing its offsets is an error
    that names them.
    """
    await fill(kafka, topic_name, 2, 1)
    tps = [TopicPartition(topic_name, partition) for partition in (0, 1)]
    async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin, asyncio.timeout(60):
        async with java_member(kafka, topic_name, "", tmp_path) as theirs:
            while not theirs or not theirs[0]:  # noqa: ASYNC110 - another process changes it
                await asyncio.sleep(0.05)
            group = await admin.describe_group(topic_name)
            assert (group.state, [each.assignment for each in group.members]) == ("Stable", [frozenset(tps)])
            for change in (
                admin.alter_group_offsets(topic_name, {tps[0]: 1}),
                admin.reset_group_offsets(topic_name, "earliest", tps),
                admin.delete_group_offsets(topic_name, tps),
                admin.delete_group(topic_name),
            ):
                with pytest.raises(GroupNotEmpty, match=group.members[0].member_id):
                    await change
        assert (await admin.describe_group(f"{topic_name}-nobody")).state == "Dead"
