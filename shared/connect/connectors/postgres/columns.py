"""Converts Postgres's columns to Connect's fields, and values from the driver or from text to Connect's values."""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Sequence
from decimal import Context, Decimal, InvalidOperation
from typing import Any, NamedTuple

from penstock.shared.connect.connectors.postgres.table_reader import aware
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.schema import (
    Field,
    Schema,
    SchemaType,
    date_schema,
    decimal_schema,
    time_schema,
    timestamp_schema,
)

DIGITS = Context(prec=150_000)
"""The maximum precision of Postgres's numeric. Python's default of 28 digits would fail for longer ones."""
_TYPES = {
    "int2": SchemaType.INT16,
    "int4": SchemaType.INT32,
    "int8": SchemaType.INT64,
    "float4": SchemaType.FLOAT32,
    "float8": SchemaType.FLOAT64,
    "bool": SchemaType.BOOLEAN,
    "bytea": SchemaType.BYTES,
}
TYPE_NAMES = {
    16: "bool", 17: "bytea", 20: "int8", 21: "int2", 23: "int4", 700: "float4", 701: "float8",
    1082: "date", 1083: "time", 1114: "timestamp", 1184: "timestamptz", 1700: "numeric",
}  # fmt: skip
"""The types that are not read as text, by OID, which is the same in every database."""


class TypeName(NamedTuple):
    """The type in one of the driver's attributes."""

    name: str


class Attribute(NamedTuple):
    """A column in the form of the driver's descriptions, for columns without one."""

    name: str
    type: TypeName


def schema_of(name: str, attributes: Sequence[Any], scale: int) -> Schema:
    """A row's schema from its columns' types. A type that Connect lacks becomes text."""
    fields = []
    for attribute in attributes:
        kind = attribute.type.name
        if kind == "numeric":
            schema = decimal_schema(scale, optional=True)
        elif kind == "date":
            schema = date_schema(optional=True)
        elif kind == "time":
            schema = time_schema(optional=True)
        elif kind in ("timestamp", "timestamptz"):
            schema = timestamp_schema(optional=True)
        else:
            schema = Schema(_TYPES.get(kind, SchemaType.STRING), optional=True)
        fields.append(Field(attribute.name, schema))
    return Schema.struct(name, *fields)


def value_of(schema: Schema, value: Any, scale: int) -> Any:
    """A column's value in the form of its schema."""
    if value is None:
        return None
    if isinstance(value, Decimal):
        if not value.is_finite():
            return None  # Connect's Decimal has no infinity
        return value.quantize(Decimal(1).scaleb(-scale), context=DIGITS)
    if isinstance(value, dt.datetime):
        return aware(value)
    return str(value) if schema.type is SchemaType.STRING and not isinstance(value, str) else value


def value_from(type_oid: int, text: str) -> Any:
    """A column's value in the driver's form, from its text in the styles that `TEXT_STYLES` sets.

    >>> value_from(1184, "2024-01-01 12:00:00.25+00")
    datetime.datetime(2024, 1, 1, 12, 0, 0, 250000, tzinfo=datetime.timezone.utc)
    """
    name = TYPE_NAMES.get(type_oid)
    if name is None:
        return text
    try:
        return _PARSERS[name](text)
    except (ValueError, InvalidOperation):
        raise ConnectError(f"{text!r} is a {name} that Connect cannot represent") from None


TEXT_STYLES = "SET datestyle = 'ISO'; SET bytea_output = 'hex'; SET extra_float_digits = 3; SET timezone = 'UTC'"


def _parse_infinite_times(parse: Callable[[str], Any], kind: Any) -> Callable[[str], Any]:
    """Parses infinite times as the first and the last time of Python, as the driver does."""
    ends = {"infinity": kind.max, "-infinity": kind.min}
    return lambda text: ends[text] if text in ends else parse(text)


_PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("int2", "int4", "int8"), int),
    **dict.fromkeys(("float4", "float8"), float),
    "bool": lambda text: text == "t",
    "bytea": lambda text: bytes.fromhex(text.removeprefix("\\x")),
    "numeric": Decimal,
    "date": _parse_infinite_times(dt.date.fromisoformat, dt.date),
    "time": dt.time.fromisoformat,
    **dict.fromkeys(("timestamp", "timestamptz"), _parse_infinite_times(dt.datetime.fromisoformat, dt.datetime)),
}
