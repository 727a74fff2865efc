"""Watermarks: how they are written, and found among records."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.records import Columns, ConsumerRecord, ProducerRecord
from penstock.shared.streams.task.watermarks import (
    HEADER,
    NO_LIMIT,
    Watermark,
    holds_records,
    watermark_of,
    watermark_record,
    watermarks_in,
)
from tests.consumed import as_consumed


@pytest.mark.parametrize(("time_ms", "timestamp"), [(70, 70), (-5, 0), (NO_LIMIT, 0)])
def test_a_mark_comes_back_as_it_was_written(time_ms: int, timestamp: int) -> None:
    """A watermark record has no key or value, goes to its partition at a valid timestamp, and is decoded unchanged."""
    watermark = Watermark(1, 4, time_ms)
    record = watermark_record("app-x-repartition", 3, watermark)
    assert (record.key, record.value, record.partition, record.timestamp) == (None, None, 3, timestamp)
    assert watermark_of(record.headers) == watermark


def test_watermarks_among_records() -> None:
    """Watermarks are found at their positions among records. A record without a key and value is not a watermark."""
    watermark = Watermark(0, 2, 5)
    plain = ProducerRecord("t", b"{}", b"k", (("a", b"b"),), 0, 1)
    rows = [
        plain,
        watermark_record("t", 0, watermark),
        ProducerRecord("t", None, None, (), 0, 1),
        watermark_record("t", 0, watermark),
    ]
    columns = Columns.of([as_consumed(record, i) for i, record in enumerate(rows)])
    assert list(watermarks_in(columns)) == [(1, watermark), (3, watermark)]
    assert [holds_records(part) for part in (columns, columns[1:2], columns[2:3])] == [True, False, True]
    assert list(watermarks_in(Columns.of([ConsumerRecord("t", 0, 0, 1, None, None)]))) == []


@pytest.mark.parametrize("value", [b"", b"{}", b"\xff", b'{"x":' + b"[" * 100_000])
def test_a_watermark_that_cannot_be_read_is_a_corrupt_record(value: bytes) -> None:
    """Its error has the record's coordinates."""
    record = ProducerRecord("t", None, None, ((HEADER, value),), 0, 1)
    with pytest.raises(CorruptRecord, match=f"t-0@7: .*{HEADER}"):
        list(watermarks_in(Columns.of([as_consumed(record, 7)])))
