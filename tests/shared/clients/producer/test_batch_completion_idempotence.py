"""Sequence numbers through every kind of failure, checked by epoch and base sequence in the sent bytes."""

from __future__ import annotations

import pytest

from penstock.shared.clients.producer.transaction_manager import EPOCH_MAX
from penstock.shared.common.errors import InvalidRequest, RecordTooLarge
from tests.shared.clients.producer.harness import (
    DUPLICATE,
    INVALID_RECORD,
    NOT_LEADER,
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


def test_a_number_that_was_surely_refused_is_used_again() -> None:
    """A rejection without later batches requires no epoch bump: unsent and rejected batches leave no gap."""
    core = warm()
    core.send()
    core.respond(core.turn_one(), INVALID_RECORD)
    core.send()
    assert core.state(core.turn_one()) == (0, 1)


def test_out_of_order_for_the_next_batch_bumps_the_epoch() -> None:
    """Without earlier pending batches the broker has lost data, so the batch starts a new epoch."""
    core = warm()
    record = core.send()
    batch = core.turn_one()
    core.respond(batch, OUT_OF_ORDER)
    assert record.fate is None
    assert core.after_backoff() == [batch]
    assert core.state(batch) == (1, 0)


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


def test_answers_out_of_order() -> None:
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


def test_answers_out_of_order_where_the_second_succeeds() -> None:
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


@pytest.mark.parametrize("code", [UNKNOWN_PRODUCER, OUT_OF_ORDER])
def test_the_broker_has_forgotten_the_producer(code: int) -> None:
    """The batches continue in a new epoch and in order, whether or not acknowledged records were deleted."""
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
