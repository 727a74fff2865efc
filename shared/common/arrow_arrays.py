"""Byte strings as Arrow arrays and back, without a Python object for each, and the Arrow types of a state's columns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from penstock.shared.common.byte_copies import copied
from penstock.shared.common.packed_bytes import NULL, PackedBytes

ARROW_TYPES = {"int64": pa.int64(), "float64": pa.float64(), "binary": pa.binary()}
BINARY_BYTES_MAX = 2**31 - 1
"""The most bytes that one Arrow array of type `binary` can hold: its offsets are int32."""


def binary_array(strings: PackedBytes) -> pa.Array:
    """Return an Arrow array of type `binary` of the byte strings, none of which may be null. Their bytes are copied.

    Raises pyarrow's ArrowCapacityError for more than BINARY_BYTES_MAX bytes.

    >>> binary_array(PackedBytes.of([b"ann", b""])).to_pylist()
    [b'ann', b'']
    """
    size = int(strings.lengths.sum())
    # The sums below would wrap, and the array would have other strings.
    if size > BINARY_BYTES_MAX:
        raise pa.ArrowCapacityError(f"{size} bytes do not fit into one binary array, at most {BINARY_BYTES_MAX} do")
    own = copied(strings)
    ends = np.zeros(len(own) + 1, np.int32)
    np.cumsum(own.lengths, out=ends[1:])
    return pa.Array.from_buffers(pa.binary(), len(own), [None, pa.py_buffer(ends), pa.py_buffer(own.data)])


def packed(column: Any) -> PackedBytes:
    """Return the strings and nulls of an Arrow array of type `binary` as PackedBytes, without a copy of the bytes.

    An array of type `large_binary` is converted first. Spark makes such arrays if `useLargeVarTypes` is set.

    >>> packed(pa.array([b"a", None, b"bc"], pa.binary()))[1:].tolist()
    [None, b'bc']
    """
    column = column.cast(pa.binary())
    _, offsets, data = column.buffers()
    ends = np.frombuffer(offsets, np.int32)[column.offset : column.offset + len(column) + 1].astype(np.int64)
    held = np.empty(0, np.uint8) if data is None else np.frombuffer(data, np.uint8)
    lengths = np.diff(ends)
    if column.null_count:
        lengths = np.where(np.asarray(column.is_valid()), lengths, NULL)
    return PackedBytes(held, ends[:-1], lengths)


def codes_of(column: pa.ChunkedArray) -> NDArray[np.int64]:
    """Return a small number for each value of the column. Equal values have equal numbers.

    >>> codes_of(pa.chunked_array([["a", "b"], ["a"]])).tolist()
    [0, 1, 0]
    """
    # The chunks of an encoded column share one dictionary.
    return np.concatenate([chunk.indices.to_numpy() for chunk in column.dictionary_encode().chunks]).astype(np.int64)
