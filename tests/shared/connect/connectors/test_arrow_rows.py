"""Records become Arrow tables with one row for each record. Records that cannot be rows are errors."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
import pytest

from penstock.shared.common.errors import DataError
from penstock.shared.connect.connectors.arrow_rows import NothingInIt, check_row, table_of
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.schema import INT32, OPTIONAL_INT32, STRING, Field, Schema

MAP = Schema.map(STRING, INT32)


def records(*pairs: tuple[Schema | None, Any]) -> list[SinkRecord]:
    return [
        SinkRecord("t", 0, None, None, schema, value, kafka_offset=offset)
        for offset, (schema, value) in enumerate(pairs)
    ]


@pytest.mark.parametrize(
    ("schema", "kind"),
    [(MAP, pa.int32()), (None, pa.int64()), (Schema.map(STRING, MAP), pa.map_(pa.string(), pa.int32()))],
)
def test_a_map_has_a_column_for_each_key(schema: Schema | None, kind: pa.DataType) -> None:
    """The columns' type is that of the map's values, or else comes from the values."""
    one, two = ({"x": 1}, {"x": 2}) if pa.types.is_map(kind) else (1, 2)
    table = table_of(records((schema, {"a": one}), (schema, {"b": two})))
    assert table.schema == pa.schema([("a", kind), ("b", kind)])
    rows = table.to_pylist(maps_as_pydicts="strict")
    assert rows == [{"a": one, "b": None}, {"a": None, "b": two}]


def test_columns_of_structs_come_from_their_schema() -> None:
    """A struct's fields are columns even if they are null in all records."""
    schema = Schema.struct("S", Field("a", INT32), Field("b", OPTIONAL_INT32))
    table = table_of(records((schema, {"a": 1, "b": None}), (schema, {"a": 2, "b": None})))
    assert table.schema == pa.schema([("a", pa.int32()), ("b", pa.int32())])
    assert table.column("a").to_pylist() == [1, 2]


def test_nulls_without_a_type_are_no_table() -> None:
    """Records of which no column can be made are rejected. They would be lost as a table without rows."""
    with pytest.raises(NothingInIt):
        table_of(records((None, {"a": None}), (None, {"b": None})))


@pytest.mark.parametrize("value", [None, 1, [1], {1: 2}, {None: 2}, {b"x": 2}])
def test_other_values_are_no_rows(value: Any) -> None:
    """The error names the record. A map with keys that are not strings has no names of columns."""
    (record,) = records((None, value))
    with pytest.raises(DataError, match="t-0@0"):
        check_row(record)


@pytest.mark.parametrize("schema", [None, MAP, Schema.struct("Empty")])
def test_an_empty_value_is_no_row(schema: Schema | None) -> None:
    """A value without columns is an error, whatever the other records are."""
    (record,) = records((schema, {}))
    with pytest.raises(DataError, match="empty"):
        check_row(record)


def test_a_struct_without_values_is_a_row() -> None:
    """A struct's columns come from its schema, so its value may leave them all out."""
    (record,) = records((Schema.struct("S", Field("b", OPTIONAL_INT32)), {}))
    check_row(record)
    assert table_of([record]).to_pylist() == [{"b": None}]
