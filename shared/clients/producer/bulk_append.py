"""The part of `send_many` that needs no await: loops that append many records to batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import repeat
from typing import Any

import numpy as np

from penstock.shared.clients.producer.delivery import (
    Deliveries,
    Delivery,
    DeliveryLocations,
    Run,
    Span,
)
from penstock.shared.clients.producer.partitioner import PartitionedTopic
from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.clients.producer.record_accumulator import PartitionQueue
from penstock.shared.common.errors import BufferExhausted, PenstockError, TransactionAborted, UnknownTopicOrPartition
from penstock.shared.common.records import AnyHeaders, ProducerRecord, RecordColumns, TopicPartition

NO_HEADERS: list[tuple[str, bytes | None]] = []

COLUMNS_MIN = 1_000
"""From this number of record objects on, `send_many` makes columns of them, which the kernels append faster."""

NO_QUEUE = PartitionQueue(TopicPartition("", -1), 0)
"""The queue of a record whose partition is not chosen yet. It never has an open batch."""


class Bulk:
    """The records of one `send_many`, and where each of them went. `timestamp` (ms) is used for records without one."""

    def __init__(self, records: Sequence[ProducerRecord], timestamp: int) -> None:
        self.records = records
        self.timestamp = timestamp
        self._rest = iter(() if isinstance(records, RecordColumns) else records)
        self._locations = DeliveryLocations()
        self._sent_alone: dict[int, Delivery] = {}
        self.ended: PenstockError | None = None
        """The error after which no record is taken (see `failed`)."""
        self._unknown: dict[tuple[str, int | None], PenstockError] = {}
        self.stop = len(records)
        """The index of the record before which `fill` ends."""
        self.impatient: set[str] = set()
        """Topics that were waited for once without success; their other unknown partitions are not waited for again."""
        self.rejections = 0
        self.first_rejection: Exception | None = None

    def __repr__(self) -> str:
        return f"<Bulk {len(self._locations)} of {len(self.records)} records added>"

    def __len__(self) -> int:
        return len(self._locations)

    def fill(self, topics: Mapping[str, PartitionedTopic]) -> ProducerRecord | None:
        """Append records to open batches, up to the first one that must be enqueued alone: for example, it needs a new
        batch.

        Returns that record, or None if all up to `stop` were appended. After an error that ends the bulk (see
        `failed`), appends nothing and returns the next record.
        """
        # A topic that is not in `topics` needs more, so the first record is returned.
        if self.ended is not None:
            topics = {}
        run = self._locations.begin()
        try:
            return self._append_records(topics, run)
        finally:
            self._locations.end()

    def _append_records(self, topics: Mapping[str, PartitionedTopic], run: Run) -> ProducerRecord | None:
        """The loop is flat: one more call, property or object here lowers the throughput."""
        locations = self._locations.of
        now_ms = self.timestamp
        # No topic is this object, so the first record is looked up, even if its topic is None.
        name: object = NO_QUEUE
        record: ProducerRecord | None = None
        try:
            for record in self._rest:
                # By identity: the records of a bulk mostly share one string. Equal strings cost one more lookup.
                if record.topic is not name:
                    name = record.topic
                    found = topics.get(record.topic)
                    if found is None:
                        return record
                    topic = found
                    known_queue = topic.by_key.get
                    sticky_queue = topic.sticky_queue or NO_QUEUE
                key = record.key
                queue = sticky_queue if key is None else known_queue(key) or topic.for_key(key)
                if (batch := queue.open) is None or record.partition is not None or record.headers:
                    return record
                value = record.value
                # Before the append: the builder takes any buffer. `__class__` costs less than `type` or `isinstance`.
                if value.__class__ is not bytes and value is not None:
                    return record
                timestamp = record.timestamp
                if timestamp is None:
                    timestamp = now_ms
                elif type(timestamp) is not int or timestamp < 0:
                    return record
                index = batch.count
                # `append` is a slot and not a method: to read it first costs less than `batch.append(...)`.
                append = batch.append
                if append(index, timestamp, key, value, NO_HEADERS) is None:
                    return record
                batch.count = index + 1
                if batch.run is not run:
                    batch.run = run
                    run[batch] = index
                locations.append(batch)
        # Not bytes, or no record at all: `_take_bulk_record` serializes the record, or raises the error that fits.
        except (TypeError, ValueError, OverflowError, BufferError, AttributeError):
            return record
        return None

    def rejected(self, record: ProducerRecord) -> PenstockError | None:
        """Return the error of an earlier record that this record must share without waiting again.

        Returns None if there is no such error.
        """
        known = self._unknown.get((record.topic, None))
        if known is None and record.partition is not None:
            known = self._unknown.get((record.topic, record.partition))
        return known or self.ended

    def failed(self, record: ProducerRecord, error: Exception, *, whole_topic: bool = False) -> None:
        """Note that the next record was rejected.

        BufferExhausted and TransactionAborted end the bulk: every later record is rejected as well. With `whole_topic`
        the error left the record's topic unknown, so every later record of the topic is rejected as well.
        """
        self.rejections += 1
        self.first_rejection = self.first_rejection or error
        # Without these rules every later record would wait for `max_block_ms` again: a bulk of 1,000 for 17 hours.
        # 1. The buffer has stayed full, or the transaction cannot be committed: no later record is taken.
        if isinstance(error, BufferExhausted | TransactionAborted):
            self.ended = error
        # 2. The topic is unknown, or its metadata may not be read: so it is for every later record of the topic.
        elif whole_topic and isinstance(error, PenstockError):
            self._unknown[record.topic, None] = error
        # 3. One partition is unknown. If a partitioner chose it, the next record may have another one.
        elif isinstance(error, UnknownTopicOrPartition):
            self.impatient.add(record.topic)
            if record.partition is not None:
                self._unknown[record.topic, record.partition] = error
        self._locations.add(error, -1)

    def reject_rest(self, error: PenstockError) -> None:
        """Note that all later records were rejected."""
        left = len(self.records) - len(self)
        self.rejections += left
        self._locations.add_slice(left, [(error, -1, np.arange(left))])

    def add_delivery(self, delivery: Delivery) -> None:
        """Note that the next record was sent alone, with this delivery."""
        # Serializers may have changed the sizes, and interceptors the timestamp.
        self._sent_alone[len(self._locations)] = delivery
        self._locations.add(delivery._batch, delivery._index)

    def deliveries(self) -> Deliveries:
        """Return the deliveries of all records."""
        return Deliveries(
            self._locations, self.records, self.timestamp, self._sent_alone, all_accepted=not self.rejections
        )


class ColumnBulk(Bulk):
    """A `Bulk` of records in `columns`. No ProducerRecord is made for a record that is appended to an open batch.

    Records are appended in two ways: many at once by kernels (a slice), or one by one up to `stop`.
    """

    def __init__(self, columns: RecordColumns, timestamp: int, records: Sequence[ProducerRecord] | None = None) -> None:
        """`records` are the records as objects, if the columns were made from them."""
        super().__init__(columns if records is None else records, timestamp)
        self.columns = columns
        self.stop = 0
        self._fields: Iterator[tuple[Any, Any, Any, Any]] = iter(())

    def one_by_one(self, stop: int) -> None:
        """Let `fill` take the records up to `stop` one by one."""
        self.stop = min(stop, len(self.columns))
        part = self.columns[len(self) : self.stop]
        timestamps: Iterable[int] = repeat(self.timestamp)
        if part.timestamps is not None:
            timestamps = part.timestamps.tolist() if isinstance(part.timestamps, np.ndarray) else part.timestamps
        headers: Iterable[AnyHeaders] = repeat(()) if part.headers is None else part.headers
        self._fields = zip(part.keys, part.values, timestamps, headers, strict=False)

    def sliced(self, count: int, spans: list[Span]) -> None:
        """Note that the bulk's next `count` records went into batches, or failed, as in `spans`."""
        self._locations.add_slice(count, spans)
        self.stop = len(self)

    def slice_failed(self, error: Exception, records: int) -> None:
        """Count `records` records of a slice as rejected with `error`.

        BufferExhausted and TransactionAborted end the bulk (see `failed`).
        """
        self.rejections += records
        self.first_rejection = self.first_rejection or error
        self.ended = error if isinstance(error, BufferExhausted | TransactionAborted) else self.ended

    def _append_records(self, topics: Mapping[str, PartitionedTopic], run: Run) -> ProducerRecord | None:
        columns = self.columns
        topic = topics.get(columns.topic)
        try:
            # As the loops do, read the one record that is not taken here: the caller takes it alone.
            if topic is None:
                next(self._fields, None)
            elif columns.partition is None:
                self._fill_by_key(topic, run)
            else:
                queue = topic.queues.get(columns.partition)
                self._fill_batch(None if queue is None else queue.open, run)
        # Not bytes: `_take_bulk_record` serializes the record, or raises the error that fits.
        except (TypeError, ValueError, OverflowError, BufferError):
            pass
        # The record that was read and not taken.
        at = len(self._locations)
        return self.records[at] if at < self.stop else None

    def _fill_by_key(self, topic: PartitionedTopic, run: Run) -> None:
        locations = self._locations.of
        known_queue = topic.by_key.get
        sticky_queue = topic.sticky_queue or NO_QUEUE
        for key, value, timestamp, headers in self._fields:
            queue = sticky_queue if key is None else known_queue(key) or topic.for_key(key)
            if (batch := queue.open) is None or timestamp.__class__ is not int or timestamp < 0 or headers:
                return
            if value.__class__ is not bytes and value is not None:
                return
            index = batch.count
            append = batch.append
            if append(index, timestamp, key, value, NO_HEADERS) is None:
                return
            batch.count = index + 1
            if batch.run is not run:
                batch.run = run
                run[batch] = index
            locations.append(batch)

    def _fill_batch(self, batch: ProducerBatch | None, run: Run) -> None:
        if batch is None:
            next(self._fields, None)
            return
        first = batch.count
        index = first
        append = batch.append
        now_ms = self.timestamp
        try:
            for key, value, timestamp, headers in self._fields:
                if (
                    (value.__class__ is not bytes and value is not None)
                    or (key is not None and key.__class__ is not bytes)
                    # The bulk's own timestamp needs no check.
                    or (timestamp is not now_ms and (timestamp.__class__ is not int or timestamp < 0))
                    or headers
                    or append(index, timestamp, key, value, NO_HEADERS) is None
                ):
                    return
                index += 1
        # Also if `append` raised: the records before are in the batch.
        finally:
            batch.count = index
            if index > first:
                run[batch] = first
                self._locations.of.extend([batch] * (index - first))


def bulk_of(records: Iterable[ProducerRecord[Any, Any]], timestamp: int, *, may_be_columns: bool) -> Bulk:
    """Return a ColumnBulk for records in columns, and a Bulk for all others.

    With `may_be_columns`, COLUMNS_MIN or more records of one topic are made columns, unless one has a partition.
    """
    if isinstance(records, RecordColumns):
        return ColumnBulk(records, timestamp)
    # A copy: the caller may change its list while the results are not read.
    own = list(records)
    try:
        columns = _columns_of(own, timestamp) if may_be_columns and len(own) >= COLUMNS_MIN else None
    # An attribute that cannot be compared, such as an array: taken alone, the record raises the error that fits.
    except (TypeError, ValueError):
        columns = None
    return Bulk(own, timestamp) if columns is None else ColumnBulk(columns, timestamp, own)


def _columns_of(records: list[ProducerRecord[Any, Any]], timestamp: int) -> RecordColumns | None:
    # One comprehension for each attribute: it costs 10 ns a record, and a loop over all attributes 200.
    if {type(each) for each in records} != {ProducerRecord}:
        return None
    count = len(records)
    topic = records[0].topic
    if type(topic) is not str or [each.topic for each in records].count(topic) != count:
        return None
    if [each.partition for each in records].count(None) != count:
        return None
    keys = [each.key for each in records]
    values = [each.value for each in records]
    timestamps = [each.timestamp for each in records]
    own_times = None
    if timestamps.count(None) != count:
        own_times = [timestamp if each is None else each for each in timestamps]
    headers = [each.headers for each in records]
    return RecordColumns(topic, keys, values, own_times, None, headers if any(headers) else None)
