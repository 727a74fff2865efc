"""Splitting of batches that are too large for the broker."""

from __future__ import annotations

from penstock.shared.common.errors import (
    DeliveryTimeout,
    NotLeaderOrFollower,
    RecordTooLarge,
    SendCancelled,
)
from tests.shared.clients.producer.harness import (
    NOT_LEADER,
    TOO_LARGE,
    B,
    Harness,
)


def test_too_large_for_the_broker() -> None:
    """The batch is split into two halves with separate responses. The memory is released with the last one."""
    core = Harness(compression_type="gzip")
    records = [core.send(value=b"%d" % i) for i in range(4)]
    core.respond(core.turn_one(), TOO_LARGE)
    assert core.metrics.totals["batch_split_total"] == 1
    sent = []
    for offset in (0, 2):
        batch = core.turn_one()
        sent += core.values(batch)
        core.respond(batch, offset=offset)
    assert sent == [record.value for record in records]
    assert [record.offset for record in records] == [0, 1, 2, 3]
    assert core.all_memory_is_back
    assert core.after(20_000) == []


def test_splitting_ends_with_single_records() -> None:
    """A single record that is too large fails with RecordTooLarge after the necessary number of splits."""
    core = Harness(delivery_timeout_ms=10**6)
    records = [core.send(value=b"%d" % i) for i in range(8)]
    tries = 0
    while sent := core.turn() or core.after_backoff():
        tries += len(sent)
        for batch in sent:
            core.respond(batch, TOO_LARGE)
    assert tries == 15
    assert all(isinstance(record.fate, RecordTooLarge) for record in records)
    assert core.all_memory_is_back


def test_one_large_record_among_small_ones() -> None:
    """Only the record that is too large fails."""
    core = Harness(delivery_timeout_ms=10**6)
    records = [core.send(value=b"x" * (9_000 if i == 3 else 10)) for i in range(8)]
    offset = 0
    while sent := core.turn() or core.after_backoff():
        for batch in sent:
            if len(core.bytes[batch]) > 5_000:
                core.respond(batch, TOO_LARGE)
            elif core.state(batch)[1] == offset or core.state(batch)[0]:
                core.respond(batch, offset=offset)
                offset += batch.count
            else:
                core.respond(batch, 45)
    assert [isinstance(record.fate, RecordTooLarge) for record in records] == [i == 3 for i in range(8)]
    assert [record.offset for i, record in enumerate(records) if i != 3] == list(range(7))


def test_an_expired_batch_is_not_split() -> None:
    """MESSAGE_TOO_LARGE after the expiry has no effect."""
    core = Harness(delivery_timeout_ms=1_500)
    records = [core.send(), core.send()]
    batch = core.turn_one()
    core.after(1_500)
    core.respond(batch, TOO_LARGE)
    assert all(isinstance(record.fate, DeliveryTimeout) for record in records)
    assert core.after_backoff() == []
    assert core.all_memory_is_back


def test_parts_keep_the_age_of_the_whole() -> None:
    """The delivery timeout counts from the first record, through every split, ahead of younger batches."""
    core = Harness(delivery_timeout_ms=1_000, batch_size=200)
    old = [core.send(), core.send()]
    batch = core.turn_one()
    core.now_ms = 500
    young = core.send(B)
    core.down = {1}
    core.respond(batch, TOO_LARGE)
    core.after(500)
    assert all(isinstance(record.fate, DeliveryTimeout) for record in old)
    assert young.fate is None


def test_a_split_batch_that_had_records_cancelled_records() -> None:
    """Each remaining record gets its own offset."""
    core = Harness()
    records = [core.send(value=b"%d" % i) for i in range(6)]
    for i in (0, 3):
        assert records[i].cancel()
    core.respond(core.turn_one(), TOO_LARGE)
    sent: list[bytes] = []
    for _ in range(2):
        batch = core.turn_one()
        core.respond(batch, offset=len(sent))
        sent += core.values(batch)
    assert sent == [b"1", b"2", b"4", b"5"]
    assert [records[i].offset for i in (1, 2, 4, 5)] == [0, 1, 2, 3]
    assert all(isinstance(records[i].fate, SendCancelled) for i in (0, 3))


def test_a_split_is_no_retry() -> None:
    """With one retry, a batch may be split any number of times, and each part may be retried once."""
    core = Harness(retries=1)
    records = [core.send(value=b"%d" % i) for i in range(4)]
    core.respond(core.turn_one(), TOO_LARGE)
    core.respond(core.turn_one(), TOO_LARGE)
    (single,) = core.turn()
    core.respond(single, NOT_LEADER)
    assert core.after_backoff() == [single]
    assert records[0].fate is None
    core.respond(single, NOT_LEADER)
    assert isinstance(records[0].fate, NotLeaderOrFollower)
    core.respond(core.turn_one())
    half = core.turn_one()
    core.respond(half, NOT_LEADER)
    assert core.after_backoff() == [half], "it was split once"
