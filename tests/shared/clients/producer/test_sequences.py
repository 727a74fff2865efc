"""Sequence numbers of an idempotent producer: in order and without gaps, after every kind of failure."""

from __future__ import annotations

import pytest
from structlog.testing import capture_logs

from penstock.shared.clients.producer.producer_batch import ProducerState
from penstock.shared.clients.producer.transaction_manager import EPOCH_MAX, SequenceLedger
from penstock.shared.common.errors import DeliveryTimeout, InvalidRequest, RecordTooLarge
from tests.shared.clients.producer.harness import (
    DUPLICATE,
    INVALID_RECORD,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
    OLD_EPOCH,
    OUT_OF_ORDER,
    TIMED_OUT,
    TOO_LARGE,
    UNKNOWN_PRODUCER,
    A,
    B,
    Harness,
    flying,
    warm,
)


def ledger(epoch: int = 0) -> SequenceLedger:
    made = SequenceLedger()
    made.adopt(7, epoch)
    return made


def test_numbers_are_handed_out_in_order() -> None:
    """Each batch starts where the previous one of its partition ended. Partitions have separate sequence numbers."""
    sequences = ledger()
    assert sequences.assign(A, 5) == ProducerState(7, 0, 0)
    assert sequences.assign(A, 2) == ProducerState(7, 0, 5)
    assert sequences.assign(B, 1) == ProducerState(7, 0, 0)


def test_the_ledger_wraps() -> None:
    """Sequence numbers wrap from 2^31 - 1 to 0, and an acknowledgement across the wrap moves forward."""
    sequences = ledger()
    first = sequences.assign(A, 2**31 - 1)
    second = sequences.assign(A, 3)
    assert sequences.assign(A, 1).base_sequence == 2
    sequences.acknowledged(A, first, 2**31 - 1)
    sequences.acknowledged(A, second, 3)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.epoch == 1, "the third was lost"


def test_a_lost_batch_across_the_wrap_needs_a_new_epoch() -> None:
    """A number behind the wrap is smaller, but later. An acknowledgement may move far, up to half of the ring."""
    sequences = ledger()
    for _ in range(2):
        state = sequences.assign(A, 2**30 - 1)
        sequences.acknowledged(A, state, 2**30 - 1)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.epoch == 0, "all numbers are acknowledged"
    assert sequences.assign(A, 3).base_sequence == 2**31 - 2
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.epoch == 1


def test_numbers_acknowledged_across_the_wrap_are_not_lost() -> None:
    """If every number is acknowledged, the last one behind the wrap, a lost batch needs no new epoch."""
    sequences = ledger()
    for count in (2**30 - 1, 2**30 - 1, 2, 3):
        sequences.acknowledged(A, sequences.assign(A, count), count)
        sequences.given_up(A, lost=True)
        sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 3)


def test_acknowledgements_may_come_in_any_order() -> None:
    """An acknowledged batch implies all earlier ones. Later responses for those change nothing."""
    sequences = ledger()
    first, second = sequences.assign(A, 1), sequences.assign(A, 9)
    sequences.acknowledged(A, second, 9)
    sequences.acknowledged(A, first, 1)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 10)


def test_acknowledgements_across_the_wrap_may_come_in_any_order() -> None:
    """Numbers after the wrap are ahead of those before it, also if their acknowledgement comes first."""
    sequences = ledger()
    for count in (2**30 - 1, 2**30 - 1):
        sequences.acknowledged(A, sequences.assign(A, count), count)
    before, after = sequences.assign(A, 2), sequences.assign(A, 3)
    assert (before.base_sequence, after.base_sequence) == (2**31 - 2, 0)
    sequences.acknowledged(A, after, 3)
    sequences.acknowledged(A, before, 2)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 3)


def test_one_batch_at_a_time_until_the_first_is_acknowledged() -> None:
    """A new producer id or epoch allows one unacknowledged batch per partition until the first acknowledgement."""
    sequences = ledger()
    assert sequences.may_assign(A)
    state = sequences.assign(A, 1)
    assert not sequences.may_assign(A)
    assert sequences.may_assign(B)
    sequences.acknowledged(A, state, 1)
    assert sequences.may_assign(A)
    sequences.gap_shown(A)
    assert not sequences.may_assign(A)
    sequences.settle(A)
    assert sequences.may_assign(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 0)
    assert not sequences.may_assign(A)


def test_the_number_of_a_rejected_batch_is_used_again() -> None:
    """The sequence number of a batch that the broker certainly did not write is used again, in the same epoch."""
    sequences = ledger()
    sequences.assign(A, 4)
    sequences.given_up(A, lost=False)
    assert sequences.troubled() == [A]
    assert not sequences.may_assign(A)
    sequences.settle(A)
    assert sequences.troubled() == []
    assert sequences.may_assign(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 0)


def test_a_lost_batch_starts_a_new_epoch() -> None:
    """A lost batch may still arrive, so the next batch uses a new epoch and the broker rejects the old one."""
    sequences = ledger()
    sequences.assign(A, 4)
    sequences.given_up(A, lost=True)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 0)


@pytest.mark.parametrize("second_is_lost", [False, True])
def test_one_lost_batch_of_several_costs_an_epoch(second_is_lost: bool) -> None:
    """Whatever becomes of a later batch, an earlier one may still arrive."""
    sequences = ledger()
    sequences.assign(A, 1)
    sequences.assign(A, 1)
    sequences.given_up(A, lost=True)
    sequences.given_up(A, lost=second_is_lost)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 0)


def test_a_new_producer_id_begins_at_number_0() -> None:
    """A partition moves to it once all its records are acknowledged. Kafka's first producer id is 0."""
    sequences = SequenceLedger()
    assert not sequences.ready
    sequences.adopt(0, 0)
    assert sequences.ready
    first = sequences.assign(A, 1_000)
    sequences.adopt(1, 0)
    assert sequences.assign(A, 1_000) == ProducerState(0, 0, 1_000)
    sequences.acknowledged(A, first, 1_000)
    sequences.acknowledged(A, ProducerState(0, 0, 1_000), 1_000)
    assert sequences.assign(A, 1) == ProducerState(1, 0, 0)


def test_a_partition_keeps_its_producer_id_across_the_wrap() -> None:
    """A number behind the wrap is not acknowledged only because it is smaller than the expected one."""
    sequences = ledger()
    for _ in range(2):
        sequences.acknowledged(A, sequences.assign(A, 2**30 - 1), 2**30 - 1)
    before = sequences.assign(A, 5)
    sequences.adopt(8, 0)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 3)
    sequences.acknowledged(A, before, 5)
    sequences.acknowledged(A, ProducerState(7, 0, 3), 1)
    assert sequences.assign(A, 1) == ProducerState(8, 0, 0)


def test_a_new_producer_id_may_be_smaller() -> None:
    """Each broker grants ids from a block of its own. A late acknowledgement under the old id does not count."""
    sequences = ledger()
    first = sequences.assign(A, 5)
    sequences.acknowledged(A, first, 5)
    old = sequences.assign(A, 5)
    sequences.acknowledged(A, old, 5)
    sequences.adopt(3, 0)
    assert sequences.assign(A, 2) == ProducerState(3, 0, 0)
    sequences.acknowledged(A, old, 5)
    assert not sequences.may_assign(A)
    sequences.given_up(A, lost=False)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(3, 0, 0)


@pytest.mark.parametrize("new_id", [3, 8])
def test_a_gap_under_an_old_producer_id_costs_no_epoch(new_id: int) -> None:
    """The partition moves to the new id, in the epoch that the new id has."""
    sequences = ledger()
    sequences.assign(A, 1)
    sequences.adopt(new_id, 0)
    sequences.gap_shown(A)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(new_id, 0, 0)


def test_trouble_is_of_a_partition() -> None:
    """A gap in one partition does not stop the others. They move to the new epoch once all their batches are
    acknowledged."""
    sequences = ledger()
    state = sequences.assign(B, 1)
    sequences.acknowledged(B, state, 1)
    pending = sequences.assign(B, 1)
    sequences.assign(A, 1)
    sequences.gap_shown(A)
    assert sequences.has_gap(A)
    assert sequences.is_troubled(A)
    assert not sequences.is_troubled(B)
    sequences.settle(A)
    assert sequences.assign(B, 1) == ProducerState(7, 0, 2)
    sequences.acknowledged(B, pending, 1)
    sequences.acknowledged(B, ProducerState(7, 0, 2), 1)
    assert sequences.assign(B, 1) == ProducerState(7, 1, 0)


def test_one_bump_for_all_in_trouble() -> None:
    """Several troubled partitions share one epoch bump."""
    sequences = ledger()
    for tp in (A, B):
        sequences.assign(tp, 1)
        sequences.gap_shown(tp)
    sequences.settle(A)
    sequences.settle(B)
    assert sequences.epoch == 1
    assert sequences.assign(A, 1) == sequences.assign(B, 1) == ProducerState(7, 1, 0)


def test_a_response_of_the_old_epoch_does_not_disturb_the_new() -> None:
    """A batch of the old epoch that is acknowledged late leaves the new numbers alone."""
    sequences = ledger()
    old = sequences.assign(A, 5)
    sequences.gap_shown(A)
    sequences.settle(A)
    sequences.acknowledged(A, sequences.assign(A, 3), 3)
    sequences.acknowledged(A, old, 5)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 3)
    sequences.given_up(A, lost=False)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 1, 3)


def test_epochs_run_out() -> None:
    """After the last epoch, no sequence number is assigned until there is a new producer id."""
    sequences = ledger(EPOCH_MAX)
    for tp in (A, B):
        sequences.assign(tp, 1)
        sequences.gap_shown(tp)
    for tp in (A, B):
        sequences.settle(tp)
    assert not sequences.ready
    assert not sequences.may_assign(A)
    with pytest.raises(AssertionError):
        sequences.assign(A, 1)
    sequences.adopt(8, 0)
    assert sequences.assign(A, 1) == ProducerState(8, 0, 0)


def test_the_last_epoch_is_used_before_a_new_producer_id() -> None:
    """The last epoch follows the one before it. Only the trouble after that needs a new producer id."""
    sequences = ledger(EPOCH_MAX - 1)
    sequences.assign(A, 1)
    sequences.gap_shown(A)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, EPOCH_MAX, 0)
    sequences.gap_shown(A)
    sequences.settle(A)
    assert not sequences.ready


def test_a_lost_batch_that_was_written_is_settled_once() -> None:
    """A later batch was acknowledged, so the lost one is in the log. A rejection afterwards costs no epoch."""
    sequences = ledger()
    sequences.assign(A, 1)
    second = sequences.assign(A, 1_000)
    sequences.given_up(A, lost=True)
    sequences.acknowledged(A, second, 1_000)
    sequences.settle(A)
    assert sequences.assign(A, 4) == ProducerState(7, 0, 1_001)
    sequences.given_up(A, lost=False)
    sequences.settle(A)
    assert sequences.assign(A, 1) == ProducerState(7, 0, 1_001)


def test_forgetting() -> None:
    """After `forget`, no partition is troubled and sequence numbers start at 0 again."""
    sequences = ledger()
    sequences.assign(A, 1)
    sequences.given_up(A, lost=False)
    sequences.forget()
    assert sequences.troubled() == []
    assert sequences.assign(A, 1) == ProducerState(7, 0, 0)


def test_trouble_of_a_partition_that_has_no_numbers() -> None:
    """A response for a partition without sequence numbers is ignored."""
    sequences = ledger()
    sequences.given_up(A, lost=True)
    sequences.gap_shown(A)
    sequences.acknowledged(A, ProducerState(7, 0, 0), 1)
    assert not sequences.has_gap(A)
    assert sequences.troubled() == []
    assert repr(sequences) == "<SequenceLedger producer 7 epoch 0, 0 partitions>"


def test_a_first_batch_goes_alone() -> None:
    """Until a partition's first batch is acknowledged under its producer id, no second one is in flight."""
    core = Harness(batch_size=100)
    for _ in range(3):
        core.send(value=b"x" * 60)
    batch = core.turn_one()
    assert core.state(batch) == (0, 0)
    assert core.turn() == []
    core.respond(batch)
    assert [core.state(one) for one in core.turn()] == [(0, 1), (0, 2)]


def test_numbers_count_records() -> None:
    """The next base sequence is the previous one plus its record count. Partitions count separately."""
    core = Harness()
    for _ in range(3):
        core.send(A)
    core.respond(core.turn_one())
    core.send(A)
    core.send(B)
    assert {batch.tp: core.state(batch) for batch in core.turn()} == {A: (0, 3), B: (0, 0)}


def test_several_in_flight() -> None:
    """Two batches may be in flight, and each is acknowledged by its own response."""
    core = warm()
    one, two = flying(core, 2)
    core.respond(one, offset=1)
    assert two.base_offset == -1
    core.respond(two, offset=2)
    assert (one.base_offset, two.base_offset) == (1, 2)


def test_several_in_flight_are_retried_in_order() -> None:
    """Batches that fail after the first are retried one at a time with their sequence numbers, before new ones."""
    core = warm()
    batches = flying(core, 3)
    core.respond(batches[0], NOT_LEADER)
    fourth = core.send(value=b"x" * 60)
    core.respond(batches[1], OUT_OF_ORDER)
    core.respond(batches[2], OUT_OF_ORDER)
    for number, batch in enumerate(batches, 1):
        assert core.after_backoff() == [batch]
        assert core.state(batch) == (0, number)
        core.respond(batch, offset=number)
    assert core.after_backoff() == [fourth.batch]
    assert core.state(fourth.batch) == (0, 4)


def test_the_first_fails_for_good() -> None:
    """Later batches in flight fail for the sequence gap, and are sent again with sequence numbers that close it."""
    core = warm()
    record = core.send(value=b"x" * 60)
    second = core.send(value=b"y" * 60)
    one, two = core.turn()
    core.respond(one, TOO_LARGE)
    assert isinstance(record.fate, RecordTooLarge)
    core.respond(two, OUT_OF_ORDER)
    assert core.after_backoff() == [two]
    assert core.state(two) == (1, 0)
    core.respond(two, offset=1)
    assert second.offset == 1


def test_a_rejection_without_later_batches_bumps_no_epoch() -> None:
    """A rejection without later batches requires no epoch bump: unsent and rejected batches leave no gap."""
    core = warm()
    core.send()
    core.respond(core.turn_one(), INVALID_RECORD)
    core.send()
    with capture_logs() as logged:
        assert core.state(core.turn_one()) == (0, 1)
    assert logged == []


def test_out_of_order_for_the_next_batch_bumps_the_epoch() -> None:
    """Without earlier pending batches the broker has lost data, so the batch starts a new epoch."""
    core = warm()
    record = core.send()
    batch = core.turn_one()
    core.respond(batch, OUT_OF_ORDER)
    assert record.fate is None
    with capture_logs() as logged:
        assert core.after_backoff() == [batch]
    assert core.state(batch) == (1, 0)
    assert [(one["event"], one["epoch"]) for one in logged] == [("new epoch: a batch is lost", 1)]


def test_a_loss_in_the_last_epoch_is_logged() -> None:
    """A loss in the last epoch is logged, although a new producer id follows instead of an epoch."""
    core = Harness()
    core.ledger.adopt(7, EPOCH_MAX)
    core.send()
    core.respond(core.turn_one(), OUT_OF_ORDER)
    with capture_logs() as logged:
        assert core.after_backoff() == []
    assert [one["event"] for one in logged] == ["new epoch: a batch is lost"]
    assert not core.ledger.ready


def test_out_of_order_for_the_very_first_batch() -> None:
    """An out-of-order first batch starts a new epoch too, although nothing was acknowledged."""
    core = Harness()
    core.send()
    batch = core.turn_one()
    core.respond(batch, OUT_OF_ORDER)
    assert core.after_backoff() == [batch]
    assert core.state(batch) == (1, 0)


def test_partitions_with_nothing_in_flight_follow_into_the_new_epoch() -> None:
    """The next batch of such a partition starts the new epoch at sequence 0."""
    core = warm()
    core.send(A)
    batch = core.turn_one()
    core.respond(batch, OUT_OF_ORDER)
    core.after_backoff()
    core.respond(batch)
    core.send(B)
    assert core.state(core.turn_one()) == (1, 0)


def test_partitions_with_something_in_flight_follow_later() -> None:
    """They keep epoch and sequence numbers until their batches complete. Then the next batch starts the new epoch."""
    core = warm(retries=1)
    core.send(A)
    third = core.send(B)
    a, b = core.turn()
    core.respond(a, OUT_OF_ORDER)
    core.turn()
    core.respond(b, NOT_LEADER)
    again = core.after_backoff()
    assert {batch.tp: core.state(batch) for batch in again} == {A: (1, 0), B: (0, 1)}
    core.respond(a)
    core.respond(b, NOT_LEADER)
    assert third.fate is not None, "retries are used up"
    core.send(A)
    core.send(B)
    assert {batch.tp: core.state(batch) for batch in core.turn()} == {A: (1, 1), B: (1, 0)}


def test_partitions_in_trouble_at_once_share_a_bump() -> None:
    """Concurrent failures of several partitions share one epoch bump."""
    core = warm()
    core.send(A)
    core.send(B)
    a, b = core.turn()
    core.respond(a, OUT_OF_ORDER)
    core.respond(b, OUT_OF_ORDER)
    assert {core.state(batch) for batch in core.after_backoff()} == {(1, 0)}
    assert core.ledger.epoch == 1


def test_responses_out_of_order() -> None:
    """If the second of two batches fails first, its retry waits until the first batch has completed."""
    core = warm()
    one, two = flying(core, 2)
    core.respond(two, OUT_OF_ORDER)
    assert core.after_backoff() == [], "the first is still out"
    core.respond(one, NOT_LEADER)
    for number, batch in ((1, one), (2, two)):
        assert core.after_backoff() == [batch]
        assert core.state(batch) == (0, number)
        core.respond(batch, offset=number)


def test_responses_out_of_order_where_the_second_succeeds() -> None:
    """The first batch is retried unchanged and is acknowledged without affecting the sequence numbers."""
    core = warm()
    one, two = flying(core, 2)
    core.respond(two, offset=2)
    core.respond(one, TIMED_OUT)
    assert core.after_backoff() == [one]
    assert core.state(one) == (0, 1)
    core.respond(one, offset=1)
    core.send()
    assert core.state(core.turn_one()) == (0, 3)


def test_a_duplicate_is_a_success() -> None:
    """DUPLICATE_SEQUENCE_NUMBER means that the batch is in the log. Its offset is the broker's, or unknown."""
    core = warm()
    for offset, number in ((None, 1), (17, 2)):
        record = core.send()
        core.lose(core.turn_one())
        (batch,) = core.after_backoff()
        assert core.state(batch) == (0, number)
        core.respond(batch, DUPLICATE, offset=offset)
        assert record.offset == (-1 if offset is None else offset)
    core.send()
    assert core.state(core.turn_one()) == (0, 3)


@pytest.mark.parametrize("code", [UNKNOWN_PRODUCER, OUT_OF_ORDER, OLD_EPOCH])
def test_the_broker_has_forgotten_the_producer(code: int) -> None:
    """The batches continue in a new epoch and in order, whether or not acknowledged records were deleted. They do so
    too if the broker knows a later epoch."""
    core = warm()
    one, two = flying(core, 2)
    core.respond(one, code)
    core.respond(two, code)
    assert core.after_backoff() == [one]
    assert core.state(one) == (1, 0)
    core.respond(one, offset=1)
    assert core.after_backoff() == [two]
    assert core.state(two) == (1, 1)


def test_the_last_epoch_is_used_up() -> None:
    """After the last epoch nothing is sent until there is a new producer id. Batches that need it then use it."""
    core = warm()
    core.ledger.adopt(7, EPOCH_MAX)
    core.send(A)
    core.send(B)
    a, b = core.turn()
    core.respond(b, NOT_LEADER)
    core.respond(a, OUT_OF_ORDER)
    assert core.after_backoff() == []
    assert not core.ledger.ready
    core.ledger.adopt(8, 0)
    again = core.turn()
    assert {(batch.tp, batch.producer_state.producer_id, *core.state(batch)) for batch in again} == {
        (A, 8, 0, 0),
        (B, 7, EPOCH_MAX, 0),
    }
    core.respond(b, offset=9)
    core.send(B)
    assert core.turn_one().producer_state == (8, 0, 0)


def test_the_last_epoch_is_used_up_while_another_partition_has_something_new() -> None:
    """Sequence numbers are resolved before draining, so no batch is drained under an outdated producer id."""
    core = warm()
    core.ledger.adopt(7, EPOCH_MAX)
    core.send(B)
    batch = core.turn_one()
    core.respond(batch, OUT_OF_ORDER)
    new = core.send(A)
    assert core.after_backoff() == []
    core.ledger.adopt(8, 0)
    assert {batch.producer_state[:2] for batch in core.turn()} == {(8, 0)}
    assert new.batch.attempts == 1


def test_a_split_keeps_the_numbers() -> None:
    """The parts share the sequence numbers of the batch. The following batch keeps its own."""
    core = Harness(batch_size=200, delivery_timeout_ms=10**6)
    core.warm_up()
    records = [core.send(value=b"x" * 50) for _ in range(4)]
    one, two = core.turn()
    assert (one.count, two.count) == (2, 2)
    core.respond(one, TOO_LARGE)
    core.respond(two, OUT_OF_ORDER)
    states = []
    for offset in (1, 2, 3):
        (batch,) = core.after_backoff()
        states.append(core.state(batch))
        core.respond(batch, offset=offset)
    assert states == [(0, 1), (0, 2), (0, 3)]
    assert [record.offset for record in records] == [1, 2, 3, 4]


def test_retries_used_up_behind_a_pending_batch() -> None:
    """A batch that fails after one that is still retried leaves a gap at the end, which is closed."""
    core = warm(retries=1)
    one, two = flying(core, 2)
    core.respond(one, NOT_LEADER)
    core.respond(two, INVALID_RECORD)
    assert isinstance(two.error, InvalidRequest)
    core.after_backoff()
    core.respond(one, offset=1)
    core.send()
    assert core.state(core.turn_one()) == (0, 2)


def test_numbers_wrap() -> None:
    """Sequence numbers wrap from 2^31 - 1 to 0 within an epoch. Batches before the wrap stay earlier."""
    core = warm()
    core.ledger.acknowledged(A, core.ledger.assign(A, 2**31 - 2), 2**31 - 2)
    core.send(value=b"x" * 60)
    core.send(value=b"y" * 60)
    one, two = core.turn()
    assert [core.state(batch)[1] for batch in (one, two)] == [2**31 - 1, 0]
    core.respond(one, NOT_LEADER)
    core.respond(two, OUT_OF_ORDER)
    assert core.after_backoff() == [one]
    assert core.state(one) == (0, 2**31 - 1)


def test_a_partition_with_a_batch_in_flight_holds_up_no_other() -> None:
    """Its sequence numbers are resolved later, those of other partitions at once."""
    core = warm()
    one, _ = flying(core, 2)
    core.send(B)
    (other,) = core.turn()
    for batch in (one, other):
        core.respond(batch, INVALID_RECORD)
    core.send(A)
    core.send(B)
    (again,) = core.turn()
    assert (again.tp, core.state(again)) == (B, (0, 1))


def test_expired_before_being_sent() -> None:
    """A batch without a sequence number leaves nothing unresolved."""
    core = warm(delivery_timeout_ms=1_000)
    core.down = {1}
    record = core.send()
    core.after(1_000)
    assert isinstance(record.fate, DeliveryTimeout)
    core.down = set()
    core.send()
    assert core.state(core.turn_one()) == (0, 1)


def test_the_first_expires_and_the_second_succeeds() -> None:
    """The first batch must be in the log. A third one waits for that result and continues in the same epoch."""
    core = warm(delivery_timeout_ms=3_000)
    first = core.send(value=b"x" * 60)
    (one,) = core.turn()
    core.now_ms = 2_000
    core.send(value=b"y" * 60)
    (two,) = core.turn()
    core.respond(one, TIMED_OUT)
    core.lose(two)
    core.now_ms = 3_000
    third = core.send(value=b"z" * 60)
    assert core.turn() == [two], "the third needs a number, and the first's fate decides which"
    assert isinstance(first.fate, DeliveryTimeout)
    core.respond(two, offset=2)
    assert core.turn() == [third.batch]
    assert core.state(third.batch) == (0, 3)


@pytest.mark.parametrize("code", [TIMED_OUT, NOT_ENOUGH_REPLICAS])
def test_the_first_expires_and_the_second_fails(code: int) -> None:
    """The sequence gap is detected, and both queued batches get sequence numbers of a new epoch."""
    core = warm(delivery_timeout_ms=3_000)
    core.send(value=b"x" * 60)
    (one,) = core.turn()
    core.now_ms = 2_500
    core.send(value=b"y" * 60)
    (two,) = core.turn()
    core.respond(one, code)
    core.now_ms = 3_000
    third = core.send(value=b"z" * 60)
    assert core.turn() == []
    core.respond(two, OUT_OF_ORDER)
    assert core.after(200) == [two]
    assert core.state(two) == (1, 0)
    core.respond(two, offset=1)
    assert core.turn() == [third.batch]
    assert core.state(third.batch) == (1, 1)


def test_all_sent_batches_expire() -> None:
    """An unknown outcome requires an epoch bump, without waiting for the next record."""
    core = warm(delivery_timeout_ms=1_000)
    core.send()
    core.lose(core.turn_one())
    core.down = {1}
    core.after(1_000)
    assert core.ledger.epoch == 1
    core.down = set()
    core.send()
    assert core.state(core.turn_one()) == (1, 0)


def test_batches_that_expire_do_not_delay_the_next_one() -> None:
    """While one that expired in flight has no response, the next batch gets the number after it. One that expired
    before it was sent had no number."""
    core = warm(delivery_timeout_ms=1_000)
    (expired,) = flying(core, 1)
    core.down = {1}
    unsent = core.send(value=b"x" * 60)
    core.after(1_000)
    assert isinstance(unsent.fate, DeliveryTimeout)
    core.down = set()
    third = core.send(value=b"y" * 60)
    assert core.turn() == [third.batch]
    assert core.state(third.batch) == (0, 2)
    core.respond(expired, offset=1)
    core.respond(third.batch, offset=2)
    core.send()
    assert core.state(core.turn_one()) == (0, 3)


def test_expired_in_flight_and_rejected_afterwards() -> None:
    """The late error shows that the sequence number is unused."""
    core = warm(delivery_timeout_ms=1_000)
    core.send()
    batch = core.turn_one()
    core.after(1_000)
    core.respond(batch, OUT_OF_ORDER)
    core.send()
    assert core.state(core.turn_one()) == (0, 1)


def test_expired_in_flight_and_written_afterwards() -> None:
    """The late success uses the sequence number without an epoch bump."""
    core = warm(delivery_timeout_ms=1_000)
    core.send()
    batch = core.turn_one()
    core.after(1_000)
    core.respond(batch, offset=1)
    core.send()
    assert core.state(core.turn_one()) == (0, 2)


def test_expired_in_flight_with_others_behind() -> None:
    """While the expired batch is in flight, a batch that fails as out of order waits and keeps its sequence number."""
    core = warm(delivery_timeout_ms=1_000)
    one = flying(core, 1)[0]
    core.now_ms = 500
    core.send(value=b"y" * 60)
    (two,) = core.turn()
    core.after(500)
    core.respond(two, OUT_OF_ORDER)
    assert core.after(200) == []
    core.lose(one)
    assert core.after(200) == [two]
    assert core.state(two) == (0, 2)
    core.respond(two, offset=2)
    assert core.ledger.epoch == 0


def test_an_out_of_order_error_proves_that_nothing_was_written() -> None:
    """An out-of-order error shows that the batch is not in the log, even after a lost attempt. Its error states
    that."""
    core = warm(delivery_timeout_ms=1_000)
    record = core.send()
    core.lose(core.turn_one())
    (batch,) = core.after(300)
    core.now_ms = 1_000
    core.respond(batch, OUT_OF_ORDER)
    core.turn()
    assert "was not written" in str(record.fate)


@pytest.mark.parametrize("code", [3, 5, NOT_LEADER, TIMED_OUT, 20, 56])
def test_a_leader_that_lost_the_partition_may_have_appended(code: int) -> None:
    """A batch that expires after such an error leaves its sequence number unresolved, so the next one has a new
    epoch."""
    core = warm(delivery_timeout_ms=1_000)
    record = core.send(value=b"x" * 60)
    (batch,) = core.turn()
    core.respond(batch, code)
    core.down = {1}
    core.after(1_000)
    core.turn()
    assert isinstance(record.fate, DeliveryTimeout)
    assert record.fate.maybe_written
    core.down = set()
    core.send()
    assert core.state(core.turn_one()) == (1, 0)


def test_a_rejection_before_the_append_needs_no_new_epoch() -> None:
    """Replicas are counted before the append, so the sequence number is reused."""
    core = warm(delivery_timeout_ms=1_000)
    record = core.send(value=b"x" * 60)
    (batch,) = core.turn()
    core.respond(batch, NOT_ENOUGH_REPLICAS)
    core.down = {1}
    core.after(1_000)
    core.turn()
    assert isinstance(record.fate, DeliveryTimeout)
    assert not record.fate.maybe_written
    core.down = set()
    core.send()
    assert core.state(core.turn_one()) == (0, 1)
