"""What Penstock's consumer read, as Spark takes it."""

from __future__ import annotations

from penstock.services.spark.far_times import batch_of
from penstock.shared.common.records import Columns, ConsumerRecord


def record(offset: int, timestamp: int, *headers: tuple[str, bytes | None]) -> ConsumerRecord:
    return ConsumerRecord("in", 1, offset, timestamp, b"k" if headers else None, b"v", headers)


def test_records_up_to_an_offset() -> None:
    """What a poll brought beyond the end of the range is left out; times are as they are, however far."""
    far = 1_700_000_000_000_000_000
    columns = Columns.of([record(7, far, ("h", None)), record(9, 3), record(10, 4)])
    assert batch_of(columns, 10).to_pylist() == [
        {
            "partition": 1,
            "offset": 7,
            "timestamp_ms": far,
            "key": b"k",
            "value": b"v",
            "headers": [{"key": "h", "value": None}],
        },
        {"partition": 1, "offset": 9, "timestamp_ms": 3, "key": None, "value": b"v", "headers": []},
    ]
    assert batch_of(columns[1:], 8).num_rows == 0
