"""Zigzag integers of variable length, as in Kafka's records, for kernels that write or read them."""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import numpy as np

from penstock.shared.common.compiled import compiled

VARINT_BYTES_MAX = 10
NOT_ONE = -(2**63)
"""Returned for an integer that cannot be read."""


@compiled
def zigzag(value):
    """The zigzag encoding of an integer: an unsigned number."""
    wide = np.int64(value)
    return np.uint64(wide << np.int64(1)) ^ np.uint64(wide >> np.int64(63))


@compiled
def varint_size(unsigned):
    """The number of bytes that `put_varint` writes."""
    size = 1
    while unsigned >= np.uint64(128):
        unsigned >>= np.uint64(7)
        size += 1
    return size


@compiled
def put_varint(out, at, unsigned):
    """Write an unsigned number, such as a result of `zigzag`, and return the position after it."""
    while unsigned >= np.uint64(128):
        out[at] = np.uint8((unsigned & np.uint64(127)) | np.uint64(128))
        unsigned >>= np.uint64(7)
        at += 1
    out[at] = np.uint8(unsigned)
    return at + 1


@compiled
def read_varint(data, at, stop):
    """A zigzag integer of at most 63 bits, and the position after it; NOT_ONE if it cannot be read."""
    if at >= stop:
        return NOT_ONE, at
    byte = data[at]
    if byte < 128:
        return np.int64(byte >> 1) ^ -np.int64(byte & 1), at + 1
    value = np.int64(byte & 127)
    shift = 7
    while True:
        at += 1
        if at >= stop or shift > 56:
            return NOT_ONE, at
        byte = data[at]
        value |= np.int64(byte & 127) << shift
        if byte < 128:
            return (value >> 1) ^ -(value & 1), at + 1
        shift += 7
