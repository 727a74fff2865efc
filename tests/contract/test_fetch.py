"""Fetch, ListOffsets and DeleteRecords on both brokers."""

from __future__ import annotations

import asyncio

from penstock.shared.clients.protocol.record_batches import read_batches
from penstock.shared.testing.fake_broker import Api, ErrorCode, Message
from tests.contract.conftest import Log, Wire, batch

EARLIEST, LATEST, MAX_TIMESTAMP = -2, -1, -3


def values(row: Message) -> list[tuple[int, bytes]]:
    return [(r.offset, r.value) for b in read_batches(row.records or b"") for r in b]


async def test_written_records_are_fetched(log: Log) -> None:
    """Records are returned in order with their offsets, in whole batches from the one that contains the offset."""
    await log.produce(batch(b"a", b"b", b"c"))
    await log.produce(batch(b"d"))
    row = await log.fetch(1)
    assert values(row) == [(0, b"a"), (1, b"b"), (2, b"c"), (3, b"d")]
    assert (row.error_code, row.high_watermark, row.last_stable_offset, row.log_start_offset) == (0, 4, 4, 0)
    assert values(await log.fetch(3)) == [(3, b"d")]
    assert values(await log.fetch(4)) == []


async def test_batches_carry_the_leader_epoch(log: Log) -> None:
    """A batch in the log has its leader's epoch, whatever the producer wrote."""
    await log.produce(batch(b"a"))
    records = (await log.fetch(0)).records
    described = await log.wire.request(Api.METADATA, topics=[Message(name=log.topic)])
    assert int.from_bytes(records[12:16], "big") == described.topics[0].partitions[0].leader_epoch


async def test_offsets_outside_of_the_log_are_errors(log: Log) -> None:
    """An offset below the log's start or above its end is OFFSET_OUT_OF_RANGE."""
    await log.produce(batch(b"a", b"b", b"c"))
    await log.wire.request(Api.DELETE_RECORDS, topics=log.topics(offset=2), timeout_ms=5_000)
    codes = [ErrorCode((await log.fetch(offset)).error_code).name for offset in (1, 2, 3, 4)]
    assert codes == ["OFFSET_OUT_OF_RANGE", "NONE", "NONE", "OFFSET_OUT_OF_RANGE"]


async def test_a_limit_lets_one_batch_through(log: Log) -> None:
    """A fetch returns at least one batch, and more only within its limit."""
    for _ in range(3):
        await log.produce(batch(b"x" * 500))
    assert len(values(await log.fetch(0, max_bytes=1))) == 1
    assert len(values(await log.fetch(0, max_bytes=1_300))) == 2


async def test_a_fetch_waits_for_data(log: Log, other_wire: Wire) -> None:
    """A fetch at the log's end is answered when something is written, or with nothing after its wait time."""
    assert values(await log.fetch(0, wait_ms=50)) == []
    waiting = asyncio.create_task(log.fetch(0, wait_ms=15_000))
    await asyncio.sleep(0.05)
    await Log(other_wire, log.topic).produce(batch(b"a"))
    assert values(await waiting) == [(0, b"a")]


async def test_an_unknown_partition_is_an_error(log: Log, name: str) -> None:
    """The fetch of an unknown topic is an error of its partition."""
    row = await Log(log.wire, f"{name}-none").fetch(0)
    assert ErrorCode(row.error_code) is ErrorCode.UNKNOWN_TOPIC_OR_PARTITION


async def test_a_leader_epoch_is_compared(log: Log) -> None:
    """A leader epoch above the broker's is UNKNOWN_LEADER_EPOCH."""
    topics = log.topics(fetch_offset=0, partition_max_bytes=1 << 20, current_leader_epoch=99)
    response = await log.wire.request(Api.FETCH, min_bytes=1, topics=topics)
    assert ErrorCode(response.topics[0].partitions[0].error_code) is ErrorCode.UNKNOWN_LEADER_EPOCH


async def test_offsets_are_found_by_time(log: Log) -> None:
    """The offset of a time is the first record at or after it, even if a later record is older."""
    assert await log.offset(EARLIEST) == await log.offset(LATEST) == (0, 0)
    assert await log.offset(0) == (0, -1)
    await log.produce(batch(b"a", b"b", b"c", at_ms=1_000))
    await log.produce(batch(b"d", at_ms=500))
    await log.produce(batch(b"e", at_ms=2_000))
    assert [await log.offset(at) for at in (0, 1_001, 1_002, 1_003, 2_001)] == [(0, 0), (0, 1), (0, 2), (0, 4), (0, -1)]
    assert [await log.offset(at) for at in (EARLIEST, LATEST, MAX_TIMESTAMP)] == [(0, 0), (0, 5), (0, 4)]


async def test_deleted_records_are_gone(log: Log) -> None:
    """A deletion moves the log's start, -1 deletes all records, and an offset above the end is an error."""

    async def delete(offset: int) -> tuple[str, int]:
        response = await log.wire.request(Api.DELETE_RECORDS, topics=log.topics(offset=offset), timeout_ms=5_000)
        row = response.topics[0].partitions[0]
        return ErrorCode(row.error_code).name, row.low_watermark

    await log.produce(batch(b"a", b"b", b"c", at_ms=1_000))
    await log.produce(batch(b"d", at_ms=2_000))
    assert await delete(2) == ("NONE", 2)
    assert await log.offset(EARLIEST) == (0, 2)
    assert await log.offset(0) == (0, 2)
    assert await delete(1) == ("NONE", 2)
    assert await delete(5) == ("OFFSET_OUT_OF_RANGE", -1)
    assert await delete(-1) == ("NONE", 4)
    assert await log.offset(EARLIEST) == await log.offset(LATEST) == (0, 4)
    assert (await log.produce(batch(b"e"))).base_offset == 4
