"""Records, and columns of records."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.records import (
    Columns,
    ConsumerRecord,
    Headers,
    ProducerRecord,
    RecordColumns,
    TopicPartition,
)

headers: st.SearchStrategy[Headers] = st.lists(
    st.tuples(st.text(max_size=3), st.none() | st.binary(max_size=3)), max_size=2
).map(tuple)
data = st.none() | st.binary(max_size=5)


@st.composite
def batches(draw: st.DrawFn) -> list[ConsumerRecord]:
    offset, out = draw(st.integers(0, 2**62)), []
    for step in draw(st.lists(st.integers(1, 1_000), min_size=1, max_size=20)):
        offset += step
        timestamp = draw(st.integers(-1, 2**62))
        out.append(ConsumerRecord("t", 3, offset, timestamp, draw(data), draw(data), draw(headers)))
    return out


@given(batches())
def test_columns_hold_the_records(records: list[ConsumerRecord]) -> None:
    """Columns round-trip records in order, with plain ints for offsets and times."""
    columns = Columns.of(records)
    assert list(columns.records()) == records
    assert [columns.record(i) for i in range(len(columns))] == records
    assert {type(r.offset) for r in columns.records()} == {type(columns.record(0).timestamp)} == {int}
    assert columns.topic_partition == records[0].topic_partition == TopicPartition("t", 3)


@given(batches(), st.integers(0, 20), st.integers(0, 20))
def test_a_slice_is_columns_of_a_slice(records: list[ConsumerRecord], first: int, last: int) -> None:
    """A slice of columns contains that slice of the records."""
    part = Columns.of(records)[first:last]
    assert list(part.records()) == records[first:last]
    assert len(part) == len(records[first:last])


def test_columns_are_typed() -> None:
    """Offsets and timestamps are int64 arrays, and headers are None if no record has any."""
    columns = Columns.of([ConsumerRecord("t", 0, 5, 7, None, b"v")])
    assert (columns.offsets.dtype, columns.timestamps.dtype, columns.headers) == (np.int64, np.int64, None)
    with_headers = ConsumerRecord("t", 0, 6, 7, None, None, (("h", None),))
    assert Columns.of([ConsumerRecord("t", 0, 5, 7, None, b"v"), with_headers]).headers == [(), (("h", None),)]


@pytest.mark.parametrize(
    "records",
    [[], [ConsumerRecord("t", 0, 0, 0, None, None), ConsumerRecord("t", 1, 0, 0, None, None)]],
)
def test_columns_are_of_one_partition(records: list[ConsumerRecord]) -> None:
    """No records, and records of several partitions, are a ValueError."""
    with pytest.raises(ValueError, match="exactly one partition"):
        Columns.of(records)


def test_a_partition_as_text() -> None:
    """A partition as text is topic, dash, number."""
    assert str(TopicPartition("clicks-v2", 3)) == "clicks-v2-3"


def test_columns_are_iterated_by_record() -> None:
    """Iterating columns yields the records."""
    records = [ConsumerRecord("t", 0, offset, 7, None, b"v") for offset in (5, 6)]
    assert list(Columns.of(records)) == records


def test_columns_can_be_indexed() -> None:
    """An index of columns is a record and a slice is columns, and an index beyond the end is an IndexError."""
    records = [ConsumerRecord("t", 0, offset, 7, None, b"v") for offset in (5, 6)]
    columns = Columns.of(records)
    assert (columns[0], columns[-1], list(columns[1:])) == (records[0], records[1], records[1:])
    with pytest.raises(IndexError):
        columns[2]


def test_columns_to_send_can_be_indexed_and_sliced() -> None:
    """A record of columns to send has its own time and headers, also in a slice."""
    headers = [(("trace", b"%d" % i),) for i in range(5)]
    for times in ([7, 8, 9, 10, 11], np.arange(7, 12)):
        columns = RecordColumns("t", [b"k"] * 5, [b"%d" % i for i in range(5)], times, 3, headers)
        expected = [ProducerRecord("t", b"%d" % i, b"k", headers[i], 3, 7 + i) for i in range(5)]
        assert list(columns) == expected
        assert list(columns[2:4]) == expected[2:4]
    assert RecordColumns("t", [None], [b"v"])[:1][0] == ProducerRecord("t", b"v")


@pytest.mark.parametrize(
    "columns",
    [
        {"keys": [], "values": [b"a", b"b"]},
        {"keys": [b"k"], "values": [b"a", b"b"]},
        {"keys": [b"k"] * 2, "values": [b"a"]},
        {"keys": [None], "values": [b"a"], "timestamps": []},
        {"keys": [None], "values": [b"a"], "timestamps": np.array([1, 2])},
        {"keys": [None], "values": [b"a"], "headers": []},
    ],
)
def test_columns_to_send_have_one_length(columns: dict[str, Any]) -> None:
    """Columns of different lengths raise ValueError: no value is left out."""
    with pytest.raises(ValueError, match="keys"):
        RecordColumns("t", **columns)
