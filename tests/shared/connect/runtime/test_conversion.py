"""The conversion of a sink's records: the fast path and the slow path give the same records."""

from __future__ import annotations

from typing import Any, cast

from penstock.shared.common.records import NO_TIMESTAMP, Columns, ConsumerRecord
from penstock.shared.connect.converters.plain import StringConverter
from penstock.shared.connect.runtime.conversion import Conversion
from penstock.shared.connect.runtime.transformation_chain import TransformationChain

UNUSED = cast(Any, None)


async def test_columns_and_single_records_are_converted_alike() -> None:
    """A record without a timestamp has None, and each record has its coordinates in Kafka."""
    converter = StringConverter()
    conversion = Conversion(converter, converter, UNUSED, TransformationChain([]), UNUSED, UNUSED, UNUSED, UNUSED)
    found = [
        ConsumerRecord("t", 1, offset, timestamp, key, b"v", ())
        for offset, timestamp, key in [(5, NO_TIMESTAMP, b"a"), (6, 0, None), (8, 1_000, b"b")]
    ]
    columns = Columns.of(found)
    at_once = conversion._convert_columns_at_once(columns)
    assert at_once is not None
    assert at_once == [await conversion._sink_record(record) for record in columns.records()]
    assert [record.timestamp for record in at_once] == [None, 0, 1_000]
    assert [record.original for record in at_once] == [("t", 1, 5), ("t", 1, 6), ("t", 1, 8)]
