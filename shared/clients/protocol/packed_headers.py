"""Headers of many records in their wire format: a Python object is made for a header only when it is requested.

>>> own = PackedHeaders.of([(("trace", b"a"),), ()])
>>> own.blocks[0], own[0], own[1]
(b'\\x02\\ntrace\\x02a', (('trace', b'a'),), ())
>>> list(own.followed_by([("from", b"clicks"), ("at", PackedBytes.of([b"7", None]))]))
[(('trace', b'a'), ('from', b'clicks'), ('at', b'7')), (('from', b'clicks'), ('at', None))]
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np
from aiokafka.record.util import decode_varint, encode_varint
from numpy.typing import NDArray

from penstock.shared.common.byte_copies import copy_bytes
from penstock.shared.common.compiled import compiled
from penstock.shared.common.interleaving import interleave_row, interleaved_pieces, interleaved_texts
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Headers
from penstock.shared.common.varints import VARINT_BYTES_MAX, put_varint, read_varint, zigzag


@compiled
def _follow(data, offsets, lengths, more, pieces, piece_ends, texts, starts, sizes, out, out_offsets, out_lengths):
    """Write for each record the number of its headers, its own headers, then `more` others.

    The others are pieces, which are the same for all records, and length-prefixed texts of the record, in turn.
    """
    at = 0
    for row in range(len(lengths)):
        out_offsets[row] = at
        count = 0
        begin = offsets[row]
        stop = begin + lengths[row]
        if begin < stop:
            count, begin = read_varint(data, begin, stop)
        at = put_varint(out, at, zigzag(count + more))
        if begin < stop:
            copy_bytes(out, at, data, begin, stop - begin)
            at += stop - begin
        at = interleave_row(out, at, row, pieces, piece_ends, texts, starts, sizes, True)
        out_lengths[row] = at - out_offsets[row]


class PackedHeaders(Sequence[Headers]):
    """A sequence with the headers of each record, as blocks of bytes.

    A block has the number of a record's headers, then the headers. An empty block or a null means no headers. The
    headers of a record are decoded when they are requested.
    """

    __slots__ = ("blocks",)

    def __init__(self, blocks: PackedBytes) -> None:
        self.blocks = blocks

    @classmethod
    def of(cls, rows: Sequence[Sequence[tuple[str, bytes | None]]]) -> PackedHeaders:
        """Return the same headers in one buffer."""
        return rows if isinstance(rows, PackedHeaders) else cls(PackedBytes.of(list(map(header_block, rows))))

    @classmethod
    def none(cls, count: int) -> PackedHeaders:
        """Return `count` records without headers."""
        nothing = np.zeros(count, np.int64)
        return cls(PackedBytes(np.empty(0, np.uint8), nothing, nothing))

    def __len__(self) -> int:
        return len(self.blocks)

    @overload
    def __getitem__(self, index: int) -> Headers: ...

    @overload
    def __getitem__(self, index: slice) -> PackedHeaders: ...

    def __getitem__(self, index: int | slice) -> Headers | PackedHeaders:
        if isinstance(index, slice):
            return PackedHeaders(self.blocks[index])
        return _decode_headers(self.blocks[index] or b"")

    def at(self, indexes: NDArray[Any]) -> PackedHeaders:
        """Return the headers of the records at these indexes."""
        return PackedHeaders(self.blocks.at(indexes))

    def followed_by(self, more: Sequence[tuple[str, bytes | PackedBytes]]) -> PackedHeaders:
        """Return each record's headers followed by `more`.

        A value in `more` is the same bytes for all records, or PackedBytes with bytes or a null for each record. At
        least one value is PackedBytes.
        """
        # What is the same for all records becomes a piece: a kernel then copies pieces and texts in turn.
        pieces = [bytearray()]
        columns = list[PackedBytes]()
        for name, value in more:
            _put_bytes(pieces[-1], name.encode())
            if isinstance(value, PackedBytes):
                columns.append(value)
                pieces.append(bytearray())
            else:
                _put_bytes(pieces[-1], value)
        own = self.blocks
        count = len(self)
        texts = interleaved_texts(columns)
        # An upper bound of what a record gets besides its own headers and texts: a kernel cannot let `out` grow.
        sized = VARINT_BYTES_MAX + sum(map(len, pieces)) + VARINT_BYTES_MAX * len(columns)
        out = np.empty(int(own.sizes().sum() + np.maximum(texts[2], 0).sum()) + count * sized, np.uint8)
        offsets = np.empty(count, np.int64)
        lengths = np.empty(count, np.int64)
        _follow(*own.arrays, len(more), *interleaved_pieces(pieces), *texts, out, offsets, lengths)
        return PackedHeaders(PackedBytes(out, offsets, lengths))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PackedHeaders.of({list(self)})"


def header_block(headers: Sequence[tuple[str, bytes | None]]) -> bytes:
    """Return the number of one record's headers, then the headers, as bytes; empty if there are none."""
    if not headers:
        return b""
    block = bytearray()
    encode_varint(len(headers), block.append)
    for name, value in headers:
        _put_bytes(block, name.encode())
        _put_bytes(block, value)
    return bytes(block)


def _put_bytes(block: bytearray, string: bytes | None) -> None:
    encode_varint(-1 if string is None else len(string), block.append)
    block += string or b""


def _decode_headers(block: bytes) -> Headers:
    """Return the headers of a block that is known to be valid."""
    if not block:
        return ()
    count, at = decode_varint(block, 0)
    headers = []
    for _ in range(count):
        length, at = decode_varint(block, at)
        # As in Java, invalid UTF-8 becomes U+FFFD.
        name = block[at : at + length].decode(errors="replace")
        at += length
        length, at = decode_varint(block, at)
        headers.append((name, None if length < 0 else block[at : at + length]))
        at += max(length, 0)
    return tuple(headers)


def compile_kernels() -> None:
    """Compile the kernel for packed headers, or load it from the cache of compiled code."""
    PackedHeaders.none(1).followed_by([("name", PackedBytes.of([b"value"]))])
