"""The JSON Schema converter, with its schemas in a registry, and the conversion of schemas in both directions."""

from __future__ import annotations

import json
from decimal import Decimal
from typing import Any

import pytest

from penstock.shared.common.errors import DataError
from penstock.shared.connect.converters.json_schema import (
    JsonSchemaConverter,
    from_json,
    from_json_schema,
    to_json,
    to_json_schema,
)
from penstock.shared.connect.converters.schema_registry_serde import framed
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
from tests.shared.connect.converters.converting import fetching
from tests.shared.connect.converters.registry_server import SchemaRegistry, schema_registry

USER = Schema.struct("User", Field("id", INT32), Field("name", OPTIONAL_STRING), Field("due", decimal_schema(2)))
VALUE = {"id": 1, "name": None, "due": Decimal("1.50")}

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


def converter(registry: SchemaRegistry, **settings: str) -> JsonSchemaConverter:
    made = JsonSchemaConverter()
    given = {name.replace("_", "."): value for name, value in settings.items()}
    made.configure({"schema.registry.url": registry.url, **given}, False)
    return made


async def test_values_and_schemas_round_trip() -> None:
    """The schema is registered as a JSON Schema, and the value is JSON after the schema's id."""
    async with schema_registry() as registry:
        made = converter(registry, decimal_format="NUMERIC")
        data = await fetching(lambda: made.from_connect_data("users", USER, VALUE))
        assert data == framed(1, b'{"id":1,"name":null,"due":1.50}')
        assert await fetching(lambda: made.to_connect_data("users", data)) == (USER, VALUE)
        assert registry.schemas[1]["schemaType"] == "JSON"
        assert made.from_connect_data("users", None, None) is None
        assert made.to_connect_data("users", None) == (None, None)


async def test_foreign_schemas_are_read() -> None:
    """Schemas of other clients are read without Connect's extensions."""
    async with schema_registry() as registry:
        made = converter(registry)
        person = {
            "type": "object",
            "required": ["n"],
            "properties": {"n": {"type": "string"}, "a": {"type": "integer"}},
        }
        id = registry.add("t-value", person, "JSON")
        schema, value = await fetching(lambda: made.to_connect_data("t", framed(id, b'{"n":"x"}')))
        assert value == {"n": "x", "a": None}
        assert schema is not None
        assert [(field.name, field.schema.optional) for field in schema.fields] == [("n", False), ("a", True)]
        any_id = registry.add("u-value", {}, "JSON")
        found = await fetching(lambda: made.to_connect_data("u", framed(any_id, b'{"x":[1]}')))
        assert found == (None, {"x": [1]})


async def test_invalid_json_and_values_are_data_errors() -> None:
    """Invalid JSON and values that do not match the schema are DataErrors."""
    async with schema_registry() as registry:
        made = converter(registry)
        id = registry.add("t-value", json.loads('{"type": "integer"}'), "JSON")
        with pytest.raises(DataError, match=r"topic t.*schema 1"):
            await fetching(lambda: made.to_connect_data("t", framed(id, b"{")))
        with pytest.raises(DataError, match=r"topic t.*schema 1.*nested too deeply"):
            await fetching(lambda: made.to_connect_data("t", framed(id, b"[" * 100_000)))
        with pytest.raises(DataError):
            await fetching(lambda: made.to_connect_data("t", framed(id, b'"x"')))
        with pytest.raises(DataError):
            await fetching(lambda: made.from_connect_data("t", STRING, 5))


def test_a_schema_round_trips() -> None:
    """A schema round-trips, also with features that JSON Schema lacks."""
    assert from_json_schema(to_json_schema(EVERY)) == EVERY


def test_maps_with_other_keys_are_arrays_of_entries() -> None:
    """A map whose keys are not strings, or are optional strings, is an array of objects with key and value."""
    value = {"numbered": {5: {"x": "a"}}}
    schema = Schema.struct(None, Field("numbered", EVERY.field("numbered").schema))  # type: ignore[union-attr]
    assert to_json(schema, value) == {"numbered": [{"key": 5, "value": {"x": "a"}}]}
    assert from_json(schema, to_json(schema, value)) == value
    with pytest.raises(DataError, match="array of objects"):
        from_json(schema, {"numbered": {"5": {"x": "a"}}})
    with pytest.raises(DataError, match="MAP"):
        to_json(schema, {"numbered": 5})
    by_optional_text = Schema.map(OPTIONAL_STRING, INT32)
    entries = [{"key": "a", "value": 1}, {"key": None, "value": 2}]
    assert to_json(by_optional_text, {"a": 1, None: 2}) == entries
    assert from_json(by_optional_text, entries) == {"a": 1, None: 2}
    assert from_json_schema(to_json_schema(by_optional_text)) == by_optional_text
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
        ({"oneOf": [{"type": "null", "title": "Not included"}, {"type": "string"}]}, OPTIONAL_STRING),
        ({"type": "object", "additionalProperties": {"type": "integer"}}, Schema.map(STRING, INT64)),
        ({"$ref": "#/$defs/n", "$defs": {"n": {"type": "number"}}}, FLOAT64),
        ({"$ref": "other.json#/definitions/a~1b"}, BOOLEAN),
        ({"type": "string", "title": {}, "description": {}, "connect.version": "a"}, STRING),
        ({"type": "integer", "default": 7.0}, Schema(SchemaType.INT64, default=7)),
        ({"type": "integer", "default": "0"}, INT64),
        ({"type": "array", "items": {"type": "string"}, "default": [0]}, Schema.array(STRING)),
        ({}, None),
        ({"type": "object"}, None),
        ({"type": ["object", "null"], "properties": {}, "additionalProperties": True}, None),
        ({"type": "object", "additionalProperties": {}}, None),
        ({"type": "object", "properties": {}}, Schema.struct(None)),
        ({"type": "object", "additionalProperties": False}, Schema.struct(None)),
    ],
)
def test_foreign_schemas_are_converted(json: Any, schema: Schema | None) -> None:
    """Unions with null, enums, references, defaults and free-form objects are converted."""
    assert from_json_schema(json, {"other.json": {"definitions": {"a/b": {"type": "boolean"}}}}) == schema


def test_two_documents_may_have_the_same_reference() -> None:
    """The same reference in another document is another schema, and not recursion."""
    here = {"$ref": "#/definitions/A", "definitions": {"A": {"$ref": "other.json#/definitions/X"}}}
    other = {"definitions": {"X": {"$ref": "#/definitions/A"}, "A": {"type": "string"}}}
    assert from_json_schema(here, {"other.json": other}) == STRING
    other["definitions"]["A"] = {"$ref": "#/definitions/X"}
    with pytest.raises(DataError, match="refers to itself"):
        from_json_schema(here, {"other.json": other})


@pytest.mark.parametrize(
    ("json", "message"),
    [
        ({"oneOf": [{"type": "string"}, {"type": "integer"}]}, "2 types"),
        ({"$ref": "#"}, "refers to itself"),
        ({"$ref": "#/nowhere"}, "not there"),
        ({"type": "array"}, "no schema for its items"),
        *(
            ({"type": "object", "properties": {"a": one}}, "property 'a'")
            for one in ({}, {"type": "object"}, {"anyOf": [{"type": "object", "additionalProperties": True}]})
        ),
        ({"type": "wave"}, "no equivalent in Connect"),
        *(
            (json, "not a JSON Schema")
            for json in ([], {"type": {}}, {"type": "string", "connect.type": []}, {"oneOf": 5})
        ),
    ],
)
def test_unsupported_json_schemas_are_an_error(json: Any, message: str) -> None:
    """A JSON Schema without an equivalent in Connect is a DataError with the reason."""
    with pytest.raises(DataError, match=message):
        from_json_schema(json)
