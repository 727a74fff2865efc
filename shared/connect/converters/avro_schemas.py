"""Converts Connect's schemas to Avro's and back, in the form of Confluent's Avro converter.

Properties that Avro lacks are stored in attributes that begin with `connect.`: the type of a small integer, names,
versions and parameters. An optional type is a union with null. Any other union is a struct named `AVRO_UNION` with one
optional field for each branch. A map whose keys are not strings, or are optional strings, is an array of records named
`MapEntry`.

>>> from penstock.shared.connect.schema import INT64, OPTIONAL_STRING
>>> to_avro(Schema.struct("a.User", Field("id", INT64), Field("name", OPTIONAL_STRING)))["fields"]
[{'name': 'id', 'type': 'long'}, {'name': 'name', 'type': ['null', 'string'], 'default': None}]
>>> from_avro(["null", "int"]) == Schema(SchemaType.INT32, optional=True)
True
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import replace
from decimal import MAX_PREC
from typing import Any

from penstock.shared.common.errors import DataError
from penstock.shared.connect.converters.json import DEPTH_MAX
from penstock.shared.connect.schema import (
    DATE,
    DECIMAL,
    LOGICAL,
    NO_DEFAULT,
    TIME,
    TIMESTAMP,
    Field,
    Schema,
    SchemaType,
    date_from_days,
    date_to_days,
    decimal_from_bytes,
    decimal_to_bytes,
    scale_of,
    time_from_ms,
    time_to_ms,
    timestamp_from_ms,
    timestamp_to_ms,
)

NAMESPACE = "io.confluent.connect.avro"
AVRO_UNION = f"{NAMESPACE}.Union"
AVRO_ENUM = f"{NAMESPACE}.Enum"
MAP_ENTRY = "MapEntry"
DEFAULT_NAME = "ConnectDefault"
DECIMAL_PRECISION = 64
PRIMITIVES = {
    "int": SchemaType.INT32,
    "long": SchemaType.INT64,
    "float": SchemaType.FLOAT32,
    "double": SchemaType.FLOAT64,
    "boolean": SchemaType.BOOLEAN,
    "string": SchemaType.STRING,
    "bytes": SchemaType.BYTES,
}
OF_CONNECT = {kind: name for name, kind in PRIMITIVES.items()} | {SchemaType.INT8: "int", SchemaType.INT16: "int"}
LOGICAL_TYPES = {"decimal": DECIMAL, "date": DATE, "time-millis": TIME, "timestamp-millis": TIMESTAMP}
OF_LOGICAL = {name: logical for logical, name in LOGICAL_TYPES.items()}


def is_union(schema: Schema) -> bool:
    """Return whether a struct stands for a union: each field is a branch, and a value sets one of them."""
    return schema.name == AVRO_UNION and schema.type is SchemaType.STRUCT


def to_avro(schema: Schema) -> Any:
    """Return a Connect schema as Avro's JSON.

    Raises DataError if that is impossible: for example, two different structs or enums have the same name.
    """
    return _Writing().whole(schema)


class _Writing:
    """The conversion of one schema to Avro. Avro defines a record or an enum once: a repeated one becomes its name."""

    def __init__(self) -> None:
        self._named: dict[str, Schema] = {}
        self._unnamed = 0

    def whole(self, schema: Schema) -> Any:
        is_default_null = not schema.has_default or schema.default is None
        if is_union(schema):
            branches = [self._avro_type_of(replace(field.schema, optional=False)) for field in schema.fields]
            if not schema.optional:
                return branches
            return ["null", *branches] if is_default_null else [*branches, "null"]
        plain = self._avro_type_of(schema)
        if not schema.optional:
            return plain
        return ["null", plain] if is_default_null else [plain, "null"]

    def _avro_type_of(self, schema: Schema) -> Any:
        if schema.type is SchemaType.STRUCT:
            return self._avro_record(schema)
        made: dict[str, Any] = {"type": OF_CONNECT.get(schema.type)}
        if schema.type is SchemaType.ARRAY and schema.value_schema is not None:
            made = {"type": "array", "items": self.whole(schema.value_schema)}
        elif schema.type is SchemaType.MAP:
            made = self._avro_map(schema)
        elif schema.type in (SchemaType.INT8, SchemaType.INT16):
            made["connect.type"] = schema.type.value
        if schema.parameter(AVRO_ENUM) is not None:
            return self._avro_enum(schema)
        logical = OF_LOGICAL.get(schema.name or "")
        if logical == "decimal":
            precision = schema.parameter("connect.decimal.precision") or DECIMAL_PRECISION
            made |= {"scale": scale_of(schema), "precision": int(precision)}
        made |= _connect_properties_of_schema(schema)
        if logical is not None:
            made["logicalType"] = logical
        return made["type"] if set(made) == {"type"} else made

    def _avro_map(self, schema: Schema) -> dict[str, Any]:
        keys = schema.key_schema
        values = schema.value_schema
        if keys is None or values is None:
            raise DataError("a map's schema needs those of its keys and values")
        if schema.has_text_keys:
            return {"type": "map", "values": self.whole(values)}
        fields = Field("key", keys), Field("value", values)
        names = (f"{NAMESPACE}.{MAP_ENTRY}{number if number > 1 else ''}" for number in itertools.count(1))
        entry = next(one for name in names if self._is_free_record_name(one := Schema.struct(name, *fields)))
        return {"type": "array", "items": self._avro_record(entry), "connect.type": "map"}

    def _is_free_record_name(self, record: Schema) -> bool:
        return self._named.get(record.name or "", record) == record

    def _is_defined(self, name: str, schema: Schema) -> bool:
        """Whether this schema was already written under this name. Raises DataError if a different one was."""
        defined = self._named.setdefault(name, schema)
        if defined != schema:
            raise DataError(f"two different structs or enums are called {name}")
        return defined is not schema

    def _avro_enum(self, schema: Schema) -> Any:
        name = schema.parameter(AVRO_ENUM) or ""
        prefix = f"{AVRO_ENUM}."
        kept = tuple((key, text) for key, text in schema.parameters if key.startswith(AVRO_ENUM))
        if self._is_defined(name, Schema(SchemaType.STRING, parameters=kept)):
            return name
        symbols = [text for key, text in schema.parameters if key.startswith(prefix)]
        return {"type": "enum", **_avro_name_and_namespace(name), "symbols": symbols}

    def _avro_record(self, schema: Schema) -> Any:
        name = schema.name or self._default_record_name(schema)
        same = replace(schema, optional=False, default=NO_DEFAULT)
        if self._is_defined(name, same):
            return name
        fields = []
        for field in schema.fields:
            made = {"name": field.name, "type": self.whole(field.schema)}
            if field.schema.has_default and field.schema.default is not None:
                made["default"] = default_to_json(field.schema, field.schema.default)
            elif field.schema.optional:
                made["default"] = None
            fields.append(made)
        return {
            "type": "record",
            **_avro_name_and_namespace(name),
            "fields": fields,
            **_connect_properties_of_schema(schema),
        }

    def _default_record_name(self, schema: Schema) -> str:
        self._unnamed += 1
        return f"{NAMESPACE}.{DEFAULT_NAME}{self._unnamed if self._unnamed > 1 else ''}"


def _avro_name_and_namespace(full: str) -> dict[str, str]:
    namespace, _, name = full.rpartition(".")
    return {"name": name, "namespace": namespace} if namespace else {"name": name}


def _connect_properties_of_schema(schema: Schema) -> dict[str, Any]:
    kept: dict[str, Any] = {}
    if schema.version is not None:
        kept["connect.version"] = schema.version
    if schema.parameters:
        kept["connect.parameters"] = dict(schema.parameters)
    if schema.doc is not None:
        kept["connect.doc"] = schema.doc
    if schema.name is not None:
        kept["connect.name"] = schema.name
    return kept


def default_to_json(schema: Schema, value: Any) -> Any:
    """Return a schema's default in Avro's JSON, where bytes are a text with one character a byte."""
    if value is None and schema.has_default and not schema.optional:
        # A field that a struct's default lacks: Avro's null would be invalid there.
        value = schema.default
    if value is None:
        return None
    if schema.name == DECIMAL:
        return decimal_to_bytes(value, scale_of(schema)).decode("latin-1")
    if schema.name == DATE:
        return date_to_days(value)
    if schema.name == TIME:
        return time_to_ms(value)
    if schema.name == TIMESTAMP:
        return timestamp_to_ms(value)
    if is_union(schema):
        set_fields = (f for f in schema.fields if value.get(f.name) is not None)
        return next((default_to_json(f.schema, value[f.name]) for f in set_fields), None)
    if schema.type is SchemaType.STRUCT:
        return {f.name: default_to_json(f.schema, value.get(f.name)) for f in schema.fields}
    items = schema.value_schema
    if schema.type is SchemaType.ARRAY and items is not None:
        return [default_to_json(items, item) for item in value]
    keys = schema.key_schema
    if schema.type is SchemaType.MAP and items is not None and keys is not None:
        if schema.has_text_keys:
            return {key: default_to_json(items, item) for key, item in value.items()}
        return [{"key": default_to_json(keys, key), "value": default_to_json(items, value[key])} for key in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value).decode("latin-1")
    return value


def default_from_json(schema: Schema, json: Any) -> Any:
    """Return the value of a schema's default in Avro's JSON."""
    if json is None:
        return None
    if schema.name == DECIMAL:
        return decimal_from_bytes(json.encode("latin-1"), scale_of(schema))
    if schema.name in (DATE, TIME, TIMESTAMP):
        return {DATE: date_from_days, TIME: time_from_ms, TIMESTAMP: timestamp_from_ms}[schema.name](json)
    if is_union(schema):
        branch = _branch_of_default(schema, json)
        return {f.name: default_from_json(f.schema, json) if f is branch else None for f in schema.fields}
    if schema.type is SchemaType.STRUCT and isinstance(json, Mapping):
        return {f.name: default_from_json(f.schema, json.get(f.name)) for f in schema.fields}
    items = schema.value_schema
    if schema.type is SchemaType.ARRAY and items is not None and isinstance(json, list):
        return [default_from_json(items, item) for item in json]
    keys = schema.key_schema
    if schema.type is SchemaType.MAP and items is not None and keys is not None:
        if not schema.has_text_keys:
            return {default_from_json(keys, entry["key"]): default_from_json(items, entry["value"]) for entry in json}
        return {key: default_from_json(items, item) for key, item in json.items()}
    return json.encode("latin-1") if schema.type is SchemaType.BYTES and isinstance(json, str) else json


def _branch_of_default(union: Schema, json: Any) -> Field:
    """Return the first branch that a union's default matches, or the union's first branch if none matches.

    Before Avro 1.12, a default had to match the union's first branch. Since then, it may match any branch.
    """
    return next((field for field in union.fields if _is_default_of(field.schema, json)), union.fields[0])


def _is_default_of(schema: Schema, json: Any) -> bool:
    if schema.parameter(AVRO_ENUM) is not None:
        return schema.parameter(f"{AVRO_ENUM}.{json}") is not None
    try:
        schema.validate(default_from_json(schema, json))
    except (AttributeError, DataError, LookupError, TypeError, ValueError):
        # The JSON of another type, such as a text for a Date, fails in several ways.
        return False
    return True


def from_avro(avro: Any, named: Mapping[str, Any] | None = None) -> Schema:
    """Return an Avro schema as a Connect schema. `named` has the named schemas that it refers to.

    Raises DataError if Connect cannot represent it.
    """
    reading = _AvroSchemaReader(dict(named or {}))
    return reading.whole(avro, "", 0)


class _AvroSchemaReader:
    """The conversion of one Avro schema to Connect."""

    def __init__(self, named: dict[str, Any]) -> None:
        self._named = named
        self._inside: set[str] = set()

    def whole(self, avro: Any, namespace: str, depth: int) -> Schema:
        if depth > DEPTH_MAX:
            raise DataError(f"an Avro schema is nested deeper than {DEPTH_MAX}")
        if isinstance(avro, list):
            return self._connect_union(avro, namespace, depth)
        if isinstance(avro, str):
            return self._connect_schema_by_name(avro, namespace, depth)
        if not isinstance(avro, dict) or "type" not in avro:
            raise DataError(f"not an Avro schema: {avro!r:.200}")
        kind = avro["type"]
        if isinstance(kind, list | dict):
            return self.whole(kind, namespace, depth + 1)
        if kind in ("record", "error"):
            return self._connect_struct(avro, namespace, depth)
        if kind == "array":
            return self._connect_array(avro, namespace, depth)
        if kind == "map":
            return _restore_connect_properties(
                Schema.map(Schema(SchemaType.STRING), self.whole(avro["values"], namespace, depth + 1)), avro
            )
        if kind in ("enum", "fixed"):
            self._named[_full_avro_name(avro, namespace)] = (avro, namespace)
            return (
                _connect_enum(avro, namespace)
                if kind == "enum"
                else _restore_connect_properties(Schema(SchemaType.BYTES), avro)
            )
        if kind not in PRIMITIVES:
            return self._connect_schema_by_name(kind, namespace, depth)
        small = {"int8": SchemaType.INT8, "int16": SchemaType.INT16}.get(avro.get("connect.type", ""))
        return _restore_connect_properties(Schema(small or PRIMITIVES[kind]), avro)

    def _connect_schema_by_name(self, name: str, namespace: str, depth: int) -> Schema:
        if name in PRIMITIVES:
            return Schema(PRIMITIVES[name])
        full = name if "." in name or not namespace else f"{namespace}.{name}"
        full = full if full in self._named or full in self._inside else name
        if full in self._inside:
            raise DataError(f"the Avro schema {full} refers to itself, which a Connect schema cannot")
        if full not in self._named:
            raise DataError(f"the Avro schema names {name!r}, which is not defined")
        found = self._named[full]
        avro, where = found if isinstance(found, tuple) else (found, "")
        return self.whole(avro, where, depth + 1)

    def _connect_union(self, branches: list[Any], namespace: str, depth: int) -> Schema:
        rest = [branch for branch in branches if branch != "null"]
        optional = len(rest) < len(branches)
        if len(rest) == 1:
            found = self.whole(rest[0], namespace, depth + 1)
            return found.as_optional() if optional else found
        made = [self.whole(branch, namespace, depth + 1) for branch in rest]
        fields = [Field(_branch_name(avro), schema.as_optional()) for avro, schema in zip(rest, made, strict=True)]
        names = [field.name for field in fields]
        if len({*names}) < len(names):
            # As in Confluent's converter, whose struct cannot have two fields of one name either.
            raise DataError(f"an Avro union has two types of one name, without the namespaces: {', '.join(names)}")
        return Schema.struct(AVRO_UNION, *fields, optional=optional)

    def _connect_struct(self, avro: dict[str, Any], namespace: str, depth: int) -> Schema:
        full = _full_avro_name(avro, namespace)
        inner = full.rpartition(".")[0]
        self._inside.add(full)
        fields = []
        for field in avro["fields"]:
            schema = self.whole(field["type"], inner, depth + 1)
            default = field.get("default")
            # As in Confluent's converter, a default of another type is ignored.
            if default is not None and _is_default_of(schema, default):
                schema = replace(schema, default=default_from_json(schema, default))
            fields.append(Field(field["name"], schema))
        self._inside.remove(full)
        self._named[full] = (avro, namespace)
        unnamed = inner == NAMESPACE and full.rpartition(".")[2].startswith(DEFAULT_NAME)
        return _restore_connect_properties(Schema.struct(None if unnamed else full, *fields), avro)

    def _connect_array(self, avro: dict[str, Any], namespace: str, depth: int) -> Schema:
        items = self.whole(avro["items"], namespace, depth + 1)
        if avro.get("connect.type") == "map" or (items.name or "").endswith(f"{NAMESPACE}.{MAP_ENTRY}"):
            key = items.field("key")
            value = items.field("value")
            if key is not None and value is not None:
                entries = Schema.map(key.schema, value.schema)
                # A map with text keys is Avro's own map, so an array of such entries stays an array.
                if not entries.has_text_keys:
                    return _restore_connect_properties(entries, avro)
        return _restore_connect_properties(Schema.array(items), avro)


def _branch_name(avro: Any) -> str:
    """The name of a union's branch: its type, or its own name without the namespace."""
    if isinstance(avro, dict):
        avro = avro.get("name", avro["type"])
    return str(avro).rpartition(".")[2]


def _full_avro_name(avro: dict[str, Any], namespace: str) -> str:
    name = str(avro.get("name", ""))
    own = avro.get("namespace", namespace)
    return name if "." in name or not own else f"{own}.{name}"


def _connect_enum(avro: dict[str, Any], namespace: str) -> Schema:
    symbols = tuple((f"{AVRO_ENUM}.{symbol}", symbol) for symbol in avro["symbols"])
    return _restore_connect_properties(
        Schema(SchemaType.STRING, parameters=((AVRO_ENUM, _full_avro_name(avro, namespace)), *symbols)), avro
    )


def _restore_connect_properties(schema: Schema, avro: dict[str, Any]) -> Schema:
    logical = LOGICAL_TYPES.get(avro.get("logicalType", ""))
    if logical is not None and LOGICAL[logical][0] is not schema.type:
        # As Avro requires, a logical type of another Avro type is ignored.
        logical = None
    name = avro.get("connect.name") or logical or schema.name
    parameters = dict(schema.parameters) | {str(k): str(v) for k, v in (avro.get("connect.parameters") or {}).items()}
    version = avro.get("connect.version")
    if avro.get("logicalType") == "decimal" and name == DECIMAL:
        parameters.setdefault("scale", str(avro.get("scale", 0)))
        if avro.get("precision", DECIMAL_PRECISION) != DECIMAL_PRECISION:
            parameters["connect.decimal.precision"] = str(avro["precision"])
    if version is None and name in OF_LOGICAL:
        version = 1
    return replace(
        schema, name=name, version=version, doc=avro.get("connect.doc"), parameters=tuple(parameters.items())
    )


def for_fastavro(avro: Any) -> Any:
    """Return an Avro schema in the form for fastavro.

    It lacks the logical types that Connect lacks, whose values keep the underlying type. Decimals in bytes have the
    largest precision: fastavro rejects a scale above the precision, and rounds longer values. Confluent's converter
    ignores the precision.
    """
    if isinstance(avro, list):
        return [for_fastavro(branch) for branch in avro]
    if not isinstance(avro, dict):
        return avro
    kept = {key: for_fastavro(value) for key, value in avro.items() if key != "default"}
    if "default" in avro:
        kept["default"] = avro["default"]
    if isinstance(kept.get("logicalType"), str) and kept["logicalType"] not in LOGICAL_TYPES:
        del kept["logicalType"]
    if kept.get("logicalType") == "decimal" and kept.get("type") == "bytes":
        kept["precision"] = MAX_PREC
    return kept
