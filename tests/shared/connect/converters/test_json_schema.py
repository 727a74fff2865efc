"""The JSON Schema converter, with its schemas in a registry."""

from __future__ import annotations

import json
from decimal import Decimal

import pytest

from penstock.shared.common.errors import DataError
from penstock.shared.connect.converters.json_schema import JsonSchemaConverter
from penstock.shared.connect.converters.schema_registry_serde import framed
from penstock.shared.connect.schema import INT32, OPTIONAL_STRING, STRING, Field, Schema, decimal_schema
from tests.shared.connect.converters.converting import fetching
from tests.shared.connect.converters.registry_server import SchemaRegistry, schema_registry

USER = Schema.struct("User", Field("id", INT32), Field("name", OPTIONAL_STRING), Field("due", decimal_schema(2)))
VALUE = {"id": 1, "name": None, "due": Decimal("1.50")}


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
