"""Which record is next, and when a partition without one keeps the others waiting."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.task.partition_group import NEVER_WAIT, PartitionGroup, RecordQueue

NOTHING_MORE = {"a": 0, "b": 0}


def columns(topic: str, *timestamps: int, first: int = 0) -> Columns:
    return Columns.of([ConsumerRecord(topic, 0, first + i, at, None, None) for i, at in enumerate(timestamps)])


def group_of(max_task_idle_ms: int = 0, **timestamps: tuple[int, ...]) -> PartitionGroup:
    group = PartitionGroup(["a", "b"], max_task_idle_ms)
    for topic, times in timestamps.items():
        group.queues[topic].add(columns(topic, *times))
    return group


def taken(group: PartitionGroup) -> list[tuple[str, int]]:
    """All buffered records in the order of processing, by topic and timestamp."""
    found = []
    while len(group):
        run = group.next_run()
        found += [(run.topic, at) for at in run.timestamps.tolist()]
    return found


def test_the_lowest_timestamp_is_next() -> None:
    """The record with the lowest timestamp is next. Records of one partition stay in the order of offsets."""
    group = group_of(a=(1, 5, 3), b=(2, 4, 6))
    assert taken(group) == [("a", 1), ("b", 2), ("b", 4), ("a", 5), ("a", 3), ("b", 6)]
    assert len(group) == 0


def test_of_equal_times_the_first_topic_is_next() -> None:
    """Of equal timestamps the first topic is next, so that a replay has the same order."""
    assert taken(group_of(a=(1, 2), b=(1, 1, 2))) == [("a", 1), ("b", 1), ("b", 1), ("a", 2), ("b", 2)]


def test_a_run_is_as_long_as_the_order_allows() -> None:
    """Records of one partition that follow each other are handed out together."""
    group = group_of(a=(1, 2, 3, 9), b=(5,))
    assert [len(group.next_run()) for _ in range(3)] == [3, 1, 1]


def test_a_run_ends_at_the_nearest_of_the_other_partitions() -> None:
    """Of three partitions the second lowest timestamp limits the run, whichever topic it is of."""
    times = {"a": (1, 2, 3, 10), "b": (5, 6), "c": (2, 2, 6)}
    for topics in (["a", "b", "c"], ["c", "b", "a"]):
        group = PartitionGroup(topics, NEVER_WAIT)
        for topic in topics:
            group.queues[topic].add(columns(topic, *times[topic]))
        merged = [(at, topics.index(topic), topic) for topic, own in times.items() for at in own]
        assert taken(group) == [(topic, at) for at, _, topic in sorted(merged)]


def test_a_record_out_of_order_does_not_wait() -> None:
    """The head of a partition decides, not the records behind it: an old record behind a new one waits with it."""
    assert taken(group_of(a=(10, 1), b=(5,))) == [("b", 5), ("a", 10), ("a", 1)]


def test_nothing_at_hand_is_not_ready() -> None:
    """Without a buffered record a group is never ready."""
    assert not group_of().is_ready(0, NOTHING_MORE)
    assert not group_of(NEVER_WAIT).is_ready(0, NOTHING_MORE)


def test_all_partitions_at_hand_are_ready() -> None:
    """With a buffered record of each partition no further knowledge is needed."""
    assert group_of(a=(1,), b=(2,)).is_ready(0, {})


@pytest.mark.parametrize("lags", [{}, {"b": None}, {"b": 3}])
def test_a_partition_that_may_have_more_is_waited_for(lags: dict[str, int | None]) -> None:
    """If a partition has records at the broker, or that is unknown, the others wait without limit."""
    group = group_of(a=(1,))
    assert not group.is_ready(0, lags)
    assert not group.is_ready(10**9, lags)
    assert group.is_ready(10**9, {"b": 0})


def test_max_task_idle_is_waited_for_a_record_to_be_written() -> None:
    """The wait for a partition begins when it is known to be read to its end, and again after each of its records."""
    group = group_of(100, a=(1,))
    assert [group.is_ready(now, {"b": 0}) for now in (1_000, 1_099, 1_100)] == [False, False, True]
    group.queues["b"].add(columns("b", 5))
    assert group.is_ready(1_101, {})
    assert taken(group) == [("a", 1), ("b", 5)]
    group.queues["a"].add(columns("a", 7, first=1))
    assert [group.is_ready(now, {"b": 0}) for now in (2_000, 2_100)] == [False, True]
    assert not group.is_ready(2_101, {"b": 4})
    assert [group.is_ready(now, {"b": 0}) for now in (2_102, 2_201, 2_202)] == [False, False, True]


def test_never_waiting() -> None:
    """With -1 buffered records are processed at once."""
    assert group_of(NEVER_WAIT, b=(1,)).is_ready(0, {"a": 50})


def test_records_are_at_hand_once() -> None:
    """Records that were added before are skipped, until the queue is cleared."""
    queue = RecordQueue()
    queue.add(columns("a", 1, 2, 3))
    queue.add(columns("a", 1, 2, 3))
    queue.add(columns("a", 3, 4, first=2))
    assert (len(queue), queue.take_until(None).offsets.tolist()) == (4, [0, 1, 2])
    assert repr(queue) == "RecordQueue(1 records, next 4)"
    queue.clear()
    queue.add(columns("a", 1))
    assert (len(queue), queue.head_ms()) == (1, 1)


def test_a_group_can_be_cleared() -> None:
    """After a clear nothing is buffered and no wait has begun."""
    group = group_of(100, a=(1,))
    assert not group.is_ready(0, {"b": 0})
    group.clear()
    group.queues["a"].add(columns("a", 1))
    assert not group.is_ready(100, {"b": 0})


times = st.lists(st.integers(0, 20), max_size=12)


@given(times, times, st.integers(1, 4))
def test_equals_taking_one_by_one(a: list[int], b: list[int], size: int) -> None:
    """Runs have the order of comparing the two heads record by record, however records were added."""
    group = PartitionGroup(["a", "b"], NEVER_WAIT)
    for topic, own in (("a", a), ("b", b)):
        for at in range(0, len(own), size):
            group.queues[topic].add(columns(topic, *own[at : at + size], first=at))
    expected, left, right = [], list(a), list(b)
    while left or right:
        if left and (not right or left[0] <= right[0]):
            expected.append(("a", left.pop(0)))
        else:
            expected.append(("b", right.pop(0)))
    assert taken(group) == expected


def test_a_queue_knows_its_bytes() -> None:
    """The bytes are those of the buffered records, however they were added, processed and put back."""
    for seed in range(200):
        chance = random.Random(seed)
        left = [chance.randrange(40) for _ in range(chance.randint(2, 12))]
        values = [ConsumerRecord("a", 0, 2 * i, i, b"k", b"x" * size) for i, size in enumerate(left)]
        queue, cut = RecordQueue(), chance.randrange(1, len(left))
        for part in (values[:cut], values[cut:]):
            queue.add(Columns.of(part))
        while left:
            if chance.random() < 0.5:
                assert queue.bytes == sum(left) + len(left)
            run = queue.take_until(None, chance.randint(1, 5))
            done = chance.randint(0, len(run))
            if done < len(run):
                queue.put_back(run[done:])
            del left[:done]
        assert queue.bytes == 0
        queue.add(Columns.of([ConsumerRecord("a", 0, 100, 0, None, b"xyz")]))
        assert queue.bytes == 3
