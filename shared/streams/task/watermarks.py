"""Marks of time in repartition topics: what one task tells the tasks behind the topic of how far time is.

Where time moves by itself (`idle_timeout_ms`) windows close without a record, and their results may have to go through
a repartition topic to further windows. Those must not have moved on by themselves meanwhile, or every result would come
late. So a task that has read its sources says now and then, in each partition of each such topic it writes to: no
result still to come from here is earlier than this, but for records that are late already. A mark stands behind the
results that were written before it. Behind the topic time moves up to the earliest of all tasks' marks and no further.

A mark is a record without key and value; its header says the rest.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from penstock.shared.common.records import Columns, Headers, ProducerRecord
from penstock.shared.streams.processor import INT64_MAX

HEADER = "penstock.time-mark"
NO_LIMIT = INT64_MAX
"""The time of a task that never had a record: it holds nobody back."""


class Watermark(msgspec.Struct, frozen=True):
    """What the task of a partition says; `tasks` is how many there are, one a partition."""

    partition: int
    tasks: int
    time_ms: int


def watermark_record(topic: str, to_partition: int, mark: Watermark) -> ProducerRecord:
    """A mark as a record of a repartition topic; its timestamp puts it among the records of its time."""
    timestamp = 0 if mark.time_ms == NO_LIMIT else max(0, mark.time_ms)
    return ProducerRecord(topic, None, None, ((HEADER, msgspec.json.encode(mark)),), to_partition, timestamp)


def watermark_of(headers: Headers) -> Watermark | None:
    """What a record's headers say, if it is a mark."""
    for name, value in headers:
        if name == HEADER and value is not None:
            return msgspec.json.decode(value, type=Watermark)
    return None


def watermarks_in(columns: Columns) -> Iterator[tuple[int, Watermark]]:
    """The marks among records of a repartition topic, each with its place."""
    keys, headers, at = columns.keys, columns.headers, -1
    if headers is None or None not in keys:
        return
    for _ in range(keys.count(None)):
        at = keys.index(None, at + 1)
        if columns.values[at] is None and (mark := watermark_of(headers[at])) is not None:
            yield at, mark


def holds_records(columns: Columns) -> bool:
    """Whether there is anything but marks."""
    return sum(1 for _ in watermarks_in(columns)) < len(columns)
