"""The record accumulator: batches per partition, when they are ready, and when they expire."""

from __future__ import annotations

from shared.clients.producer.accumulator import RecordAccumulator
from shared.clients.producer.batch import Batch
from shared.clients.producer.settings import ProducerSettings
from shared.common.records import TopicPartition

A, B = TopicPartition("t", 0), TopicPartition("t", 1)


def accumulator(**settings: int) -> RecordAccumulator:
    return RecordAccumulator(ProducerSettings.model_validate({"linger_ms": 10, "batch_size": 200, **settings}))


def add(to: RecordAccumulator, tp: TopicPartition = A, size: int = 10, now_ms: int = 0) -> Batch:
    return to.append(tp, None, b"x" * size, [], 0, now_ms)[0]


def drain(of: RecordAccumulator, now_ms: int, *, hurry: bool = False, leader: int | None = 1) -> list[Batch]:
    requests, _ = of.drain(now_ms, lambda tp: leader, lambda node: True, lambda tp: False, hurry)
    return [batch for batches in requests.values() for batch in batches]


def test_linger() -> None:
    """A batch is due when it has lingered, and the delay says when that is."""
    records = accumulator()
    batch = add(records)
    assert drain(records, 9) == []
    assert records.delay_ms(9, lambda tp: False) == 1
    assert drain(records, 10) == [batch]


def test_a_full_batch_is_due_at_once() -> None:
    """What does not fit opens a second batch and makes the first one due."""
    records = accumulator()
    first = add(records, size=100)
    second = add(records, size=100)
    assert first is not second
    assert drain(records, 0) == [first]


def test_flush_and_waiters_for_memory_override_linger() -> None:
    """A flush, or somebody waiting for memory, makes every batch due."""
    records = accumulator()
    batch, other = add(records), add(records, B)
    assert drain(records, 0, hurry=True) == [batch, other]
    later = accumulator()
    batch = add(later)
    later.flushes += 1
    assert drain(later, 0) == [batch]


def test_a_partition_has_one_batch_in_flight() -> None:
    """The next batch of a partition waits until the one before has landed."""
    records = accumulator()
    first, second = add(records, size=100), add(records, size=100)
    assert drain(records, 100) == [first]
    assert drain(records, 100) == []
    records.landed(first)
    assert drain(records, 100) == [second]


def test_retry_backoff_delays_its_own_partition_alone() -> None:
    """A batch that is tried again goes first, when its time has come; other partitions go on meanwhile."""
    records = accumulator()
    first, second = add(records, size=100), add(records, size=100)
    assert drain(records, 0) == [first]
    records.landed(first)
    first.attempts = 1
    records.reenqueue(first, 50)
    other = add(records, B)
    assert drain(records, 20) == [other]
    assert records.delay_ms(20, lambda tp: False) == 30
    assert drain(records, 50) == [first]
    records.landed(first)
    assert drain(records, 50) == [second]


def test_a_request_is_bounded_and_partitions_take_turns() -> None:
    """What does not fit into max_request_size waits for the next request, where it goes first."""
    records = accumulator(batch_size=1_000, max_request_size=1_500, linger_ms=0)
    for tp in (A, B):
        for _ in range(3):
            add(records, tp, size=800)
    (first,) = drain(records, 0)
    records.landed(first)
    (second,) = drain(records, 0)
    assert {first.tp, second.tp} == {A, B}


def test_one_too_large_batch_still_goes_alone() -> None:
    """A single batch above max_request_size is sent by itself."""
    records = accumulator(max_request_size=100, linger_ms=0)
    batch = add(records, size=500)
    assert drain(records, 0) == [batch]


def test_no_leader() -> None:
    """A due batch without a leader stays, and its topic is reported."""
    records = accumulator(linger_ms=0)
    add(records)
    requests, leaderless = records.drain(0, lambda tp: None, lambda node: True, lambda tp: False, False)
    assert (requests, leaderless) == ({}, {"t"})
    assert len(drain(records, 0)) == 1


def test_expiry() -> None:
    """Batches older than delivery_timeout_ms are taken from their queue, or reported while in flight; younger stay."""
    records = accumulator(delivery_timeout_ms=1_000)
    flying, queued = add(records, size=100), add(records, size=100, now_ms=1)
    young = add(records, B, now_ms=500)
    assert drain(records, 100) == [flying]
    assert records.expire(999) == []
    assert records.expire(1_001) == [flying, queued]
    for batch in (flying, queued):
        records.forget(batch)
    records.landed(flying)
    assert drain(records, 1_001) == [young]


def test_muted_partitions_are_left_alone() -> None:
    """A partition that its transaction does not know yet is not drained."""
    records = accumulator(linger_ms=0)
    batch, _ = add(records), add(records, B)
    requests, _ = records.drain(0, lambda tp: 1, lambda node: True, lambda tp: tp == B, False)
    assert requests == {1: [batch]}
