"""Where an answer that was cut goes on: the place of its last row in the order of all rows, as text to be handed back.

A place is what a row is found by, not a count of rows: what comes and goes between two pages moves no other row, and
another instance, or the same one after a restart, goes on from it alike. The text has a digest of the question, so that
with another question it is refused.

>>> pages = Continuations(RowPlace, "shop", "sessions")
>>> pages.place(pages.text(RowPlace(0, b"ann", 5)))
RowPlace(partition=0, key=b'ann', start=5)
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
"""Characters of it in an error; keys may be long."""


class WrongContinuation(DataError):
    """A continuation that no answer to this question gave."""


class RowPlace(NamedTuple):
    """A store's row: rows come by partition, and within it as `row_order` has them."""

    partition: int
    key: bytes
    start: int


class WindowPlace(NamedTuple):
    """A window, open or closed: those that begin first come first."""

    start_ms: int
    end_ms: int
    partition: int
    key: bytes


class LivePlace(NamedTuple):
    """A live window of any store: those that end last come first, as `live_order` has them."""

    end_ms: int
    store: str
    partition: int
    key: str
    start_ms: int


PlaceT = TypeVar("PlaceT", RowPlace, WindowPlace, LivePlace)
RowOrder = tuple[int, bytes]
_START = struct.Struct(">Q")  # shifted, so that bytes are in the numbers' order
_SHIFT = 1 << 63


def start_bytes(start: int) -> bytes:
    """A signed number of 64 bits as bytes that sort as numbers do."""
    return _START.pack(start + _SHIFT)


key_hash = crc32
"""What a partition's rows are sorted by before anything else, in memory as on disk: a number of 32 bits."""


def row_order(key: bytes, start: int) -> RowOrder:
    """What a partition's rows are sorted by.

    >>> row_order(b"ann", -1) < row_order(b"ann", 0)
    True
    """
    return key_hash(key), key + start_bytes(start)


def live_order(place: LivePlace) -> tuple[int, str, int, str, int]:
    """What live windows are sorted by."""
    return -place.end_ms, place.store, place.partition, place.key, place.start_ms


class Continuations(Generic[PlaceT]):
    """Continuations of the answers to one question, which is of what msgpack can have; None is the first page's, and
    says of an answer that it is the last."""

    def __init__(self, kind: type[PlaceT], *question: Any) -> None:
        asked = msgspec.msgpack.encode((kind.__name__, question))
        self._shape: Any = tuple[bytes, kind]  # type: ignore[valid-type]
        self._digest = blake2b(asked, digest_size=DIGEST_BYTES).digest()

    def text(self, place: PlaceT | None) -> str | None:
        """The place as text that can stand in a URL as it is."""
        if place is None:
            return None
        packed = msgspec.msgpack.encode((self._digest, place))
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    def place(self, text: str | None) -> PlaceT | None:
        """The place that an answer to this question gave; WrongContinuation names what is none."""
        if text is None:
            return None
        shown = repr(text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…")
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            digest, place = msgspec.msgpack.decode(packed, type=self._shape)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as e:
            raise WrongContinuation(f"continuation {shown} is none: give the one of the page before as it is") from e
        if digest != self._digest:
            raise WrongContinuation(f"continuation {shown} is of another question: only how many rows may differ")
        found: PlaceT = place
        return found
