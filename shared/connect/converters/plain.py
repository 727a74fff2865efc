"""StringConverter, ByteArrayConverter and the primitives: one value without an envelope, big-endian as in Java."""

from __future__ import annotations

import codecs
import datetime as dt
import struct
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from penstock.shared.common.errors import DataError
from penstock.shared.common.records import Headers
from penstock.shared.connect.config_def import ConfigDef, Importance, Type, invalid
from penstock.shared.connect.converter import Converted, ConverterAndHeaderConverter
from penstock.shared.connect.converters.simple_header import header_text
from penstock.shared.connect.schema import (
    OPTIONAL_BOOLEAN,
    OPTIONAL_BYTES,
    OPTIONAL_FLOAT32,
    OPTIONAL_FLOAT64,
    OPTIONAL_INT16,
    OPTIONAL_INT32,
    OPTIONAL_INT64,
    OPTIONAL_STRING,
    Schema,
    SchemaType,
    as_float32,
)


def _validate_encoding(name: str, value: Any) -> None:
    try:
        # `codecs.lookup` also knows codecs between bytes, such as hex, and some that cannot replace invalid bytes.
        b"\xff".decode(value, "replace").encode(value, "replace")
    except (LookupError, ValueError):
        raise invalid(name, value, "not an encoding of text") from None


def java_text(value: Any, schema: Schema | None) -> str:
    """Return a value's text, as Java's `toString` writes it. A struct, which has a schema, becomes `Struct{a=1,b=x}`.

    Dates and times are in ISO 8601, with the microseconds, and bytes are base64. In Java the text of a date depends on
    the time zone of the JVM, and that of bytes is an address.

    >>> java_text({"a": None, "b": [1e20, True]}, None)
    '{a=null, b=[1.0E20, true]}'
    """
    if type(value) is str:
        return value
    if isinstance(value, Mapping) and schema is not None and schema.type is SchemaType.STRUCT:
        given = [(field, value.get(field.name)) for field in schema.fields]
        texts = [f"{field.name}={java_text(item, field.schema)}" for field, item in given if item is not None]
        return f"Struct{{{','.join(texts)}}}"
    keys, items = (None, None) if schema is None else (schema.key_schema, schema.value_schema)
    if isinstance(value, Mapping):
        texts = [f"{java_text(key, keys)}={java_text(item, items)}" for key, item in value.items()]
        return f"{{{', '.join(texts)}}}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(java_text(item, items) for item in value)}]"
    if isinstance(value, dt.date | dt.time):
        return value.isoformat()
    if isinstance(value, bytearray | memoryview):
        value = bytes(value)
    return "null" if value is None else header_text(value, schema)


class StringConverter(ConverterAndHeaderConverter):
    """Text. Other values are written as `java_text` describes. Invalid bytes are read as U+FFFD."""

    kafka_class = "org.apache.kafka.connect.storage.StringConverter"

    def __init__(self) -> None:
        self._encoding = "utf-8"

    @classmethod
    def config(cls) -> ConfigDef:
        return ConfigDef().define(
            "converter.encoding",
            Type.STRING,
            "UTF-8",
            Importance.HIGH,
            "Character encoding of the text.",
            _validate_encoding,
        )

    def configure(self, configs: Mapping[str, Any], is_key: bool) -> None:
        self._encoding = codecs.lookup(self.config().parse(configs)["converter.encoding"]).name

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if value is None:
            return None
        try:
            return java_text(value, schema).encode(self._encoding)
        except UnicodeEncodeError as e:
            raise DataError(f"Failed to serialize to a string: {e.reason}") from e

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        return OPTIONAL_STRING, None if data is None else data.decode(self._encoding, "replace")

    def to_connect_values(self, topic: str, datas: Sequence[bytes | None]) -> tuple[Schema | None, list[Any]]:
        encoding = self._encoding
        if None not in datas:
            return OPTIONAL_STRING, [data.decode(encoding, "replace") for data in datas]  # type: ignore[union-attr]
        return OPTIONAL_STRING, [None if data is None else data.decode(encoding, "replace") for data in datas]


class ByteArrayConverter(ConverterAndHeaderConverter):
    """The bytes, unchanged."""

    kafka_class = "org.apache.kafka.connect.converters.ByteArrayConverter"

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if schema is not None and schema.type is not SchemaType.BYTES:
            raise DataError(f"Invalid schema type for ByteArrayConverter: {schema.type.name}")
        if value is None or isinstance(value, bytes):
            return value
        if isinstance(value, bytearray | memoryview):
            return bytes(value)
        raise DataError(f"ByteArrayConverter is not compatible with objects of type {type(value).__name__}")

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        return OPTIONAL_BYTES, data

    def to_connect_values(self, topic: str, datas: Sequence[bytes | None]) -> tuple[Schema | None, list[Any]]:
        return OPTIONAL_BYTES, list(datas)


class _NumberConverter(ConverterAndHeaderConverter):
    schema: ClassVar[Schema]
    form: ClassVar[struct.Struct]
    python: ClassVar[type]

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if schema is not None and schema.type is not self.schema.type:
            raise DataError(f"Failed to serialize to {self.schema.type.name}: the schema is {schema.type.name}")
        if value is None:
            return None
        fits = type(value) is int or (self.python is float and type(value) is float)
        try:
            if fits:
                return self.form.pack(value)
        except (struct.error, OverflowError):
            pass
        raise DataError(f"Failed to serialize to {self.schema.type.name}: {value!r:.100}")

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        if data is None:
            return self.schema, None
        if len(data) != self.form.size:
            raise DataError(
                f"Failed to deserialize {self.schema.type.name}: got {len(data)} bytes, expected {self.form.size}"
            )
        return self.schema, self.form.unpack(data)[0]


class ShortConverter(_NumberConverter):
    """INT16 in two bytes."""

    kafka_class = "org.apache.kafka.connect.converters.ShortConverter"
    schema = OPTIONAL_INT16
    form = struct.Struct(">h")
    python = int


class IntegerConverter(_NumberConverter):
    """INT32 in four bytes."""

    kafka_class = "org.apache.kafka.connect.converters.IntegerConverter"
    schema = OPTIONAL_INT32
    form = struct.Struct(">i")
    python = int


class LongConverter(_NumberConverter):
    """INT64 in eight bytes."""

    kafka_class = "org.apache.kafka.connect.converters.LongConverter"
    schema = OPTIONAL_INT64
    form = struct.Struct(">q")
    python = int


class FloatConverter(_NumberConverter):
    """FLOAT32 in four bytes."""

    kafka_class = "org.apache.kafka.connect.converters.FloatConverter"
    schema = OPTIONAL_FLOAT32
    form = struct.Struct(">f")
    python = float

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        schema, number = super().to_connect_data(topic, data, headers)
        return schema, None if number is None else as_float32(number)


class DoubleConverter(_NumberConverter):
    """FLOAT64 in eight bytes."""

    kafka_class = "org.apache.kafka.connect.converters.DoubleConverter"
    schema = OPTIONAL_FLOAT64
    form = struct.Struct(">d")
    python = float


class BooleanConverter(ConverterAndHeaderConverter):
    """One byte, 1 or 0."""

    kafka_class = "org.apache.kafka.connect.converters.BooleanConverter"

    def from_connect_data(self, topic: str, schema: Schema | None, value: Any) -> bytes | None:
        if schema is not None and schema.type is not SchemaType.BOOLEAN:
            raise DataError(f"Invalid schema type for BooleanConverter: {schema.type.name}")
        if value is None or isinstance(value, bool):
            return None if value is None else bytes([value])
        raise DataError(f"BooleanConverter is not compatible with objects of type {type(value).__name__}")

    def to_connect_data(self, topic: str, data: bytes | None, headers: Headers = ()) -> Converted:
        if data is None or data in (b"\x00", b"\x01"):
            return OPTIONAL_BOOLEAN, None if data is None else data == b"\x01"
        raise DataError(f"Failed to deserialize BOOLEAN: {data[:20]!r}")
