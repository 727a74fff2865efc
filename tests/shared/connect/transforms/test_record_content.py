"""Transforms of a record's content: fields of keys and values, their types and schemas, and headers.

They work with and without schemas.
"""

from __future__ import annotations

import datetime as dt
import math
from decimal import Decimal
from typing import Any

import pytest

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.record import Header, SourceRecord
from penstock.shared.connect.schema import (
    INT8,
    INT32,
    INT64,
    OPTIONAL_INT32,
    OPTIONAL_STRING,
    STRING,
    Field,
    Schema,
    SchemaType,
    timestamp_schema,
)
from penstock.shared.connect.transforms.cast import TYPES, CastKey, CastValue, cast
from penstock.shared.connect.transforms.content import InsertFieldValue, MaskFieldValue, SetSchemaMetadataValue
from penstock.shared.connect.transforms.headers import DropHeaders, HeaderFromValue, InsertHeader
from penstock.shared.connect.transforms.shape import (
    ExtractFieldKey,
    ExtractFieldValue,
    FlattenValue,
    HoistFieldValue,
    ReplaceFieldValue,
    ValueToKey,
    field_path,
)
from tests.shared.connect.transforms.transforming import applied, configured, record

INNER = Schema.struct(None, Field("n", INT32), optional=True)
OUTER = Schema.struct("S", Field("id", STRING), Field("inner", INNER))
DEFAULTED = Schema(SchemaType.INT32, optional=True, default=42)

SCHEMA = Schema.struct("S", Field("a", STRING))

AT = dt.datetime(2024, 1, 2, 3, 4, 5, 678_000, tzinfo=dt.UTC)

ONE = (Header("a", 1), Header("b", 2), Header("a", 3))


def test_a_field_is_extracted() -> None:
    """The field replaces the value; a missing one is null without a schema and a DataError with one."""
    assert applied(ExtractFieldValue, {"a": 1}, field="a").value == 1
    assert applied(ExtractFieldValue, {"a": 1}, field="b").value is None
    assert applied(ExtractFieldValue, None, field="a").value is None
    found = applied(ExtractFieldValue, {"id": "x", "inner": None}, OUTER, field="id")
    assert (found.value, found.value_schema) == ("x", STRING)
    with pytest.raises(DataError, match="Unknown field: nope"):
        applied(ExtractFieldValue, {"id": "x"}, OUTER, field="nope")
    key = configured(ExtractFieldKey, field="k").apply(record(key={"k": 5}))
    assert key is not None
    assert key.key == 5


def test_v2_paths() -> None:
    """Under V2 dots descend into structs and maps, and backticks escape them."""
    more = {"field_syntax_version": "V2"}
    assert applied(ExtractFieldValue, {"a": {"b.c": 3}}, field="a.`b.c`", **more).value == 3
    assert applied(ExtractFieldValue, {"id": "x", "inner": {"n": 4}}, OUTER, field="inner.n", **more).value == 4


@pytest.mark.parametrize(
    ("path", "names"),
    [
        ("a", ["a"]),
        ("`a`", ["a"]),
        ("`a.b`", ["a.b"]),
        ("``.a", ["", "a"]),
        ("a.", ["a", ""]),
        ("`a`.", ["a", ""]),
        (".a..b", ["", "a", "", "b"]),
        ("a`b.c", ["a`b", "c"]),
        ("`a`b.c`.d", ["a`b.c", "d"]),
        ("`a\\`b`", ["a\\`b"]),  # needs no escape, so the backslash is itself
        ("`a\\`.b`.c", ["a`.b", "c"]),
    ],
)
def test_v2_paths_are_split_as_in_kafka(path: str, names: list[str]) -> None:
    """Dots, backticks and backslashes have the meaning of Kafka's SingleFieldPath."""
    assert field_path(path, "V2") == tuple(names)


@pytest.mark.parametrize("path", ["`", "a.`b", "`a`b", "`a\\`", "`a`b.c"])
def test_an_open_backtick_is_a_config_error(path: str) -> None:
    """A name that begins with a backtick must end with one."""
    with pytest.raises(ConfigError, match="backtick"):
        field_path(path, "V2")


def test_a_name_that_begins_with_a_backtick() -> None:
    """The advice of the error works: another pair of backticks encloses such a name."""
    assert field_path("a.``b`.`c`", "V2") == ("a", "`b", "c")


def test_null_becomes_the_default() -> None:
    """A null becomes the schema's default unless `replace.null.with.default` is false."""
    schema = Schema.struct(None, Field("a", DEFAULTED))
    assert applied(ExtractFieldValue, {"a": None}, schema, field="a").value == 42
    off = {"replace_null_with_default": "false"}
    assert applied(ExtractFieldValue, {"a": None}, schema, field="a", **off).value is None


def test_a_value_is_hoisted() -> None:
    """The whole value becomes a field."""
    assert applied(HoistFieldValue, 5, field="n").value == {"n": 5}
    found = applied(HoistFieldValue, 5, INT32, field="n")
    assert found.value_schema == Schema.struct(None, Field("n", INT32))


def test_nesting_is_flattened() -> None:
    """Names are joined, fields below optional structs are optional, and arrays are unchanged."""
    assert applied(FlattenValue, {"a": {"b": {"c": 1}}, "d": [1]}).value == {"a.b.c": 1, "d": [1]}
    found = applied(FlattenValue, {"id": "x", "inner": None}, OUTER, delimiter="_")
    assert found.value == {"id": "x", "inner_n": None}
    assert found.value_schema == Schema.struct("S", Field("id", STRING), Field("inner_n", OPTIONAL_INT32))
    with pytest.raises(DataError, match="Only Map objects"):
        applied(FlattenValue, 5)


def test_fields_are_replaced() -> None:
    """Exclude overrides include, and renames come last."""
    given = {"a": 1, "b": 2, "c": 3}
    assert applied(ReplaceFieldValue, given, exclude="a").value == {"b": 2, "c": 3}
    assert applied(ReplaceFieldValue, given, include="a,b", exclude="b").value == {"a": 1}
    assert applied(ReplaceFieldValue, given, include="a", renames="a:x").value == {"x": 1}
    found = applied(ReplaceFieldValue, {"id": "x", "inner": None}, OUTER, exclude="inner", renames="id:key")
    assert (found.value, found.value_schema) == ({"key": "x"}, Schema.struct("S", Field("key", STRING)))
    with pytest.raises(ConfigError, match="Invalid rename mapping"):
        applied(ReplaceFieldValue, given, renames="a")


def test_the_key_is_made_of_fields_of_the_value() -> None:
    """The key has the listed fields in order; a missing one is null or, with a schema, a DataError."""
    assert applied(ValueToKey, {"a": 1, "b": 2}, fields="b,z").key == {"b": 2, "z": None}
    found = applied(ValueToKey, {"id": "x", "inner": None}, OUTER, fields="id")
    assert (found.key, found.key_schema) == ({"id": "x"}, Schema.struct(None, Field("id", STRING)))
    with pytest.raises(DataError, match="exist: z"):
        applied(ValueToKey, {"id": "x"}, OUTER, fields="z")


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
    """Name and version of a schema are set, and null becomes a field's default. A record without a schema is a
    DataError.
    """
    found = applied(SetSchemaMetadataValue, {"a": "x"}, SCHEMA, schema_name="N", schema_version="3")
    assert found.value_schema is not None
    assert (found.value_schema.name, found.value_schema.version) == ("N", 3)
    assert applied(SetSchemaMetadataValue, None, schema_name="N").value is None
    defaulted = Schema.struct("S", Field("a", DEFAULTED))
    assert applied(SetSchemaMetadataValue, {"a": None}, defaulted, schema_name="N").value == {"a": 42}
    kept = {"schema_name": "N", "replace_null_with_default": "false"}
    assert applied(SetSchemaMetadataValue, {"a": None}, defaulted, **kept).value == {"a": None}
    assert applied(SetSchemaMetadataValue, None, defaulted.as_optional(), schema_name="N").value is None
    assert applied(SetSchemaMetadataValue, 5, INT32, schema_name="N").value == 5
    with pytest.raises(DataError, match="Schema required"):
        applied(SetSchemaMetadataValue, {"a": "x"}, schema_name="N")
    with pytest.raises(ConfigError, match="Neither"):
        configured(SetSchemaMetadataValue)


@pytest.mark.parametrize(
    ("value", "target", "expected"),
    [
        (300, "int8", 44),  # wraps, as Java's narrowing does
        (-129, "int8", 127),
        (1 << 40, "int32", 0),
        (3.9, "int32", 3),
        (-3.9, "int16", -3),
        (1e300, "int64", (1 << 63) - 1),
        (float("nan"), "int32", 0),
        (True, "int64", 1),
        ("12", "int16", 12),
        ("1.5", "float64", 1.5),
        (" 1. ", "float64", 1.0),
        (".5e1d", "float64", 5.0),
        ("1.5F", "float32", 1.5),
        ("-Infinity", "float64", -math.inf),
        (7, "float32", 7.0),
        ("3.14", "float32", 3.14),
        (0.1, "float32", 0.1),
        (0.123456789, "float32", 0.12345679),
        (16777217, "float32", 16777216.0),
        (3.4028235e38, "float32", 3.4028235e38),
        (-1e300, "float32", -math.inf),
        ("1e39", "float32", math.inf),
        (math.inf, "float32", math.inf),
        (0, "boolean", False),
        (2.5, "boolean", True),
        (0.5, "boolean", False),
        (float("nan"), "boolean", False),
        (Decimal(9007199254740993), "int64", 9007199254740993),
        (Decimal("3000000000.9"), "int32", -1294967296),
        (Decimal("-1.9"), "int8", -1),
        (Decimal("1.5"), "float64", 1.5),
        (Decimal("0.5"), "boolean", False),
        (Decimal(2), "boolean", True),
        ("+12", "int16", 12),
        ("TRUE", "boolean", True),
        ("maybe", "boolean", False),
        (" true", "boolean", False),
        (Decimal("1E+63"), "int64", -(1 << 63)),
        (Decimal("3E+5000000"), "int64", 0),
        (Decimal("-3E+5000000"), "boolean", False),
        (True, "string", "true"),
        (1.0, "string", "1.0"),
        (1e7, "string", "1.0E7"),
        (b"\x00\x01", "string", "AAE="),
        (AT, "int64", 1704164645678),
        (AT.date(), "int32", 19724),
        (AT, "string", "2024-01-02T03:04:05.678Z"),
        (None, "int8", None),
    ],
)
def test_values_are_cast_as_java_casts_them(value: Any, target: str, expected: Any) -> None:
    """Values are cast as in Java."""
    assert cast(value, TYPES[target]) == expected


@pytest.mark.parametrize(
    ("value", "target"),
    [
        *(("128", "int8"), ("x", "int32"), ("1.0", "int32"), ("1_000", "int32"), (" 1", "int32"), ("9" * 50, "int64")),
        *(
            (text, "float64")
            for text in ("1_000", "inf", "nan", "\uff11\uff12", "", ".", "1e", "NaNf", "1 f", "1" * 100_000 + "x")
        ),
        *(([], "int32"), ({}, "string"), (Decimal("NaN"), "int32"), (Decimal("NaN"), "boolean")),
    ],
)
def test_values_that_cannot_be_cast_are_errors(value: Any, target: str) -> None:
    """Text that is no number or does not fit, and structures, are DataErrors."""
    with pytest.raises(DataError):
        cast(value, TYPES[target])


def test_fields_of_maps_and_structs_are_cast() -> None:
    """Fields are cast and the schema follows; other fields are unchanged, and optional fields stay optional."""
    assert applied(CastValue, {"a": "1", "b": 2}, spec="a:int32").value == {"a": 1, "b": 2}
    schema = Schema.struct("S", Field("a", OPTIONAL_STRING), Field("b", INT64))
    found = applied(CastValue, {"a": "1", "b": 2}, schema, spec="a:int32,b:string")
    assert found.value == {"a": 1, "b": "2"}
    assert found.value_schema is not None
    types = [(f.name, f.schema.type, f.schema.optional) for f in found.value_schema.fields]
    assert types == [("a", SchemaType.INT32, True), ("b", SchemaType.STRING, False)]


def test_the_whole_is_cast() -> None:
    """A spec without a field name casts the whole key or value."""
    found = applied(CastValue, 5, INT32, spec="string")
    assert (found.value, found.value_schema) == ("5", Schema(SchemaType.STRING))
    key = configured(CastKey, spec="int64").apply(record(key="7"))
    assert key is not None
    assert key.key == 7


def test_a_tombstone_is_not_cast() -> None:
    """A tombstone is unchanged."""
    assert applied(CastValue, None, spec="a:int32").value is None


@pytest.mark.parametrize("spec", ["", "a:int7", "int8,a:int8", "a"])
def test_invalid_specs_of_casts_are_errors(spec: str) -> None:
    """A spec with an unknown type, mixed forms or no type is a ConfigError."""
    with pytest.raises(ConfigError):
        configured(CastValue, spec=spec)


def headers(transform: object, **more: object) -> tuple[Header, ...]:
    found = transform.apply(record(headers=ONE, **more))  # type: ignore[attr-defined]
    return tuple(found.headers)


def test_headers_are_dropped_by_name() -> None:
    """All headers with a listed name are dropped."""
    assert headers(configured(DropHeaders, headers="a,z")) == (Header("b", 2),)


def test_a_header_is_inserted_with_its_type() -> None:
    """An inserted header's type is inferred from the literal."""
    inserted = headers(configured(InsertHeader, header="n", value_literal="5"))
    assert inserted == (*ONE, Header("n", 5, INT8))
    assert headers(configured(InsertHeader, header="n", value_literal="five"))[-1] == Header("n", "five", STRING)


def test_fields_are_copied_or_moved_into_headers() -> None:
    """A copied field stays in the value; a moved field is removed from value and schema."""
    copied = configured(HeaderFromValue, fields="x", headers="h", operation="copy").apply(record({"x": 1, "y": 2}))
    assert copied is not None
    assert (copied.value, copied.headers) == ({"x": 1, "y": 2}, (Header("h", 1),))
    schema = Schema.struct("S", Field("x", INT32), Field("y", INT32))
    moved = configured(HeaderFromValue, fields="x", headers="h", operation="move").apply(
        record({"x": 1, "y": 2}, schema)
    )
    assert moved is not None
    assert (moved.value, moved.headers) == ({"y": 2}, (Header("h", 1, INT32),))
    assert moved.value_schema == Schema.struct("S", Field("y", INT32))
    with pytest.raises(DataError, match="Unknown field: z"):
        configured(HeaderFromValue, fields="z", headers="h", operation="copy").apply(record({"x": 1, "y": 2}, schema))
    with pytest.raises(ConfigError, match="same number"):
        configured(HeaderFromValue, fields="x,y", headers="h", operation="copy")
