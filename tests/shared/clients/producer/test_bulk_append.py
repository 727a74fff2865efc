"""Sending many records: the fast path into open batches, where it stops, and the results."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from penstock.shared.clients.producer.bulk_append import COLUMNS_MIN, Bulk, ColumnBulk, bulk_of
from penstock.shared.clients.producer.delivery import Delivery
from penstock.shared.clients.producer.record_accumulator import PartitionQueue, RecordAccumulator
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    BufferExhausted,
    RecordTooLarge,
    TransactionAborted,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import ProducerRecord, RecordColumns, RecordMetadata, TopicPartition


@dataclass
class Topic:
    """Records with a key go to partition 0, others to partition 1."""

    queues: list[PartitionQueue]
    by_key: dict[bytes, PartitionQueue] = field(default_factory=dict)

    @property
    def sticky_queue(self) -> PartitionQueue | None:
        return self.queues[1]

    @sticky_queue.setter
    def sticky_queue(self, _: PartitionQueue | None) -> None: ...

    def for_key(self, key: bytes) -> PartitionQueue:
        return self.by_key.setdefault(key, self.queues[0])


def topic(batch_size: int = 1_000) -> Topic:
    accumulator = RecordAccumulator(ProducerSettings(batch_size=batch_size))
    queues = [accumulator.queue(TopicPartition("t", number)) for number in (0, 1)]
    for queue in queues:
        accumulator.open_batch(queue, 0, 0)
    return Topic(queues)


def records(*values: bytes, key: bytes | None = None) -> list[ProducerRecord]:
    return [ProducerRecord("t", value, key) for value in values]


async def test_all_at_once() -> None:
    """With room in open batches, all records are appended in order in one step."""
    known = topic()
    bulk = Bulk([*records(b"a", b"b"), *records(b"c", key=b"k")], 77)
    assert bulk.fill({"t": known}) is None
    for queue in known.queues:
        assert queue.open is not None
        queue.open.complete(10, -1)
    assert await bulk.deliveries() == [
        RecordMetadata("t", 1, 10, 77, -1, 1),
        RecordMetadata("t", 1, 11, 77, -1, 1),
        RecordMetadata("t", 0, 10, 77, 1, 1),
    ]


async def test_it_stops_at_what_needs_more() -> None:
    """The fast path stops at a partition, headers, a full or missing batch, an invalid timestamp, a value that is not
    bytes, or another topic."""
    odd = [
        ProducerRecord("t", b"v", partition=0),
        ProducerRecord("t", b"v", headers=(("h", b"1"),)),
        ProducerRecord("t", b"v" * 2_000),
        ProducerRecord("t", b"v", timestamp=-5),
        ProducerRecord("t", "text"),  # type: ignore[arg-type]
        ProducerRecord("t", b"v", "text"),  # type: ignore[arg-type]
        ProducerRecord("other", b"v"),
    ]
    for record in odd:
        known = topic()
        known.for_key(b"k")
        bulk = Bulk([*records(b"a"), record, *records(b"z")], 77)
        assert bulk.fill({"t": known}) is record
        bulk.failed(record, RecordTooLarge("x"))
        assert bulk.fill({"t": known}) is None
        assert repr(bulk) == "<Bulk 3 of 3 records added>"
    known = topic()
    known.queues[1].open = None
    bulk = Bulk(records(b"a"), 77)
    assert bulk.fill({"t": known}) is bulk.records[0]


async def test_a_record_that_went_its_own_way() -> None:
    """A record outside the fast path has its index in the results, with its serialized sizes and its timestamp. Its
    own key and value need no length."""
    first: Any = ProducerRecord("t", 1.5, 7)
    known, bulk = topic(), Bulk([first, *records(b"b", b"c")], 77)
    own = topic().queues[0].open
    assert own is not None
    own.append(0, 77, None, b"serialized", [])
    own.count = 1
    assert bulk.fill({}) is bulk.records[0]
    bulk.add_delivery(Delivery(own, 0, 42, 8, 10))
    assert bulk.fill({"t": known}) is None
    own.complete(3, -1)
    batch = known.queues[1].open
    assert batch is not None
    batch.complete(8, -1)
    results = await bulk.deliveries()
    assert results == [
        RecordMetadata("t", 0, 3, 42, 8, 10),
        RecordMetadata("t", 1, 8, 77, -1, 1),
        RecordMetadata("t", 1, 9, 77, -1, 1),
    ]


async def test_an_error_fails_later_records_without_another_wait() -> None:
    """A full buffer fails all later records, an unknown topic those of the topic, an unknown partition only its
    record."""
    other = ProducerRecord("other", b"v")
    for error, record, same, rest in (
        (BufferExhausted("full"), records(b"a")[0], True, True),
        (UnknownTopicOrPartition("t"), records(b"a")[0], True, False),
        (BrokerNotAvailable("t"), records(b"a")[0], True, False),
        (UnknownTopicOrPartition("t-9"), ProducerRecord("t", b"a", partition=9), False, False),
        (RecordTooLarge("big"), records(b"a")[0], False, False),
        (TransactionAborted("abort first"), records(b"a")[0], True, True),
    ):
        bulk = Bulk([record, *records(b"b"), other], 77)
        assert bulk.fill({}) is record
        assert bulk.rejected(record) is None
        bulk.failed(record, error, whole_topic=str(error) == "t")
        assert (bulk.rejected(bulk.records[1]) is error) is same
        assert (bulk.rejected(other) is error) is rest


async def test_after_an_error_that_ends_the_bulk_no_record_is_appended() -> None:
    """Later records are not appended, also if they fit into an open batch. Otherwise the records that a caller gets
    back to send again would be overtaken."""
    for error in (BufferExhausted("full"), TransactionAborted("abort first")):
        bulk = Bulk(records(b"a", b"b", b"c"), 77)
        assert bulk.fill({}) is bulk.records[0]
        for record in bulk.records[:2]:
            bulk.failed(record, error)
            assert bulk.fill({"t": topic()}) is bulk.records[len(bulk)]
        columns = ColumnBulk(RecordColumns("t", [None] * 3, [b"a", b"b", b"c"]), 77)
        columns.one_by_one(3)
        for nth in range(3):
            record = columns.fill({} if nth == 0 else {"t": topic()})
            assert record is not None
            assert (record.value, len(columns)) == (columns.records[nth].value, nth)
            columns.failed(record, error)


def test_an_unknown_partition_is_waited_for_once() -> None:
    """Later records of the partition fail with the same error, and other unknown partitions of the topic get no further
    wait."""
    ninth, tenth = (ProducerRecord("t", b"a", partition=number) for number in (9, 10))
    bulk, error = Bulk([ninth, tenth, ninth], 77), UnknownTopicOrPartition("t-9")
    assert bulk.fill({}) is ninth
    assert "t" not in bulk.impatient
    bulk.failed(ninth, error)
    assert bulk.rejected(ninth) is error
    assert bulk.rejected(tenth) is None
    assert "t" in bulk.impatient
    assert (bulk.rejections, bulk.first_rejection) == (1, error)


def test_a_fraction_of_a_millisecond_is_no_timestamp() -> None:
    """The compiled builder would truncate it, so records and columns leave the fast path there."""
    odd = ProducerRecord("t", b"v", timestamp=1.5)  # type: ignore[arg-type]
    assert Bulk([odd], 77).fill({"t": topic()}) is odd
    for partition in (None, 0):
        columns = RecordColumns("t", [None], [b"v"], [1.5], partition)  # type: ignore[list-item]
        known: Any = topic()
        known.queues = dict(enumerate(known.queues))
        known.queues[1] = known.queues[0]
        bulk = ColumnBulk(columns, 77)
        bulk.one_by_one(1)
        found = bulk.fill({"t": known})
        assert found is not None
        assert (found.timestamp, len(bulk)) == (1.5, 0)


async def test_records_own_timestamps() -> None:
    """An explicit timestamp is kept."""
    known, bulk = topic(), Bulk([ProducerRecord("t", b"a", timestamp=5), ProducerRecord("t", b"b")], 77)
    assert bulk.fill({"t": known}) is None
    batch = known.queues[1].open
    assert batch is not None
    batch.complete(0, -1)
    assert [getattr(one, "timestamp", None) for one in await bulk.deliveries()] == [5, 77]
    assert await Bulk([], 0).deliveries() == []


async def test_a_list_may_be_used_again() -> None:
    """The results do not change if the caller clears its list after the call."""
    known, buffer = topic(), records(b"a", b"bc")
    bulk = bulk_of(buffer, 77, may_be_columns=True)
    assert bulk.fill({"t": known}) is None
    buffer.clear()
    batch = known.queues[1].open
    assert batch is not None
    batch.complete(0, -1)
    deliveries = bulk.deliveries()
    results = [RecordMetadata("t", 1, 0, 77, -1, 1), RecordMetadata("t", 1, 1, 77, -1, 2)]
    assert await deliveries == results
    assert deliveries.last() == results[-1]


def test_many_records_of_a_topic_become_columns() -> None:
    """Each column has the records' own fields; a record without a timestamp has the bulk's."""
    buffer = [ProducerRecord("t", b"%d" % i, b"k%d" % i) for i in range(COLUMNS_MIN)]
    keys, values = [r.key for r in buffer], [r.value for r in buffer]
    bulk = bulk_of(buffer, 77, may_be_columns=True)
    assert isinstance(bulk, ColumnBulk)
    assert bulk.columns == RecordColumns("t", keys, values)
    assert bulk.records == buffer
    buffer[1] = ProducerRecord("t", b"1", b"k1", {"trace": b"x"}, timestamp=5)
    bulk = bulk_of(buffer, 77, may_be_columns=True)
    assert isinstance(bulk, ColumnBulk)
    times = [77, 5] + [77] * (COLUMNS_MIN - 2)
    headers = [(), {"trace": b"x"}] + [()] * (COLUMNS_MIN - 2)
    assert bulk.columns == RecordColumns("t", keys, values, times, None, headers)


class Special(ProducerRecord, frozen=True, gc=False):
    """A subclass may compute its fields."""


@pytest.mark.parametrize(
    "odd",
    [
        ProducerRecord("other", b"v"),
        ProducerRecord("t", b"v", partition=0),
        ProducerRecord(None, b"v"),  # type: ignore[arg-type]
        Special("t", b"v"),
        "no record",
        # An array has no truth value, and neither has the result of its comparison.
        ProducerRecord("t", b"v", headers=np.arange(2)),  # type: ignore[arg-type]
        ProducerRecord("t", b"v", partition=np.arange(2)),  # type: ignore[arg-type]
        ProducerRecord("t", b"v", timestamp=np.arange(2)),  # type: ignore[arg-type]
    ],
    ids=[
        "another topic",
        "a partition",
        "no topic",
        "a subclass",
        "no record",
        "headers as an array",
        "a partition as an array",
        "a timestamp as an array",
    ],
)
@pytest.mark.parametrize("at", [0, COLUMNS_MIN - 1])
def test_records_that_do_not_become_columns(odd: Any, at: int) -> None:
    """One such record is enough, at any position."""
    buffer = records(*[b"v"] * COLUMNS_MIN)
    buffer[at] = odd
    assert type(bulk_of(buffer, 77, may_be_columns=True)) is Bulk


def test_few_records_do_not_become_columns() -> None:
    """One record below the limit is too few. A producer that may not take columns keeps any number of objects."""
    assert type(bulk_of(records(*[b"v"] * (COLUMNS_MIN - 1)), 77, may_be_columns=True)) is Bulk
    assert type(bulk_of(records(*[b"v"] * COLUMNS_MIN), 77, may_be_columns=False)) is Bulk
