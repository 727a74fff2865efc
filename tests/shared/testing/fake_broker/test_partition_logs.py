"""The log of one partition, and the record batches that a broker reads, changes and appends."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol.record_batches import new_batch_builder, read_batches, seal_batch
from penstock.shared.testing.fake_broker.broker_batches import (
    BrokerBatch,
    InvalidBatch,
    assign_offset,
    marker,
    next_sequence,
    parse,
    records,
    stamp,
)
from penstock.shared.testing.fake_broker.partition_log import Appended, PartitionLog, ProducerStates
from penstock.shared.testing.fake_broker.protocol import ErrorCode
from tests.shared.clients.protocol.compressions import COMPRESSION


def built(
    *values: bytes, producer: tuple[int, int, int] = (-1, -1, -1), codec: str = "none", transactional: bool = False
) -> bytes:
    builder = new_batch_builder(1 << 20, transactional)
    for index, value in enumerate(values):
        builder.append(index, 1_000 + index, b"k", value, [("h", b"x")])
    return seal_batch(builder, producer, COMPRESSION[codec])


def test_a_header_is_read() -> None:
    """A parsed batch has the fields that a broker needs."""
    batch = parse(built(b"a", b"b", producer=(7, 2, 40), transactional=True))
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence, batch.last_sequence) == (7, 2, 40, 41)
    assert (batch.count, batch.base_timestamp, batch.max_timestamp) == (2, 1_000, 1_001)
    assert batch.is_transactional
    assert not batch.is_control


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_a_placed_batch_keeps_its_records(codec: str) -> None:
    """A batch in the log has its offset and epoch, and its checksum is still valid."""
    batch = assign_offset(parse(built(b"a" * 100, b"b" * 100, codec=codec)), 50, 3)
    assert (batch.base_offset, batch.last_offset) == (50, 51)
    (unpacked,) = read_batches(batch.data)
    assert unpacked.validate_crc()
    found = [(r.offset, r.timestamp, r.key, r.value, r.headers) for r in records(batch, "t", 1)]
    assert found == [(50, 1_000, b"k", b"a" * 100, (("h", b"x"),)), (51, 1_001, b"k", b"b" * 100, (("h", b"x"),))]


def test_a_stamped_batch_has_the_brokers_time() -> None:
    """With LogAppendTime every record has the broker's time, and the checksum is valid."""
    batch = assign_offset(stamp(parse(built(b"a", b"b")), 77_000), 0, 0)
    (unpacked,) = read_batches(batch.data)
    assert unpacked.validate_crc()
    assert [record.timestamp for record in records(batch, "t", 0)] == [77_000, 77_000]


@pytest.mark.parametrize("committed", [True, False])
def test_markers_are_kafkas(committed: bool) -> None:
    """A marker is a control batch that a client can read."""
    batch = assign_offset(marker(7, 2, committed=committed, now_ms=5), 9, 0)
    (unpacked,) = read_batches(batch.data)
    assert unpacked.validate_crc()
    assert unpacked.is_control_batch
    assert unpacked.is_transactional
    assert (unpacked.producer_id, unpacked.base_offset) == (7, 9)
    assert [record.key for record in unpacked] == [b"\0\0\0\1" if committed else b"\0\0\0\0"]


@given(st.integers(0, 200), st.integers(0, 255))
def test_one_wrong_byte_is_found(at: int, value: int) -> None:
    """A batch with a changed byte after its checksum is corrupt."""
    data = bytearray(built(b"v" * 200))
    at = 21 + at % (len(data) - 21)
    if data[at] == value:
        return
    data[at] = value
    with pytest.raises(InvalidBatch) as raised:
        parse(bytes(data))
    assert raised.value.code is ErrorCode.CORRUPT_MESSAGE


@pytest.mark.parametrize(
    ("data", "code"),
    [
        (None, ErrorCode.INVALID_RECORD),
        (b"", ErrorCode.INVALID_RECORD),
        (built(b"a")[:-1], ErrorCode.INVALID_RECORD),
        (built(b"a") * 2, ErrorCode.INVALID_RECORD),
        (built(b"a")[:16] + b"\1" + built(b"a")[17:], ErrorCode.INVALID_RECORD),
        (marker(1, 0, committed=True, now_ms=0).data, ErrorCode.INVALID_RECORD),
        (built(b"a", producer=(1, 0, -1)), ErrorCode.INVALID_RECORD),
    ],
    ids=["none", "empty", "cut off", "two", "old format", "marker", "no sequence"],
)
def test_invalid_batches(data: bytes | None, code: ErrorCode) -> None:
    """Invalid batches have Kafka's error code."""
    with pytest.raises(InvalidBatch) as raised:
        parse(data)
    assert raised.value.code is code


@given(st.integers(0, 2**31 - 1), st.integers(1, 1_000))
def test_sequences_wrap_around(sequence: int, step: int) -> None:
    """A step of several sequences equals as many single steps, also beyond the highest sequence."""
    by_one = sequence
    for _ in range(step):
        by_one = next_sequence(by_one)
    assert next_sequence(sequence, step) == by_one < 2**31


MANY = 1 << 20


def log_of(*counts: int) -> PartitionLog:
    log = PartitionLog()
    for count in counts:
        log.append(parse(built(*[b"v"] * count)), leader_epoch=4)
    return log


def offsets(data: bytes) -> list[int]:
    return [record.offset for batch in read_batches(data) for record in batch]


def test_a_repetition_is_not_appended() -> None:
    """A repeated batch is answered with its offset and not appended."""
    log = PartitionLog()
    for _ in range(2):
        assert log.append(parse(built(b"a", b"b", producer=(7, 0, 0))), 0) == Appended(0, 1, 0, -1)
    assert (len(log.batches), log.end_offset) == (1, 2)


def test_where_leader_epochs_end() -> None:
    """An epoch ends where the next one with records begins, and one without records ends like the one before it."""
    log = PartitionLog()
    for epoch in (1, 1, 4):
        log.append(parse(built(b"a", b"b")), epoch)
    ends = {epoch: log.end_of_epoch(epoch, 5) for epoch in (0, 1, 3, 4, 5, 6)}
    assert ends == {0: (0, 0), 1: (1, 4), 3: (1, 4), 4: (4, 6), 5: (5, 6), 6: None}


def test_truncation() -> None:
    """A truncation removes whole batches, and the next record has the first removed offset."""
    log = log_of(2, 3, 2)
    size = log.size_bytes
    log.truncate(4)
    assert (log.end_offset, len(log.batches)) == (2, 1)
    assert 0 < log.size_bytes < size
    log.truncate(0)
    assert (log.end_offset, log.size_bytes) == (0, 0)


def test_truncated_batches_are_forgotten() -> None:
    """A truncated batch that is sent again is appended, while the one before it still is a repetition."""
    log = PartitionLog()
    first, second = [built(b"v", producer=(7, 0, sequence)) for sequence in (0, 1)]
    for data in (first, second):
        log.append(parse(data), 0, append_time_ms=50)
    log.truncate(1)
    assert log.append(parse(first), 0, append_time_ms=99) == Appended(0, 0, 0, 50)
    assert log.append(parse(second), 0, append_time_ms=99) == Appended(1, 1, 1, 99)
    assert log.end_offset == 2
    log.truncate(0)
    assert log.append(parse(second), 0) == Appended(1, 1, 0, -1), "of an unknown producer any number"


def test_truncated_transactions() -> None:
    """A transaction whose marker is truncated is open again, and one whose first record is truncated does not exist."""
    log = log_of(1)
    transactional(log, 1, 0)
    log.end_transaction(1, 0, 0, committed=False, now_ms=0)
    transactional(log, 1, 2)
    log.end_transaction(1, 1, 0, committed=True, now_ms=0)
    log.truncate(6)
    assert (log.last_stable_offset, log.end_offset) == (4, 6)
    assert log.in_transaction(1)
    assert log.producers.check(parse(built(b"v", producer=(1, 0, 4)))) is ErrorCode.NONE, "the marker's epoch is gone"
    log.truncate(3)
    assert (log.last_stable_offset, log.end_offset) == (1, 3)
    assert log.fetch(0, MANY, committed=True).aborted == ()
    log.truncate(1)
    assert log.last_stable_offset == log.end_offset == 1
    assert not log.in_transaction(1)


def test_deleted_records_are_stable() -> None:
    """An open transaction does not limit the stable offset before the log's start, and its producer is still known."""
    log = PartitionLog()
    transactional(log, 1, 0)
    log.delete_records(2)
    assert log.last_stable_offset == log.start_offset == 2
    assert log.append(parse(built(b"a", b"b", producer=(1, 0, 0))), 0) == Appended(0, 1, 0, -1)
    transactional(log, 1, 2)
    log.truncate(2)
    assert log.in_transaction(1), "it began before the start"


@given(st.lists(st.integers(1, 5), max_size=12), st.integers(0, 60), st.integers(0, 500))
def test_a_fetch_returns_whole_batches(counts: list[int], offset: int, max_bytes: int) -> None:
    """A fetch begins with the batch that contains the offset, and is one batch or within the limit."""
    log = log_of(*counts)
    fetched = log.fetch(offset, max_bytes, committed=False)
    if offset > log.end_offset:
        assert fetched.code is ErrorCode.OFFSET_OUT_OF_RANGE
        return
    found = offsets(fetched.data)
    assert found == list(range(found[0], found[-1] + 1)) if found else offset == log.end_offset
    assert not found or offset in found
    assert len(fetched.data) <= max_bytes or len(read_batches(fetched.data)) == 1


def transactional(log: PartitionLog, producer_id: int, sequence: int) -> None:
    log.append(parse(built(b"a", b"b", producer=(producer_id, 0, sequence), transactional=True)), 0)


def test_the_first_open_transaction_limits_the_stable_offset() -> None:
    """Only records before the first open transaction are stable."""
    log = PartitionLog()
    transactional(log, 1, 0)
    transactional(log, 2, 0)
    assert (log.last_stable_offset, log.end_offset) == (0, 4)
    log.end_transaction(1, 0, 0, committed=True, now_ms=0)
    assert (log.last_stable_offset, log.end_offset) == (2, 5)
    assert offsets(log.fetch(0, MANY, committed=True).data) == [0, 1]
    log.end_transaction(2, 0, 0, committed=False, now_ms=0)
    assert log.last_stable_offset == log.end_offset == 6
    fetched = log.fetch(0, MANY, committed=True)
    assert [(one.producer_id, one.first_offset, one.last_offset) for one in fetched.aborted] == [(2, 2, 5)]
    assert log.fetch(0, MANY, committed=False).aborted == ()


def test_readable_records_are_those_of_consumers() -> None:
    """Committed reads leave out open and aborted transactions, and no read has markers."""
    log = log_of(1)
    transactional(log, 1, 0)
    log.end_transaction(1, 0, 0, committed=False, now_ms=0)
    transactional(log, 1, 2)

    def seen(*, committed: bool) -> list[int]:
        return [r.offset for batch in log.readable(committed=committed) for r in records(batch, "t", 0)]

    assert seen(committed=True) == [0]
    assert seen(committed=False) == [0, 1, 2, 4, 5]


def test_deleted_records_cannot_be_fetched() -> None:
    """A fetch before the log's start is an error, and the batch that contains the start is returned whole."""
    log = log_of(3, 3)
    log.delete_records(4)
    assert (log.start_offset, len(log.batches)) == (4, 1)
    assert log.fetch(3, MANY, committed=False).code is ErrorCode.OFFSET_OUT_OF_RANGE
    assert offsets(log.fetch(4, MANY, committed=False).data) == [3, 4, 5]
    log.delete_records(6)
    assert (log.batches, log.start_offset, log.end_offset) == ([], 6, 6)
    assert log.offset_for_time(0, committed=False).offset == -1


def test_retention() -> None:
    """Retention removes the oldest whole batches, and none of an open transaction."""
    log = log_of(1, 1, 1)
    size = log.size_bytes // 3
    log.retain(3 * size)
    assert log.start_offset == 0
    log.retain(2 * size - 1)
    assert (log.start_offset, log.size_bytes) == (2, size)
    transactional(log, 1, 0)
    log.retain(0)
    assert (log.start_offset, log.end_offset, len(log.batches)) == (3, 5, 1)
    log.end_transaction(1, 0, 0, committed=True, now_ms=0)
    log.retain(0)
    assert (log.start_offset, log.end_offset, log.size_bytes, log.batches) == (6, 6, 0, [])


def test_bytes_are_counted_as_far_as_wanted() -> None:
    """Counting bytes stops at the number that a fetch waits for."""
    log = log_of(1, 1, 1)
    size = len(log.batches[0].data)
    assert log.bytes_from(0, 1, committed=False) == size
    assert log.bytes_from(0, MANY, committed=False) == 3 * size
    assert log.bytes_from(2, MANY, committed=False) == size
    assert log.bytes_from(3, MANY, committed=False) == 0


def test_the_repr_of_a_log() -> None:
    """The repr of a log has its bounds."""
    log = log_of(2)
    transactional(log, 1, 0)
    assert repr(log) == "PartitionLog(0..4, stable to 2)"


def batch_of(sequence: int, *, epoch: int = 0, count: int = 2) -> BrokerBatch:
    return parse(built(*[b"v"] * count, producer=(7, epoch, sequence)))


def append(states: ProducerStates, batch: BrokerBatch, offset: int) -> None:
    assert states.check(batch) is ErrorCode.NONE
    states.appended(assign_offset(batch, offset, 0))


def test_the_last_five_are_remembered() -> None:
    """One of the last five batches is found with its offset, and the sixth is out of order."""
    states = ProducerStates()
    for sequence in range(0, 12, 2):
        append(states, batch_of(sequence), 100 + sequence)
    assert states.check(batch_of(2)) == Appended(2, 3, 102, -1)
    assert states.check(batch_of(10)) == Appended(10, 11, 110, -1)
    assert states.check(batch_of(0)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_longer_batch_is_another_one() -> None:
    """A batch with the same first sequence and another last one is no repetition."""
    states = ProducerStates()
    append(states, batch_of(0), 0)
    assert states.check(batch_of(0, count=3)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER


def test_a_marker_fences() -> None:
    """A marker's epoch fences the one before it, and its first sequence is zero."""
    states = ProducerStates()
    append(states, batch_of(0), 0)
    states.fenced(7, 1)
    assert states.check(batch_of(2)) is ErrorCode.INVALID_PRODUCER_EPOCH
    assert states.check(batch_of(2, epoch=1)) is ErrorCode.OUT_OF_ORDER_SEQUENCE_NUMBER
    assert states.check(batch_of(0, epoch=1)) is ErrorCode.NONE


def test_a_marker_of_the_same_epoch_changes_nothing() -> None:
    """After a marker of its own epoch a producer's sequence continues."""
    states = ProducerStates()
    append(states, batch_of(0), 0)
    states.fenced(7, 0)
    assert states.check(batch_of(2)) is ErrorCode.NONE


@given(st.lists(st.integers(1, 9), min_size=1, max_size=30), st.integers(0, 2**31 - 1))
def test_batches_in_order_are_taken(counts: list[int], first: int) -> None:
    """Batches of any size in order are accepted, also beyond the highest sequence, and then known."""
    states, sequence, offset = ProducerStates(), first, 0
    for count in counts:
        batch = batch_of(sequence, count=count)
        append(states, batch, offset)
        assert states.check(batch_of(sequence, count=count)) == Appended(sequence, batch.last_sequence, offset, -1)
        sequence, offset = (sequence + count) % 2**31, offset + count
