"""Produce on both brokers: appended batches, errors, and the checks of idempotent producers."""

from __future__ import annotations

import time

import pytest

from penstock.shared.clients.protocol.record_batches import crc32c, new_batch_builder, seal_batch
from penstock.shared.testing.fake_broker import Api, ErrorCode, Message
from penstock.shared.testing.fake_broker.broker_batches import CONTROL_MASK, CRC_AT
from penstock.shared.testing.fake_broker.broker_batches import CRC_COVERS_FROM as ATTRIBUTES_AT
from tests.contract.conftest import Log, Wire, batch, created

HOUR_MS = 3_600_000


async def producer_id(wire: Wire) -> int:
    response = await wire.request(Api.INIT_PRODUCER_ID, transactional_id=None, transaction_timeout_ms=60_000)
    assert response.error_code == 0
    return int(response.producer_id)


def numbered(pid: int, epoch: int, sequence: int, count: int = 10) -> bytes:
    return batch(*(b"%d" % n for n in range(count)), producer=(pid, epoch, sequence))


async def produce_result(log: Log, records: bytes | None) -> tuple[str, int]:
    row = await log.produce(records)
    return ErrorCode(row.error_code).name, row.base_offset


@pytest.mark.parametrize("acks", [1, -1])
async def test_batches_follow_each_other(log: Log, acks: int) -> None:
    """A batch has the offset after the last record before it."""
    rows = [await log.produce(batch(b"a", b"b", b"c"), acks) for _ in range(3)]
    assert [(row.error_code, row.base_offset, row.log_start_offset) for row in rows] == [
        (0, 0, 0),
        (0, 3, 0),
        (0, 6, 0),
    ]
    assert [row.log_append_time_ms for row in rows] == [-1, -1, -1]


async def test_a_repeated_batch_has_its_first_offset(log: Log) -> None:
    """A batch that is sent again is answered with its first offset, if it is one of the last five."""
    pid = await producer_id(log.wire)
    for sequence in range(0, 60, 10):
        assert await produce_result(log, numbered(pid, 0, sequence)) == ("NONE", sequence)
    assert await produce_result(log, numbered(pid, 0, 50)) == ("NONE", 50)
    assert await produce_result(log, numbered(pid, 0, 10)) == ("NONE", 10)
    assert await produce_result(log, numbered(pid, 0, 0)) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
    assert await produce_result(log, numbered(pid, 0, 60)) == ("NONE", 60)


async def test_a_gap_in_the_sequence_is_an_error(log: Log) -> None:
    """A sequence that is not the next one is out of order, and the next one is still accepted afterwards."""
    pid = await producer_id(log.wire)
    assert await produce_result(log, numbered(pid, 0, 0)) == ("NONE", 0)
    assert await produce_result(log, numbered(pid, 0, 20)) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
    assert await produce_result(log, numbered(pid, 0, 5)) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
    assert await produce_result(log, numbered(pid, 0, 10)) == ("NONE", 10)


async def test_an_unknown_producer_starts_anywhere(log: Log) -> None:
    """A partition accepts any first sequence of an unknown producer."""
    assert await produce_result(log, numbered(await producer_id(log.wire), 0, 7)) == ("NONE", 0)


async def test_a_new_epoch_starts_at_zero(log: Log) -> None:
    """The first batch of a newer epoch must have the sequence zero, and it fences the older epoch."""
    pid = await producer_id(log.wire)
    assert await produce_result(log, numbered(pid, 0, 0)) == ("NONE", 0)
    assert await produce_result(log, numbered(pid, 1, 10)) == ("OUT_OF_ORDER_SEQUENCE_NUMBER", -1)
    assert await produce_result(log, numbered(pid, 1, 0)) == ("NONE", 10)
    assert await produce_result(log, numbered(pid, 0, 10)) == ("INVALID_PRODUCER_EPOCH", -1)
    assert await produce_result(log, numbered(pid, 1, 0)) == ("NONE", 10)


async def test_sequences_go_round(log: Log) -> None:
    """Zero follows the highest sequence, also within a batch."""
    pid = await producer_id(log.wire)
    assert await produce_result(log, numbered(pid, 0, 2**31 - 5)) == ("NONE", 0)
    assert await produce_result(log, numbered(pid, 0, 5)) == ("NONE", 10)
    assert await produce_result(log, numbered(pid, 0, 2**31 - 5)) == ("NONE", 0)


async def test_a_damaged_batch_is_corrupt(log: Log) -> None:
    """A batch with a wrong checksum is CORRUPT_MESSAGE."""
    good = batch(b"value")
    assert await produce_result(log, good[:-1] + b"\xff") == ("CORRUPT_MESSAGE", -1)
    assert await produce_result(log, good) == ("NONE", 0)


@pytest.mark.parametrize("size", [0, 30, -1])
async def test_a_batch_that_is_cut_off_is_invalid(log: Log, size: int) -> None:
    """Bytes without a whole batch get INVALID_RECORD, which a client does not retry."""
    assert await produce_result(log, batch(b"value")[:size]) == ("INVALID_RECORD", -1)


@pytest.mark.parametrize("length", [-5, 10, 40])
async def test_a_batch_with_a_short_length_is_corrupt(log: Log, length: int) -> None:
    """A batch whose length is below that of its header is CORRUPT_MESSAGE."""
    good = batch(b"value")
    damaged = good[:8] + length.to_bytes(4, "big", signed=True) + good[12:]
    assert await produce_result(log, damaged) == ("CORRUPT_MESSAGE", -1)


async def test_a_partition_gets_one_batch(log: Log) -> None:
    """Two batches for one partition in a request are an error."""
    assert await produce_result(log, batch(b"a") + batch(b"b")) == ("INVALID_RECORD", -1)


async def test_invalid_acks_are_an_error(log: Log) -> None:
    """Acks other than 0, 1 and -1 are an error."""
    row = await log.produce(batch(b"a"), acks=2)
    assert ErrorCode(row.error_code) is ErrorCode.INVALID_REQUIRED_ACKS


async def test_an_unknown_partition_is_an_error(log: Log, name: str) -> None:
    """Each partition has its own error, and others are appended to."""
    topics = [
        Message(name=log.topic, partitions=[Message(partition=p, records=batch(b"v")) for p in (0, 7)]),
        Message(name=f"{name}-none", partitions=[Message(partition=0, records=batch(b"v"))]),
    ]
    response = await log.wire.request(Api.PRODUCE, acks=-1, timeout_ms=5_000, topics=topics)
    codes = {(t.name, p.partition): ErrorCode(p.error_code).name for t in response.topics for p in t.partitions}
    assert codes == {
        (log.topic, 0): "NONE",
        (log.topic, 7): "UNKNOWN_TOPIC_OR_PARTITION",
        (f"{name}-none", 0): "UNKNOWN_TOPIC_OR_PARTITION",
    }


async def test_a_batch_can_be_too_large(wire: Wire, name: str) -> None:
    """`max.message.bytes` limits the whole batch."""
    await created(wire, name, max_message_bytes="1000")
    log = Log(wire, name)
    assert await produce_result(log, batch(b"v" * 1_000)) == ("MESSAGE_TOO_LARGE", -1)
    assert await produce_result(log, batch(b"v" * 900)) == ("NONE", 0)


@pytest.mark.parametrize("policy", ["compact", "compact,delete"])
async def test_records_of_a_compacted_topic_need_a_key(wire: Wire, name: str, policy: str) -> None:
    """A batch with records without a key is rejected, and the response names these records."""
    await created(wire, name, cleanup_policy=policy)
    keys: list[list[bytes | None]] = [[b"a", None, b"", None], [b"a", b""]]
    rows = []
    for of_batch in keys:
        builder = new_batch_builder(1_000, False)
        for index, key in enumerate(of_batch):
            builder.append(index, int(time.time() * 1000), key, b"v", [])
        rows.append(await Log(wire, name).produce(seal_batch(builder, (-1, -1, -1))))
    assert [(ErrorCode(row.error_code).name, row.base_offset) for row in rows] == [("INVALID_RECORD", -1), ("NONE", 0)]
    assert [error.batch_index for error in rows[0].record_errors] == [1, 3]


async def test_the_future_is_limited(wire: Wire, name: str) -> None:
    """A record's timestamp may be ahead by `message.timestamp.after.max.ms`, by default an hour. The response names
    all records that are further ahead."""
    await created(wire, name)
    await created(wire, f"{name}-any", message_timestamp_after_max_ms=str(2**63 - 1))
    now_ms = int(time.time() * 1000)
    ahead = batch(b"v", at_ms=now_ms + 2 * HOUR_MS)
    assert await produce_result(Log(wire, name), ahead) == ("INVALID_TIMESTAMP", -1)
    builder = new_batch_builder(1_000, False)
    for index, ahead_hours in enumerate((0, 2, 0, 3)):
        builder.append(index, now_ms + ahead_hours * HOUR_MS, None, b"v", [])
    row = await Log(wire, name).produce(seal_batch(builder, (-1, -1, -1)))
    assert [error.batch_index for error in row.record_errors] == [1, 3]
    assert await produce_result(Log(wire, f"{name}-any"), ahead) == ("NONE", 0)


async def test_the_broker_can_set_the_time(wire: Wire, name: str) -> None:
    """With LogAppendTime, response and log have the broker's time."""
    await created(wire, name, message_timestamp_type="LogAppendTime")
    log = Log(wire, name)
    row = await log.produce(batch(b"a", b"b", at_ms=5))
    assert abs(row.log_append_time_ms - time.time() * 1000) < HOUR_MS
    assert await log.offset(row.log_append_time_ms) == (0, 0)
    assert await log.offset(row.log_append_time_ms + 1) == (0, -1)


async def test_min_insync_replicas_is_capped_at_the_replicas(wire: Wire, name: str) -> None:
    """`min.insync.replicas` above the number of replicas counts as that number."""
    await created(wire, name, min_insync_replicas="2")
    assert ErrorCode((await Log(wire, name).produce(batch(b"v"))).error_code) is ErrorCode.NONE


async def test_transactional_batches_need_an_id(log: Log) -> None:
    """A transactional batch in a request without a transactional id is an error."""
    data = batch(b"v", producer=(await producer_id(log.wire), 0, 0), transactional=True)
    assert await produce_result(log, data) == ("TRANSACTIONAL_ID_AUTHORIZATION_FAILED", -1)


async def test_clients_write_no_markers(log: Log) -> None:
    """A control batch of a client is an error."""
    data = bytearray(batch(b"v"))
    data[ATTRIBUTES_AT + 1] |= CONTROL_MASK
    data[CRC_AT:ATTRIBUTES_AT] = crc32c(bytes(data[ATTRIBUTES_AT:])).to_bytes(4, "big")
    assert await produce_result(log, bytes(data)) == ("INVALID_RECORD", -1)
