"""The key and the value of a windowed result, as the nodes behind a window get them."""

from __future__ import annotations

from typing import Any, Generic, NamedTuple

import msgspec

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
