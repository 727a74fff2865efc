"""Keys and values to bytes and back.

A serializer is a callable `(topic, value) -> bytes | None`, a deserializer `(topic, bytes | None) -> value`; None
stays None both ways (a tombstone is not an empty value). Every failure is a `SerializationError` that says which
topic and why.

>>> json_serializer("clicks", {"user": "ann"})
b'{"user":"ann"}'
>>> json_deserializer("clicks", b'{"user":')
Traceback (most recent call last):
    ...
penstock.errors.SerializationError: clicks: not JSON: Input data was truncated
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
from typing_extensions import TypeVar

from penstock.shared.common.errors import SerializationError

Serializer = Callable[[str, Any], bytes | None]
T = TypeVar("T", default=Any)
Deserializer = Callable[[str, bytes | None], T]


def bytes_serializer(topic: str, value: Any) -> bytes | None:
    """bytes, bytearray and memoryview as they are; anything else is refused."""
    if value is None or type(value) is bytes:
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise SerializationError(f"{topic}: expected bytes, got {type(value).__name__}; set a serializer for other types")


def bytes_deserializer(topic: str, data: bytes | None) -> bytes | None:
    """The bytes as they are."""
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
    return None if data is None else _decode(topic, data, _json_decode)


def struct_deserializer(struct: type[T]) -> Deserializer[T | None]:
    """JSON to one msgspec struct (or any type msgspec knows); a missing or ill-typed field is refused by its path."""
    decode: Callable[[bytes], T] = msgspec.json.Decoder(struct).decode

    def deserialize(topic: str, data: bytes | None) -> T | None:
        return None if data is None else _decode(topic, data, decode)

    return deserialize


def _decode(topic: str, data: bytes, decode: Callable[[bytes], T]) -> T:
    try:
        return decode(data)
    except msgspec.ValidationError as e:
        raise SerializationError(f"{topic}: {e}") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as e:
        raise SerializationError(f"{topic}: not JSON: {e}") from e
