"""How records become bytes at a sink: what `to()` writes unless it is given an encoder; and results read back."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from penstock.shared.common.errors import SerializationError
from penstock.shared.common.serialization import Deserializer, json_deserializer, json_serializer
from penstock.shared.streams.record import Record, WindowKey, WindowResult


def encode_json(record: Record) -> tuple[bytes | None, bytes | None]:
    """Keys: str as UTF-8, bytes as they are, a window's as its record key. Values: JSON, None as a tombstone."""
    key = record.key
    return encode_key(key.key if isinstance(key, WindowKey) else key), _value_bytes(record.value)


def encode_updates(record: Record) -> tuple[bytes | None, bytes | None]:
    """As `encode_json`, but a window's key is the whole window as JSON: a retraction has no value to name it."""
    key = record.key
    if isinstance(key, WindowKey):
        return msgspec.json.encode(key._asdict()), _value_bytes(record.value)
    return encode_key(key), _value_bytes(record.value)


def result_deserializer(window_key: str) -> Deserializer:
    """Reads a window's result back from its flat object; `window_key` is "bytes" where its key is."""

    def decode(topic: str, data: bytes | None) -> WindowResult | None:
        if (value := json_deserializer(topic, data)) is None:
            return None
        try:
            key, start, end = value.pop("key"), value.pop("start"), value.pop("end")
            key = base64.b64decode(key, validate=True) if window_key == "bytes" else key
        except (AttributeError, TypeError, LookupError, ValueError) as e:
            raise SerializationError(f"{topic}: no window's result: {e!r}") from e
        return WindowResult(key, start, end, value)

    return decode


def bytes_keyed(result: WindowResult) -> WindowResult:
    """A result that was read from JSON, where its key of bytes is base64."""
    return msgspec.structs.replace(result, key=base64.b64decode(result.key))


def _value_bytes(value: Any) -> bytes | None:
    if isinstance(value, WindowResult):
        return value.to_json()
    return value if isinstance(value, bytes) else json_serializer("value", value)


def encode_key(key: Any) -> bytes | None:
    """A record key: text as UTF-8, bytes as they are, None as None, anything else as JSON."""
    if key is None or isinstance(key, bytes):
        return key
    return key.encode() if isinstance(key, str) else msgspec.json.encode(key)
