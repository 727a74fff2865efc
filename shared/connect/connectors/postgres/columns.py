"""Converts Postgres's columns and their values to Connect's fields, and back.

The source gets values from the driver, or as text. The sink converts the values of records to those of columns.
"""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable, Sequence
from decimal import Context, Decimal
from functools import partial
from typing import Any, TypeVar

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.connect.connectors.postgres.database import driver
from penstock.shared.connect.connectors.postgres.sql import quoted_column
from penstock.shared.connect.schema import (
    DATE,
    DECIMAL,
    TIME,
    TIMESTAMP,
    Field,
    Schema,
    SchemaType,
    as_float32,
    date_schema,
    decimal_schema,
    time_schema,
    timestamp_from_ms,
    timestamp_schema,
)

D = TypeVar("D", dt.date, dt.datetime)
Column = tuple[str, str]
"""The name and the type of a column."""

DIGITS = Context(prec=150_000)
"""Enough digits for any numeric of Postgres. Python's default of 28 digits would fail for longer ones."""
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
"""The types whose values do not become strings, by OID, which is the same in every database."""
TYPE_OIDS = {name: oid for oid, name in TYPE_NAMES.items()}
_READ_TYPES = {*TYPE_NAMES.values(), "text", "varchar", "bpchar"}
"""The types that a query returns without a cast to text. The cast would cut spaces off bpchar."""
_COLUMN_TYPES = {
    SchemaType.INT8: "smallint",
    SchemaType.INT16: "smallint",
    SchemaType.INT32: "integer",
    SchemaType.INT64: "bigint",
    SchemaType.FLOAT32: "real",
    SchemaType.FLOAT64: "double precision",
    SchemaType.BOOLEAN: "boolean",
    SchemaType.STRING: "text",
    SchemaType.BYTES: "bytea",
    SchemaType.ARRAY: "jsonb",
    SchemaType.MAP: "jsonb",
    SchemaType.STRUCT: "jsonb",
}
_LOGICAL_COLUMN_TYPES = {DATE: "date", TIME: "time", TIMESTAMP: "timestamptz", DECIMAL: "numeric"}
_VALUE_COLUMN_TYPES: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "bigint"),
    (float, "double precision"),
    (str, "text"),
    (bytes, "bytea"),
    (Decimal, "numeric"),
    (dt.datetime, "timestamptz"),
    (dt.date, "date"),
    (dt.time, "time"),
)


def columns_of_query(prepared: Any) -> list[Column]:
    """Return the columns of a prepared query."""
    return [(attribute.name, attribute.type.name) for attribute in prepared.get_attributes()]


def schema_of(name: str, columns: Sequence[Column], scale: int) -> Schema:
    """Return the schema of a row from the types of its columns. A type without a counterpart in Connect becomes a
    string."""
    fields = []
    for column, kind in columns:
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
        fields.append(Field(column, schema))
    return Schema.struct(name, *fields)


def with_texts(statement: str, columns: Sequence[Column]) -> str:
    """Return the query with columns of types without a counterpart in Connect as text. `columns` are its columns.

    >>> with_texts("SELECT * FROM t", [("id", "int4"), ("list", "text[]")])
    'SELECT c0 AS "id",c1::text AS "list" FROM (SELECT * FROM t) q (c0,c1)'
    """
    kept = [kind in _READ_TYPES for _, kind in columns]
    if all(kept):
        return statement
    # Numbered, since columns of a query may have the same name.
    names = [f"c{at}" for at in range(len(kept))]
    selected = [
        f"{name}{'' if is_kept else '::text'} AS {quoted_column(column)}"
        for name, is_kept, (column, _) in zip(names, kept, columns, strict=True)
    ]
    return f"SELECT {','.join(selected)} FROM ({statement}) q ({','.join(names)})"


def value_of(value: Any, schema: Schema, scale: int) -> Any:
    """Return a column's value in the form of its schema. `value` has the driver's form.

    A numeric is rounded to `scale` digits after the point. A numeric that is infinite or NaN becomes None.
    """
    if isinstance(value, Decimal):
        if not value.is_finite():
            # Connect's Decimal has neither infinity nor NaN.
            return None
        return value.quantize(Decimal(1).scaleb(-scale), context=DIGITS)
    if isinstance(value, dt.datetime):
        return aware(value)
    if isinstance(value, float) and schema.type is SchemaType.FLOAT32:
        return as_float32(value)
    return value


def aware(value: dt.datetime) -> dt.datetime:
    """Return a column's time with its zone; UTC if the column has none."""
    return value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)


def value_from(type_oid: int, text: str) -> Any:
    """Return a column's value in the driver's form, from its text in the styles that `TEXT_STYLES` sets.

    >>> value_from(1184, "2024-01-01 12:00:00.25+00")
    datetime.datetime(2024, 1, 1, 12, 0, 0, 250000, tzinfo=datetime.timezone.utc)
    """
    name = TYPE_NAMES.get(type_oid)
    return text if name is None else _PARSERS[name](text)


TEXT_STYLES = "SET datestyle = 'ISO'; SET bytea_output = 'hex'; SET extra_float_digits = 3; SET timezone = 'UTC'"


def parse_time(text: str) -> dt.time:
    """Return the value of a `time` column. 24:00:00, which neither Python nor Connect has, becomes the last time of the
    day, as in the `LocalTime` of Postgres's JDBC driver.
    """
    return dt.time.max if text == "24:00:00" else dt.time.fromisoformat(text)


def _parse_in_range(parse: Callable[[str], Any], kind: Any) -> Callable[[str], Any]:
    """Return a parser that reads a time outside the years 1 to 9999, as `_nearest` does."""

    def parse_nearest(text: str) -> Any:
        if text == "-infinity" or text.endswith(" BC"):
            return kind.min
        # Only a year after 9999 has more than four digits.
        return parse(text) if text[4] == "-" else kind.max

    return parse_nearest


def decode_date(form: tuple[int]) -> dt.date:
    """Return the value of a date column from its binary form, the days since 2000-01-01.

    >>> decode_date((1,)), decode_date((2**31 - 1,))
    (datetime.date(2000, 1, 2), datetime.date(9999, 12, 31))
    """
    return _nearest(dt.date(2000, 1, 1), days=form[0])


def encode_timestamp(value: dt.datetime) -> tuple[int]:
    """Return the binary form of a time with a zone."""
    return ((value - dt.datetime(2000, 1, 1, tzinfo=dt.UTC)) // dt.timedelta(microseconds=1),)


BEFORE_YEAR_1 = dt.datetime.min.replace(tzinfo=dt.UTC)
"""The value of a timestamp that is before the year 1 or -infinity. The first time of the year 1 is equal, but
is another object."""
_YEAR_1 = encode_timestamp(BEFORE_YEAR_1)


def decode_timestamp(form: tuple[int]) -> dt.datetime:
    """Return the value of a timestamp column, in UTC, from its binary form, the µs since 2000-01-01.

    >>> decode_timestamp((-(2**63),)) is BEFORE_YEAR_1
    True
    """
    return BEFORE_YEAR_1 if form < _YEAR_1 else aware(_nearest(dt.datetime(2000, 1, 1), microseconds=form[0]))


def _nearest(start: D, **distance: int) -> D:
    """Return the time at this distance. An infinite time, or one outside the years 1 to 9999, becomes the first or the
    last one in these years."""
    try:
        return start + dt.timedelta(**distance)
    except OverflowError:
        return start.max if max(distance.values()) > 0 else start.min


_PARSERS: dict[str, Callable[[str], Any]] = {
    **dict.fromkeys(("int2", "int4", "int8"), int),
    **dict.fromkeys(("float4", "float8"), float),
    "bool": lambda text: text == "t",
    "bytea": lambda text: bytes.fromhex(text.removeprefix("\\x")),
    "numeric": Decimal,
    "date": _parse_in_range(dt.date.fromisoformat, dt.date),
    "time": parse_time,
    **dict.fromkeys(("timestamp", "timestamptz"), _parse_in_range(dt.datetime.fromisoformat, dt.datetime)),
}


def column_type(schema: Schema | None, value: Any) -> str | None:
    """Return the type of the Postgres column for a record's field. Returns None for a null without a schema."""
    if schema is not None:
        return _LOGICAL_COLUMN_TYPES.get(schema.name or "", _COLUMN_TYPES[schema.type])
    for kind, name in _VALUE_COLUMN_TYPES:
        if isinstance(value, kind):
            return name
    return None if value is None else "jsonb"


def column_adapter(kind: str) -> Callable[[Any], Any] | None:
    """Return the function that converts a record's value for a column of this type; None if none is needed."""
    # Without a precision or length: `timestamp(3) without time zone` is `timestamp without time zone`. Without the
    # fields of an interval: `interval day to second(3)` is `interval`.
    plain = re.sub(r"\([^)]*\)|(?<=^interval) [a-z ]+", "", kind)
    # The driver would write the float 0.1 as a numeric of 55 digits, and a boolean as a number.
    if plain in ("numeric[]", "real[]", "double precision[]"):
        return partial(_adapt_items, _ADAPTERS[plain.removesuffix("[]")])
    return _ADAPTERS.get(plain)


RANGES = ("int4range", "int8range", "numrange", "tsrange", "tstzrange", "daterange")
INTEGER_BYTES = {"int2": 2, "int4": 4, "int8": 8}
"""The sizes of Postgres's integers."""


def encode_integer(size: int, value: Any) -> bytes:
    """Return a value for an integer column as bytes, in Postgres's binary form.

    Raises DataError if the value is not a whole number, or out of range. The driver's own encoder truncates fractions.
    """
    if type(value) is not int:
        is_number = isinstance(value, float | Decimal) and not (isinstance(value, Decimal) and value.is_snan())
        if not is_number or not math.isfinite(value) or value != int(value):
            raise DataError(f"{value!r:.100} is not a whole number, as an integer column needs")
        value = int(value)
    try:
        return int.to_bytes(value, size, "big", signed=True)
    except OverflowError:
        shown = repr(value) if value.bit_length() < 400 else f"an integer of {value.bit_length()} bits"
        raise DataError(f"{shown} is out of the range of an integer of {size} bytes") from None


def decode_integer(data: bytes) -> int:
    """Return the value of an integer column from Postgres's binary form."""
    return int.from_bytes(data, "big", signed=True)


def _adapt_json(value: Any) -> Any:
    # A text must be JSON, as the source reads it. Postgres rejects any other text.
    if value is None or isinstance(value, str):
        return value
    return msgspec.json.encode(value, enc_hook=str).decode()


def _adapt_text(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes | bytearray | memoryview):
        # Postgres has no cast of bytea to text: the encoding of the bytes is unknown.
        raise DataError(f"{value!r:.100} is bytes, and its column has text")
    return _adapt_json(value) if isinstance(value, dict | list) else str(value)


def _from_iso(kind: Any, what: str) -> Callable[[Any], Any]:
    """Return the adapter that parses texts of ISO 8601. None, datetimes and values of this kind remain."""

    def adapt_text(value: Any) -> Any:
        # From a datetime the driver writes the time of day.
        if value is None or isinstance(value, kind | dt.datetime):
            return value
        try:
            return kind.fromisoformat(value)
        except (TypeError, ValueError):
            raise DataError(f"{value!r:.100} is not an ISO 8601 {what}") from None

    return adapt_text


_adapt_date = _from_iso(dt.date, "date")
_adapt_time = _from_iso(dt.time, "time of day")
_adapt_datetime = _from_iso(dt.datetime, "time")


def encode_as_date(value: Any) -> tuple[int]:
    """Return a value for a date column in Postgres's binary form.

    Raises DataError if the value is neither a date nor the text of one. The driver's own encoder writes the last date
    of the year 9999 as infinity, and the first of the year 1 as -infinity.
    """
    return (_adapt_date(value).toordinal() - dt.date(2000, 1, 1).toordinal(),)


def encode_as_timestamp(value: Any) -> tuple[int]:
    """Return a value for a `timestamp` or `timestamptz` column in Postgres's binary form. An integer is ms since the
    epoch, and a text is in ISO 8601. A time without a zone is UTC, and a date is midnight in UTC.

    Raises DataError for any other value, also for a float. The driver's own encoder writes the last µs of the year
    9999 as infinity, and the first of the year 1 as -infinity.
    """
    if isinstance(value, bool):
        raise DataError(f"{value!r} is not a time")
    if isinstance(value, int):
        return encode_timestamp(timestamp_from_ms(value))
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        value = dt.datetime(value.year, value.month, value.day)
    return encode_timestamp(aware(_adapt_datetime(value)))


def _adapt_bits(value: Any) -> Any:
    return driver().BitString(value) if isinstance(value, str) else value


def _only_null(kind: str) -> Callable[[Any], Any]:
    """Return the adapter for a type whose values the driver has in classes that no record has."""

    def adapt_null(value: Any) -> None:
        if value is not None:
            raise DataError(f"the sink cannot write columns of type {kind}")

    return adapt_null


def _adapt_float(value: Any) -> Any:
    if isinstance(value, bool):
        raise DataError(f"{value!r} is not a number")
    return value


def _adapt_numeric(value: Any) -> Any:
    return Decimal(str(_adapt_float(value))) if isinstance(value, float | int) else value


def _adapt_items(adapt: Callable[[Any], Any], value: Any) -> Any:
    # A list in a list is another dimension of the array.
    return [_adapt_items(adapt, item) for item in value] if isinstance(value, list | tuple) else adapt(value)


def _adapt_bytea(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


def _adapt_char(value: Any) -> Any:
    data = _adapt_bytea(value)
    # Postgres reads the empty text as a zero byte, and returns it as the empty text.
    return data if data != b"" else b"\0"


_ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "json": _adapt_json,
    "jsonb": _adapt_json,
    "text": _adapt_text,
    "character varying": _adapt_text,
    "character": _adapt_text,
    "bpchar": _adapt_text,
    "numeric": _adapt_numeric,
    **dict.fromkeys(("real", "double precision"), _adapt_float),
    "bytea": _adapt_bytea,
    '"char"': _adapt_char,
    **dict.fromkeys(("time without time zone", "time with time zone"), _adapt_time),
    **dict.fromkeys(("bit", "bit varying"), _adapt_bits),
    **{kind: _only_null(kind) for kind in ("interval", *RANGES)},
}
