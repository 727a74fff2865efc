"""The accumulator: when a batch is due, which batches share a request, their order, and retries, expiry and failure."""

from __future__ import annotations

import random

import pytest

from penstock.shared.clients.producer.producer_batch import BatchState
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.common.errors import DeliveryTimeout, SendCancelled
from penstock.shared.common.records import TopicPartition
from tests.shared.clients.producer.harness import (
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
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
    for core.now_ms in (10_003, 10_004):
        assert core.delay_ms() == 0, "it has expired"


def test_a_due_batch_that_waits_for_its_node_needs_no_delay() -> None:
    """Time alone does not send it, so only the expiry counts."""
    core = Harness(linger_ms=10)
    core.busy = {1}
    core.send()
    assert core.after(20) == []
    assert core.delay_ms() == 10_000 - 20


def test_a_batch_lingers_behind_one_in_flight() -> None:
    """Its linger counts while its partition may have more batches in flight. Otherwise only the expiry counts."""
    for most, delay in ((2, 10), (1, 9_990)):
        core = Harness(linger_ms=10, max_in_flight_requests_per_connection=most)
        core.send()
        assert core.after(10)
        core.send()
        assert core.delay_ms() == delay


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
    core = Harness(batch_size=100, max_in_flight_requests_per_connection=301, enable_idempotence=False)
    for _ in range(300):
        core.send(value=b"x" * 80)
    assert len(core.turn()) == 300
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
    other = core.send(B)
    assert core.delay_ms() == 10_000
    one = core.send(A)
    assert core.delay_ms() == 5
    assert core.after(5) == [one.batch]
    assert core.delay_ms() == 10_000 - 5
    core.transaction.added.add(B)
    assert core.turn() == [other.batch]


def test_a_batch_of_cancelled_records_records_is_never_sent() -> None:
    """It completes without a leader or a request, and releases its memory."""
    core = Harness()
    core.leaders[A] = None
    records = [core.send() for _ in range(1_500)]
    assert all(record.cancel() for record in records)
    assert core.turn() == []
    assert core.leaderless == set()
    assert not core.accumulator.incomplete
    assert core.all_memory_is_back
    assert all(isinstance(record.fate, SendCancelled) for record in records)
    assert records[0].batch.state is BatchState.DONE


def test_a_batch_of_cancelled_records_delays_no_other_partition() -> None:
    """The batches behind it are in the same drain."""
    core = Harness()
    cancelled, other = core.send(A), core.send(B)
    assert cancelled.cancel()
    drained = core.accumulator.drain(0, lambda _: 1, *[lambda _: True] * 2, core.completion.may_send, hurry=False)
    assert drained.emptied == [cancelled.batch]
    assert drained.requests == {1: [other.batch]}


def test_a_batch_with_cancelled_records_is_retried() -> None:
    """A retry has the records that were left at the first attempt, also if as many were cancelled."""
    core = Harness()
    cancelled, kept = core.send(value=b"cancelled"), core.send(value=b"kept")
    assert cancelled.cancel()
    core.respond(core.turn_one(), NOT_ENOUGH_REPLICAS)
    (batch,) = core.after_backoff()
    assert core.values(batch) == [b"kept"]
    core.respond(batch, offset=4)
    assert kept.offset == 4
    assert isinstance(cancelled.fate, SendCancelled)


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


def test_a_retry_goes_alone() -> None:
    """While a batch is retried, no other batch of its partition is in flight. Then the rest follows."""
    core = Harness(batch_size=100, delivery_timeout_ms=10**6)
    core.warm_up()
    for _ in range(4):
        core.send(value=b"x" * 80)
    first, second, third, fourth = core.turn()
    core.respond(first, NOT_ENOUGH_REPLICAS)
    fresh = core.send(value=b"x" * 80)
    assert core.after_backoff() == [], "not beside the others"
    for batch in (second, third, fourth):
        core.respond(batch, 45)
    for batch in (first, second, third, fourth):
        assert core.after_backoff() == [batch]
        assert core.after_backoff() == []
        core.respond(batch, offset=1)
    assert core.after_backoff() == [fresh.batch]


def test_retry_backoff_delays_its_own_partition_alone() -> None:
    """A retried batch waits for its backoff and stays first. Other partitions continue."""
    core = Harness(batch_size=100)
    first, second = core.send(value=b"x" * 80), core.send(value=b"x" * 80)
    assert core.turn_one() is first.batch
    core.respond(first.batch, NOT_ENOUGH_REPLICAS)
    other = core.send(B)
    assert core.turn() == [other.batch]
    assert core.delay_ms() == first.batch.retry_at_ms
    assert core.after(first.batch.retry_at_ms - 1) == []
    assert core.after(1) == [first.batch]
    core.respond(first.batch)
    assert core.turn() == [second.batch]


def test_backoff_grows_up_to_its_maximum() -> None:
    """Each wait is twice the one before, within 20 % of jitter, and never beyond the maximum (and its jitter)."""
    core = Harness(retry_backoff_max_ms=1_000, delivery_timeout_ms=10**9)
    record = core.send()
    core.turn()
    for expected in (100, 200, 400, 800, 1_000, 1_000):
        core.respond(record.batch, NOT_ENOUGH_REPLICAS)
        waits = record.batch.retry_at_ms - core.now_ms
        assert 0.8 * expected <= waits <= 1.2 * expected
        assert core.after(waits - 1) == []
        assert core.after(1) == [record.batch]


def test_a_new_leader_spares_a_retry_its_backoff() -> None:
    """A leader that has not had the batch gets it at once. One that has had it gets it after the backoff."""
    core = Harness()
    record = core.send()
    core.turn()
    core.respond(record.batch, NOT_LEADER)
    assert core.turn() == [], "no new leader yet"
    core.leaders[A] = None
    assert core.turn() == []
    assert core.leaderless == set(), "it is not due yet"
    core.leaders[A] = 2
    assert core.turn() == [record.batch]
    core.respond(record.batch, NOT_LEADER)
    core.leaders[A] = 1
    assert core.turn() == [], "leaders may point at each other"
    core.leaders[A] = 3
    assert core.turn() == [record.batch], "the second retry as well"
    core.respond(record.batch, NOT_LEADER)
    core.leaders[A] = 2
    assert core.turn() == []
    assert core.after(480) == [record.batch]
    assert record.batch.nodes == (1, 2, 3)


def test_an_expiry_names_the_missing_node_or_leader() -> None:
    """The error of a record that was never sent names the unreachable node, or the missing leader."""
    for leader, down, reason in (
        (1, {1}, "not written, node 1 was not reached"),
        (None, set(), "not written, no leader"),
    ):
        core = Harness(delivery_timeout_ms=1_000)
        core.leaders[A], core.down = leader, down
        record = core.send()
        core.after(500)
        core.after(500)
        assert reason in str(record.fate)
    core = Harness(delivery_timeout_ms=1_000)
    core.warm_up()
    record = core.send()
    core.turn()
    core.down = {1}
    behind = core.send()
    core.after(500)
    core.after(500)
    assert str(record.fate).endswith("it may still be written"), "it was sent"
    assert str(behind.fate).endswith("not written, node 1 was not reached")


def test_empty_queues_of_deleted_partitions_are_dropped() -> None:
    """Those of other topics stay. A send that waited for a dropped queue uses the current one."""
    core = Harness()
    old, busy = core.accumulator.queue(A), core.send(B)
    for topic in ("deleted", "before", "later"):
        core.accumulator.queue(TopicPartition(topic, 0))
    core.accumulator.drop(b"deleted".decode())
    assert core.accumulator.partitions == 4
    core.accumulator.drop(A.topic)
    assert core.accumulator.partitions == 3
    assert core.accumulator.queue(B).queued[0] is busy.batch
    assert core.memory.try_acquire(100)
    batch = core.accumulator.open_batch(old, 100, core.now_ms)
    assert core.accumulator.queue(A).open is batch
    assert core.accumulator.queue(A) is not old


def test_one_batch_expires() -> None:
    """A batch expires exactly at delivery_timeout_ms, in a muted partition too."""
    for muted in (False, True):
        core = Harness(delivery_timeout_ms=3_200, linger_ms=300)
        record = core.send()
        core.down = {1} if muted else set()
        core.now_ms = 3_199
        core.completion.expire(3_199)
        assert record.fate is None
        core.completion.expire(3_200)
        assert isinstance(record.fate, DeliveryTimeout)
        assert core.after(3_200) == []
        assert core.all_memory_is_back


def test_a_very_long_delivery_timeout() -> None:
    """The largest timeout is kept to the millisecond."""
    core = Harness(delivery_timeout_ms=2**31 - 1)
    record = core.send()
    core.down = {1}
    core.turn()
    assert core.delay_ms() == 2**31 - 1
    core.after(2**31 - 2)
    assert record.fate is None
    core.after(1)
    assert isinstance(record.fate, DeliveryTimeout)


def test_several_batches_expire() -> None:
    """Batches that are queued, in flight or in backoff expire by their own age, and younger ones stay."""
    core = Harness(batch_size=100, delivery_timeout_ms=1_000)
    flying = core.send(A, b"x" * 80)
    core.turn()
    waiting, retried = core.send(A, b"x" * 80), core.send(B)
    core.turn()
    core.respond(retried.batch, NOT_ENOUGH_REPLICAS)
    core.now_ms = 500
    young = core.send(C)
    core.down = {1}
    core.after(500)
    assert all(isinstance(one.fate, DeliveryTimeout) for one in (flying, waiting, retried))
    assert young.fate is None
    core.down = set()
    assert core.turn() == [young.batch]


def test_a_batch_that_is_soon_to_expire_is_sent() -> None:
    """A batch that is about to expire is still sent."""
    core = Harness(delivery_timeout_ms=1_000)
    record = core.send()
    core.down = {1}
    core.after(999)
    core.down = set()
    assert core.turn() == [record.batch]
    assert core.delay_ms() == 1


def test_an_expired_batch_is_not_tried_again() -> None:
    """A batch that expires during its backoff leaves the queue."""
    core = Harness(delivery_timeout_ms=1_000)
    record = core.send()
    core.turn()
    core.now_ms = 990
    core.respond(record.batch, NOT_ENOUGH_REPLICAS)
    assert core.after(10) == []
    assert core.after_backoff() == []
    assert isinstance(record.fate, DeliveryTimeout)


def test_fail_all_batches() -> None:
    """Batches in flight fail too. Every record gets its error once."""
    core = Harness(batch_size=150, linger_ms=2**31 - 1, delivery_timeout_ms=2**31)
    records = [core.send(tp, b"x" * 50) for _ in range(33) for tp in (A, B, C)]
    assert core.turn()
    core.completion.fail_all(SendCancelled("closed"), out=True)
    assert all(isinstance(record.fate, SendCancelled) for record in records)
    assert not core.accumulator.incomplete
    assert not core.accumulator.queued()


def test_fail_unsent_batches() -> None:
    """Batches in flight wait for their responses."""
    core = Harness(batch_size=150, linger_ms=2**31 - 1, delivery_timeout_ms=2**31)
    records = [core.send(tp, b"x" * 50) for _ in range(33) for tp in (A, B, C)]
    sent = core.turn()
    ended = core.completion.fail_all(SendCancelled("aborted"), out=False)
    in_flight = [record for record in records if record.batch in sent]
    assert ended > 0
    assert in_flight
    assert not any(record.fates for record in in_flight)
    assert all(record.fates for record in records if record.batch not in sent)
    for batch in sent:
        core.respond(batch)
    assert core.all_memory_is_back


def test_retries_without_idempotence_keep_their_order() -> None:
    """Batches without sequence numbers return to their old places, in any order of their responses."""
    core = Harness(batch_size=100, enable_idempotence=False)
    records = [core.send(value=b"%d" % i + b"x" * 80) for i in range(4)]
    sent = core.turn()
    for batch in (sent[1], sent[3], sent[0], sent[2]):
        core.lose(batch)
    resent = []
    for _ in records:
        (batch,) = core.after_backoff()
        resent += core.values(batch)
        core.respond(batch)
    assert resent == [record.value for record in records]


def test_the_parts_of_a_split_take_its_place() -> None:
    """Parts are sent before later batches, and the first one's retry before the second."""
    core = Harness(enable_idempotence=False, batch_size=300, max_in_flight_requests_per_connection=1)
    records = [core.send(value=b"%d" % i + b"x" * 100) for i in range(3)]
    core.respond(core.turn_one(), 10)
    one = core.turn_one()
    core.respond(one, NOT_ENOUGH_REPLICAS)
    seen = []
    for _ in range(3):
        (batch,) = core.after_backoff()
        seen += core.values(batch)
        core.respond(batch)
    assert seen == [record.value for record in records]


def test_expiry_leaves_no_trace_of_slowness() -> None:
    """A partition counts as slow from when its batch could not be sent until it is sent or expires."""
    core = Harness(delivery_timeout_ms=1_000)
    core.down = {1}
    core.send()
    core.after(100)
    queue = core.accumulator.queue(A)
    assert queue.ready_since_ms == 100
    core.after(100)
    assert queue.ready_since_ms == 100, "since it was due first"
    core.after(900)
    assert queue.ready_since_ms is None
    assert not queue.is_held_up(core.now_ms)
    core.send()
    core.down = set()
    core.turn()
    assert queue.ready_since_ms is None


def test_the_retried_batch_of_a_partition() -> None:
    """The first batch counts as retried from its first failure, in backoff or in flight, until it expires."""
    core = Harness(batch_size=100, delivery_timeout_ms=5_000)
    queue = core.accumulator.queue(A)
    assert (queue.retried(), queue.held) == (None, 0)
    record = core.send()
    batch = core.turn_one()
    assert (queue.retried(), queue.held) == (None, batch.memory)
    core.respond(batch, NOT_ENOUGH_REPLICAS)
    assert queue.retried() is batch
    core.after_backoff()
    assert queue.retried() is batch
    second = core.send()
    assert queue.held == batch.memory + second.batch.memory
    core.after(5_000)
    assert record.fate is not None
    assert queue.retried() is None
