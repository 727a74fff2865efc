"""Sequence numbers of expired batches: which are resolved at once, and which require an epoch bump."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import DeliveryTimeout
from tests.shared.clients.producer.harness import (
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
    OUT_OF_ORDER,
    TIMED_OUT,
    flying,
    warm,
)


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


def test_expired_in_flight_and_refused_afterwards() -> None:
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
