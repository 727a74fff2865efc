"""What a commit writes: records in order, each with its own headers, in the partition of its source key."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.clients.producer.partitioner import for_key
from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import ConsumerRecord, Headers, ProducerRecord, TopicPartition
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.entry_columns import EntryColumns
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.task.outputs import OutputColumns, TaskCommit, TaskOutputs
from penstock.shared.streams.topology import Topology
from penstock.shared.testing.fake_broker import FakeCluster
from tests.integration.test_stream_worker import Chain, chain_of, running, until


def columns() -> OutputColumns:
    keys, values = PackedBytes.of([b"a", b"b"]), PackedBytes.of([b"1", b"2"])
    return OutputColumns("out", keys, values, np.array([1, 3]))


def test_outputs_as_records_in_order() -> None:
    """Single records and columns are written in the order in which they were added."""
    outputs = TaskOutputs()
    first, last = ProducerRecord("late", b"x"), ProducerRecord("out", b"9")
    for output in (first, columns(), last):
        outputs.add(output)
    commit = TaskCommit(outputs, EntryColumns.of([]), {})
    middle = [ProducerRecord("out", b"1", b"a", timestamp=1), ProducerRecord("out", b"2", b"b", timestamp=3)]
    assert commit.outputs == [first, *middle, last]
    assert len(outputs) == 3
    outputs.roll_back(1)
    assert outputs.items == [first]


def test_headers_stay_with_their_records() -> None:
    """Records of a column keep their own headers, also if they go to different partitions."""
    own: list[Headers] = [(("trace", b"a"),), ()]
    late = replace(columns(), headers=PackedHeaders.of(own))
    assert [late.record(i).headers for i in range(2)] == own
    assert [[record.headers for record in bulk] for bulk in late.bulks()] == [own]
    late.partitions = [4, 3]
    assert [[(record.partition, record.headers) for record in bulk] for bulk in late.bulks()] == [
        [(4, own[0])],
        [(3, own[1])],
    ]


TOPIC, OUT = "clicks", "clicks-out"
QUICK = {"group.min.session.timeout.ms": "10"}
KEYS = [f"key-{i}" for i in range(20)]
SOURCE_PARTITIONS = 2
PARTITIONS = {OUT: SOURCE_PARTITIONS, f"{OUT}-wider": 5}
"""The partitions of the results topics: as many as the source has, and another number."""
KINDS: dict[str, Callable[[Any], Any]] = {
    "session": lambda grouped: grouped.session_window(10, 10_000),  # those of a key are merged, and retracted
    "hopping": lambda grouped: grouped.hopping_window(20, 10, 10_000),
    "sliding": lambda grouped: grouped.sliding_window(10, 10_000),  # which no store keeps as columns
}


def updates(kind: str, key: str = "string") -> Topology:
    builder = StreamsBuilder()
    grouped = builder.stream(TOPIC, key=key).group_by_key()  # type: ignore[arg-type]
    results = KINDS[kind](grouped).aggregate("s", n=Count()).on_update()
    for topic in PARTITIONS:
        results.to(topic)
    return builder.build()


def results_in(topic: str, keys: list[bytes], values: list[bytes | None]) -> OutputColumns:
    """Results at 1 ms and later."""
    times = np.arange(1, len(keys) + 1)
    return OutputColumns(topic, PackedBytes.of(keys), PackedBytes.of(values), times)


async def send(chain: Chain, times: range) -> None:
    """A record of each key at each time, in the partition that its key has."""
    async with Producer(chain.kafka) as producer:
        records = [ProducerRecord(TOPIC, b"{}", key.encode(), timestamp=at) for at in times for key in KEYS]
        assert await (await producer.send_many(records)).first_error() is None


async def processed(chain: Chain, records: int) -> None:
    async with Admin(chain.kafka) as admin:

        async def are() -> bool:
            return sum(to.offset for to in (await admin.group_offsets(TOPIC)).values()) == records

        await until(are)


async def create_outputs(chain: Chain) -> None:
    async with Admin(chain.kafka) as admin:
        await admin.create_topics([NewTopic(topic, partitions, 1) for topic, partitions in PARTITIONS.items()])


async def read(chain: Chain, topic: str) -> list[ConsumerRecord]:
    """All that is in a results topic."""
    settings = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="earliest")
    partitions_of_output = [TopicPartition(topic, p) for p in range(PARTITIONS[topic])]
    found: list[ConsumerRecord] = []
    async with Consumer(chain.kafka, settings) as consumer:
        consumer.assign(partitions_of_output)
        ends = await consumer.end_offsets(partitions_of_output)
        for at in partitions_of_output:
            while await consumer.position(at) < ends[at]:
                for columns in (await consumer.poll(100)).values():
                    found += columns.records()
    return found


@pytest.mark.parametrize("guarantee", ["exactly_once", "at_least_once"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("key", ["string", "bytes"])
async def test_updates_are_in_their_source_keys_partition(kind: str, guarantee: str, key: str) -> None:
    """Results and retractions are in the partition of their source key, by murmur2, so that a key's changes stay in
    order."""
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC, SOURCE_PARTITIONS) as chain:
        await create_outputs(chain)
        async with running(chain.worker(updates(kind, key), processing_guarantee=guarantee)):
            await send(chain, range(0, 90, 30))
            await processed(chain, 60)
            await send(chain, range(15, 90, 30))
            await processed(chain, 120)
            await send(chain, range(8, 90, 15))
            await processed(chain, 240)
        found = {topic: await read(chain, topic) for topic in PARTITIONS}
    for topic, records in found.items():
        windows = defaultdict(set)
        for record in records:
            window = json.loads(record.key or b"")
            source_key = base64.b64decode(window["key"]) if key == "bytes" else window["key"].encode()
            assert record.partition == for_key(source_key, PARTITIONS[topic])
            windows[source_key].add((window["start"], record.value is None))
        assert set(windows) == {key.encode() for key in KEYS}
        if kind == "session":
            assert all(any(gone for _, gone in own) for own in windows.values())


@pytest.mark.parametrize("kind", KINDS)
async def test_closed_windows_are_in_their_source_keys_partition(kind: str) -> None:
    """A closed window has its source key, and is in that key's partition."""
    builder = StreamsBuilder()
    windows = KINDS[kind](builder.stream(TOPIC).group_by_key())
    results = windows.aggregate("s", n=Count()).on_close()
    for topic in PARTITIONS:
        results.to(topic)
    async with FakeCluster(configs=QUICK) as cluster, chain_of(cluster, TOPIC, SOURCE_PARTITIONS) as chain:
        await create_outputs(chain)
        async with running(chain.worker(builder.build())):
            await send(chain, range(0, 90_000, 30_000))
            await processed(chain, 60)
        found = {topic: await read(chain, topic) for topic in PARTITIONS}
    for topic, records in found.items():
        assert {record.key for record in records} == {key.encode() for key in KEYS}
        assert [r for r in records if r.partition != for_key(r.key or b"", PARTITIONS[topic])] == []


def test_the_partition_is_set_by_the_source_key_alone() -> None:
    """This holds for single records and for columns. A record without a source key is partitioned by the producer."""
    outputs = TaskOutputs()
    outputs.add(ProducerRecord("late", b"x", b"a"))
    outputs.add(ProducerRecord(OUT, b"1", b"window 1"), b"b")
    columns = results_in(OUT, [b"w2", b"w3", b"w4"], [b"2", None, b"4"])
    columns.source_keys = PackedBytes.of([b"c", b"b", b"c"])
    outputs.add(columns)
    outputs.add(results_in("closed", [b"k"], [b"5"]))
    assert outputs.topics_by_source_key() == {OUT}
    of_b, of_c = (for_key(key, 7) for key in (b"b", b"c"))
    assert of_b != of_c
    outputs.assign_partitions({OUT: range(7)})
    commit = TaskCommit(outputs, EntryColumns.of([]), {})
    assert [record.partition for record in commit.outputs] == [None, of_b, of_c, of_b, of_c, None]
    bulks = columns.bulks()
    assert [(bulk.partition, list(bulk.values), list(bulk.timestamps)) for bulk in bulks] == [
        (of_c, [b"2", b"4"], [1, 3]),
        (of_b, [None], [2]),
    ]
