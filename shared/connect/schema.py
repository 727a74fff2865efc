"""Kafka Connect's schemas, for plain Python values.

A STRUCT or MAP is a `dict`, an ARRAY a `list`, and BYTES are `bytes`. The logical types are Decimal
(`decimal.Decimal`), Date (`datetime.date`), Time (`datetime.time`) and Timestamp (`datetime.datetime` with a time
zone). Functions convert their values to the bytes or number of the underlying type, and back.

A value may also have no schema (JSON without an envelope). It is then passed on unchanged.

>>> user = Schema.struct("User", Field("id", INT64), Field("name", OPTIONAL_STRING))
>>> user.validate({"id": 7, "name": None})
>>> user.validate({"id": "7"})
Traceback (most recent call last):
    ...
penstock.errors.DataError: User.id: '7' is not of type INT64
"""

from __future__ import annotations

import datetime as dt
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from decimal import Decimal
from enum import Enum
from typing import Any

from penstock.shared.common.errors import DataError
from penstock.shared.common.time_text import EPOCH


class SchemaType(Enum):
    """Kafka Connect's types. The value is the type's name in JSON envelopes, and in Avro's property `connect.type`."""

    INT8 = "int8"
    INT16 = "int16"
    INT32 = "int32"
    INT64 = "int64"
    FLOAT32 = "float"
    FLOAT64 = "double"
    BOOLEAN = "boolean"
    STRING = "string"
    BYTES = "bytes"
    ARRAY = "array"
    MAP = "map"
    STRUCT = "struct"


INTEGER_BITS = {SchemaType.INT8: 8, SchemaType.INT16: 16, SchemaType.INT32: 32, SchemaType.INT64: 64}
FLOATS = (SchemaType.FLOAT32, SchemaType.FLOAT64)
_PLAIN_TYPES: dict[SchemaType, type] = {
    SchemaType.FLOAT32: float,
    SchemaType.FLOAT64: float,
    SchemaType.BOOLEAN: bool,
    SchemaType.STRING: str,
    SchemaType.BYTES: bytes,
}

DECIMAL = "org.apache.kafka.connect.data.Decimal"
DATE = "org.apache.kafka.connect.data.Date"
TIME = "org.apache.kafka.connect.data.Time"
TIMESTAMP = "org.apache.kafka.connect.data.Timestamp"
LOGICAL: dict[str, tuple[SchemaType, type]] = {
    DECIMAL: (SchemaType.BYTES, Decimal),
    DATE: (SchemaType.INT32, dt.date),
    TIME: (SchemaType.INT32, dt.time),
    TIMESTAMP: (SchemaType.INT64, dt.datetime),
}
"""By logical type name: the schema type that carries it, and its Python type."""
EPOCH_DAY = dt.date(1970, 1, 1)
DAY_MS = 86_400_000
_FLOAT32_BYTES = struct.Struct("<f")


class _NoDefault(Enum):
    NO_DEFAULT = "no default"


NO_DEFAULT = _NoDefault.NO_DEFAULT


@dataclass(frozen=True, slots=True)
class Field:
    """One field of a struct."""

    name: str
    schema: Schema


@dataclass(frozen=True)
class Schema:
    """A type: a STRUCT has `fields`, an ARRAY has `value_schema`, a MAP has `key_schema` and `value_schema`."""

    type: SchemaType
    optional: bool = False
    name: str | None = None
    version: int | None = None
    doc: str | None = None
    default: Any = NO_DEFAULT
    parameters: tuple[tuple[str, str], ...] = ()
    fields: tuple[Field, ...] = ()
    key_schema: Schema | None = None
    value_schema: Schema | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "_by_name", {field.name: field for field in self.fields})
        is_plain = self.name not in LOGICAL
        # For `_is_plain_match`: the Python type of all values, or the range of integers.
        object.__setattr__(self, "_kind", _PLAIN_TYPES.get(self.type) if is_plain else None)
        bits = INTEGER_BITS.get(self.type) if is_plain else None
        object.__setattr__(self, "_integers", range(0) if bits is None else range(-(1 << bits - 1), 1 << bits - 1))

    @classmethod
    def struct(cls, name: str | None, *fields: Field, **more: Any) -> Schema:
        """Return the schema of a struct with these fields."""
        return cls(SchemaType.STRUCT, name=name, fields=fields, **more)

    @classmethod
    def array(cls, items: Schema, **more: Any) -> Schema:
        """Return the schema of an array with these items."""
        return cls(SchemaType.ARRAY, value_schema=items, **more)

    @classmethod
    def map(cls, keys: Schema, values: Schema, **more: Any) -> Schema:
        """Return the schema of a map with these keys and values."""
        return cls(SchemaType.MAP, key_schema=keys, value_schema=values, **more)

    def field(self, name: str) -> Field | None:
        """Return the struct's field of that name, or None if there is none."""
        found: dict[str, Field] = self.__dict__["_by_name"]
        return found.get(name)

    @property
    def has_default(self) -> bool:
        return self.default is not NO_DEFAULT

    @property
    def has_text_keys(self) -> bool:
        """Whether the keys of this MAP are of type STRING and not optional.

        Avro and JSON Schema write any other MAP as an array of entries.
        """
        keys = self.key_schema
        return keys is not None and keys.type is SchemaType.STRING and not keys.optional

    def parameter(self, name: str) -> str | None:
        """Return the value of a schema parameter; None if it is not set."""
        return dict(self.parameters).get(name)

    def as_optional(self) -> Schema:
        """Return this schema, made optional."""
        return self if self.optional else replace(self, optional=True)

    def validate(self, value: Any, where: str = "") -> None:
        """Raises DataError, with the path of the value, if the value does not match this schema."""
        where = where or self.name or "value"
        if value is None:
            if not self.optional and not self.has_default:
                raise DataError(f"{where}: null, and not optional")
            return
        if self.name in LOGICAL:
            # A datetime is a `date` in Python, but as a Date it would lose its time of day.
            if not isinstance(value, LOGICAL[self.name][1]) or (self.name == DATE and isinstance(value, dt.datetime)):
                raise DataError(f"{where}: {value!r} is not a {self.name.rpartition('.')[2]}")
        elif self.type is SchemaType.STRUCT:
            self._validate_struct(value, where)
        elif self.type is SchemaType.ARRAY:
            self._check_type(isinstance(value, list | tuple), value, where)
            for index, item in enumerate(value):
                if self.value_schema is not None and not self.value_schema._is_plain_match(item):
                    self.value_schema.validate(item, f"{where}[{index}]")
        elif self.type is SchemaType.MAP:
            self._check_type(isinstance(value, Mapping), value, where)
            for key, item in value.items():
                if self.key_schema is not None and self.value_schema is not None:
                    self.key_schema.validate(key, f"{where} key")
                    self.value_schema.validate(item, f"{where}[{key!r}]")
        else:
            self._check_type(_is_of_primitive_type(self.type, value), value, where)

    def _validate_struct(self, value: Any, where: str) -> None:
        self._check_type(isinstance(value, Mapping), value, where)
        by_name: dict[str, Field] = self.__dict__["_by_name"]
        for key in value:
            if key not in by_name:
                raise DataError(f"{where}: no field {key!r}")
        for name, field in by_name.items():
            item = value.get(name)
            # Paths are made only if they may be needed: converters validate every record.
            if not field.schema._is_plain_match(item):
                field.schema.validate(item, f"{where}.{name}")

    def _is_plain_match(self, value: Any) -> bool:
        """Return whether a value is a number, text, boolean or bytes that surely matches. Cheaper than `validate`."""
        known = self.__dict__
        kind = type(value)
        return value in known["_integers"] if kind is int else kind is known["_kind"]

    def _check_type(self, fits: bool, value: Any, where: str) -> None:
        if not fits:
            raise DataError(f"{where}: {value!r:.200} is not of type {self.type.name}")


def _is_of_primitive_type(kind: SchemaType, value: Any) -> bool:
    if bits := INTEGER_BITS.get(kind):
        return type(value) is int and -(1 << bits - 1) <= value < 1 << bits - 1
    if kind in FLOATS:
        return type(value) in (float, int)
    if kind is SchemaType.BOOLEAN:
        return type(value) is bool
    return isinstance(value, str) if kind is SchemaType.STRING else isinstance(value, bytes | bytearray | memoryview)


INT8 = Schema(SchemaType.INT8)
INT16 = Schema(SchemaType.INT16)
OPTIONAL_INT16 = Schema(SchemaType.INT16, optional=True)
INT32 = Schema(SchemaType.INT32)
OPTIONAL_INT32 = Schema(SchemaType.INT32, optional=True)
INT64 = Schema(SchemaType.INT64)
OPTIONAL_INT64 = Schema(SchemaType.INT64, optional=True)
FLOAT32 = Schema(SchemaType.FLOAT32)
OPTIONAL_FLOAT32 = Schema(SchemaType.FLOAT32, optional=True)
FLOAT64 = Schema(SchemaType.FLOAT64)
OPTIONAL_FLOAT64 = Schema(SchemaType.FLOAT64, optional=True)
BOOLEAN = Schema(SchemaType.BOOLEAN)
OPTIONAL_BOOLEAN = Schema(SchemaType.BOOLEAN, optional=True)
STRING = Schema(SchemaType.STRING)
OPTIONAL_STRING = Schema(SchemaType.STRING, optional=True)
BYTES = Schema(SchemaType.BYTES)
OPTIONAL_BYTES = Schema(SchemaType.BYTES, optional=True)


def decimal_schema(scale: int, **more: Any) -> Schema:
    """Return a Decimal schema with `scale` digits after the point."""
    return Schema(SchemaType.BYTES, name=DECIMAL, version=1, parameters=(("scale", str(scale)),), **more)


def date_schema(**more: Any) -> Schema:
    """Return a schema of the logical type Date: days since 1970-01-01."""
    return Schema(SchemaType.INT32, name=DATE, version=1, **more)


def time_schema(**more: Any) -> Schema:
    """Return a schema of the logical type Time: milliseconds after midnight."""
    return Schema(SchemaType.INT32, name=TIME, version=1, **more)


def timestamp_schema(**more: Any) -> Schema:
    """Return a schema of the logical type Timestamp: milliseconds since the epoch."""
    return Schema(SchemaType.INT64, name=TIMESTAMP, version=1, **more)


def decimal_to_bytes(value: Decimal, scale: int) -> bytes:
    """Return a Connect Decimal's unscaled value: bytes, big-endian in two's complement, as Java's BigDecimal has it."""
    sign, digits, exponent = value.as_tuple()
    if not isinstance(exponent, int):
        raise DataError(f"{value} is not a number")
    # Decimal arithmetic would round to the context's precision.
    unscaled = int("".join(map(str, digits)))
    shift = exponent + scale
    whole, rest = (unscaled * 10**shift, 0) if shift >= 0 else divmod(unscaled, 10**-shift)
    if rest:
        raise DataError(f"BigDecimal has mismatching scale value for given Decimal schema: {value}, scale {scale}")
    number: int = -whole if sign else whole
    return number.to_bytes((number + (number < 0)).bit_length() // 8 + 1, "big", signed=True)


def decimal_from_bytes(data: bytes, scale: int) -> Decimal:
    """Return the Connect Decimal with this unscaled value and `scale` digits after the point."""
    number = int.from_bytes(data, "big", signed=True)
    return Decimal((number < 0, tuple(map(int, str(abs(number)))), -scale))


def scale_of(schema: Schema) -> int:
    """Return the scale of a Decimal schema. Raises DataError if the scale is missing or not an integer."""
    try:
        return int(schema.parameter("scale") or "")
    except ValueError:
        raise DataError("Invalid Decimal schema: scale parameter not found.") from None


def timestamp_to_ms(value: dt.datetime) -> int:
    """Return a Connect Timestamp as ms since the epoch. A datetime without a time zone is UTC."""
    value = value if value.tzinfo is not None else value.replace(tzinfo=dt.UTC)
    return (value - EPOCH) // dt.timedelta(milliseconds=1)


def time_to_ms(value: dt.time) -> int:
    """Return a Connect Time as ms after midnight."""
    return ((value.hour * 60 + value.minute) * 60 + value.second) * 1000 + value.microsecond // 1000


def time_from_ms(ms: int) -> dt.time:
    """Return the Connect Time of a number of ms after midnight. Raises DataError outside of one day."""
    if not 0 <= ms < DAY_MS:
        raise DataError(f"Invalid time: {ms} ms is not a time of one day")
    return (EPOCH + dt.timedelta(milliseconds=ms)).time()


def date_to_days(value: dt.date) -> int:
    """Return a Connect Date as days since 1970-01-01."""
    return (value - EPOCH_DAY).days


def date_from_days(days: int) -> dt.date:
    """Return the Connect Date of a number of days since 1970-01-01. Raises DataError if Python cannot hold it."""
    try:
        return EPOCH_DAY + dt.timedelta(days=days)
    except OverflowError:
        raise DataError(f"Invalid date: {days} days after 1970 are beyond what Python's dates hold") from None


def timestamp_from_ms(ms: int) -> dt.datetime:
    """Return the Connect Timestamp of a number of ms since the epoch. Raises DataError if Python cannot hold it."""
    try:
        return EPOCH + dt.timedelta(milliseconds=ms)
    except OverflowError:
        raise DataError(f"Invalid timestamp: {ms} ms after 1970 are beyond what Python's dates hold") from None


def as_float32(number: float) -> float:
    """Return the nearest float32 as its shortest decimal, as Java prints it: infinity beyond the range of float32.

    >>> as_float32(21.299999237060547), as_float32(0.123456789)
    (21.3, 0.12345679)
    """
    try:
        packed = _FLOAT32_BYTES.pack(number)
    except OverflowError:
        return math.copysign(math.inf, number)
    (nearest,) = _FLOAT32_BYTES.unpack(packed)
    # A float32 holds all decimals of 6 digits, and 9 digits tell any two of them apart.
    for form in ("%.6g", "%.7g", "%.8g"):
        decimal = float(form % nearest)
        if _FLOAT32_BYTES.pack(decimal) == packed:
            return decimal
    return float(f"{nearest:.9g}")


def infer_schema(value: Any) -> Schema | None:
    """Return the optional schema of a scalar, or None for null and other values.

    Raises DataError for a Decimal that is not finite.

    >>> infer_schema(1.5).type
    <SchemaType.FLOAT64: 'double'>
    """
    if isinstance(value, bool):
        return OPTIONAL_BOOLEAN
    if isinstance(value, int):
        return OPTIONAL_INT64
    if isinstance(value, float):
        return OPTIONAL_FLOAT64
    if isinstance(value, str):
        return OPTIONAL_STRING
    if isinstance(value, bytes):
        return OPTIONAL_BYTES
    if isinstance(value, dt.datetime):
        return timestamp_schema(optional=True)
    if isinstance(value, dt.date):
        return date_schema(optional=True)
    if isinstance(value, dt.time):
        return time_schema(optional=True)
    if isinstance(value, Decimal):
        exponent = value.as_tuple().exponent
        if not isinstance(exponent, int):
            raise DataError(f"{value} is not a number")
        return decimal_schema(max(0, -exponent), optional=True)
    return None
