"""Cast: converts fields, or the whole key or value, to another primitive type.

Numbers become narrower as in Java. Integers wrap around. Decimals are truncated and wrap around. Floats are truncated.
For int64 they are limited to its range. For a narrower type they are limited to the range of int32 and then wrap
around. A number is true if its int64 is not 0. A text must be an integer in the range of the type for an integer type,
and for a float a decimal number, NaN or Infinity as Java's `Double.parseDouble` reads it. A number beyond the range of
float32 becomes infinite. As a boolean, only the text `true` is true, in upper or lower case.
Bytes become base64 text. Dates and times become their underlying number, or ISO text.
"""

from __future__ import annotations

import base64
import datetime as dt
import math
import re
from dataclasses import replace
from decimal import Decimal
from typing import Any

from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.connect.config_def import HIGH, NO_DEFAULT, ConfigDef, Type
from penstock.shared.connect.converters.simple_header import header_text
from penstock.shared.connect.record import ConnectRecord
from penstock.shared.connect.schema import (
    INTEGER_BITS,
    Field,
    Schema,
    SchemaType,
    as_float32,
    date_to_days,
    time_to_ms,
    timestamp_to_ms,
)
from penstock.shared.connect.transforms.parts import (
    OnPart,
    key_and_value,
    require_map,
    require_struct,
    with_replace_null,
)

TYPES = {
    "int8": SchemaType.INT8,
    "int16": SchemaType.INT16,
    "int32": SchemaType.INT32,
    "int64": SchemaType.INT64,
    "float32": SchemaType.FLOAT32,
    "float64": SchemaType.FLOAT64,
    "boolean": SchemaType.BOOLEAN,
    "string": SchemaType.STRING,
}
INTEGER_TEXT = re.compile("[+-]?[0-9]+")
FLOAT_TEXT = re.compile(r"\s*[+-]?(NaN|Infinity|([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?[fFdD]?)\s*", re.ASCII)
"""What Java's `Double.parseDouble` reads, except hexadecimal numbers. Python also reads 1_000 and inf, but not 1f."""


def parse_spec(spec: list[str]) -> dict[str | None, SchemaType]:
    """Return Cast's types by field; the type of the whole key or value is under None.

    Raises ConfigError for an invalid spec.
    """
    if not spec:
        raise ConfigError("Must specify at least one field to cast.")
    casts: dict[str | None, SchemaType] = {}
    for item in spec:
        name, colon, kind = item.rpartition(":")
        if kind.strip().lower() not in TYPES:
            raise ConfigError(f"Invalid field mapping: {item}: one of {', '.join(TYPES)} must follow the colon")
        casts[name.strip() if colon else None] = TYPES[kind.strip().lower()]
    if None in casts and len(casts) > 1:
        raise ConfigError("Cast transformations that specify a type to cast the entire value to may ony specify one")
    return casts


def cast(value: Any, target: SchemaType) -> Any:
    """Return a value cast to another type. Raises DataError if it cannot be converted."""
    if value is None:
        return None
    if target is SchemaType.STRING:
        return _as_string(value)
    number = _as_number_or_text(value)
    try:
        if target in INTEGER_BITS:
            return _as_integer(number, INTEGER_BITS[target])
        if target is SchemaType.BOOLEAN:
            if isinstance(number, str):
                return number.lower() == "true"
            return _as_integer(number, INTEGER_BITS[SchemaType.INT64]) != 0
        if isinstance(number, str):
            if not FLOAT_TEXT.fullmatch(number):
                raise ValueError(number)
            number = number.strip().rstrip("fFdD")
        return as_float32(float(number)) if target is SchemaType.FLOAT32 else float(number)
    except (ValueError, OverflowError):
        raise DataError(f"Value ({value}) was out of range for requested data type") from None


def _as_number_or_text(value: Any) -> int | float | Decimal | str:
    """Return the number or text of a value, from which Cast converts to another type."""
    if isinstance(value, bool):
        return int(value)
    if isinstance(value, int | float | Decimal | str):
        return value
    if isinstance(value, dt.datetime):
        return timestamp_to_ms(value)
    if isinstance(value, dt.date):
        return date_to_days(value)
    if isinstance(value, dt.time):
        return time_to_ms(value)
    raise DataError(f"Unexpected type in Cast transformation: {type(value).__name__}")


def _as_integer(number: int | float | Decimal | str, bits: int) -> int:
    """Return a number or text as an integer of `bits` bits.

    Raises ValueError or OverflowError for a text that is not such an integer, or a Decimal that is not finite.
    """
    half = 1 << bits - 1
    if isinstance(number, str):
        if not INTEGER_TEXT.fullmatch(number) or not -half <= (parsed := int(number)) < half:
            raise ValueError(number)
        return parsed
    if isinstance(number, float):
        limit = 1 << (63 if bits == 64 else 31)
        number = 0 if math.isnan(number) else int(min(max(number, -limit), limit - 1))
        number = min(number, limit - 1)
    if isinstance(number, Decimal):
        exponent = number.as_tuple().exponent
        # 10**64 is a multiple of 2**64. `int` would take seconds or minutes for a very large exponent.
        if isinstance(exponent, int) and exponent >= INTEGER_BITS[SchemaType.INT64]:
            return 0
    return (int(number) + half) % (2 * half) - half


def _as_string(value: Any) -> str:
    if isinstance(value, bytes | bytearray | memoryview):
        return base64.b64encode(value).decode()
    if isinstance(value, dict | list):
        raise DataError(f"Unexpected type in Cast transformation: {type(value).__name__}")
    return header_text(value, None)


class _Cast(OnPart):
    """Casts fields, or the whole key or value, to other types."""

    @classmethod
    def config(cls) -> ConfigDef:
        definition = ConfigDef().define(
            "spec",
            Type.LIST,
            NO_DEFAULT,
            HIGH,
            "Fields to cast as field1:type,field2:type, or one type for the whole key or value.",
            lambda _name, spec: _validate_cast_spec(spec),
        )
        return with_replace_null(definition)

    def configured(self) -> None:
        self._casts = parse_spec(self.values["spec"])
        self._whole = self._casts.get(None)

    def transform(self, record: ConnectRecord, schema: Schema | None, value: Any) -> ConnectRecord:
        if value is None:
            return record
        if self._whole is not None:
            new_schema = None if schema is None else self.updated(schema, self._whole_schema)
            return self.new(record, new_schema, cast(value, self._whole))
        if schema is None:
            given = dict(require_map(value, "cast types"))
            return self.new(record, None, given | {n: cast(given.get(n), to) for n, to in self._casts_of_fields()})
        given = dict(require_struct(schema, value, "cast types"))
        found = {field.name: self.field_value(field, given) for field in schema.fields}
        casts = {name: cast(found[name], to) for name, to in self._casts_of_fields() if name in found}
        return self.new(record, self.updated(schema, self._struct_schema), found | casts)

    def _casts_of_fields(self) -> list[tuple[str, SchemaType]]:
        return [(name, to) for name, to in self._casts.items() if name is not None]

    def _whole_schema(self, schema: Schema) -> Schema:
        assert self._whole is not None
        return _cast_schema(schema, self._whole)

    def _struct_schema(self, schema: Schema) -> Schema:
        fields = [
            Field(f.name, _cast_schema(f.schema, self._casts[f.name])) if f.name in self._casts else f
            for f in schema.fields
        ]
        return replace(schema, fields=tuple(fields))


def _cast_schema(schema: Schema, to: SchemaType) -> Schema:
    default = cast(schema.default, to) if schema.has_default else schema.default
    return Schema(to, optional=schema.optional, doc=schema.doc, default=default)


def _validate_cast_spec(spec: list[str] | None) -> None:
    parse_spec(spec or [])


CastKey, CastValue = key_and_value(_Cast, "Cast")
