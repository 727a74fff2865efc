"""Encodes the finished offsets above a committed offset as text for the commit's metadata.

Records that are handled in parallel finish out of order. Kafka stores one offset for each partition, with a text of up
to 4,096 bytes. The text begins with `p1r:` or `p1b:`; the rest is base64. A run is a range of finished offsets. Version
1 `r` has runs as varints: gap, length - 1, gap, length - 1 … Version 1 `b` has a bitmap with one bit for each offset.
Both begin with the committed offset itself, so that the text cannot be applied to another offset. A run may contain
offsets without a record.

>>> text = encode_finished(100, [(103, 110), (120, 120)])
>>> text
'p1r:ZAMHCQA='
>>> decode_finished(OffsetAndMetadata(100, text))
((103, 110), (120, 120))
>>> decode_finished(OffsetAndMetadata(100, "written by someone else"))
()
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator, Sequence

import numpy as np

from penstock.shared.common.errors import DataError
from penstock.shared.common.records import OffsetAndMetadata

Ranges = tuple[tuple[int, int], ...]

_RUNS = "p1r:"
_BITS = "p1b:"
_BASE_BYTES_MAX = 9


def encode_finished(offset: int, finished: Sequence[tuple[int, int]]) -> str:
    """Return finished ranges (first, last), ascending from `offset`, as commit metadata: runs, or a shorter bitmap."""
    if not finished:
        return ""
    runs = bytearray(_encode_varint(offset))
    at = offset
    finished = _join_adjacent_ranges(finished)
    for first, last in finished:
        runs += _encode_varint(first - at) + _encode_varint(last - first)
        at = last + 1
    if len(runs) <= _BASE_BYTES_MAX + (at - offset) // 8:
        return _RUNS + base64.b64encode(runs).decode()
    bits = np.zeros(at - offset, np.uint8)
    for first, last in finished:
        bits[first - offset : last + 1 - offset] = 1
    return _BITS + base64.b64encode(_encode_varint(offset) + np.packbits(bits).tobytes()).decode()


def encoded_bytes_max(runs: int, span: int) -> int:
    """Return an upper bound of the length of `encode_finished` for `runs` ranges over `span` offsets."""
    # Each run is encoded as two varints: the gap before it, and its length. All of them add up to at most the span. So
    # at most span / 128^k of them need more than k bytes.
    longer = sum(min(2 * runs, span >> shift) for shift in range(7, 64, 7))
    size = _BASE_BYTES_MAX + min(2 * runs + longer, span // 8 + 1)
    return len(_RUNS) + (size + 2) // 3 * 4 if runs else 0


def decode_finished(committed: OffsetAndMetadata) -> Ranges:
    """Return the finished ranges in a commit's metadata, empty for the metadata of another program. Raises DataError
    for damaged metadata."""
    text = committed.metadata
    if not text.startswith((_RUNS, _BITS)):
        return ()
    try:
        data = base64.b64decode(text[len(_RUNS) :], validate=True)
        numbers = _decode_varints(data)
        base, used = next(numbers)
        if base != committed.offset:
            raise ValueError(f"it belongs to offset {base}")
        if text.startswith(_RUNS):
            return tuple(_decode_offset_ranges(committed.offset, numbers))
        edges = np.flatnonzero(np.diff(np.unpackbits(np.frombuffer(data[used:], np.uint8)), prepend=0, append=0)) + base
        return tuple((int(first), int(last) - 1) for first, last in zip(edges[::2], edges[1::2], strict=True))
    except (ValueError, StopIteration, binascii.Error) as e:
        raise DataError(f"commit metadata at offset {committed.offset} is damaged: {str(e) or 'cut off'}") from None


def _join_adjacent_ranges(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    out: list[tuple[int, int]] = []
    for first, last in ranges:
        if out and first == out[-1][1] + 1:
            out[-1] = (out[-1][0], last)
        else:
            out.append((first, last))
    return out


def _decode_offset_ranges(at: int, numbers: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    for gap, _ in numbers:
        length = next(numbers, None)
        if length is None:
            raise ValueError("a run without its length")
        yield at + gap, at + gap + length[0]
        at += gap + length[0] + 1


def _encode_varint(number: int) -> bytes:
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)


def _decode_varints(data: bytes) -> Iterator[tuple[int, int]]:
    """The varints, each with the position after it."""
    number = 0
    shift = 0
    for at, byte in enumerate(data, 1):
        number |= (byte & 0x7F) << shift
        shift += 7
        if shift > 63:
            raise ValueError("a number of more than 63 bits")
        if byte < 0x80:
            yield number, at
            number = 0
            shift = 0
    if shift:
        raise ValueError("the last number is cut off")
