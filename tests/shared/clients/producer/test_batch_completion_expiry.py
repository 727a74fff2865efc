"""Sequence numbers of batches that are given up: what is settled at once, and what costs an epoch."""

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
    """A batch that never had a number leaves nothing unresolved."""
    core = warm(delivery_timeout_ms=1_000)
    core.down = {1}
    record = core.send()
    core.after(1_000)
    assert isinstance(record.fate, DeliveryTimeout)
    core.down = set()
    core.send()
    assert core.state(core.turn_one()) == (0, 1)


def test_the_first_expires_and_the_second_succeeds() -> None:
    """So the first reached the log after all: a third waits for that, and goes on in the same epoch."""
    core = warm(delivery_timeout_ms=3_000)
    first = core.send(value=b"x" * 60)
    (one,) = core.turn()
    core.now_ms = 2_000
    core.send(value=b"y" * 60)
    (two,) = core.turn()
    core.answer(one, TIMED_OUT)
    core.lose(two)
    core.now_ms = 3_000
    third = core.send(value=b"z" * 60)
    assert core.turn() == [two], "the third needs a number, and the first's fate decides which"
    assert isinstance(first.fate, DeliveryTimeout)
    core.answer(two, offset=2)
    assert core.turn() == [third.batch]
    assert core.state(third.batch) == (0, 3)


@pytest.mark.parametrize("code", [TIMED_OUT, NOT_ENOUGH_REPLICAS])
def test_the_first_expires_and_the_second_fails(code: int) -> None:
    """The gap shows: both that are queued get numbers of a new epoch."""
    core = warm(delivery_timeout_ms=3_000)
    core.send(value=b"x" * 60)
    (one,) = core.turn()
    core.now_ms = 2_500
    core.send(value=b"y" * 60)
    (two,) = core.turn()
    core.answer(one, code)
    core.now_ms = 3_000
    third = core.send(value=b"z" * 60)
    assert core.turn() == []
    core.answer(two, OUT_OF_ORDER)
    assert core.after(200) == [two]
    assert core.state(two) == (1, 0)
    core.answer(two, offset=1)
    assert core.turn() == [third.batch]
    assert core.state(third.batch) == (1, 1)


def test_all_that_was_sent_expires() -> None:
    """Lost for good with an unknown fate costs an epoch, settled without waiting for the next record."""
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
    """The late refusal says that the number is free."""
    core = warm(delivery_timeout_ms=1_000)
    core.send()
    batch = core.turn_one()
    core.after(1_000)
    core.answer(batch, OUT_OF_ORDER)
    core.send()
    assert core.state(core.turn_one()) == (0, 1)


def test_expired_in_flight_and_written_afterwards() -> None:
    """The late success uses the number up, and no epoch."""
    core = warm(delivery_timeout_ms=1_000)
    core.send()
    batch = core.turn_one()
    core.after(1_000)
    core.answer(batch, offset=1)
    core.send()
    assert core.state(core.turn_one()) == (0, 2)


def test_expired_in_flight_with_others_behind() -> None:
    """While the expired one's request is out, what is refused as out of order waits for it and keeps its number."""
    core = warm(delivery_timeout_ms=1_000)
    one = flying(core, 1)[0]
    core.now_ms = 500
    core.send(value=b"y" * 60)
    (two,) = core.turn()
    core.after(500)
    core.answer(two, OUT_OF_ORDER)
    assert core.after(200) == []
    core.lose(one)
    assert core.after(200) == [two]
    assert core.state(two) == (0, 2)
    core.answer(two, offset=2)
    assert core.ledger.epoch == 0


def test_a_refusal_by_number_clears_up_an_earlier_loss() -> None:
    """Refused as out of order, a batch is not in the log, whatever became of its earlier try; its error says so."""
    core = warm(delivery_timeout_ms=1_000)
    record = core.send()
    core.lose(core.turn_one())
    (batch,) = core.after(300)
    core.now_ms = 1_000
    core.answer(batch, OUT_OF_ORDER)
    core.turn()
    assert "was not written" in str(record.fate)


@pytest.mark.parametrize("code", [3, 5, NOT_LEADER, TIMED_OUT, 20, 56])
def test_a_leader_that_lost_the_partition_may_have_appended(code: int) -> None:
    """A batch that expires after such an answer leaves its number unused: the next one is under a new epoch."""
    core = warm(delivery_timeout_ms=1_000)
    record = core.send(value=b"x" * 60)
    (batch,) = core.turn()
    core.answer(batch, code)
    core.down = {1}
    core.after(1_000)
    core.turn()
    assert isinstance(record.fate, DeliveryTimeout)
    assert record.fate.maybe_written
    core.down = set()
    core.send()
    assert core.state(core.turn_one()) == (1, 0)


def test_what_was_refused_before_it_was_appended_costs_no_epoch() -> None:
    """Too few replicas are counted before the append: the number is handed out again."""
    core = warm(delivery_timeout_ms=1_000)
    record = core.send(value=b"x" * 60)
    (batch,) = core.turn()
    core.answer(batch, NOT_ENOUGH_REPLICAS)
    core.down = {1}
    core.after(1_000)
    core.turn()
    assert isinstance(record.fate, DeliveryTimeout)
    assert not record.fate.maybe_written
    core.down = set()
    core.send()
    assert core.state(core.turn_one()) == (0, 1)
