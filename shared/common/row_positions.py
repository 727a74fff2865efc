"""Positions of rows and windows, after which a query for the next page continues.

A position identifies a row by its partition, key and time; it is not a number of rows. So rows that appear or disappear
between two pages do not shift the other rows.
"""

from __future__ import annotations

import struct
from typing import Annotated, NamedTuple
from zlib import crc32

from msgspec import Meta

from penstock.shared.common.records import INT64_MAX

Number = Annotated[int, Meta(ge=-INT64_MAX, le=INT64_MAX)]
"""Fits 64 bits, also if it is negated. Decoding rejects other numbers."""


class RowPosition(NamedTuple):
    """A row of a store: rows are sorted by partition, and within a partition by `row_order`."""

    partition: Number
    key: bytes
    start: Number


class WindowPosition(NamedTuple):
    """A window, open or closed: windows are sorted by start, the earliest first."""

    start_ms: Number
    end_ms: Number
    partition: Number
    key: bytes


class OpenPosition(NamedTuple):
    """An open window of any store: windows are sorted by end. The end is negated, so that the latest comes first."""

    negated_end_ms: Number
    store: str
    partition: Number
    key: str
    start_ms: Number


RowOrder = tuple[int, bytes]
_START = struct.Struct(">Q")
# The shift makes every number positive, so that the bytes sort like the numbers.
_SHIFT = 1 << 63


def start_bytes(start: int) -> bytes:
    """The start or end of a row, a signed 64-bit number, as bytes that sort like the numbers."""
    return _START.pack(start + _SHIFT)


key_hash = crc32
"""The first sort key of a partition's rows, in memory and on disk: a number below `KEY_HASHES`."""
KEY_HASHES = 1 << 32


def row_order(key: bytes, start: int) -> RowOrder:
    """The sort key of a row among those of its partition.

    >>> row_order(b"ann", -1) < row_order(b"ann", 0)
    True
    """
    return key_hash(key), key + start_bytes(start)
