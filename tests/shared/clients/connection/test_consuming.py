"""What is read out of aiokafka's consumer: batches as columns, control records left out."""

from __future__ import annotations

import asyncio
from typing import Any

from aiokafka import TopicPartition as AioTopicPartition
from aiokafka.consumer.fetcher import READ_COMMITTED, READ_UNCOMMITTED, PartitionRecords
from aiokafka.record.memory_records import MemoryRecords

from shared.clients.connection import COMPRESSION, new_batch_builder, seal_batch
from shared.clients.connection.consuming import decode
from shared.clients.connection.sockets import close_all_of


def batch(*values: bytes, offset: int = 0, producer_id: int = -1, headers: Any = ()) -> bytes:
    builder = new_batch_builder(16_384, COMPRESSION["none"], producer_id >= 0)
    for i, value in enumerate(values):
        builder.append(i, 1_000 + i, b"k", value, list(headers))
    data = bytearray(seal_batch(builder, (producer_id, 0, 0)))
    data[0:8] = offset.to_bytes(8, "big")
    return bytes(data)


def fetched(*batches: bytes, start: int = 0, aborted: Any = None, level: int = READ_COMMITTED) -> Any:
    return PartitionRecords(
        AioTopicPartition("t", 0), MemoryRecords(b"".join(batches)), aborted, start, None, None, True, level
    )


def test_columns() -> None:
    """Batches become one set of columns; headers are left out where no record has any."""
    columns, next_offset, error = decode(fetched(batch(b"a", b"b"), batch(b"c", offset=7)), "t", 0)
    assert (columns.values, columns.offsets.tolist(), columns.timestamps.tolist()) == (
        [b"a", b"b", b"c"],
        [0, 1, 7],
        [1_000, 1_001, 1_000],
    )
    assert (columns.headers, next_offset, error) == (None, 8, None)


def test_headers() -> None:
    """Where one record has headers, each has its own."""
    columns, _, _ = decode(fetched(batch(b"a"), batch(b"b", offset=1, headers=[("h", b"1"), ("n", None)])), "t", 0)
    assert columns.headers == [(), (("h", b"1"), ("n", None))]


def test_records_before_the_start_are_left_out() -> None:
    """A batch that was fetched from its middle gives only what is asked for."""
    columns, next_offset, _ = decode(fetched(batch(b"a", b"b", b"c"), start=2), "t", 0)
    assert (columns.values, next_offset) == ([b"c"], 3)


def test_aborted_transactions() -> None:
    """Under read_committed the batches of an aborted producer are left out, and the position still goes past them."""
    batches = batch(b"a", producer_id=5), batch(b"b", offset=1, producer_id=6), batch(b"c", offset=2, producer_id=5)
    columns, next_offset, _ = decode(fetched(*batches, aborted=[(5, 0)]), "t", 0)
    assert (columns.values, next_offset) == ([b"b"], 3)
    columns, _, _ = decode(fetched(*batches, aborted=[(5, 0)], level=READ_UNCOMMITTED), "t", 0)
    assert columns.values == [b"a", b"b", b"c"]


def test_a_corrupt_batch() -> None:
    """A batch that fails its checksum ends the columns before it, and is named by topic, partition and offset."""
    broken = bytearray(batch(b"value", offset=2))
    broken[-3] ^= 0xFF
    columns, next_offset, error = decode(fetched(batch(b"a", b"b"), bytes(broken)), "t", 0)
    assert (columns.values, next_offset) == ([b"a", b"b"], 2)
    assert str(error) == "t-0 at offset 2: a batch fails its checksum"


async def test_closing_while_a_fetch_waits() -> None:
    """A fetch that waits before its next try ends with the consumer, and its cancellation with it."""

    class Waiting:
        """A fetcher whose close waits for its tasks one by one, as aiokafka's does."""

        def __init__(self) -> None:
            self._fetch_task = asyncio.ensure_future(asyncio.Event().wait())
            self._pending_tasks = {asyncio.ensure_future(asyncio.Event().wait()) for _ in range(2)}
            self.closed = False

        async def close(self) -> None:
            for task in self._pending_tasks:
                task.cancel()
                await task
            self.closed = True

    fetcher = Waiting()
    tasks = [fetcher._fetch_task, *fetcher._pending_tasks]
    await close_all_of(fetcher)()
    assert fetcher.closed
    assert all(task.cancelled() for task in tasks)
