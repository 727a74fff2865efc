"""Serializers and deserializers: keys and values to bytes and back.

A serializer is a callable `(topic, value) -> bytes | None`, a deserializer `(topic, bytes | None) -> value`; None
stays None both ways (a tombstone is not an empty value). Every failure is a `SerializationError` that names the
topic and the reason.

>>> json_serializer("clicks", {"user": "ann"})
b'{"user":"ann"}'
>>> json_deserializer("clicks", b'{"user":')
Traceback (most recent call last):
    ...
penstock.errors.SerializationError: clicks: not JSON: Input data was truncated
"""

from __future__ import annotations

import inspect
import math
import struct
from collections.abc import Callable
from typing import Any, Generic

import msgspec
from typing_extensions import TypeVar

from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.common.json_decoding import JSON_ERRORS, JsonTypeMismatch, invalid_json

Serializer = Callable[[str, Any], bytes | None]
T = TypeVar("T", default=Any)
Deserializer = Callable[[str, bytes | None], T]


def check_serializer(name: str, serializer: object) -> None:
    """Raise ConfigError unless `serializer`, the argument `name`, is a function that takes a topic and a value and is
    not async. A deserializer takes a topic and bytes.

    >>> check_serializer("key_serializer", lambda topic, value: value.encode())
    >>> check_serializer("key_serializer", len)
    Traceback (most recent call last):
        ...
    penstock.errors.ConfigError: key_serializer must be a function of a topic and a value, got <built-in function len>
    """
    of = f"{name} must be a function of a topic and {'bytes' if 'deserializer' in name else 'a value'}"
    if not callable(serializer):
        raise ConfigError(f"{of}, got {serializer!r}")
    if inspect.iscoroutinefunction(serializer):
        raise ConfigError(f"{of} that is not async, got {serializer!r}")
    try:
        # Of a decorated function, the arguments of what is called.
        signature = inspect.signature(serializer, follow_wrapped=False)
    # Some functions that are written in C have no signature.
    except (TypeError, ValueError):
        return
    try:
        signature.bind("topic", b"")
    except TypeError:
        raise ConfigError(f"{of}, got {serializer!r}") from None


def bytes_serializer(topic: str, value: Any) -> bytes | None:
    """The bytes of bytes, bytearray or memoryview; None for None. Raises SerializationError for any other type."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise SerializationError(f"{topic}: expected bytes, got {type(value).__name__}; set a serializer for other types")


def bytes_deserializer(topic: str, data: bytes | None) -> bytes | None:
    """The bytes, unchanged."""
    return data


def string_serializer(topic: str, value: Any) -> bytes | None:
    """str as UTF-8."""
    if value is None:
        return None
    if not isinstance(value, str):
        raise SerializationError(f"{topic}: expected str, got {type(value).__name__}")
    try:
        return value.encode()
    except UnicodeEncodeError as e:
        raise SerializationError(f"{topic}: not encodable as UTF-8: {e.reason} at {e.start}") from e


def string_deserializer(topic: str, data: bytes | None) -> str | None:
    """UTF-8 to str."""
    if data is None:
        return None
    try:
        return data.decode()
    except UnicodeDecodeError as e:
        raise SerializationError(f"{topic}: not UTF-8: {e.reason} at byte {e.start}") from e


def short_serializer(topic: str, value: Any) -> bytes | None:
    """int as Java's ShortSerializer writes it: two bytes, big-endian."""
    return _pack_integer(topic, value, _SHORT)


def short_deserializer(topic: str, data: bytes | None) -> int | None:
    """Two bytes, big-endian, to int."""
    value: int | None = _unpack_number(topic, data, _SHORT)
    return value


def integer_serializer(topic: str, value: Any) -> bytes | None:
    """int as Java's IntegerSerializer writes it: four bytes, big-endian.

    >>> integer_serializer("clicks", -2)
    b'\\xff\\xff\\xff\\xfe'
    """
    return _pack_integer(topic, value, _INTEGER)


def integer_deserializer(topic: str, data: bytes | None) -> int | None:
    """Four bytes, big-endian, to int."""
    value: int | None = _unpack_number(topic, data, _INTEGER)
    return value


def long_serializer(topic: str, value: Any) -> bytes | None:
    """int as Java's LongSerializer writes it: eight bytes, big-endian."""
    return _pack_integer(topic, value, _LONG)


def long_deserializer(topic: str, data: bytes | None) -> int | None:
    """Eight bytes, big-endian, to int."""
    value: int | None = _unpack_number(topic, data, _LONG)
    return value


def float_serializer(topic: str, value: Any) -> bytes | None:
    """float or int as Java's FloatSerializer writes it: the nearest four-byte IEEE 754 number, big-endian."""
    return _pack_float(topic, value, _FLOAT)


def float_deserializer(topic: str, data: bytes | None) -> float | None:
    """Four bytes of IEEE 754, big-endian, to float."""
    value: float | None = _unpack_number(topic, data, _FLOAT)
    return value


def double_serializer(topic: str, value: Any) -> bytes | None:
    """float or int as Java's DoubleSerializer writes it: eight bytes of IEEE 754, big-endian."""
    return _pack_float(topic, value, _DOUBLE)


def double_deserializer(topic: str, data: bytes | None) -> float | None:
    """Eight bytes of IEEE 754, big-endian, to float."""
    value: float | None = _unpack_number(topic, data, _DOUBLE)
    return value


_SHORT, _INTEGER, _LONG, _FLOAT, _DOUBLE = (struct.Struct(f">{code}") for code in "hiqfd")


def _pack_integer(topic: str, value: Any, form: struct.Struct) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise SerializationError(f"{topic}: expected int, got {type(value).__name__}")
    try:
        return form.pack(value)
    except struct.error as e:
        raise SerializationError(
            f"{topic}: an integer of {value.bit_length()} bits needs more than {form.size} bytes"
        ) from e


def _pack_float(topic: str, value: Any, form: struct.Struct) -> bytes | None:
    if value is None:
        return None
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise SerializationError(f"{topic}: expected float, got {type(value).__name__}")
    try:
        # Java has one NaN, without sign and payload.
        return form.pack(math.nan if value != value else value)
    except (struct.error, OverflowError) as e:
        raise SerializationError(f"{topic}: the number is too large for {form.size} bytes") from e


def _unpack_number(topic: str, data: bytes | None, form: struct.Struct) -> Any:
    if data is None:
        return None
    if len(data) != form.size:
        raise SerializationError(f"{topic}: expected {form.size} bytes, got {len(data)}")
    return form.unpack(data)[0]


_json_encode = msgspec.json.Encoder().encode
_json_decode = msgspec.json.Decoder().decode


def json_serializer(topic: str, value: Any) -> bytes | None:
    """Anything msgspec can encode (dicts, lists, structs, dataclasses, datetimes) as compact JSON."""
    if value is None:
        return None
    try:
        return _json_encode(value)
    except (msgspec.MsgspecError, TypeError, ValueError, OverflowError, RecursionError) as e:
        raise SerializationError(f"{topic}: not encodable as JSON: {e}") from e


def json_deserializer(topic: str, data: bytes | None) -> Any:
    """Any JSON value as plain dicts, lists, strings and numbers."""
    return None if data is None else _decode_json(topic, data, _json_decode)


def struct_deserializer(kind: type[T]) -> Deserializer[T | None]:
    """JSON to one msgspec struct (or any type msgspec knows). The error of a missing or wrong field names its path."""
    return StructDeserializer(kind)


class StructDeserializer(Generic[T]):
    """The deserializer that `struct_deserializer` returns."""

    __slots__ = ("_decode", "kind")

    def __init__(self, kind: type[T]) -> None:
        self.kind = kind
        self._decode: Callable[[bytes], T] = msgspec.json.Decoder(kind).decode

    def __call__(self, topic: str, data: bytes | None) -> T | None:
        return None if data is None else _decode_json(topic, data, self._decode)


def _decode_json(topic: str, data: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(data)
    except JSON_ERRORS as e:
        error = invalid_json(e)
        reason = str(error) if isinstance(error, JsonTypeMismatch) else f"not JSON: {error}"
        raise SerializationError(f"{topic}: {reason}") from e
