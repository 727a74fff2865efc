"""Record batches as the fake broker reads and changes them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol.record_batches import (
    new_batch_builder,
    read_batches,
    seal_batch,
)
from penstock.shared.testing.fake_broker.broker_batches import (
    InvalidBatch,
    assign_offset,
    marker,
    next_sequence,
    parse,
    records,
    stamp,
)
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
        (None, ErrorCode.CORRUPT_MESSAGE),
        (b"", ErrorCode.CORRUPT_MESSAGE),
        (built(b"a")[:-1], ErrorCode.CORRUPT_MESSAGE),
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
