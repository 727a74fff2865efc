"""The partition and the queue of a record, and the partitions of keys in columns, which equal those of Java."""

from __future__ import annotations

import base64
import json
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer import partitioner
from penstock.shared.clients.producer.column_slices import NO_PARTITION, partitions_of_keys, rows_by_partition
from penstock.shared.clients.producer.partitioner import (
    PartitionedTopic,
    Partitioner,
    ProducerPartitioner,
    StickyPartition,
    for_key,
)
from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.clients.producer.record_accumulator import RecordAccumulator
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import ProducerRecord, TopicPartition
from tests.documents import ROOT
from tests.shared.clients.producer.clusters import NO_LEADER, connection, know

CASES = [json.loads(line) for line in (Path(__file__).parent / "data" / "murmur2.jsonl").read_text().splitlines()]
DRAWS = 11_000


def chosen(
    sticky: StickyPartition, queued: tuple[int, ...], slow: frozenset[int] = frozenset(), available: object = None
) -> int:
    numbers = list(range(len(queued)))
    return sticky.choose(
        "t",
        numbers if available is None else list(available),  # type: ignore[call-overload]
        numbers,
        lambda tp: queued[tp.partition],
        lambda tp: tp.partition in slow,
    )


def draws(sticky: StickyPartition, queued: tuple[int, ...], slow: frozenset[int] = frozenset()) -> Counter[int]:
    found: Counter[int] = Counter()
    for _ in range(DRAWS):
        found[chosen(sticky, queued, slow)] += 1
        sticky.produced(100)
    return found


@pytest.mark.parametrize("case", CASES, ids=lambda c: str(len(base64.b64decode(c["key"]))) + "-bytes")
def test_murmur2_is_javas(case: dict[str, Any]) -> None:
    """Hash and partition of a key are what Java's client computes."""
    key = base64.b64decode(case["key"])
    assert for_key(key, 2**31) == case["murmur2"] & 0x7FFF_FFFF
    assert for_key(key, 7) == case["partition_of_7"]


def test_the_choice_is_sticky_for_batch_size_bytes() -> None:
    """The partition changes after batch_size bytes, however many batches that takes."""
    sticky = StickyPartition(100, adaptive=False, rng=random.Random(3))
    first = chosen(sticky, (0,) * 50)
    for _ in range(9):
        sticky.produced(11)
        assert chosen(sticky, (0,) * 50) == first
    sticky.produced(1)
    assert chosen(sticky, (0,) * 50) != first
    assert repr(sticky) == f"<StickyPartition {sticky.partition}, 0 bytes>"


def test_uniform() -> None:
    """Without adaptive partitioning all partitions are equally likely, whatever their queues."""
    found = draws(StickyPartition(100, adaptive=False, rng=random.Random(1)), (1, 7, 2))
    assert all(abs(found[p] - DRAWS / 3) < 0.05 * DRAWS / 3 for p in range(3))


def test_uniform_where_queues_are_equal() -> None:
    """Adaptive partitioning is uniform while no queue is longer than another."""
    found = draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (4, 4, 4))
    assert all(abs(found[p] - DRAWS / 3) < 0.05 * DRAWS / 3 for p in range(3))


def test_adaptive() -> None:
    """With queues of 1, 7 and 2 batches, partitions are chosen 7 : 1 : 6."""
    found = draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (1, 7, 2))
    for partition, weight in enumerate((7, 1, 6)):
        expected = DRAWS * weight / 14
        assert abs(found[partition] - expected) < 0.1 * expected


def test_slow_brokers_are_passed_over() -> None:
    """A partition of a slow broker is not chosen, unless all are slow."""
    slow = frozenset({0, 1})
    assert set(draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (1, 7, 2), slow)) == {2}
    assert set(draws(StickyPartition(100, adaptive=True, rng=random.Random(1)), (0, 0), slow)) == {0, 1}


@pytest.mark.parametrize("adaptive", [True, False])
def test_partitions_without_a_leader_are_avoided(adaptive: bool) -> None:
    """Only available partitions are chosen. If none is available, all are candidates."""
    sticky = StickyPartition(1, adaptive=adaptive, rng=random.Random(1))
    for available, wanted in (([1], {1}), ([], {0, 1, 2})):
        found = set()
        for _ in range(60):
            found.add(chosen(sticky, (0, 0, 0), available=available))
            sticky.produced(1)
        assert found == wanted


def test_an_unavailable_choice_is_replaced() -> None:
    """An unavailable partition is replaced before it has batch_size bytes."""
    sticky = StickyPartition(1_000, adaptive=True, rng=random.Random(1))
    first = chosen(sticky, (0, 0, 0))
    rest = [p for p in range(3) if p != first]
    assert chosen(sticky, (0, 0, 0), available=rest) in rest
    assert TopicPartition("t", first).partition == first


class Table:
    """A partitioner over an accumulator, with records appended as the producer does."""

    def __init__(self, partitioner: Partitioner | None = None, **settings: object) -> None:
        self.settings = ProducerSettings.model_validate({"batch_size": 200, **settings})
        self.accumulator = RecordAccumulator(self.settings)
        self.connection = connection()
        self.slow: set[TopicPartition] = set()
        self.partitioner = ProducerPartitioner(
            self.connection, self.accumulator, self.settings, partitioner, lambda tp: tp in self.slow
        )

    def topic(self, name: str = "t") -> PartitionedTopic:
        known = self.partitioner.topic(name)
        assert known is not None
        return known

    def put(self, key: bytes | None = None, size: int = 20, partition: int | None = None) -> ProducerBatch | None:
        topic, value = self.topic(), b"x" * size
        record = ProducerRecord("t", value, key, partition=partition)
        number = self.partitioner.number_for(topic, record, key, value)
        queue = self.partitioner.queue_for(topic, number, key)
        if queue is None:
            return None
        batch = queue.open
        if batch is not None and batch.append(batch.count, 0, key, value, []) is None:
            batch, queue = None, self.partitioner.after_full(topic, number, key, queue)
        if batch is None:
            batch = queue.open
            if batch is None or batch.append(batch.count, 0, key, value, []) is None:
                batch = self.accumulator.open_batch(queue, 0, 0)
                batch.append(0, 0, key, value, [])
            self.partitioner.opened(topic, number, key, batch)
        batch.count += 1
        return batch


async def test_an_unknown_topic() -> None:
    """A record of an unknown topic is not routed until the metadata has it."""
    table = Table()
    assert table.partitioner.topic("t") is None
    know(table.connection, {"t": {0: 1}})
    assert table.topic().numbers == [0]


async def test_an_explicit_partition() -> None:
    """An explicit partition takes precedence. One that the topic lacks has no queue."""
    table = Table(lambda *_: 0)
    know(table.connection, {"t": {0: 1, 1: 1, 2: NO_LEADER}})
    for number in (1, 2):
        batch = table.put(b"k", partition=number)
        assert batch is not None
        assert batch.tp.partition == number
    assert table.put(b"k", partition=3) is None


async def test_a_custom_partitioner() -> None:
    """A custom partitioner is called for every record. None falls back to the key, and an unknown partition has no
    queue."""
    calls: list[tuple[object, ...]] = []

    def partitioner(*given: object) -> int | None:
        calls.append(given)
        return {b"one": 1, b"far": 9}.get(given[1])  # type: ignore[call-overload, no-any-return]

    table = Table(partitioner)
    know(table.connection, {"t": {0: 1, 1: 1, 2: 1}})
    batch, own = table.put(b"one"), table.put(b"21")
    assert batch is not None
    assert own is not None
    assert (batch.tp.partition, own.tp.partition) == (1, for_key(b"21", 3))
    assert table.put(b"far") is None
    assert calls[0] == ("t", b"one", b"x" * 20, [0, 1, 2])


async def test_a_custom_choice_of_the_sticky_partition_is_kept() -> None:
    """A record whose batch is full stays in the partition that the partitioner chose, without and with a key."""
    chosen: int | None = None
    table = Table(lambda *_: chosen, partitioner_ignore_keys=True)
    know(table.connection, {"t": dict.fromkeys(range(6), 1)})
    for key in (None, b"k"):
        chosen = None
        first = table.put(key)
        assert first is not None
        chosen = first.tp.partition
        batches = [table.put(key) for _ in range(200)]
        assert {batch.tp.partition for batch in batches if batch is not None} == {chosen}
        assert len({id(batch) for batch in batches}) > 10


async def test_keys_go_by_their_hash_over_all_partitions() -> None:
    """Keys are hashed over all partitions, with or without a leader. The cache does not change results, even
    when full."""
    table = Table()
    know(table.connection, {"t": {0: 1, 1: NO_LEADER, 2: 1}})
    topic, limit = table.topic(), partitioner.KEY_CACHE_MAX
    try:
        partitioner.KEY_CACHE_MAX = 10
        for key in [b"%d" % i for i in range(35)] * 2:
            assert topic.for_key(key).tp.partition == for_key(key, 3)
            assert len(topic.by_key) <= 10
    finally:
        partitioner.KEY_CACHE_MAX = limit


async def test_records_without_a_key_fill_a_batch_before_they_move_on() -> None:
    """One batch at a time is open for records without a key, and each is filled."""
    table = Table(partitioner_adaptive_partitioning_enable=False)
    know(table.connection, {"t": dict.fromkeys(range(6), 1)})
    seen: list[ProducerBatch] = []
    for _ in range(1_000):
        batch = table.put()
        assert batch is not None
        if not seen or batch is not seen[-1]:
            seen.append(batch)
    assert len(set(seen)) == len(seen), "never back to a batch that was left"
    assert len({batch.count for batch in seen[:-1]}) == 1
    assert len({batch.tp for batch in seen}) == 6


async def test_no_fractional_batches_when_lingering() -> None:
    """A batch that was sent before it was full does not change the partition."""
    table = Table(batch_size=512, linger_ms=10)
    know(table.connection, {"t": dict.fromkeys(range(3), 1)})
    for now_ms in range(10, 110, 10):
        batches = {table.put(size=20) for _ in range(12)}
        assert len(batches) == 1
        drained = table.accumulator.drain(now_ms, lambda _: 1, *[lambda _: True] * 3, hurry=False)
        ((batch,),) = drained.requests.values()
        assert 256 < batch.size() < 512
        table.accumulator.landed(batch)


async def test_ignored_keys() -> None:
    """With partitioner_ignore_keys, records with a key use the sticky partition too."""
    table = Table(partitioner_ignore_keys=True, batch_size=2_000)
    know(table.connection, {"t": dict.fromkeys(range(6), 1)})
    assert len({table.put(b"%d" % i) for i in range(20)}) == 1


async def test_records_with_a_key_do_not_move_the_sticky_choice() -> None:
    """Records with a key fill batches of their own partitions."""
    table = Table(batch_size=2_000)
    know(table.connection, {"t": dict.fromkeys(range(6), 1)})
    first = table.put()
    for i in range(30):
        table.put(b"%d" % i)
    assert table.put() is first


async def test_the_sticky_choice_avoids_what_has_no_leader_or_is_slow() -> None:
    """The sticky partition avoids partitions without a leader and slow ones."""
    table = Table()
    know(table.connection, {"t": {0: 1, 1: NO_LEADER, 2: 1, 3: 1}})
    table.slow.add(TopicPartition("t", 3))
    found = {batch.tp.partition for batch in (table.put(size=150) for _ in range(60)) if batch is not None}
    assert found == {0, 2}


async def test_a_topic_created_again_with_other_partitions() -> None:
    """Keys are distributed over the new partitions. Records queued for the old ones stay there."""
    table = Table()
    know(table.connection, {"t": dict.fromkeys(range(5), 1)})
    old = table.topic()
    lost = table.put(partition=4)
    key = next(b"%d" % i for i in range(99) if for_key(b"%d" % i, 5) != for_key(b"%d" % i, 2))
    assert old.for_key(key).tp.partition == for_key(key, 5)
    know(table.connection, {"t": {0: 1, 1: 1}})
    new = table.topic()
    assert new is not old
    assert new.for_key(key).tp.partition == for_key(key, 2)
    assert new.queues[0] is old.queues[0]
    assert table.put(partition=4) is None
    assert {batch.tp.partition for batch in (table.put(size=150) for _ in range(40)) if batch} == {0, 1}
    drained = table.accumulator.drain(10, table.connection.leader, *[lambda _: True] * 3, hurry=True)
    assert drained.leaderless == {"t"}
    assert lost is not None
    assert lost in table.accumulator.incomplete


async def test_leaders_change_without_a_new_topic() -> None:
    """A leader change keeps the topic, and availability is updated."""
    table = Table()
    know(table.connection, {"t": {0: 1, 1: 1}})
    topic = table.topic()
    know(table.connection, {"t": {0: NO_LEADER, 1: 2}})
    assert table.topic() is topic
    assert topic.available == [1]


async def test_idle_topics_are_left_out_of_the_metadata() -> None:
    """A topic leaves the metadata after metadata_max_idle_ms without a record, unless one is queued. The next record
    adds it again."""
    table = Table(metadata_max_idle_ms=5_000)
    know(table.connection, {"t": {0: 1}, "idle": {0: 1}, "busy": {0: 1}})
    client = table.connection._client
    busy = table.topic("busy")
    batch = table.accumulator.open_batch(busy.queues[0], 100, 0)
    table.topic("idle")
    for now_ms in (1_000, 4_000, 6_000):
        table.topic("t")
        table.partitioner.forget_idle(now_ms)
    assert client._topics == {"t", "idle", "busy"}
    table.topic("t")
    table.partitioner.forget_idle(6_001)
    assert client._topics == {"t", "busy"}
    table.accumulator.freed(batch)
    table.topic("t")
    table.partitioner.forget_idle(11_002)
    assert client._topics == {"t"}
    table.topic("idle")
    assert client._topics == {"t", "idle"}


async def test_queues_of_idle_topics_are_dropped() -> None:
    """Queues of idle topics are dropped, also if the topics still exist. The next record makes them again."""
    table = Table(metadata_max_idle_ms=5_000)
    know(table.connection, {"t": {0: 1}, "idle": {0: 1}, "gone": {0: 1, 1: 1}})
    for name in ("idle", "gone"):
        table.topic(name)
    know(table.connection, {"t": {0: 1}, "idle": {0: 1}})
    for now_ms in (1_000, 6_001):
        table.topic("t")
        table.partitioner.forget_idle(now_ms)
    assert table.accumulator.partitions == 1
    table.topic("idle")
    assert table.accumulator.partitions == 2


def test_java_agrees() -> None:
    """Each recorded key goes to the partition that Java's partitioner chooses."""
    keys = PackedBytes.of([base64.b64decode(case["key"]) for case in CASES])
    assert partitions_of_keys(keys, 7).tolist() == [case["partition_of_7"] for case in CASES]


@given(st.lists(st.one_of(st.none(), st.binary(max_size=40)), max_size=30), st.integers(1, 2**31 - 1))
def test_keys_go_where_single_records_go(keys: list[bytes | None], count: int) -> None:
    """The kernel and the compiled murmurhash2 agree. Records without a key are marked."""
    expected = [NO_PARTITION if key is None else for_key(key, count) for key in keys]
    assert partitions_of_keys(PackedBytes.of(keys), count).tolist() == expected


@given(st.lists(st.integers(0, 6)))
def test_rows_keep_their_order(partitions: list[int]) -> None:
    """Each partition that occurs is listed once, with its rows in ascending order."""
    found = {number: rows.tolist() for number, rows in rows_by_partition(np.array(partitions, np.int64), 7)}
    assert found == {
        number: [row for row, of in enumerate(partitions) if of == number] for number in sorted(set(partitions))
    }


def test_the_functions_run_without_a_compiler() -> None:
    """With NUMBA_DISABLE_JIT=1 the functions return the same partitions and emit no overflow warning."""
    code = f"import {__name__} as these; these.test_java_agrees(); these.test_rows_keep_their_order()"
    environment = {**os.environ, "NUMBA_DISABLE_JIT": "1"}
    subprocess.run([sys.executable, "-W", "error::RuntimeWarning", "-c", code], cwd=ROOT, env=environment, check=True)
