"""JsonSchemaConverter: values in JSON, with their JSON Schemas in a schema registry.

Connect's schemas are converted to JSON Schemas and back, in the form of Confluent's converter. Properties of a schema
that JSON Schema lacks are stored under names that begin with `connect.`. An optional type is `oneOf` with null. In a
schema of another program, a property that is not required is optional too.

>>> to_json_schema(Schema(SchemaType.INT32, optional=True))
{'oneOf': [{'type': 'null'}, {'type': 'integer', 'connect.type': 'int32'}]}
>>> from_json_schema({"type": ["null", "string"]}) == Schema(SchemaType.STRING, optional=True)
True
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from decimal import Decimal
from typing import Any

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.common.json_decoding import JSON_ERRORS, invalid_json
from penstock.shared.common.records import Headers
from penstock.shared.connect.config_def import ConfigDef
from penstock.shared.connect.converter import Converted, Converter
from penstock.shared.connect.converters.json import (
    DEPTH_MAX,
    decimals_are_numeric,
    has_decimals,
    integer_or_none,
    map_of_entries,
    text_or_none,
    value_from_json,
    value_to_json,
    with_decimal_format,
)
from penstock.shared.connect.converters.schema_registry_serde import (
    SchemaRegistrySerde,
    framed,
    parse_registered_schema,
    registry_config,
    unframed,
)
from penstock.shared.connect.schema import DECIMAL, Field, Schema, SchemaType, infer_schema

KIND = "JSON"
CONNECT_TYPES = {
    "int8": SchemaType.INT8,
    "int16": SchemaType.INT16,
    "int32": SchemaType.INT32,
    "int64": SchemaType.INT64,
    "float32": SchemaType.FLOAT32,
    "float64": SchemaType.FLOAT64,
    "bytes": SchemaType.BYTES,
}
OF_CONNECT = {kind: name for name, kind in CONNECT_TYPES.items()}
WORDS = {
    **dict.fromkeys((SchemaType.INT8, SchemaType.INT16, SchemaType.INT32, SchemaType.INT64), "integer"),
    **dict.fromkeys((SchemaType.FLOAT32, SchemaType.FLOAT64), "number"),
    SchemaType.BOOLEAN: "boolean",
    SchemaType.STRING: "string",
    SchemaType.BYTES: "string",
}
PLAIN = {
    "integer": SchemaType.INT64,
    "number": SchemaType.FLOAT64,
    "boolean": SchemaType.BOOLEAN,
    "string": SchemaType.STRING,
}


class JsonSchemaConverter(Converter):
    """JSON in the registry's wire format. A value to write must have a schema, unless it is a plain scalar."""

    kafka_class = "io.confluent.connect.json.JsonSchemaConverter"

    def __init__(self) -> None:
        self._registry: SchemaRegistrySerde
        self._numeric = False
        self._read: dict[int, tuple[Schema | None, bool]] = {}
        self._written: dict[Schema, str] = {}
        self._decode = msgspec.json.Decoder().decode
        self._decode_exactly = msgspec.json.Decoder(float_hook=Decimal).decode
        self._encode = msgspec.json.Encoder(decimal_format="number").encode

    @classmethod
    def config(cls) -> ConfigDef:
        return with_decimal_format(registry_config())

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        self._numeric = decimals_are_numeric(self.config().parse(configs))
        self._registry = SchemaRegistrySerde.of(configs, KIND, is_key=is_key)

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if value is None and (schema is None or not schema.has_default):
            return None
        schema = schema or infer_schema(value)
        if schema is None:
            raise DataError("JsonSchemaConverter needs a schema for a value that is not a scalar")
        id, _ = self._registry.to_write(topic, self._json_schema_text(schema), schema.name)
        payload = to_json(schema, value, self._numeric)
        try:
            return framed(id, self._encode(payload))
        except (TypeError, ValueError, OverflowError) as e:
            raise DataError(f"Converting Kafka Connect data to byte[] failed due to serialization error: {e}") from e

    def _json_schema_text(self, schema: Schema) -> str:
        try:
            known = self._written.get(schema)
        except TypeError:
            # A schema with an unhashable default cannot be cached.
            return json.dumps(to_json_schema(schema), separators=(",", ":"))
        if known is None:
            known = json.dumps(to_json_schema(schema), separators=(",", ":"))
            self._written[schema] = known
            if len(self._written) > self._registry.cache_size:
                self._written.pop(next(iter(self._written)))
        return known

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        if data is None:
            return None, None
        id, encoded = unframed(data)
        schema, exactly = self._schema_by_id(id)
        try:
            payload = (self._decode_exactly if exactly else self._decode)(encoded)
        except JSON_ERRORS as e:
            message = f"Failed to deserialize data for topic {topic} to JSON, schema {id}: {invalid_json(e)}"
            raise DataError(message) from e
        return schema, from_json(schema, payload)

    def _schema_by_id(self, id: int) -> tuple[Schema | None, bool]:
        """Return the schema of this id, and whether the values' floats must be read as decimals."""
        if id not in self._read:
            found = self._registry.schema(id)
            references = {name: parse_registered_schema(text) for name, text in found.references}
            schema = from_json_schema(parse_registered_schema(found.text), references)
            self._read[id] = schema, has_decimals(schema)
            if len(self._read) > self._registry.cache_size:
                self._read.pop(next(iter(self._read)))
        return self._read[id]


def to_json_schema(schema: Schema, index: int | None = None) -> dict[str, Any]:
    """Return a Connect schema as a JSON Schema. `index` is a field's index in its struct."""
    made = _json_schema_type_of(schema)
    if schema.name is not None:
        made["title"] = schema.name
    if schema.version is not None:
        made["connect.version"] = schema.version
    if schema.parameters:
        made["connect.parameters"] = dict(schema.parameters)
    if schema.doc is not None:
        made["description"] = schema.doc
    if schema.has_default and schema.default is not None:
        made["default"] = to_json(schema, schema.default)
    if schema.optional:
        made = {"oneOf": [{"type": "null"}, made]}
    if index is not None:
        made["connect.index"] = index
    return made


def _json_schema_type_of(schema: Schema) -> dict[str, Any]:
    if schema.type is SchemaType.STRUCT:
        properties = {field.name: to_json_schema(field.schema, at) for at, field in enumerate(schema.fields)}
        return {"type": "object", "properties": properties}
    if schema.type is SchemaType.ARRAY and schema.value_schema is not None:
        return {"type": "array", "items": to_json_schema(schema.value_schema)}
    if schema.type is SchemaType.MAP and schema.key_schema is not None and schema.value_schema is not None:
        values = to_json_schema(schema.value_schema)
        if schema.has_text_keys:
            return {"type": "object", "connect.type": "map", "additionalProperties": values}
        entry = {"key": to_json_schema(schema.key_schema, 0), "value": {**values, "connect.index": 1}}
        return {"type": "array", "connect.type": "map", "items": {"type": "object", "properties": entry}}
    if schema.name == DECIMAL:
        return {"type": "number", "connect.type": "bytes"}
    if schema.type not in WORDS:
        raise DataError(f"a schema of type {schema.type.name} without its parts")
    made: dict[str, Any] = {"type": WORDS[schema.type]}
    if schema.type in OF_CONNECT:
        made["connect.type"] = OF_CONNECT[schema.type]
    return made


def from_json_schema(json: Any, references: Mapping[str, Any] | None = None) -> Schema | None:
    """Return a JSON Schema as a Connect schema. Returns None for an empty JSON Schema, and for an object of any
    content: their values have no schema.

    Raises DataError if Connect cannot represent it, such as recursion, or a union of several types besides null.
    """
    try:
        return _JsonSchemaReader(json, dict(references or {})).whole(json, 0)
    except (TypeError, AttributeError) as e:
        # A part of the JSON Schema has a wrong type.
        raise DataError(f"not a JSON Schema: {type(e).__name__}: {e}") from e


class _JsonSchemaReader:
    """Converts one JSON Schema to a Connect schema, and resolves its `$ref`."""

    def __init__(self, root: Any, references: dict[str, Any]) -> None:
        self._root = root
        self._references = references
        self._following: list[tuple[int, str]] = []

    def whole(self, json: Any, depth: int) -> Schema | None:
        if depth > DEPTH_MAX:
            raise DataError(f"a JSON Schema is nested deeper than {DEPTH_MAX}")
        if json is True or json == {}:
            return None
        if not isinstance(json, dict):
            raise DataError(f"not a JSON Schema: {json!r:.200}")
        if "$ref" in json:
            return self._follow_reference(str(json["$ref"]), depth)
        for word in ("oneOf", "anyOf", "allOf"):
            if word in json:
                return self._connect_one_of(json, word, depth)
        kind = json.get("type")
        if kind == "object" and _has_any_content(json):
            return None
        if isinstance(kind, list):
            rest = [{**json, "type": one} for one in kind if one != "null"]
            return self._connect_single_branch(rest, optional="null" in kind, depth=depth)
        return self._restore_connect_properties(self._connect_schema_of_type(json, kind, depth), json)

    def _connect_schema_of_type(self, json: dict[str, Any], kind: Any, depth: int) -> Schema:
        own = json.get("connect.type")
        if kind is None and ("enum" in json or "const" in json):
            kind = "string"
        if own in CONNECT_TYPES:
            return Schema(CONNECT_TYPES[own])
        if kind in PLAIN:
            return Schema(PLAIN[kind])
        if own == "map":
            return self._connect_map(json, depth)
        if kind == "array":
            items = self.whole(json.get("items", {}), depth + 1)
            if items is None:
                raise DataError("a JSON Schema's array has no schema for its items")
            return Schema.array(items)
        if kind == "object" or "properties" in json:
            return self._connect_struct(json, depth)
        raise DataError(f"a JSON Schema of type {kind!r} has no equivalent in Connect")

    def _connect_struct(self, json: dict[str, Any], depth: int) -> Schema:
        properties = json.get("properties") or {}
        if not properties and isinstance(json.get("additionalProperties"), dict):
            return self._connect_map(json, depth)
        ours = all(isinstance(one, dict) and "connect.index" in one for one in properties.values())
        required = set(json.get("required") or ())
        fields = []
        for name, one in sorted(properties.items(), key=lambda item: _property_index(item[1])):
            found = self.whole(one, depth + 1)
            if found is None:
                raise DataError(
                    f"a JSON Schema has no schema for its property {name!r}: declare its type, and for an object "
                    "also its properties, or a schema as its additionalProperties"
                )
            fields.append(Field(name, found if ours or name in required else found.as_optional()))
        return Schema.struct(None, *fields)

    def _connect_map(self, json: dict[str, Any], depth: int) -> Schema:
        if json.get("type") == "array":
            entry = (json.get("items") or {}).get("properties") or {}
            keys = self.whole(entry.get("key", {}), depth + 1)
            values = self.whole(entry.get("value", {}), depth + 1)
        else:
            keys = Schema(SchemaType.STRING)
            values = self.whole(json.get("additionalProperties", {}), depth + 1)
        if keys is None or values is None:
            raise DataError("a JSON Schema's map has no schema for its keys or values")
        return Schema.map(keys, values)

    def _connect_one_of(self, json: dict[str, Any], word: str, depth: int) -> Schema | None:
        # Confluent's serializer gives the null type a title.
        branches = [one for one in json[word] if not (isinstance(one, dict) and one.get("type") == "null")]
        return self._connect_single_branch(branches, optional=len(branches) < len(json[word]), depth=depth)

    def _connect_single_branch(self, branches: list[Any], *, optional: bool, depth: int) -> Schema | None:
        if len(branches) != 1:
            raise DataError(f"a JSON Schema with {len(branches)} types for one value has no equivalent in Connect")
        found = self.whole(branches[0], depth + 1)
        return found.as_optional() if found is not None and optional else found

    def _follow_reference(self, reference: str, depth: int) -> Schema | None:
        name, _, path = reference.partition("#")
        document: Any = self._references.get(name) if name else self._root
        found = document
        for part in filter(None, path.split("/")):
            key = part.replace("~1", "/").replace("~0", "~")
            found = found.get(key) if isinstance(found, dict) else None
        if found is None:
            raise DataError(f"a JSON Schema refers to {reference}, which is not there")
        # Two documents may have the same path.
        target = (id(document), path)
        if target in self._following:
            raise DataError(f"the JSON Schema {reference} refers to itself, which a Connect schema cannot")
        self._following.append(target)
        before = self._root
        self._root = document
        try:
            return self.whole(found, depth + 1)
        finally:
            self._root = before
            self._following.pop()

    def _restore_connect_properties(self, schema: Schema, json: dict[str, Any]) -> Schema:
        parameters = {str(key): str(value) for key, value in (json.get("connect.parameters") or {}).items()}
        made = replace(
            schema,
            name=text_or_none(json.get("title")),
            version=integer_or_none(json.get("connect.version")),
            doc=text_or_none(json.get("description")),
            parameters=tuple(parameters.items()),
        )
        if json.get("default") is not None:
            # JSON Schema allows a default of another type. It is ignored, as in Avro.
            with contextlib.suppress(DataError):
                made = replace(made, default=from_json(made, json["default"]))
        return made


def _has_any_content(json: dict[str, Any]) -> bool:
    """Whether an object may have any content. As a struct without fields it would lose the content."""
    others = json.get("additionalProperties", "properties" not in json)
    # The schema {} accepts anything, as the schema `true` does.
    return not json.get("properties") and (others is True or others == {})


def _property_index(json: Any) -> int:
    found = json.get("connect.index", 0) if isinstance(json, dict) else 0
    return found if isinstance(found, int) else 0


def to_json(schema: Schema | None, value: Any, numeric: bool = False) -> Any:
    """Return a value as JSON in the form of Confluent's JSON Schema converter.

    The result is that of JsonConverter, but a map whose keys are not strings, or are optional strings, is an array of
    objects with `key` and `value`.
    """
    return _convert_maps_in_value(schema, value, lambda one, item: value_to_json(one, item, numeric), _map_to_entries)


def from_json(schema: Schema | None, json: Any) -> Any:
    """Return the value for JSON in the form of Confluent's JSON Schema converter. `schema` is Connect's.

    Raises DataError if the JSON does not match `schema`.
    """
    return _convert_maps_in_value(schema, json, value_from_json, _entries_to_map)


def _map_to_entries(schema: Schema, value: Any, walk: Callable[[Schema | None, Any], Any]) -> Any:
    keys = schema.key_schema
    values = schema.value_schema
    if not isinstance(value, Mapping):
        raise DataError(f"Invalid type for MAP: {type(value).__name__}")
    return [{"key": walk(keys, key), "value": walk(values, item)} for key, item in value.items()]


def _entries_to_map(schema: Schema, value: Any, walk: Callable[[Schema | None, Any], Any]) -> Any:
    keys = schema.key_schema
    values = schema.value_schema
    if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
        raise DataError("a map whose keys are not strings should be an array of objects with key and value")
    return map_of_entries((walk(keys, entry.get("key")), walk(values, entry.get("value"))) for entry in value)


def _convert_maps_in_value(
    schema: Schema | None,
    value: Any,
    leaf: Callable[[Schema | None, Any], Any],
    entries: Callable[[Schema, Any, Callable[[Schema | None, Any], Any]], Any],
) -> Any:
    """Convert a value to or from JsonSchemaConverter's JSON.

    `entries` converts each map that is an array of objects in JSON (see `to_json`). `leaf` converts each value that
    contains no such map.
    """
    if schema is None or value is None or not _has_entries(schema):
        return leaf(schema, value)

    def convert_nested_value(one: Schema | None, item: Any) -> Any:
        return _convert_maps_in_value(one, item, leaf, entries)

    if schema.type is SchemaType.STRUCT and isinstance(value, Mapping):
        return {field.name: convert_nested_value(field.schema, value.get(field.name)) for field in schema.fields}
    if schema.type is SchemaType.ARRAY and isinstance(value, list | tuple):
        return [convert_nested_value(schema.value_schema, item) for item in value]
    if schema.type is SchemaType.MAP and not schema.has_text_keys:
        return entries(schema, value, convert_nested_value)
    if schema.type is SchemaType.MAP and isinstance(value, Mapping):
        return {key: convert_nested_value(schema.value_schema, item) for key, item in value.items()}
    return leaf(schema, value)


def _has_entries(schema: Schema) -> bool:
    if schema.type is SchemaType.MAP and not schema.has_text_keys:
        return True
    inner = [field.schema for field in schema.fields]
    inner += [one for one in (schema.key_schema, schema.value_schema) if one is not None]
    return any(_has_entries(one) for one in inner)
