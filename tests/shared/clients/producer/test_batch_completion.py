"""The effects of responses, lost requests and timeouts on a batch: retry, split, failure, and release of memory."""

from __future__ import annotations

import pytest

from penstock.shared.clients.producer.producer_batch import BatchState
from penstock.shared.common.errors import (
    AuthorizationFailed,
    BrokerNotAvailable,
    CorruptRecord,
    DeliveryTimeout,
    InvalidRequest,
    KafkaTimeout,
    NotEnoughReplicas,
    NotLeaderOrFollower,
    OutOfOrderSequence,
    RecordTooLarge,
    SendCancelled,
    UnsupportedVersion,
)
from penstock.shared.common.records import RecordMetadata
from tests.shared.clients.producer.harness import (
    CORRUPT,
    INVALID_RECORD,
    NOT_ENOUGH_REPLICAS,
    NOT_LEADER,
    OUT_OF_ORDER,
    RETRY_BACKOFF_MS,
    TIMED_OUT,
    TOO_LARGE,
    TOPIC_AUTHORIZATION,
    A,
    B,
    C,
    Harness,
)


def test_acknowledged() -> None:
    """Each record gets its offset, and the memory is released."""
    core = Harness()
    records = [core.send(value=b"%d" % i, key=b"k") for i in range(3)]
    batch = core.turn_one()
    assert not core.all_memory_is_back
    core.respond(batch, offset=40)
    assert records[2].fate == RecordMetadata("t", 0, 42, 1_000, 1, 1)
    assert [record.offset for record in records] == [40, 41, 42]
    assert core.all_memory_is_back
    assert core.metrics.totals["record_send_total"] == 3
    assert repr(core.accumulator) == "<RecordAccumulator 0 batches queued, 0 out>"


def test_the_backoff_of_a_batch_grows_and_is_spread() -> None:
    """It doubles from retry_backoff_ms to retry_backoff_max_ms, with 20 % jitter that does not exceed the maximum."""
    core = Harness(delivery_timeout_ms=10**6, retry_backoff_max_ms=400)
    record, waits = core.send(), []
    for _ in range(60):
        core.respond(core.turn_one(), NOT_ENOUGH_REPLICAS)
        waits.append(record.batch.retry_at_ms - core.now_ms)
        core.now_ms = record.batch.retry_at_ms - 1
        assert core.turn() == []
        core.now_ms += 1
    for wait, backoff_ms in zip(waits, [100, 200] + [400] * 58, strict=True):
        assert 0.8 * backoff_ms <= wait <= min(1.2 * backoff_ms, 400)
    assert min(waits[2:]) < 0.9 * 400


@pytest.mark.parametrize("code", [CORRUPT, 3, 5, NOT_LEADER, TIMED_OUT, 8, 9, NOT_ENOUGH_REPLICAS, 20, 56])
def test_retriable_errors_are_retried(code: int) -> None:
    """After its backoff the batch is sent unchanged."""
    core = Harness()
    record = core.send()
    data = core.bytes[core.turn_one()]
    core.respond(record.batch, code)
    assert core.turn() == []
    assert core.after_backoff() == [record.batch]
    assert core.bytes[record.batch] == data
    core.respond(record.batch, offset=5)
    assert record.offset == 5
    assert core.metrics.totals["batch_retry_total"] == 1


def test_retries_are_bounded() -> None:
    """With retries=1 the second failure is reported to the record."""
    for idempotent in (True, False):
        core = Harness(retries=1, enable_idempotence=idempotent)
        record = core.send()
        core.lose(core.turn_one())
        assert record.fate is None
        (batch,) = core.after_backoff()
        core.lose(batch, KafkaTimeout("no response"))
        assert isinstance(record.fate, KafkaTimeout)
        assert "t-0" in str(record.fate)
        assert core.all_memory_is_back


def test_without_idempotence_a_rejection_is_final_and_a_passing_error_is_not() -> None:
    """Without idempotence retriable errors are retried too. Permanent errors are reported at once."""
    core = Harness(enable_idempotence=False)
    record = core.send()
    batch = core.turn_one()
    assert core.state(batch) == (-1, -1)
    core.respond(batch, NOT_LEADER)
    (batch,) = core.after_backoff()
    core.respond(batch, TOPIC_AUTHORIZATION)
    assert isinstance(record.fate, AuthorizationFailed)
    record = core.send()
    core.respond(core.turn_one(), OUT_OF_ORDER)
    assert isinstance(record.fate, OutOfOrderSequence)


def test_the_brokers_own_words_are_in_the_error() -> None:
    """The error has Kafka's error name, and the broker's message if there is one."""
    for detail, wanted in (("", "t-0: INVALID_REQUEST"), ("too odd", "t-0: INVALID_REQUEST: too odd")):
        core = Harness()
        record = core.send()
        core.respond(core.turn_one(), 42, detail=detail)
        assert isinstance(record.fate, InvalidRequest)
        assert str(record.fate) == wanted


@pytest.mark.parametrize("invalid", [(1,), (0,), (2, 3), (0, 2), (0, 1, 2, 3)])
@pytest.mark.parametrize("idempotent", [True, False])
def test_only_invalid_records_of_a_batch_fail(invalid: tuple[int, ...], idempotent: bool) -> None:
    """The others are stored in order. A gap in the sequence numbers is closed by a new epoch."""
    core = Harness(enable_idempotence=idempotent)
    records = [core.send(value=b"%d" % i) for i in range(4)]
    core.respond(core.turn_one(), INVALID_RECORD, detail="no key", invalid=invalid)
    stored: list[bytes] = []
    next_sequence: dict[int, int] = {}
    while sent := core.turn() or core.after_backoff():
        for batch in sent:
            epoch, sequence = core.state(batch)
            if idempotent and sequence != next_sequence.setdefault(epoch, 0):
                core.respond(batch, OUT_OF_ORDER)
                continue
            core.respond(batch, offset=len(stored))
            stored += core.values(batch)
            next_sequence[epoch] = sequence + batch.count
    valid = [record for i, record in enumerate(records) if i not in invalid]
    assert stored == [record.value for record in valid]
    assert [record.offset for record in valid] == list(range(len(valid)))
    assert all(isinstance(records[i].fate, InvalidRequest) for i in invalid)
    assert core.all_memory_is_back


@pytest.mark.parametrize(("is_lost", "invalid"), [(False, ()), (True, (1,)), (False, (7,))])
def test_a_batch_is_rejected_as_a_whole(is_lost: bool, invalid: tuple[int, ...]) -> None:
    """This happens if the broker names no invalid record, or if an earlier attempt may have stored the batch: parts of
    it could be stored twice."""
    core = Harness()
    records = [core.send() for _ in range(3)]
    batch = core.turn_one()
    if is_lost:
        core.lose(batch)
        assert core.after_backoff() == [batch]
    core.respond(batch, INVALID_RECORD, detail="no key", invalid=invalid)
    assert {str(record.fate) for record in records} == {"t-0: INVALID_RECORD: no key"}
    assert core.all_memory_is_back


def test_an_error_of_one_partition_does_not_affect_others() -> None:
    """Each batch of a request has its own result."""
    core = Harness()
    records = [core.send(tp) for tp in (A, B, C)]
    core.turn()
    ((_, batches),) = core.requests
    for batch, code in zip(batches, (NOT_LEADER, NOT_LEADER, 0), strict=True):
        core.respond(batch, code, offset=100)
    assert [record.fate is None for record in records] == [True, True, False]
    assert core.completion.metadata_is_stale
    assert core.turn() == [], "no new leader is known"
    core.leaders = {A: 2, B: 3}
    core.turn()
    assert [node for node, _ in core.requests] == [2, 3]


def test_stale_metadata_is_noted_for_errors_that_show_it() -> None:
    """Leadership errors and lost connections request a metadata refresh. Other errors do not."""
    for code, stale in ((NOT_LEADER, True), (3, True), (NOT_ENOUGH_REPLICAS, False), (CORRUPT, False)):
        core = Harness()
        core.send()
        core.respond(core.turn_one(), code)
        assert core.completion.metadata_is_stale is stale
    for error, stale in ((BrokerNotAvailable("connection closed"), True), (KafkaTimeout("no response"), False)):
        core = Harness()
        core.send()
        core.lose(core.turn_one(), error)
        assert core.completion.metadata_is_stale is stale


def test_a_batch_in_flight_expires() -> None:
    """Its record fails at once with an error that it may still be written. Memory and request are kept until the
    response."""
    for code, fate in ((0, "written"), (NOT_LEADER, "refused")):
        core = Harness(delivery_timeout_ms=1_500)
        record = core.send()
        batch = core.turn_one()
        core.after(1_500)
        assert isinstance(record.fate, DeliveryTimeout), fate
        assert "may still be written" in str(record.fate)
        assert record.fate.maybe_written
        assert not core.all_memory_is_back
        core.respond(batch, code)
        assert core.all_memory_is_back
        assert core.after_backoff() == []
        assert batch.state is BatchState.DONE


def test_the_error_states_whether_the_record_may_be_written() -> None:
    """The error states "not written" for a batch that was never sent or was rejected, and "may be written" if the
    outcome is unknown."""
    core = Harness(delivery_timeout_ms=1_000)
    queued = core.send()
    core.down = {1}
    core.after(1_000)
    assert "was not written" in str(queued.fate)
    for code, words in ((NOT_ENOUGH_REPLICAS, "was not written"), (20, "may still be written")):
        core = Harness(delivery_timeout_ms=1_000)
        record = core.send()
        core.respond(core.turn_one(), code)
        core.down = {1}
        core.after(1_000)
        assert words in str(record.fate)
        assert "last error: t-0: NOT_ENOUGH_REPLICAS" in str(record.fate)


@pytest.mark.parametrize("code", [NOT_ENOUGH_REPLICAS, TIMED_OUT])
def test_an_unknown_outcome_stays_unknown(code: int) -> None:
    """If an earlier attempt may have been written, no later failure shows that it was not."""
    core = Harness(retries=1)
    record = core.send()
    core.lose(core.turn_one())
    (batch,) = core.after_backoff()
    core.respond(batch, code)
    assert isinstance(record.fate, NotEnoughReplicas | KafkaTimeout)
    assert record.fate.maybe_written


def test_one_error_states_the_fate_of_each_record() -> None:
    """If one error ends several batches, it may be written only for the records in flight."""
    core = Harness()
    core.send(A)
    core.turn()
    core.leaders[B] = None
    queued, flying = core.send(B), core.send(C)
    core.turn()
    error = SendCancelled("closed")
    core.completion.fail_all(error, out=True)
    assert isinstance(queued.fate, SendCancelled)
    assert isinstance(flying.fate, SendCancelled)
    assert (queued.fate.maybe_written, flying.fate.maybe_written) == (False, True)
    assert not error.maybe_written


def test_a_request_that_was_not_sent_before_its_batch_expired() -> None:
    """The batch has failed already, and its memory is released."""
    core = Harness(delivery_timeout_ms=1_500)
    record = core.send()
    batch = core.turn_one()
    core.after(1_500)
    core.completion.unanswered(batch, UnsupportedVersion("Produce"), core.now_ms)
    assert isinstance(record.fate, DeliveryTimeout)
    assert core.all_memory_is_back


def test_memory_is_released_once() -> None:
    """Memory is released once, in any order of expiry, response and cancellation."""
    core = Harness(delivery_timeout_ms=1_000)
    core.send(A)
    core.send(B)
    one, two = core.turn()
    core.after(1_000)
    core.lose(one)
    core.turn()
    core.completion.fail_all(SendCancelled("closed"), out=True)
    core.respond(two, TOO_LARGE)
    assert core.all_memory_is_back


def test_a_callback_may_fail_unsent_batches() -> None:
    """A callback that fails all unsent batches during a response does not affect the other batches of the response."""
    core = Harness()
    core.send(A)
    other, queued = core.send(B), core.send(C)
    core.leaders[C] = None
    one, two = core.turn()
    ended: list[int] = []
    one.callbacks[0] = one.callbacks[0]._replace(
        on_delivery=lambda *_: ended.append(core.completion.fail_all(SendCancelled("aborted"), out=False))
    )
    core.respond(one, 42)
    assert ended == [1]
    assert isinstance(queued.fate, SendCancelled)
    assert other.fate is None
    core.respond(two, offset=3)
    assert other.offset == 3
    assert core.all_memory_is_back


def test_a_callback_that_ends_everything_while_batches_expire() -> None:
    """If a delivery callback fails all batches during an expiry, each batch still completes once."""
    core = Harness(delivery_timeout_ms=1_000)
    core.down = {1}
    records = [core.send(tp) for tp in (A, B)]
    first = records[0].batch
    first.callbacks.append(
        first.callbacks[0]._replace(on_delivery=lambda *_: core.completion.fail_all(SendCancelled("aborted"), out=True))
    )
    core.after(1_000)
    assert [type(record.fate) for record in records] == [DeliveryTimeout, SendCancelled]
    assert core.all_memory_is_back


def test_a_callback_that_raises_changes_nothing() -> None:
    """The next record gets its result, and the batch is done."""
    core = Harness()
    one, two = core.send(), core.send()

    def raises(metadata: RecordMetadata | None, error: Exception | None) -> None:
        raise RuntimeError(f"{metadata} {error}")

    one.batch.callbacks[0] = one.batch.callbacks[0]._replace(on_delivery=raises)
    core.respond(core.turn_one(), offset=7)
    assert two.offset == 8
    assert core.all_memory_is_back


def test_records_may_be_sent_in_an_expiry_callback() -> None:
    """They go into a new batch with its own delivery timeout."""
    core = Harness(delivery_timeout_ms=1_000)
    core.down = {1}
    record = core.send()
    again = []
    record.batch.callbacks.append(
        record.batch.callbacks[0]._replace(on_delivery=lambda *_: again.append(core.send(value=b"again")))
    )
    core.after(1_000)
    assert isinstance(record.fate, DeliveryTimeout)
    core.down = set()
    batch = core.turn_one()
    assert core.values(batch) == [b"again"]
    core.respond(batch, offset=3)
    assert again[0].offset == 3


def test_the_next_batch_goes_once_the_expired_one_is_over() -> None:
    """With one request in flight, a partition waits only for the expired batch's request."""
    core = Harness(delivery_timeout_ms=1_500, max_in_flight_requests_per_connection=1, enable_idempotence=False)
    core.send()
    batch = core.turn_one()
    core.now_ms = 750
    second = core.send()
    assert core.after(750) == []
    core.respond(batch)
    assert core.turn() == [second.batch]


def test_expiry_in_several_partitions() -> None:
    """A response that is too late for two partitions of one request expires both."""
    core = Harness(delivery_timeout_ms=1_500)
    records = [core.send(A), core.send(B)]
    one, two = core.turn()
    core.after(1_500)
    core.respond(one)
    core.respond(two)
    assert all(isinstance(record.fate, DeliveryTimeout) for record in records)
    assert core.all_memory_is_back


def test_cancelled_before_and_after_being_drained() -> None:
    """Before draining, a cancelled record is never sent. Afterwards it is sent and its result reported."""
    core = Harness(linger_ms=10)
    before, after = core.send(value=b"before"), core.send(value=b"after")
    assert before.cancel()
    batch = core.after(10)[0]
    assert core.values(batch) == [b"after"]
    assert not after.cancel()
    core.respond(batch, offset=1)
    assert isinstance(before.fate, SendCancelled)
    assert after.offset == 1
    assert core.metrics.totals["record_send_total"] == 1


def test_a_rejected_batch_with_cancelled_records() -> None:
    """Each record has one error: its cancellation, or the rejection."""
    core = Harness()
    cancelled, rejected = core.send(), core.send()
    assert cancelled.cancel()
    core.respond(core.turn_one(), INVALID_RECORD)
    assert isinstance(cancelled.fate, SendCancelled)
    assert isinstance(rejected.fate, InvalidRequest)
    assert core.metrics.totals["record_error_total"] == 1


def test_an_unsupported_version_is_final_and_surely_not_written() -> None:
    """The request was never sent, so the record fails and its sequence number is reused."""
    core = Harness()
    record = core.send()
    core.completion.unanswered(core.turn_one(), UnsupportedVersion("Produce"), 0)
    assert isinstance(record.fate, UnsupportedVersion)
    core.send()
    assert core.state(core.turn_one()) == (0, 0)


def test_a_corrupt_batch_is_tried_again_until_its_time_is_up() -> None:
    """CORRUPT_MESSAGE may be a network error and is retried, as in Java. A reader's CorruptRecord is permanent."""
    core = Harness(delivery_timeout_ms=1_000)
    record = core.send()
    core.respond(core.turn_one(), CORRUPT)
    assert isinstance(record.batch.last_error, CorruptRecord)
    core.down = {1}
    core.after(1_000)
    assert isinstance(record.fate, DeliveryTimeout)


def test_the_time_in_the_queue_is_measured() -> None:
    """Queue time is measured once, from the first record to the first send of a batch."""
    core = Harness(linger_ms=10, delivery_timeout_ms=10**6)
    core.now_ms = 1_005
    core.send()
    (batch,) = core.after(10)
    assert core.metrics.figures()["record_queue_time_max"] == 10
    core.respond(batch, NOT_ENOUGH_REPLICAS)
    assert core.after_backoff() == [batch]
    assert core.metrics.figures()["record_queue_time_avg"] == 10


def test_the_time_until_the_acknowledgement_is_measured() -> None:
    """It counts from the first record of the batch, through its retries."""
    core = Harness(delivery_timeout_ms=10**6)
    core.now_ms = 3
    core.send()
    core.respond(core.turn_one(), NOT_ENOUGH_REPLICAS)
    core.now_ms = 500
    core.respond(core.turn_one())
    assert core.registry.get_sample_value("penstock_producer_ack_latency_seconds_sum") == 0.497


def test_errors_are_counted_by_record() -> None:
    """Cancelled records are not counted as errors of their batch."""
    core = Harness(delivery_timeout_ms=1_000)
    core.down = {1}
    for record in [core.send() for _ in range(3)][:1]:
        record.cancel()
    core.after(1_000)
    assert core.metrics.totals["record_error_total"] == 2


def test_repr() -> None:
    """The repr shows the state."""
    assert repr(Harness().completion) == "<BatchCompletion <SequenceLedger producer 7 epoch 0, 0 partitions>>"


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
    """With one retry, a batch may be split any number of times. Each part may be retried once, after the first
    backoff."""
    core = Harness(retries=1)
    records = [core.send(value=b"%d" % i) for i in range(4)]
    core.respond(core.turn_one(), TOO_LARGE)
    core.respond(core.turn_one(), TOO_LARGE)
    (single,) = core.turn()
    core.respond(single, NOT_LEADER)
    assert single.retry_at_ms - core.now_ms <= 1.2 * RETRY_BACKOFF_MS
    assert core.after_backoff() == [single]
    assert records[0].fate is None
    core.respond(single, NOT_LEADER)
    assert isinstance(records[0].fate, NotLeaderOrFollower)
    core.respond(core.turn_one())
    half = core.turn_one()
    core.respond(half, NOT_LEADER)
    assert core.after_backoff() == [half], "it was split once"
