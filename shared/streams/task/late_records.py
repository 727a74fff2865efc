"""Late records for the late topic: the source record, with headers that describe its lateness.

In this module, the source record behind a repartition topic is the record of that topic, whose value and timestamp
earlier nodes may have changed. It has its coordinates in that topic and the headers of its origin (`origin_headers`),
as in a dead letter.

A record that a punctuation or a commit forwards has no source record. Behind a stream join, or a processor that uses
stores, a late record may be a pair or an earlier record. In both cases the forwarded record is written, without the
headers that name a source record (`forwarded_late_record`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from penstock.shared.clients.dead_letters.late_record_headers import (
    APPLICATION,
    CHANGELOG_ID,
    CLOSE_TIME_MS,
    LATENESS_MS,
    OFFSET,
    PARTITION,
    STORE,
    STREAM_TIME_MS,
    TOPIC,
)
from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.common.byte_copies import copied
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import (
    Columns,
    ConsumerRecord,
    Headers,
    Int64Array,
    ProducerRecord,
    coordinates_of,
)
from penstock.shared.streams.record import Record
from penstock.shared.streams.result_encoders import encode_without_error
from penstock.shared.streams.task.outputs import OutputColumns, record_that_fits
from penstock.shared.streams.topology import ProcessorNode
from penstock.shared.streams.window_result import WindowKey
from penstock.shared.streams.windows.json_rows import json_texts

if TYPE_CHECKING:
    from penstock.shared.streams.task.task_context import TaskContext

COLUMNS_MIN = 8
"""Fewer late records of a batch are made one by one, because making columns of them costs more than it saves."""


def late_record(
    record: ConsumerRecord,
    late_topic: str,
    timestamp_ms: int,
    close_time_ms: int,
    stream_time_ms: int,
    store: str,
    application: str,
    changelog_id: str | None = None,
) -> ProducerRecord:
    """Return the record for the late topic. Values of added headers are UTF-8 text, numbers in decimal.

    `timestamp_ms` is the time at which the record was late: the record's own, or one that a processor has set. The
    header `penstock.late.lateness_ms` is the close time minus this time: 1 or more. `store` is the store whose windows
    had closed. `changelog_id` is the topic id of the changelog, None if there is none.
    """
    coordinates = _late_coordinate_headers(record.topic.encode(), record.partition, record.offset)
    # Another store or another application may have accepted the same record. A reset creates another changelog, so its
    # id distinguishes the application before and after a reset.
    lateness = _lateness_headers(timestamp_ms, close_time_ms, stream_time_ms, store, application, changelog_id)
    headers = record.headers + coordinates + lateness
    return ProducerRecord(late_topic, record.value, record.key, headers, None, record.timestamp)


def forwarded_late_record(
    record: Record,
    late_topic: str,
    close_time_ms: int,
    stream_time_ms: int,
    store: str,
    application: str,
    changelog_id: str | None,
    record_bytes_max: int,
) -> ProducerRecord:
    """Return a forwarded record for the late topic. It never raises, because an error here would end the task.

    Of a `WindowKey`, only the record key is written. Key and value are encoded by `encode_without_error`. Parts that
    make the record larger than `record_bytes_max` are left out (`record_that_fits`).
    """
    lateness = _lateness_headers(record.timestamp, close_time_ms, stream_time_ms, store, application, changelog_id)
    key = encode_without_error(record.key.key if isinstance(record.key, WindowKey) else record.key)
    value = encode_without_error(record.value)
    return record_that_fits(late_topic, value, key, record.headers, lateness, record.timestamp, record_bytes_max)


def send_late(
    task: TaskContext, forwarded: Record, node: str, close_time_ms: int, stream_time_ms: int, is_source_record: bool
) -> None:
    """Count a record as late for a node's windows, and send it to the late topic of the current source record.

    With `is_source_record` the current source record is sent in place of `forwarded`. In a punctuation or a commit
    there is none, and `forwarded` is sent to the late topic of the first source whose records can reach the node.
    """
    if is_source_record:
        _send_current_record_as_late(task, node, forwarded.timestamp, close_time_ms, stream_time_ms)
        return
    source = task.source_node(node)
    store = _store_of_late_node(task, node)
    late = forwarded_late_record(
        forwarded,
        source.late,
        close_time_ms,
        stream_time_ms,
        store,
        task.application,
        task.changelog_id,
        task.record_bytes_max,
    )
    task.outputs.add(late)
    if task.record_metadata is not None:
        _count_late_records(task, 1)
        return
    task.metrics.late(source.topic, 1)
    task.metrics.rejected_at["late"] = f"store {store!r}, of no source record"


def send_late_columns(
    task: TaskContext,
    columns: Columns,
    indexes: Int64Array,
    node: str,
    close_times_ms: Int64Array,
    stream_times_ms: Int64Array,
) -> None:
    """As `send_late`, for the source records at these indexes of a batch; the last becomes the current record."""
    if len(indexes) < COLUMNS_MIN:
        moments = zip(indexes.tolist(), close_times_ms.tolist(), stream_times_ms.tolist(), strict=True)
        for index, close_time_ms, stream_time_ms in moments:
            record = columns.record(index)
            task.set_current_record(record)
            _send_current_record_as_late(task, node, record.timestamp, close_time_ms, stream_time_ms)
        return
    task.set_current_record(columns.record(int(indexes[-1])))
    source = task.source_node(node)
    timestamps = columns.timestamps[indexes]
    lateness = _lateness_headers(
        timestamps,
        close_times_ms,
        stream_times_ms,
        _store_of_late_node(task, node),
        task.application,
        task.changelog_id,
    )
    coordinates = _late_coordinate_headers(columns.topic.encode(), columns.partition, columns.offsets[indexes])
    headers = _headers_of_late_records(columns.headers, indexes).followed_by(coordinates + lateness)
    keys = _late_keys_or_values(columns.keys, indexes)
    values = _late_keys_or_values(columns.values, indexes)
    task.outputs.add(OutputColumns(source.late, keys, values, timestamps, headers=headers))
    _count_late_records(task, len(indexes))


def _send_current_record_as_late(
    task: TaskContext, node: str, timestamp_ms: int, close_time_ms: int, stream_time_ms: int
) -> None:
    """Send the current source record, which was late at `timestamp_ms`, to its late topic, once for each store."""
    record = task.current_record()
    assert record is not None
    source = task.source_node(node)
    store = _store_of_late_node(task, node)
    # A node may split the record into parts that are all late. A replay of the record splits it again.
    if store in task.late_stores:
        return
    task.late_stores[store] = task.late_records
    late = late_record(
        record,
        source.late,
        timestamp_ms,
        close_time_ms,
        stream_time_ms,
        store,
        task.application,
        task.changelog_id,
    )
    task.outputs.add(late)
    _count_late_records(task, 1)


def _count_late_records(task: TaskContext, records: int) -> None:
    """Count late records, and keep the current record's coordinates, in its first source topic, for the log."""
    source = task.source_record()
    assert source is not None
    task.late_records += records
    task.metrics.rejected_at["late"] = coordinates_of(source)


def _late_keys_or_values(column: Sequence[bytes | None], indexes: Int64Array) -> PackedBytes:
    """Return a copy of the keys or values of a batch's late records, for records of the late topic."""
    # Without a copy, a few late records would keep the whole fetch in memory.
    if isinstance(column, PackedBytes):
        return copied(column.at(indexes))
    return PackedBytes.of([column[index] for index in indexes.tolist()])


def _headers_of_late_records(column: Sequence[Headers] | None, indexes: Int64Array) -> PackedHeaders:
    """Return the headers of the late records among those of a batch."""
    if column is None:
        return PackedHeaders.none(len(indexes))
    if isinstance(column, PackedHeaders):
        return column.at(indexes)
    return PackedHeaders.of([column[index] for index in indexes.tolist()])


def _store_of_late_node(task: TaskContext, node: str) -> str:
    """Return the store whose windows had closed: the node's first store, or the node's name if it has none."""
    below = task.topology.nodes[node]
    return next(iter(below.stores), node) if isinstance(below, ProcessorNode) else node


def _late_coordinate_headers(topic: Any, partition: Any, offset: Any) -> tuple[tuple[str, Any], ...]:
    """Return the headers with the coordinates of a late record, for its record in the late topic."""
    return ((TOPIC, topic), (PARTITION, _late_header_number(partition)), (OFFSET, _late_header_number(offset)))


def _lateness_headers(
    timestamp_ms: Any, close_time_ms: Any, stream_time_ms: Any, store: str, application: str, changelog_id: str | None
) -> tuple[tuple[str, Any], ...]:
    """Return the headers that describe lateness, for one record, or for many if the times are arrays.

    For many records, a header's value is either one text for all or a column with one text for each.
    """
    headers = (
        (LATENESS_MS, _late_header_number(close_time_ms - timestamp_ms)),
        (CLOSE_TIME_MS, _late_header_number(close_time_ms)),
        (STREAM_TIME_MS, _late_header_number(stream_time_ms)),
        (STORE, store.encode()),
        (APPLICATION, application.encode()),
    )
    return headers if changelog_id is None else (*headers, (CHANGELOG_ID, changelog_id.encode()))


def _late_header_number(number: int | Int64Array) -> bytes | PackedBytes:
    """Return a number, or each one of an array, as the decimal text of a late record's header."""
    return b"%d" % number if isinstance(number, int) else json_texts(number)
