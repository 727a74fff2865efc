"""Continuations of cut answers: the position of the last row in the order of all rows, as text for the next request.

A position identifies a row; it is not a count of rows. Rows that appear or disappear between two pages do not shift the
other rows, and another instance or a restarted one continues from the same position. The text contains a digest of the
query. It is rejected if it is used with another query.

>>> pages = Continuations(RowPosition, "shop", "sessions")
>>> pages.position(pages.text(RowPosition(0, b"ann", 5)))
RowPosition(partition=0, key=b'ann', start=5)
"""

from __future__ import annotations

import base64
import binascii
import struct
from hashlib import blake2b
from typing import Any, Generic, NamedTuple, TypeVar
from zlib import crc32

import msgspec

from penstock.shared.common.errors import DataError

DIGEST_BYTES = 8
SHOWN_MAX = 100
"""Characters of a continuation that an error shows; keys may be long."""


class WrongContinuation(DataError):
    """A continuation that no answer to this query returned."""


class RowPosition(NamedTuple):
    """A row of a store: rows are sorted by partition, and within a partition by `row_order`."""

    partition: int
    key: bytes
    start: int


class WindowPosition(NamedTuple):
    """A window, open or closed: windows are sorted by start, the earliest first."""

    start_ms: int
    end_ms: int
    partition: int
    key: bytes


class LivePosition(NamedTuple):
    """A live window of any store: windows are sorted by end, the latest first, as `live_order` does it."""

    end_ms: int
    store: str
    partition: int
    key: str
    start_ms: int


class LiveOrder(NamedTuple):
    """The sort key of a live window: its position with the end negated, so that the latest end comes first."""

    negated_end_ms: int
    store: str
    partition: int
    key: str
    start_ms: int

    def position(self) -> LivePosition:
        """The position with this sort key."""
        return LivePosition(-self.negated_end_ms, self.store, self.partition, self.key, self.start_ms)


PositionT = TypeVar("PositionT", RowPosition, WindowPosition, LivePosition)
RowOrder = tuple[int, bytes]
_START = struct.Struct(">Q")  # shifted, so that the bytes sort like the numbers
_SHIFT = 1 << 63


def start_bytes(start: int) -> bytes:
    """A signed 64-bit number as bytes that sort like the numbers."""
    return _START.pack(start + _SHIFT)


key_hash = crc32
"""The first sort key of a partition's rows, in memory and on disk: a 32-bit number."""


def row_order(key: bytes, start: int) -> RowOrder:
    """The sort key of a partition's rows.

    >>> row_order(b"ann", -1) < row_order(b"ann", 0)
    True
    """
    return key_hash(key), key + start_bytes(start)


def live_order(position: LivePosition) -> LiveOrder:
    """The sort key of live windows.

    >>> live_order(LivePosition(9, "s", 0, "ann", 5)) < live_order(LivePosition(8, "s", 0, "ann", 5))
    True
    """
    return LiveOrder(-position.end_ms, position.store, position.partition, position.key, position.start_ms)


class Continuations(Generic[PositionT]):
    """Continuations of the answers to one query, which consists of values that msgpack can encode.

    None is the continuation of the first page. In an answer, None marks the last page.
    """

    def __init__(self, kind: type[PositionT], *query: Any) -> None:
        packed_query = msgspec.msgpack.encode((kind.__name__, query))
        self._shape: Any = tuple[bytes, kind]  # type: ignore[valid-type]
        self._digest = blake2b(packed_query, digest_size=DIGEST_BYTES).digest()

    def text(self, position: PositionT | None) -> str | None:
        """The position as text that a URL can contain without escapes."""
        if position is None:
            return None
        packed = msgspec.msgpack.encode((self._digest, position))
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    def position(self, text: str | None) -> PositionT | None:
        """The position that an answer to this query returned. Raises WrongContinuation for any other text."""
        if text is None:
            return None
        shown = repr(text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…")
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            digest, position = msgspec.msgpack.decode(packed, type=self._shape)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as e:
            raise WrongContinuation(
                f"continuation {shown} is invalid: use the one of the previous page unchanged"
            ) from e
        if digest != self._digest:
            raise WrongContinuation(
                f"continuation {shown} belongs to another query: only the number of rows may differ"
            )
        found: PositionT = position
        return found
