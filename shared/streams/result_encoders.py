"""Encoders of results, of which two are the defaults of `to()`."""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.shared.common.serialization import json_serializer
from penstock.shared.streams.record import Record
from penstock.shared.streams.window_result import WindowKey, WindowResult


def encode_json(record: Record) -> tuple[bytes | None, bytes | None]:
    """Encode str keys as UTF-8, a window's key as its record key, all else as JSON; bytes and None are unchanged."""
    key = record.key
    return encode_result_key(key.key if isinstance(key, WindowKey) else key), _value_bytes(record.value)


def encode_updates(record: Record) -> tuple[bytes | None, bytes | None]:
    """Encode as `encode_json`, but a window's key is the whole window as JSON, since a retraction has no value."""
    key = record.key
    if isinstance(key, WindowKey):
        return msgspec.json.encode(key._asdict()), _value_bytes(record.value)
    return encode_result_key(key), _value_bytes(record.value)


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
    """Encode the key or value of a record that is written without a sink, such as a dead letter.

    Text becomes UTF-8, bytes and None are unchanged, and a windowed result is one flat JSON object. Anything else is
    JSON, with the `repr` of objects of unknown types. If that fails, the result is the `repr` of the whole value, or
    else the name of its type.

    >>> class Mute:
    ...     def __repr__(self) -> str:
    ...         raise KeyError("no text")
    >>> encode_without_error({"n": 1}), encode_without_error(Mute()), encode_without_error({1j: Mute()})
    (b'{"n":1}', b'<Mute>', b'<dict>')
    """
    if value is None or isinstance(value, bytes):
        return value
    if isinstance(value, str):
        return value.encode(errors="backslashreplace")
    # A user's class may raise any error.
    try:
        return value.to_json() if isinstance(value, WindowResult) else msgspec.json.encode(value, enc_hook=repr)
    except Exception:
        try:
            return repr(value).encode(errors="backslashreplace")
        except Exception:
            return f"<{type(value).__qualname__}>".encode()
