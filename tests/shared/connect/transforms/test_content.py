"""InsertField, MaskField and SetSchemaMetadata."""

from __future__ import annotations

import datetime as dt
from decimal import Decimal
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.record import SourceRecord
from penstock.shared.connect.schema import INT32, INT64, OPTIONAL_STRING, STRING, Field, Schema, timestamp_schema
from penstock.shared.connect.transforms.content import InsertFieldValue, MaskFieldValue, SetSchemaMetadataValue
from tests.shared.connect.transforms.transforming import applied, configured, record

SCHEMA = Schema.struct("S", Field("a", STRING))


def test_a_records_coordinates_are_inserted() -> None:
    """Coordinates are inserted as numbers, or with a schema as its types; `!` makes a field required."""
    settings = {"topic_field": "t", "partition_field": "p!", "offset_field": "o", "timestamp_field": "at"}
    transform = configured(InsertFieldValue, static_field="s", static_value="x", **settings)
    plain = transform.apply(record({"a": 1}, timestamp=1_000))
    assert plain is not None
    assert plain.value == {"a": 1, "t": "clicks", "p": 3, "o": 7, "at": 1_000, "s": "x"}
    found = transform.apply(record({"a": "y"}, SCHEMA, timestamp=1_000))
    assert found is not None
    assert found.value["at"] == dt.datetime(1970, 1, 1, 0, 0, 1, tzinfo=dt.UTC)
    assert found.value_schema is not None
    assert [(f.name, f.schema) for f in found.value_schema.fields] == [
        ("a", STRING),
        ("t", OPTIONAL_STRING),
        ("p", INT32),
        ("o", INT64.as_optional()),
        ("at", timestamp_schema(optional=True)),
        ("s", OPTIONAL_STRING),
    ]
    assert transform.apply(record(None)) == record(None)


def test_a_source_has_no_offset_to_insert() -> None:
    """Inserting an offset into a source's record is a DataError, and incomplete settings are ConfigErrors."""
    source = SourceRecord("t", None, None, None, None, {}, source_partition={}, source_offset={})
    with pytest.raises(DataError, match="only supported for sink"):
        configured(InsertFieldValue, offset_field="o").apply(source)
    with pytest.raises(ConfigError, match="No field insertion configured"):
        configured(InsertFieldValue)
    with pytest.raises(ConfigError, match=r"static\.value"):
        configured(InsertFieldValue, static_field="s")


@pytest.mark.parametrize(
    ("value", "masked"),
    [
        *((True, False), (5, 0), (1.5, 0.0), ("x", ""), (b"x", b""), ([1], []), ({"a": 1}, {}), (None, None)),
        (Decimal("1.5"), Decimal(0)),
        (dt.date(2024, 1, 1), dt.date(1970, 1, 1)),
        (dt.datetime(2024, 1, 1, tzinfo=dt.UTC), dt.datetime(1970, 1, 1, tzinfo=dt.UTC)),
    ],
)
def test_fields_are_masked_by_their_types_empty_value(value: Any, masked: Any) -> None:
    """A masked field has its type's empty value; null and other fields are unchanged."""
    assert applied(MaskFieldValue, {"a": value, "b": 1}, fields="a").value == {"a": masked, "b": 1}


def test_fields_are_masked_by_a_replacement() -> None:
    """Text and numbers are masked by the replacement; other types are DataErrors."""
    assert applied(MaskFieldValue, {"a": "x", "b": 5}, fields="a,b", replacement="9").value == {"a": "9", "b": 9}
    for value in (5, True, [1]):
        with pytest.raises(DataError):
            applied(MaskFieldValue, {"a": value}, fields="a", replacement="zzz")
    assert applied(MaskFieldValue, {"a": "x"}, SCHEMA, fields="a").value_schema is SCHEMA


def test_a_schema_is_renamed() -> None:
    """Name and version of a schema are set; a record without a schema is a DataError."""
    found = applied(SetSchemaMetadataValue, {"a": "x"}, SCHEMA, schema_name="N", schema_version="3")
    assert found.value_schema is not None
    assert (found.value_schema.name, found.value_schema.version) == ("N", 3)
    assert applied(SetSchemaMetadataValue, None, schema_name="N").value is None
    with pytest.raises(DataError, match="Schema required"):
        applied(SetSchemaMetadataValue, {"a": "x"}, schema_name="N")
    with pytest.raises(ConfigError, match="Neither"):
        configured(SetSchemaMetadataValue)
