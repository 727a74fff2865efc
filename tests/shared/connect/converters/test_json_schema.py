"""Conversion of Connect's schemas to JSON Schemas and of foreign JSON Schemas to Connect's."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.common.errors import DataError
from penstock.shared.connect.converters.json_schema import (
    from_json,
    from_json_schema,
    to_json,
    to_json_schema,
)
from penstock.shared.connect.schema import (
    BOOLEAN,
    BYTES,
    FLOAT64,
    INT8,
    INT32,
    INT64,
    OPTIONAL_STRING,
    STRING,
    Field,
    Schema,
    SchemaType,
    date_schema,
    decimal_schema,
    timestamp_schema,
)

EVERY = Schema.struct(
    "Every",
    *(Field(f"f{at}", one) for at, one in enumerate((BOOLEAN, BYTES, FLOAT64, INT8, INT32, INT64, OPTIONAL_STRING))),
    Field("decimal", decimal_schema(2)),
    Field("day", date_schema(optional=True)),
    Field("at", timestamp_schema()),
    Field("many", Schema.array(INT32)),
    Field("named", Schema.map(STRING, INT32)),
    Field("numbered", Schema.map(INT32, Schema.struct("In", Field("x", STRING)))),
    Field("left", Schema(SchemaType.INT32, default=7)),
    doc="all there are",
)


def test_a_schema_round_trips() -> None:
    """A schema round-trips, also with features that JSON Schema lacks."""
    assert from_json_schema(to_json_schema(EVERY)) == EVERY


def test_maps_with_other_keys_are_arrays_of_entries() -> None:
    """A map without string keys is an array of objects with key and value, at any depth."""
    value = {"numbered": {5: {"x": "a"}}}
    schema = Schema.struct(None, Field("numbered", EVERY.field("numbered").schema))  # type: ignore[union-attr]
    assert to_json(schema, value) == {"numbered": [{"key": 5, "value": {"x": "a"}}]}
    assert from_json(schema, to_json(schema, value)) == value
    with pytest.raises(DataError, match="array of objects"):
        from_json(schema, {"numbered": {"5": {"x": "a"}}})
    with pytest.raises(DataError, match="MAP"):
        to_json(schema, {"numbered": 5})
    by_array = Schema.map(Schema.array(INT32), STRING)
    with pytest.raises(DataError, match="plain value"):
        from_json(by_array, [{"key": [1], "value": "a"}])


@pytest.mark.parametrize(
    ("json", "schema"),
    [
        ({"type": "integer"}, INT64),
        ({"enum": ["a", "b"]}, STRING),
        ({"type": ["string", "null"]}, OPTIONAL_STRING),
        ({"anyOf": [{"type": "string"}, {"type": "null"}]}, OPTIONAL_STRING),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, Schema.map(STRING, INT64)),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}, FLOAT64),
        ({"$ref": "other.json#/definitions/a~1b"}, BOOLEAN),
        ({}, None),
    ],
)
def test_foreign_schemas(json: Any, schema: Schema | None) -> None:
    """Unions with null, enums, references and free-form objects are converted."""
    assert from_json_schema(json, {"other.json": {"definitions": {"a/b": {"type": "boolean"}}}}) == schema


@pytest.mark.parametrize(
    ("json", "message"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "2 types"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/nowhere"}, "not there"),
        ({"type": "array"}, "no schema for its items"),
        ({"type": "object", "properties": {"a": {}}}, "property 'a'"),
        ({"type": "wave"}, "no equivalent in Connect"),
        ([], "not a JSON Schema"),
    ],
)
def test_unsupported_json_schemas_are_an_error(json: Any, message: str) -> None:
    """A JSON Schema without an equivalent in Connect is a DataError with the reason."""
    with pytest.raises(DataError, match=message):
        from_json_schema(json)
