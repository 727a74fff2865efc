"""Encoders of results, of which two are the defaults of `to()`, and the deserializer that reads results back."""

from __future__ import annotations

import base64
from typing import Any

import msgspec

from penstock.shared.common.errors import SerializationError
from penstock.shared.common.serialization import Deserializer, json_deserializer, json_serializer
from penstock.shared.streams.record import Record
from penstock.shared.streams.window_result import WindowKey, WindowResult


def encode_json(record: Record) -> tuple[bytes | None, bytes | None]:
    """Encode keys (str as UTF-8, bytes as they are, a window's as its record key) and values (JSON, None as None)."""
    key = record.key
    return encode_result_key(key.key if isinstance(key, WindowKey) else key), _value_bytes(record.value)


def encode_updates(record: Record) -> tuple[bytes | None, bytes | None]:
    """Encode as `encode_json`, but a window's key is the whole window as JSON, since a retraction has no value."""
    key = record.key
    if isinstance(key, WindowKey):
        return msgspec.json.encode(key._asdict()), _value_bytes(record.value)
    return encode_result_key(key), _value_bytes(record.value)


def result_deserializer(window_key: str) -> Deserializer:
    """Return a deserializer of windows' results from flat objects; `window_key` is "bytes" if their keys are bytes."""

    def decode_window_result(topic: str, data: bytes | None) -> WindowResult | None:
        if (value := json_deserializer(topic, data)) is None:
            return None
        try:
            key = value.pop("key")
            start = value.pop("start")
            end = value.pop("end")
            key = base64.b64decode(key, validate=True) if window_key == "bytes" else key
        except (AttributeError, TypeError, LookupError, ValueError) as e:
            raise SerializationError(f"{topic}: no window's result: {e!r}") from e
        return WindowResult(key, start, end, value)

    return decode_window_result


def bytes_keyed(result: WindowResult) -> WindowResult:
    """Return a result that was read from JSON with its key decoded from base64 to bytes."""
    return msgspec.structs.replace(result, key=base64.b64decode(result.key))


def _value_bytes(value: Any) -> bytes | None:
    if isinstance(value, WindowResult):
        return value.to_json()
    return value if isinstance(value, bytes) else json_serializer("value", value)


def encode_result_key(key: Any) -> bytes | None:
    """Encode a result's record key: text as UTF-8, bytes as they are, None as None, anything else as JSON."""
    if key is None or isinstance(key, bytes):
        return key
    return key.encode() if isinstance(key, str) else msgspec.json.encode(key)


def encode_without_error(value: Any) -> bytes | None:
    """Encode the key or value of a record that is written without a sink, such as a dead letter; never raises.

    Text is encoded as UTF-8, bytes are unchanged. Anything else is encoded as JSON, or as its `repr` if that fails.
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode(errors="backslashreplace")
    try:
        return msgspec.json.encode(value, enc_hook=repr)
    except (TypeError, ValueError, RecursionError):
        return repr(value).encode(errors="backslashreplace")
