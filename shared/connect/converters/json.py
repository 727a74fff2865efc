"""JsonConverter: values as JSON.

With `schemas.enable`, the default, a value is in an envelope with its schema: `{"schema": …, "payload": …}`.

>>> schema = schema_from_envelope({"type": "struct", "fields": [{"field": "n", "type": "int32", "optional": True}]})
>>> value_to_json(schema, {"n": 3}), value_from_json(schema, {"n": 3})
({'n': 3}, {'n': 3})
>>> schema_to_envelope(schema)
{'type': 'struct', 'fields': [{'type': 'int32', 'optional': True, 'field': 'n'}], 'optional': False}
"""

from __future__ import annotations

import base64
import datetime as dt
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from decimal import Decimal
from typing import Any

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.common.json_decoding import JSON_ERRORS
from penstock.shared.common.records import Headers
from penstock.shared.connect.config_def import ConfigDef, Importance, Type, at_least, one_of
from penstock.shared.connect.converter import Converted, ConverterAndHeaderConverter
from penstock.shared.connect.schema import (
    DATE,
    DECIMAL,
    FLOATS,
    INTEGER_BITS,
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

NOT_AN_ENVELOPE = (
    'JsonConverter with schemas.enable requires "schema" and "payload" fields and may not contain additional fields. '
    "If you are trying to deserialize plain JSON data, set schemas.enable=false in your converter configuration."
)
NO_JSON = "Converting byte[] to Kafka Connect data failed due to serialization error: "
"""The reason in dead letters for bytes that are not JSON."""
DECIMAL_DIGITS_MAX = 100_000
"""The maximum distance of a decimal's first digit from the point: 1E+999999999 as an integer would need all memory."""
DEPTH_MAX = 200
"""The maximum depth of a schema; a deeper one is an error."""
_TYPES = {kind.value: kind for kind in SchemaType}
NOT_FINITE = {"nan": "NaN", "inf": "Infinity", "-inf": "-Infinity"}
"""The text of Kafka Connect for floats that JSON lacks, by Python's text."""


class _Envelope(msgspec.Struct, forbid_unknown_fields=True):
    schema: msgspec.Raw
    payload: msgspec.Raw


class JsonConverter(ConverterAndHeaderConverter):
    """JSON with or without an envelope. Only a value in an envelope has a schema, which may be null."""

    kafka_class = "org.apache.kafka.connect.json.JsonConverter"

    def __init__(self) -> None:
        self._enveloped = True
        self._numeric = False
        self._replace_null = True
        self._cache_size = 1000
        self._read: dict[bytes, tuple[Schema | None, bool]] = {}
        self._written: dict[Schema, bytes] = {}
        self._decode = msgspec.json.Decoder().decode
        self._decode_exactly = msgspec.json.Decoder(float_hook=Decimal).decode
        self._encode = msgspec.json.Encoder(decimal_format="number").encode
        self._decode_envelope = msgspec.json.Decoder(_Envelope).decode

    @classmethod
    def config(cls) -> ConfigDef:
        definition = (
            ConfigDef()
            .define(
                "schemas.enable", Type.BOOLEAN, True, Importance.HIGH, "Whether each value is stored with its schema."
            )
            .define(
                "schemas.cache.size",
                Type.INT,
                1000,
                Importance.HIGH,
                "Maximum number of schemas in the cache.",
                at_least(0),
            )
        )
        return with_decimal_format(definition).define(
            "replace.null.with.default",
            Type.BOOLEAN,
            True,
            Importance.LOW,
            "Whether a null is replaced by the default value of its field.",
        )

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        values = self.config().parse(configs)
        self._enveloped = values["schemas.enable"]
        self._cache_size = values["schemas.cache.size"]
        self._numeric = decimals_are_numeric(values)
        self._replace_null = values["replace.null.with.default"]

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if schema is None and value is None:
            return None
        payload = value_to_json(schema, value, self._numeric, self._replace_null)
        try:
            encoded = self._encode(payload)
        except (TypeError, ValueError, OverflowError) as e:
            raise DataError(f"Converting Kafka Connect data to byte[] failed due to serialization error: {e}") from e
        if not self._enveloped:
            return encoded
        return b'{"schema":' + self._schema_bytes(schema) + b',"payload":' + encoded + b"}"

    def _schema_bytes(self, schema: Schema | None) -> bytes:
        if schema is None:
            return b"null"
        try:
            known = self._written.get(schema)
        except TypeError:
            # A schema with an unhashable default cannot be cached.
            return self._encode(schema_to_envelope(schema, self._numeric))
        if known is None:
            known = self._encode(schema_to_envelope(schema, self._numeric))
            if len(self._written) < self._cache_size:
                self._written[schema] = known
        return known

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        if data is None or not self._enveloped:
            if not data:
                return None, None
            try:
                return None, self._decode(data)
            except JSON_ERRORS as e:
                raise DataError(NO_JSON) from e
        try:
            envelope = self._decode_envelope(data)
        except msgspec.ValidationError:
            raise DataError(NOT_AN_ENVELOPE) from None
        except JSON_ERRORS as e:
            raise DataError(NO_JSON) from e
        schema, exactly = self._read_envelope_schema(bytes(envelope.schema))
        try:
            payload = (self._decode_exactly if exactly else self._decode)(envelope.payload)
        except JSON_ERRORS as e:
            raise DataError(NO_JSON) from e
        return schema, value_from_json(schema, payload, self._replace_null)

    def to_connect_values(self, topic: str, datas: Sequence[bytes | None]) -> tuple[Schema | None, list[Any]] | None:
        if self._enveloped:
            return None
        decode = self._decode
        try:
            return None, [decode(data) if data else None for data in datas]
        except JSON_ERRORS:
            return None

    def _read_envelope_schema(self, raw: bytes) -> tuple[Schema | None, bool]:
        """Return the envelope's schema, and whether the payload's floats must be read as decimals."""
        if raw in self._read:
            return self._read[raw]
        try:
            decoded = self._decode_exactly(raw)
        except JSON_ERRORS as e:
            raise DataError(NO_JSON) from e
        schema = schema_from_envelope(decoded)
        found = schema, has_decimals(schema)
        if len(self._read) < self._cache_size:
            self._read[raw] = found
        return found


def schema_from_envelope(json: Any, depth: int = 0) -> Schema | None:
    """Return the schema in JsonConverter's envelope; None for null. Raises DataError if it is invalid."""
    if json is None:
        return None
    kind = json.get("type") if isinstance(json, dict) else json
    if not isinstance(json, dict) or not isinstance(kind, str) or kind not in _TYPES or depth > DEPTH_MAX:
        raise DataError(f"Unknown schema type: {kind!s:.100}")
    parameters = json.get("parameters")
    # As in JsonConverter, an attribute of another type than it must have is ignored.
    parameters = parameters if isinstance(parameters, dict) else {}
    if not all(isinstance(value, str) for value in parameters.values()):
        raise DataError("Schema parameters must have string values.")
    schema = Schema(
        _TYPES[kind],
        optional=json.get("optional") is True,
        name=text_or_none(json.get("name")),
        version=integer_or_none(json.get("version")),
        doc=text_or_none(json.get("doc")),
        parameters=tuple(parameters.items()),
        **_parts_of_schema(_TYPES[kind], json, depth),
    )
    if (default := json.get("default")) is not None:
        schema = replace(schema, default=value_from_json(schema, default))
    return schema


def text_or_none(value: Any) -> str | None:
    """Return a JSON value if it is text, else None."""
    return value if isinstance(value, str) else None


def integer_or_none(value: Any) -> int | None:
    """Return a JSON value if it is an integer, else None."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _parts_of_schema(kind: SchemaType, json: dict[str, Any], depth: int) -> dict[str, Any]:
    def inner_schema(name: str) -> Schema:
        found = schema_from_envelope(json.get(name), depth + 1)
        if found is None:
            raise DataError(f"{kind.value} schema without its {name}")
        return found

    if kind is SchemaType.ARRAY:
        return {"value_schema": inner_schema("items")}
    if kind is SchemaType.MAP:
        return {"key_schema": inner_schema("keys"), "value_schema": inner_schema("values")}
    if kind is not SchemaType.STRUCT:
        return {}
    fields = []
    if not isinstance(json.get("fields"), list):
        raise DataError('Struct schema\'s "fields" argument is not an array.')
    for field in json["fields"]:
        name = field.get("field") if isinstance(field, dict) else None
        if not isinstance(name, str):
            raise DataError('Struct schema\'s field name not specified properly: no text in "field"')
        fields.append(Field(name, schema_from_envelope(field, depth + 1)))  # type: ignore[arg-type]  # not null: a dict
    return {"fields": tuple(fields)}


def has_decimals(schema: Schema | None) -> bool:
    """Return whether a schema's values may have decimals: `value_from_json` then needs floats read as Decimals."""
    if schema is None:
        return False
    inner = (schema.key_schema, schema.value_schema, *(field.schema for field in schema.fields))
    return schema.name == DECIMAL or any(map(has_decimals, inner))


def schema_to_envelope(schema: Schema | None, numeric_decimals: bool = False) -> dict[str, Any] | None:
    """Return a schema as JSON, in the form of JsonConverter's envelope."""
    if schema is None:
        return None
    json: dict[str, Any] = {"type": schema.type.value}
    if schema.type is SchemaType.STRUCT:
        json["fields"] = [
            {**(schema_to_envelope(field.schema, numeric_decimals) or {}), "field": field.name}
            for field in schema.fields
        ]
    elif schema.type is SchemaType.ARRAY:
        json["items"] = schema_to_envelope(schema.value_schema, numeric_decimals)
    elif schema.type is SchemaType.MAP:
        json["keys"] = schema_to_envelope(schema.key_schema, numeric_decimals)
        json["values"] = schema_to_envelope(schema.value_schema, numeric_decimals)
    json["optional"] = schema.optional
    optional_parts = {"name": schema.name, "version": schema.version, "doc": schema.doc}
    json |= {key: value for key, value in optional_parts.items() if value is not None}
    if schema.parameters:
        json["parameters"] = dict(schema.parameters)
    if schema.has_default:
        json["default"] = value_to_json(schema, schema.default, numeric_decimals)
    return json


def with_decimal_format(definition: ConfigDef) -> ConfigDef:
    """Add the setting `decimal.format` of everything that writes JSON."""
    return definition.define(
        "decimal.format",
        Type.STRING,
        "BASE64",
        Importance.LOW,
        "How decimals are written in JSON: BASE64 of their unscaled bytes, without the scale, or NUMERIC.",
        one_of("BASE64", "NUMERIC", ignore_case=True),
    )


def decimals_are_numeric(values: Mapping[str, Any]) -> bool:
    """Return whether `decimal.format` is NUMERIC."""
    numeric: bool = values["decimal.format"].upper() == "NUMERIC"
    return numeric


def value_to_json(schema: Schema | None, value: Any, numeric_decimals: bool = False, replace_null: bool = True) -> Any:
    """Return a value as JSON, as in the payload of JsonConverter's envelope. `schema` is the value's schema.

    With `numeric_decimals` decimals become JSON numbers. Raises DataError if `value` does not match `schema`. Fields
    that a struct's schema lacks are dropped.
    """
    if schema is None:
        return _schemaless_to_json(value)
    if value is None:
        if schema.has_default and replace_null:
            value = schema.default
        if value is None:
            if schema.optional:
                return None
            raise DataError("Conversion error: null value for field that is required and has no default value")
    if schema.name in _TO_JSON:
        return _TO_JSON[schema.name](schema, value, numeric_decimals)
    if schema.type is SchemaType.STRUCT:
        if not isinstance(value, Mapping):
            raise DataError(f"Invalid type for STRUCT: {type(value).__name__}")
        get = value.get
        return {f.name: value_to_json(f.schema, get(f.name), numeric_decimals, replace_null) for f in schema.fields}
    if schema.type is SchemaType.ARRAY and isinstance(value, list | tuple):
        return [value_to_json(schema.value_schema, item, numeric_decimals, replace_null) for item in value]
    if schema.type is SchemaType.MAP and isinstance(value, Mapping):
        return _map_to_json(schema, value, numeric_decimals, replace_null)
    if schema.type is SchemaType.BYTES and isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    schema.validate(value)
    return _float_to_json(value) if isinstance(value, float) else value


def _float_to_json(value: float) -> float | str:
    return value if math.isfinite(value) else NOT_FINITE[str(value)]


def _map_to_json(schema: Schema, value: Mapping[Any, Any], numeric: bool, replace_null: bool) -> Any:
    items = [(key, value_to_json(schema.value_schema, item, numeric, replace_null)) for key, item in value.items()]
    if schema.key_schema is not None and schema.key_schema.type is SchemaType.STRING and None not in value:
        return dict(items)
    return [[value_to_json(schema.key_schema, key, numeric, replace_null), item] for key, item in items]


def _schemaless_to_json(value: Any) -> Any:
    """Return a value without a schema as JSON. Raises DataError for a type that JsonConverter does not write."""
    if value is None or isinstance(value, str | int | bool):
        return value
    if isinstance(value, float):
        return _float_to_json(value)
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _schemaless_to_json(item) for key, item in value.items()}
        return [[_schemaless_to_json(key), _schemaless_to_json(item)] for key, item in value.items()]
    if isinstance(value, list | tuple):
        return [_schemaless_to_json(item) for item in value]
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    raise DataError(f"Java class {type(value).__name__} does not have corresponding schema type.")


def value_from_json(schema: Schema | None, json: Any, replace_null: bool = True) -> Any:
    """Return the value for `json`, the payload of JsonConverter's envelope. `schema` is the value's schema.

    Raises DataError if `json` does not match `schema`. Fields that a struct's schema lacks are dropped.
    """
    if schema is None:
        return json
    if json is None:
        if schema.has_default and replace_null:
            return schema.default
        if schema.optional:
            return None
        raise DataError(f"Invalid null value for required {schema.type.name} field")
    if schema.name in _FROM_JSON:
        return _FROM_JSON[schema.name](schema, json)
    if schema.type is SchemaType.STRUCT:
        if not isinstance(json, dict):
            raise DataError(f"Structs should be encoded as JSON objects, but found {type(json).__name__}")
        return {
            field.name: value_from_json(field.schema, json.get(field.name), replace_null) for field in schema.fields
        }
    if schema.type is SchemaType.ARRAY and isinstance(json, list):
        return [value_from_json(schema.value_schema, item, replace_null) for item in json]
    if schema.type is SchemaType.MAP:
        return _map_from_json(schema, json, replace_null)
    if schema.type is SchemaType.BYTES and isinstance(json, str):
        return _decode_base64(json)
    if schema.type in FLOATS and (type(json) in (int, Decimal) or json in NOT_FINITE.values()):
        return float(json)
    if schema.type in INTEGER_BITS and type(json) in (float, Decimal):
        json = _as_integer(json)
    schema.validate(json)
    return json


def _as_integer(number: float | Decimal) -> int | float | Decimal:
    """Return a whole number as an integer: JSON does not distinguish 5.0 from 5. Any other number is returned as it is.

    The limits come first: the integer of a Decimal with a huge exponent would need all memory.
    """
    return int(number) if -(1 << 63) <= number < 1 << 63 and number == int(number) else number


def _map_from_json(schema: Schema, json: Any, replace_null: bool) -> dict[Any, Any]:
    keys = schema.key_schema
    values = schema.value_schema
    if isinstance(json, dict) and (keys is None or keys.type is SchemaType.STRING):
        return {key: value_from_json(values, item, replace_null) for key, item in json.items()}
    if isinstance(json, list) and all(isinstance(pair, list) and len(pair) == 2 for pair in json):
        return map_of_entries(
            (value_from_json(keys, key, replace_null), value_from_json(values, item, replace_null))
            for key, item in json
        )
    raise DataError("a map must be a JSON object if its keys are strings, otherwise an array of pairs")


def map_of_entries(entries: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """Return a map of `entries`, pairs of key and value. Raises DataError for a key that is not hashable, such as a
    struct."""
    made: dict[Any, Any] = {}
    for key, value in entries:
        try:
            made[key] = value
        except TypeError as e:
            raise DataError(f"a map's key must be a plain value: {e}") from None
    return made


def _decode_base64(text: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except ValueError as e:
        raise DataError(f"Invalid bytes field: {e}") from None


def _decimal_to_json(schema: Schema, value: Any, numeric: bool) -> Any:
    if not isinstance(value, Decimal):
        raise DataError(f"Invalid type for Decimal, expected Decimal but was {type(value).__name__}")
    if not value.is_finite():
        raise DataError(f"{value} is not a number")
    return value if numeric else base64.b64encode(decimal_to_bytes(value, scale_of(schema))).decode()


def _decimal_from_json(schema: Schema, json: Any) -> Decimal:
    if isinstance(json, str):
        return decimal_from_bytes(_decode_base64(json), scale_of(schema))
    if isinstance(json, int | float | Decimal) and not isinstance(json, bool):
        number = Decimal(str(json)) if isinstance(json, float) else Decimal(json)
        if abs(number.adjusted()) > DECIMAL_DIGITS_MAX:
            raise DataError(f"Invalid Decimal: {number:.20} has too many digits")
        return number
    raise DataError("Invalid type for Decimal, underlying representation should be numeric or bytes")


def _check_integer(json: Any, what: str, bits: int) -> int:
    if type(json) is not int or not -(1 << bits - 1) <= json < 1 << bits - 1:
        raise DataError(f"Invalid type for {what}, underlying representation should be integer but was {json!r:.50}")
    return json


def _check_value_type(value: Any, kind: type, what: str) -> Any:
    if not isinstance(value, kind) or (kind is dt.date and isinstance(value, dt.datetime)):
        raise DataError(f"Invalid type for {what}, expected {kind.__name__} but was {type(value).__name__}")
    return value


_TO_JSON: dict[str | None, Callable[[Schema, Any, bool], Any]] = {
    DECIMAL: _decimal_to_json,
    DATE: lambda _schema, value, _numeric: date_to_days(_check_value_type(value, dt.date, "Date")),
    TIME: lambda _schema, value, _numeric: time_to_ms(_check_value_type(value, dt.time, "Time")),
    TIMESTAMP: lambda _schema, value, _numeric: timestamp_to_ms(_check_value_type(value, dt.datetime, "Timestamp")),
}
_FROM_JSON: dict[str | None, Callable[[Schema, Any], Any]] = {
    DECIMAL: _decimal_from_json,
    DATE: lambda _schema, json: date_from_days(_check_integer(json, "Date", 32)),
    TIME: lambda _schema, json: time_from_ms(_check_integer(json, "Time", 32)),
    TIMESTAMP: lambda _schema, json: timestamp_from_ms(
        _check_integer(json, "Timestamp", INTEGER_BITS[SchemaType.INT64])
    ),
}
