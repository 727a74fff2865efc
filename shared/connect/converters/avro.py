"""AvroConverter: values in Avro, with their schemas in a schema registry.

fastavro reads and writes the values. Five kinds of values differ from Connect's: unions, maps that are arrays in Avro
(`avro_schemas`), floats that are read, timestamps that are written, and a written null that stands for a default. A
schema with one of these gets a conversion function when it is first used. Other values need no conversion.
"""

from __future__ import annotations

import importlib
import io
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.common.extras import missing
from penstock.shared.common.records import Headers
from penstock.shared.connect.config_def import ConfigDef
from penstock.shared.connect.converter import Converted, Converter
from penstock.shared.connect.converters.avro_schemas import (
    AVRO_ENUM,
    OF_CONNECT,
    for_fastavro,
    from_avro,
    is_union,
    to_avro,
)
from penstock.shared.connect.converters.json import map_of_entries
from penstock.shared.connect.converters.schema_registry_client import RegistrySchema
from penstock.shared.connect.converters.schema_registry_serde import (
    HEAD_BYTES,
    SchemaRegistrySerde,
    framed,
    parse_registered_schema,
    registry_config,
    unframed,
)
from penstock.shared.connect.schema import (
    FLOATS,
    TIMESTAMP,
    Field,
    Schema,
    SchemaType,
    as_float32,
    infer_schema,
    timestamp_to_ms,
)

KIND = "AVRO"
Change = Callable[[Any], Any]


def avro_library() -> Any:
    """The module fastavro, which the extra `avro` installs."""
    try:
        return importlib.import_module("fastavro")
    except ModuleNotFoundError:
        raise ConfigError(missing("the Avro converter", "fastavro")) from None


@dataclass(frozen=True)
class _AvroSchemaCodec:
    """A schema with the functions that read and write its values."""

    schema: Schema
    avro: Any
    text: str
    from_value: Change | None = None
    to_value: Change | None = None


class AvroConverter(Converter):
    """Avro in the registry's wire format. A value to write must have a schema, unless it is a plain scalar."""

    kafka_class = "io.confluent.connect.avro.AvroConverter"

    def __init__(self) -> None:
        self._registry: SchemaRegistrySerde
        self._read: dict[int, _AvroSchemaCodec] = {}
        self._written: dict[Schema, _AvroSchemaCodec] = {}

    @classmethod
    def config(cls) -> ConfigDef:
        return registry_config()

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        self._fastavro = avro_library()
        self._registry = SchemaRegistrySerde.of(configs, KIND, is_key=is_key)

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if value is None and (schema is None or not schema.has_default):
            return None
        schema = schema or infer_schema(value)
        if schema is None:
            raise DataError("AvroConverter needs a schema for a value that is not a scalar")
        value = schema.default if value is None else value
        known = self._avro_schema_to_write(schema)
        id, latest = self._registry.to_write(topic, known.text, schema.name)
        if latest is not None:
            known = self._avro_schema_by_id(id, latest)
        # fastavro would change some values: it would write 1.5 as the int 1.
        known.schema.validate(value)
        buffer = io.BytesIO()
        try:
            self._fastavro.schemaless_writer(buffer, known.avro, known.from_value(value) if known.from_value else value)
        except DataError:
            raise
        except Exception as e:
            # fastavro raises errors of many classes.
            raise DataError(f"Failed to serialize Avro data from topic {topic}: {type(e).__name__}: {e}") from e
        return framed(id, buffer.getvalue())

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        if data is None:
            return None, None
        id, encoded = unframed(data)
        known = self._avro_schema_by_id(id, None)
        return known.schema, self._decode_avro_value(topic, id, known, encoded)

    def to_connect_values(self, topic: str, datas: Sequence[bytes | None]) -> tuple[Schema | None, list[Any]] | None:
        if not datas or datas[0] is None:
            return None
        id, _ = unframed(datas[0])
        head = framed(id, b"")
        known = self._read.get(id)
        if known is None or not all(data is not None and data.startswith(head) for data in datas):
            return None
        return known.schema, [
            self._decode_avro_value(topic, id, known, data[HEAD_BYTES:]) for data in datas if data is not None
        ]

    def _decode_avro_value(self, topic: str, id: int, known: _AvroSchemaCodec, encoded: bytes) -> Any:
        buffer = io.BytesIO(encoded)
        try:
            value = self._fastavro.schemaless_reader(
                buffer, known.avro, return_record_name=True, return_record_name_override=True
            )
        except Exception as e:
            # fastavro raises errors of many classes.
            message = f"{type(e).__name__}: {e}"
            raise DataError(f"Failed to deserialize data for topic {topic} to Avro, schema {id}: {message}") from e
        if buffer.tell() != len(encoded):
            raise DataError(f"Failed to deserialize data for topic {topic} to Avro, schema {id}: bytes are left over")
        return known.to_value(value) if known.to_value else value

    def _avro_schema_to_write(self, schema: Schema) -> _AvroSchemaCodec:
        try:
            known = self._written.get(schema)
        except TypeError:
            # A schema with an unhashable default cannot be cached.
            return self._parse_avro_schema(to_avro(schema), (), schema)
        if known is None:
            known = self._parse_avro_schema(to_avro(schema), (), schema)
            self._written[schema] = known
            if len(self._written) > self._registry.cache_size:
                self._written.pop(next(iter(self._written)))
        return known

    def _avro_schema_by_id(self, id: int, found: RegistrySchema | None) -> _AvroSchemaCodec:
        known = self._read.get(id)
        if known is None:
            registered = found or self._registry.schema(id)
            known = self._parse_avro_schema(parse_registered_schema(registered.text), registered.references)
            self._read[id] = known
            if len(self._read) > self._registry.cache_size:
                self._read.pop(next(iter(self._read)))
        return known

    def _parse_avro_schema(
        self, avro: Any, references: Sequence[tuple[str, str]], schema: Schema | None = None
    ) -> _AvroSchemaCodec:
        named: dict[str, Any] = {}
        outer = {name: parse_registered_schema(text) for name, text in references}
        try:
            # As in Confluent's converter, a default of another type is no error.
            for text in outer.values():
                self._fastavro.parse_schema(for_fastavro(text), named_schemas=named, _ignore_default_error=True)
            made = self._fastavro.parse_schema(for_fastavro(avro), named_schemas=named, _ignore_default_error=True)
        except Exception as e:
            # fastavro raises errors of many classes.
            raise DataError(f"not an Avro schema: {type(e).__name__}: {e}") from e
        schema = schema or from_avro(avro, outer)
        return _AvroSchemaCodec(
            schema, made, json.dumps(avro, separators=(",", ":")), change_to_avro(schema), change_from_avro(schema)
        )


def _convert_nested_values(schema: Schema | None, of: Callable[[Schema], Change | None]) -> Change | None:
    """The conversion of a struct's fields, an array's items or a map's values; None if nothing changes."""
    if schema is None:
        return None
    if schema.type is SchemaType.STRUCT:
        changes = {field.name: change for field in schema.fields if (change := of(field.schema)) is not None}
        if not changes:
            return None
        # The fields without a conversion are copied at once, since a struct may have many of them.
        return lambda value: value and {**value, **{k: change(value[k]) for k, change in changes.items() if k in value}}
    inner = None if schema.value_schema is None else of(schema.value_schema)
    if inner is None:
        return None
    if schema.type is SchemaType.ARRAY:
        return lambda value: value if value is None else [inner(item) for item in value]
    return lambda value: value if value is None else {key: inner(item) for key, item in value.items()}


def _is_map_as_entries(schema: Schema) -> bool:
    return schema.type is SchemaType.MAP and not schema.has_text_keys


def change_from_avro(schema: Schema) -> Change | None:
    """The conversion from fastavro's value to Connect's; None if they are the same."""
    if is_union(schema):
        branches = sorted(schema.fields, key=lambda field: _is_general_branch(field.schema))
        return lambda value: _struct_of_union_branch(branches, value)
    if _is_map_as_entries(schema):
        key_change = change_from_avro(schema.key_schema) if schema.key_schema is not None else None
        inner = change_from_avro(schema.value_schema) if schema.value_schema is not None else None
        return lambda value: value if value is None else map_of_entries(
            (key_change(entry["key"]) if key_change else entry["key"],
             inner(entry["value"]) if inner else entry["value"])
            for entry in value
        )  # fmt: skip
    # fastavro reads the float 21.3 as the double 21.299999237060547.
    return _float_from_avro if schema.type is SchemaType.FLOAT32 else _convert_nested_values(schema, change_from_avro)


def change_to_avro(schema: Schema) -> Change | None:
    """The conversion from Connect's value to fastavro's; None if they are the same."""
    change = _change_of_type_to_avro(schema)
    # For a missing field, fastavro would write the default as the JSON schema has it, where bytes are a text.
    of_fields = () if is_union(schema) else ((field.name, field.schema) for field in schema.fields)
    defaults = {name: of.default for name, of in of_fields if of.has_default and of.default is not None}
    if defaults:
        change = _with_defaults(defaults, len(schema.fields), change or _avro_value_unchanged)
    # As in Connect's Struct, a null field has the default, although the field may be optional.
    if schema.has_default and schema.default is not None:
        default = schema.default
        return lambda value: (change or _avro_value_unchanged)(default if value is None else value)
    return change


def _change_of_type_to_avro(schema: Schema) -> Change | None:
    """The conversion to fastavro's value that the schema's type needs; None if it needs none."""
    if is_union(schema):
        return lambda value: _union_value_to_branch(schema, value)
    if _is_map_as_entries(schema):
        key_change = change_to_avro(schema.key_schema) if schema.key_schema is not None else None
        inner = change_to_avro(schema.value_schema) if schema.value_schema is not None else None
        return lambda value: value if value is None else [
            {"key": key_change(key) if key_change else key, "value": inner(item) if inner else item}
            for key, item in value.items()
        ]  # fmt: skip
    # fastavro would write a datetime without a time zone as local time.
    return _timestamp_to_avro if schema.name == TIMESTAMP else _convert_nested_values(schema, change_to_avro)


def _with_defaults(defaults: Mapping[str, Any], field_count: int, change: Change) -> Change:
    """The conversion of a struct, whose missing fields get their defaults."""

    def convert(value: Any) -> Any:
        # Every record comes here, so only a struct that lacks a field is copied. Validation allows no other fields.
        if value is not None and len(value) < field_count:
            value = {**defaults, **value}
        return change(value)

    return convert


def _float_from_avro(value: Any) -> Any:
    return value if value is None else as_float32(value)


def _timestamp_to_avro(value: Any) -> Any:
    return value if value is None else timestamp_to_ms(value)


def _avro_value_unchanged(value: Any) -> Any:
    return value


def _struct_of_union_branch(branches: Sequence[Field], value: Any) -> Any:
    """A union's value as a struct in which one branch is set; None for a null.

    fastavro returns the branch's name for a record, if the union defines several records. Any other value sets the
    first of `branches` that it fits, which need not be the branch that was written: a small `long` sets `int` if that
    comes first, and a `float` sets `double` if there is one. Raises DataError if it fits none.
    """
    if value is None:
        return None
    if isinstance(value, tuple):
        # The tuple is a record: its full name and its value.
        name = value[0].rpartition(".")[2]
        value = value[1]
        found = next((field for field in branches if field.name == name), None)
    else:
        found = next((field for field in branches if _is_of_branch(field.schema, value)), None)
    if found is None:
        raise DataError(f"a union's value {value!r:.100} is of none of its types")
    change = change_from_avro(found.schema)
    return {field.name: None for field in branches} | {found.name: change(value) if change else value}


def _is_general_branch(schema: Schema) -> bool:
    """Whether a union's branch may also match values of other branches. Such a branch is tried after the others.

    A map matches a record's values, a float those of a double, and a string those of an enum.
    """
    is_plain_string = schema.type is SchemaType.STRING and schema.parameter(AVRO_ENUM) is None
    return is_plain_string or schema.type in (SchemaType.MAP, SchemaType.FLOAT32)


def _is_of_branch(schema: Schema, value: Any) -> bool:
    """Whether fastavro's value is of a union's branch. A union has only one array and one map, so their items do not
    matter."""
    if schema.type is SchemaType.STRUCT:
        return isinstance(value, dict) and value.keys() == {field.name for field in schema.fields}
    if schema.type is SchemaType.ARRAY or _is_map_as_entries(schema):
        return isinstance(value, list)
    if schema.type is SchemaType.MAP:
        return isinstance(value, dict)
    if schema.type in FLOATS:
        return isinstance(value, float)
    if schema.parameter(AVRO_ENUM) is not None:
        return schema.parameter(f"{AVRO_ENUM}.{value}") is not None
    try:
        schema.validate(value)
    except DataError:
        return False
    return True


def _union_value_to_branch(union: Schema, value: Any) -> Any:
    """A union's value with the name of its branch, by which fastavro finds the branch; of a fixed, the value alone."""
    if value is None:
        return None
    set_fields = [field for field in union.fields if value.get(field.name) is not None]
    if len(set_fields) != 1:
        raise DataError(f"a union's value sets {len(set_fields)} of its fields, not one")
    field = set_fields[0]
    change = change_to_avro(field.schema)
    inner = value[field.name]
    inner = change(inner) if change else inner
    name = _avro_name_of_branch(field)
    return inner if name is None else (name, inner)


def _avro_name_of_branch(branch: Field) -> str | None:
    schema = branch.schema
    if schema.type is SchemaType.STRUCT:
        return schema.name
    if schema.type is SchemaType.BYTES:
        # A branch with another name is a fixed, whose full name a Connect schema lacks.
        return "bytes" if branch.name == "bytes" else None
    if _is_map_as_entries(schema):
        return "array"
    return schema.parameter(AVRO_ENUM) or OF_CONNECT.get(schema.type, schema.type.value)
