"""The accumulator: when a batch is due, which batches share a request, and their order."""

from __future__ import annotations

import random

import pytest

from penstock.shared.clients.producer.producer_batch import BatchState
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.common.errors import SendCancelled
from penstock.shared.common.records import TopicPartition
from tests.shared.clients.producer.harness import (
    A,
    B,
    C,
    Harness,
)


def test_linger() -> None:
    """A batch is due after its linger, and the delay is the time until then."""
    core = Harness(linger_ms=10)
    core.now_ms = 1_000
    record = core.send()
    assert core.after(9) == []
    assert core.delay_ms() == 1
    assert core.after(1) == [record.batch]


def test_a_full_batch_is_due_at_once() -> None:
    """A record that does not fit opens a new batch, and the full one is due at once."""
    core = Harness(linger_ms=10, batch_size=150)
    records = [core.send(value=b"%d" % i + b"x" * 30) for i in range(3)]
    assert records[0].batch is records[1].batch is not records[2].batch
    (batch,) = core.turn()
    assert core.values(batch) == [record.value for record in records[:2]]


def test_a_batch_of_exactly_batch_size_is_full() -> None:
    """It is due at once. One byte less lingers."""
    size = Harness().send().batch.size()
    for batch_size, due in ((size, 1), (size + 1, 0)):
        core = Harness(linger_ms=10, batch_size=batch_size)
        core.send()
        assert len(core.turn()) == due


@pytest.mark.parametrize("compression", ["none", "gzip"])
def test_a_record_above_batch_size_has_a_batch_of_its_own(compression: str) -> None:
    """An oversized record is sent alone and does not linger."""
    core = Harness(linger_ms=10, batch_size=100, compression_type=compression)
    record = core.send(value=b"x" * 500, key=b"k")
    batch = core.turn_one()
    assert (batch.count, core.values(batch)) == (1, [record.value])


def test_the_delay_is_that_of_the_earliest_partition() -> None:
    """The oldest open batch is due first. A batch that is sendable now needs no delay."""
    core = Harness(linger_ms=10, batch_size=150)
    core.send(A)
    core.now_ms = 5
    core.send(C)
    assert core.delay_ms() == 5
    core.send(B, b"x" * 200)
    assert [batch.tp for batch in core.turn()] == [B]
    assert core.delay_ms() == 5


def test_nothing_to_wait_for() -> None:
    """Without queued batches there is no delay. With all in flight only the expiry counts."""
    core = Harness()
    assert core.delay_ms() is None
    core.now_ms = 3
    core.send()
    core.turn()
    assert core.delay_ms() == 10_000
    core.now_ms = 10
    assert core.delay_ms() == 9_993


def test_a_due_batch_that_waits_for_its_node_needs_no_delay() -> None:
    """Time alone does not send it, so only the expiry counts."""
    core = Harness(linger_ms=10)
    core.busy = {1}
    core.send()
    assert core.after(20) == []
    assert core.delay_ms() == 10_000 - 20


def test_flush_overrides_linger() -> None:
    """A flush makes every batch due. When all have completed, none is incomplete."""
    core = Harness(linger_ms=2**31 - 1, delivery_timeout_ms=2**31)
    records = [core.send(tp) for tp in (A, B, C) for _ in range(30)]
    assert core.turn() == []
    core.accumulator.flushes += 1
    sent = core.turn()
    assert core.accumulator.incomplete
    for batch in sent:
        core.respond(batch)
    assert not core.accumulator.incomplete
    assert all(record.fate for record in records)


def test_waiters_for_memory_override_linger() -> None:
    """While a send waits for memory, lingering batches are sent."""
    core = Harness(linger_ms=10)
    record = core.send()
    assert core.turn(hurry=True) == [record.batch]


def test_a_request_is_bounded_and_partitions_take_turns() -> None:
    """Batches beyond max_request_size wait for the next request. Every partition is first in turn."""
    core = Harness(batch_size=1_000, max_request_size=1_500, max_in_flight_requests_per_connection=1)
    for tp in (A, B):
        for _ in range(3):
            core.send(tp, b"x" * 800)
    core.turn()
    assert [(node, [batch.tp for batch in batches]) for node, batches in core.requests] == [(1, [A]), (1, [B])]
    core.respond(core.requests[0][1][0])
    core.respond(core.requests[1][1][0])
    core.turn()
    assert [[batch.tp for batch in batches] for _, batches in core.requests] == [[A], [B]]


def test_turns_of_partitions_go_round() -> None:
    """With room for one batch in a request, each node's partitions are served round robin."""
    d = TopicPartition("t", 3)
    core = Harness(batch_size=100, max_request_size=100, max_in_flight_requests_per_connection=1)
    core.leaders = {A: 1, B: 1, C: 2, d: 2}
    for tp in (A, B, C, d):
        core.send(tp, b"x" * 80)

    def one_request_each() -> list[TopicPartition]:
        drained = core.accumulator.drain(
            0, lambda tp: core.leaders[tp], *[lambda _: True] * 2, core.completion.may_send, hurry=False
        )
        batches = [batch for of in drained.requests.values() for batch in of]
        for batch in batches:
            core.completion.sent(batch, 0)
            core.respond(batch)
        return [batch.tp for batch in batches]

    assert one_request_each() == [A, C]
    core.send(A, b"x" * 80)
    core.send(C, b"x" * 80)
    assert one_request_each() == [B, d]
    assert one_request_each() == [A, C]
    assert one_request_each() == []


def test_batches_of_a_node_share_a_request() -> None:
    """One request for each node, with one batch of each partition."""
    core = Harness()
    core.leaders = {A: 1, B: 1, C: 2}
    for tp in (A, B, C):
        core.send(tp)
    core.turn()
    assert [(node, [batch.tp for batch in batches]) for node, batches in core.requests] == [(1, [A, B]), (2, [C])]


def test_batches_share_a_request_up_to_max_request_size() -> None:
    """A request may have exactly this size, and not one byte more."""
    size = sum(Harness().send(tp).batch.size() for tp in (A, B))
    for max_request_size, requests in ((size, [[A, B]]), (size - 1, [[A], [B]])):
        core = Harness(max_request_size=max_request_size)
        for tp in (A, B):
            core.send(tp)
        core.turn()
        assert [[batch.tp for batch in batches] for _, batches in core.requests] == requests


def test_a_single_batch_above_max_request_size_goes_alone() -> None:
    """A batch is never held back only because of its size."""
    core = Harness(max_request_size=100)
    core.send(value=b"x" * 500)
    core.send(B)
    core.turn()
    assert [[batch.tp for batch in batches] for _, batches in core.requests] == [[A], [B]]


def test_a_node_that_leads_nothing_gets_nothing() -> None:
    """Only leaders of partitions with a due batch appear in a drain."""
    core = Harness()
    core.send()
    core.leaders = {A: 2}
    core.turn()
    assert [node for node, _ in core.requests] == [2]


def test_no_leader() -> None:
    """A due batch without a leader stays queued, and its topic is reported."""
    core = Harness()
    core.leaders[A] = None
    record = core.send()
    assert core.turn() == []
    assert core.leaderless == {"t"}
    core.leaders[A] = 1
    assert core.turn() == [record.batch]


def test_several_batches_of_a_partition_are_in_flight() -> None:
    """Up to max_in_flight batches are in flight, with idempotence at most the five that a broker remembers."""
    for most, out in ((1, 1), (3, 3), (5, 5)):
        core = Harness(batch_size=100, max_in_flight_requests_per_connection=most)
        core.warm_up()
        for _ in range(8):
            core.send(value=b"x" * 80)
        assert len(core.turn()) == out
    core = Harness(batch_size=100, max_in_flight_requests_per_connection=9, enable_idempotence=False)
    for _ in range(8):
        core.send(value=b"x" * 80)
    assert len(core.turn()) == 8
    assert not core.accumulator.queue(A).is_held_up(core.now_ms)
    for _ in range(2):
        core.send(value=b"x" * 80)
    assert len(core.turn()) == 1
    assert core.accumulator.queue(A).is_held_up(core.now_ms)


def test_muted_partitions_are_not_drained() -> None:
    """A partition not yet added to its transaction is not drained, however long it waits."""
    core = Harness(transactional_id="tx", linger_ms=5)
    assert core.transaction is not None
    core.transaction.added.discard(B)
    one, other = core.send(A), core.send(B)
    assert core.after(5) == [one.batch]
    assert core.delay_ms() == 10_000 - 5
    core.transaction.added.add(B)
    assert core.turn() == [other.batch]


def test_a_batch_of_cancelled_records_records_is_never_sent() -> None:
    """It completes without a leader or a request, and releases its memory."""
    core = Harness()
    core.leaders[A] = None
    records = [core.send() for _ in range(3)]
    assert all(record.cancel() for record in records)
    assert core.turn() == []
    assert core.leaderless == set()
    assert not core.accumulator.incomplete
    assert core.all_memory_is_back
    assert all(isinstance(record.fate, SendCancelled) for record in records)
    assert records[0].batch.state is BatchState.DONE


def test_memory_bounds_a_batch() -> None:
    """A batch_size above buffer_memory or max_request_size is reduced, so that a batch always fits."""
    core = Harness(batch_size=10_000, buffer_memory=1_000)
    core.send()
    assert core.memory.available == 0
    assert core.turn(hurry=True)
    assert Harness(batch_size=10_000, max_request_size=500).accumulator.batch_size == 500


def test_stress() -> None:
    """With little memory, each of many records is sent once and in its partition's order."""
    rng, core = random.Random(1), Harness(batch_size=200, buffer_memory=2_000)
    sent: dict[TopicPartition, list[bytes]] = {A: [], B: []}
    seen: dict[TopicPartition, list[bytes]] = {A: [], B: []}
    for i in range(3_000):
        while core.memory.available < 300:
            for batch in core.turn(hurry=True):
                seen[batch.tp] += core.values(batch)
                core.respond(batch)
        tp = rng.choice((A, B))
        sent[tp].append(b"%d" % i)
        core.send(tp, sent[tp][-1])
    while core.accumulator.incomplete:
        for batch in core.turn(hurry=True):
            seen[batch.tp] += core.values(batch)
            core.respond(batch)
    assert seen == sent
    assert core.all_memory_is_back


def test_repr() -> None:
    """The repr shows the state."""
    core = Harness(batch_size=100)
    for _ in range(3):
        core.send(value=b"x" * 80)
    core.turn()
    assert repr(core.accumulator) == "<RecordAccumulator 2 batches queued, 1 out>"
    assert repr(core.accumulator.queue(A)) == "<PartitionQueue t-0, 2 queued, 1 out>"
    assert core.accumulator.queued_batches(A) == 2
    assert core.accumulator.queued_batches(B) == 0
    assert ProducerSettings().batch_size == 16_384
