"""Decodes record batches (magic 2) into columns of positions in their bytes, by a compiled kernel.

The kernel decodes the batches of ordinary producers. A batch with anything unusual (a wrong length, record attributes)
is left to aiokafka's reader, which decodes it or raises an error.

>>> from penstock.shared.clients.protocol.record_batches import new_batch_builder, seal_batch
>>> builder = new_batch_builder(1_000, False)
>>> for i, (key, value) in enumerate([(b"ann", b"{}"), (None, b"")]):
...     _ = builder.append(i, 1_000 + i, key, value, [])
>>> data = np.frombuffer(bytes(seal_batch(builder, (-1, -1, -1))), np.uint8)
>>> plan = np.array([[61, len(data), 7, 1_000, NO_APPEND_TIME, 2, 2]], np.int64)
>>> decoded = np.empty((COLUMNS, 2), np.int64)
>>> decode_batches(data, plan, decoded), decoded[OFFSET].tolist(), decoded[TIMESTAMP].tolist()
(1, [7, 8], [1000, 1001])
>>> decoded[KEY_LENGTH].tolist(), decoded[VALUE_LENGTH].tolist(), bytes(data[decoded[KEY_AT, 0] :][:3])
([3, -1], [2, 0], b'ann')
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

import numpy as np

from penstock.shared.common.compiled import compiled
from penstock.shared.common.varints import NOT_ONE, read_varint

# --- columns of a plan: one row for each batch ---
START, STOP, BASE_OFFSET, BASE_TIMESTAMP, APPEND_TIME, COUNT, OFFSETS = range(7)
"""Start and end of its records; the base of their offsets and of their timestamps; the log append time; the number of
records, and the number of offsets they span. With NO_APPEND_TIME each record has its own timestamp."""
NO_APPEND_TIME = -(2**63)

# --- columns of records ---
OFFSET, TIMESTAMP, KEY_AT, KEY_LENGTH, VALUE_AT, VALUE_LENGTH, HEADERS_AT, HEADERS_LENGTH = range(8)
COLUMNS = 8
"""A length is -1 for a null. The headers begin with their number; a record without headers has the length 0."""

RECORD_BYTES_MIN = 7
"""Length, attributes, two deltas, two lengths and the number of headers take at least a byte each."""


@compiled
def _after_headers(data, at, stop):
    """Return the end of a record's headers, or NOT_ONE if aiokafka's reader must decode the record's batch."""
    count, at = read_varint(data, at, stop)
    if count < 0:
        return NOT_ONE
    for _ in range(count):
        length, at = read_varint(data, at, stop)
        if length < 0 or length > stop - at:
            return NOT_ONE
        length, at = read_varint(data, at + length, stop)
        if length < -1 or length > stop - at:
            return NOT_ONE
        at += max(length, 0)
    return at


@compiled
def decode_batches(data, plan, decoded):
    """Decode the batches of a plan in order, up to the first one that has anything unusual. That one is left to
    aiokafka's reader. Returns the number of decoded batches.

    `decoded` must have room for the records of all batches of the plan.
    """
    n = 0
    for b in range(len(plan)):
        at = plan[b, START]
        stop = plan[b, STOP]
        base_offset = plan[b, BASE_OFFSET]
        base_timestamp = plan[b, BASE_TIMESTAMP]
        append_time = plan[b, APPEND_TIME]
        next_delta = 0
        for _ in range(plan[b, COUNT]):
            # Every length is checked before it is used, since a kernel checks no bounds.
            length, at = read_varint(data, at, stop)
            if length < 0 or length > stop - at:
                return b
            end = at + length
            # The attributes of a record are not used by any version of the format.
            if length < RECORD_BYTES_MIN - 1 or data[at] != 0:
                return b
            delta, at = read_varint(data, at + 1, end)
            if delta == NOT_ONE:
                return b
            decoded[TIMESTAMP, n] = base_timestamp + delta if append_time == NO_APPEND_TIME else append_time
            # Offsets ascend, with holes that log compaction has made, and stay within the batch.
            delta, at = read_varint(data, at, end)
            if delta < next_delta or delta >= plan[b, OFFSETS]:
                return b
            next_delta = delta + 1
            decoded[OFFSET, n] = base_offset + delta
            length, at = read_varint(data, at, end)
            if length < -1 or length > end - at:
                return b
            decoded[KEY_AT, n] = at
            decoded[KEY_LENGTH, n] = length
            length, at = read_varint(data, at + max(length, 0), end)
            if length < -1 or length > end - at:
                return b
            decoded[VALUE_AT, n] = at
            decoded[VALUE_LENGTH, n] = length
            at += max(length, 0)
            decoded[HEADERS_AT, n] = at
            if at == end - 1 and data[at] == 0:
                decoded[HEADERS_LENGTH, n] = 0
            else:
                decoded[HEADERS_LENGTH, n] = end - at
                if _after_headers(data, at, end) != end:
                    return b
            at = end
            n += 1
        # More bytes than records: the header or the records are wrong.
        if at != stop:
            return b
    return len(plan)


def compile_kernels() -> None:
    """Compile the kernel that decodes record batches, or load it from the cache of compiled code."""
    data = np.frombuffer(b"\0", np.uint8)
    decode_batches(data, np.zeros((0, OFFSETS + 1), np.int64), np.zeros((COLUMNS, 0), np.int64))
