"""Watermarks in repartition topics: a task reports its event time to the tasks behind the topic.

With idleness (`idle_timeout_ms`), windows close without a record. Their results may pass through a repartition topic to
further windows. If those windows advanced by their own idleness, the results would be late. So a task that has read its
sources to their ends writes watermarks at regular intervals, to each partition of each repartition topic that it writes
to. A watermark means that the task's later results will not have a lower timestamp, with two exceptions: results of
records that arrive out of order, and records that a user's processor forwards with an earlier timestamp, for example
after it has held them back. A task without any record so far writes NO_LIMIT, which promises nothing. Behind the topic,
time without records advances to the lowest watermark of all tasks and no further.

A watermark is a record without key and value; its header has the data.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.records import INT64_MAX, Columns, Headers, ProducerRecord

HEADER = "penstock.watermark"
NO_LIMIT = INT64_MAX
"""The watermark of a task that never had a record: it holds no other task back."""


class Watermark(msgspec.Struct, frozen=True):
    """The watermark of a partition's task; `tasks` is the number of tasks, one a partition."""

    partition: int
    tasks: int
    time_ms: int


def watermark_record(topic: str, to_partition: int, watermark: Watermark) -> ProducerRecord:
    """Return a watermark as a record for the partition `to_partition` of a repartition topic."""
    timestamp = 0 if watermark.time_ms == NO_LIMIT else max(0, watermark.time_ms)
    return ProducerRecord(topic, None, None, ((HEADER, msgspec.json.encode(watermark)),), to_partition, timestamp)


def watermark_of(headers: Headers) -> Watermark | None:
    """Return the watermark in a record's headers, or None. Raises InvalidJson if its header cannot be decoded."""
    for name, value in headers:
        if name == HEADER and value is not None:
            return decode_json(value, Watermark)
    return None


def watermarks_in(columns: Columns) -> Iterator[tuple[int, Watermark]]:
    """Yield the watermarks among records of a repartition topic, each with its index.

    Raises CorruptRecord if a watermark cannot be decoded.
    """
    keys = columns.keys
    headers = columns.headers
    at = -1
    # A watermark has no key. Most batches have no such record, and then no headers are decoded.
    if headers is None or None not in keys:
        return
    for _ in range(keys.count(None)):
        at = keys.index(None, at + 1)
        if columns.values[at] is not None:
            continue
        try:
            watermark = watermark_of(headers[at])
        except InvalidJson as e:
            coordinates = f"{columns.topic}-{columns.partition}@{columns.offsets[at]}"
            raise CorruptRecord(f"{coordinates}: the header {HEADER} cannot be read: {e}") from e
        if watermark is not None:
            yield at, watermark


def holds_records(columns: Columns) -> bool:
    """Return whether there are records other than watermarks."""
    return sum(1 for _ in watermarks_in(columns)) < len(columns)
