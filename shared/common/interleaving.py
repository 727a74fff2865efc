"""Texts of many rows, put together by a compiled kernel: constant pieces with a row's texts between them.

>>> names, ages = PackedBytes.of([b"ann", b"bob"]), PackedBytes.of([b"7", b"10"])
>>> list(interleaved([b"<", b", ", b">"], [names, ages]))
[b'<ann, 7>', b'<bob, 10>']
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.byte_copies import copy_bytes
from penstock.shared.common.compiled import compiled
from penstock.shared.common.packed_bytes import PackedBytes, read_only
from penstock.shared.common.varints import put_varint, zigzag


@compiled
def interleave_row(out, at, row, pieces, piece_ends, data, starts, lengths, is_sized):
    """Interleave one row: write piece, text, piece, text, … and the last piece. Returns the position after it.

    With `is_sized`, the length of each text is written before the text, as a varint. The length of a null is -1, and
    its text is empty.
    """
    columns = len(starts)
    piece = 0
    for c in range(columns + 1):
        copy_bytes(out, at, pieces, piece, piece_ends[c] - piece)
        at += piece_ends[c] - piece
        piece = piece_ends[c]
        if c < columns:
            start = starts[c, row]
            length = lengths[c, row]
            if is_sized:
                at = put_varint(out, at, zigzag(length))
            for j in range(start, start + length):
                out[at] = data[j]
                at += 1
    return at


@compiled
def _interleave_rows(pieces, piece_ends, data, starts, lengths, out, out_starts, out_lengths):
    at = 0
    for row in range(len(out_starts)):
        out_starts[row] = at
        at = interleave_row(out, at, row, pieces, piece_ends, data, starts, lengths, False)
        out_lengths[row] = at - out_starts[row]


def interleaved_pieces(pieces: Sequence[bytes | bytearray]) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The constant pieces in one buffer, and their end positions, as `interleave_row` takes them."""
    return np.frombuffer(b"".join(pieces), np.uint8), np.cumsum([len(piece) for piece in pieces])


def interleaved_texts(columns: Sequence[PackedBytes]) -> tuple[NDArray[np.uint8], NDArray[Any], NDArray[Any]]:
    """The texts of all columns in one buffer, and their offsets and lengths, as `interleave_row` takes them."""
    before = np.cumsum([0, *(len(column.data) for column in columns[:-1])])
    starts = np.stack([column.offsets + at for column, at in zip(columns, before.tolist(), strict=True)])
    lengths = np.stack([column.lengths for column in columns])
    return read_only(np.concatenate([column.data for column in columns]), np.uint8), starts, lengths


def interleaved(pieces: Sequence[bytes], columns: Sequence[PackedBytes]) -> PackedBytes:
    """For each row: the first piece, the first column's text, …, the last piece (one piece more than columns).

    A null is like an empty text.
    """
    data, starts, lengths = interleaved_texts(columns)
    count = starts.shape[1]
    out = np.empty(int(np.maximum(lengths, 0).sum()) + count * sum(map(len, pieces)), np.uint8)
    out_starts = np.empty(count, np.int64)
    out_lengths = np.empty(count, np.int64)
    _interleave_rows(*interleaved_pieces(pieces), data, starts, lengths, out, out_starts, out_lengths)
    return PackedBytes(out, out_starts, out_lengths)
