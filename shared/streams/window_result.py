"""The key and the value of a windowed result, as the nodes behind a window get them, and the deserializer for it."""

from __future__ import annotations

import base64
from typing import Any, Generic, NamedTuple

import msgspec

from penstock.shared.common.errors import SerializationError
from penstock.shared.common.serialization import Deserializer, json_deserializer
from penstock.shared.streams.record import K


class WindowKey(NamedTuple, Generic[K]):
    """The key of a windowed result: the record key and the window's bounds in ms.

    `end` is inclusive for sessions and sliding windows, and exclusive for tumbling and hopping windows.
    """

    key: K
    start: int
    end: int


class WindowResult(msgspec.Struct, Generic[K], frozen=True):
    """A window's results by name."""

    key: K
    start: int
    end: int
    results: dict[str, Any]

    def to_json(self) -> bytes:
        """Return the windowed result as one flat JSON object: key, start, end, then the results."""
        return msgspec.json.encode({"key": self.key, "start": self.start, "end": self.end, **self.results})


def result_deserializer(window_key: str) -> Deserializer:
    """Return a deserializer of windowed results, the inverse of `to_json`; `window_key` is the type of their keys."""

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


def with_bytes_key(result: WindowResult) -> WindowResult:
    """Return a windowed result that was read from JSON with its key decoded from base64 to bytes."""
    return msgspec.structs.replace(result, key=base64.b64decode(result.key))
