"""Encodes records in columns as record batches (magic 2) by a kernel, without a Python object for each record.

The result equals that of aiokafka's builder byte for byte, and a batch is full at the same record. The clients load
this module only if numba is installed and columns are sent. record_batches.py has aiokafka's builder.

>>> keys, values = PackedBytes.of([b"ann", None]), PackedBytes.of([b"1", b"22"])
>>> columns = EncodableColumns.of(keys, values, np.array([1_000, 1_001]))
>>> builder = ColumnBatchBuilder(1_024, 1_024, transactional=False)
>>> builder.extend(columns, np.arange(2), 0, 2), builder.count, builder.size()
(2, 2, 81)
"""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from penstock.shared.clients.protocol.record_batches import (
    ATTRIBUTES_AT,
    CRC_AT,
    LENGTH_FROM,
    MAGIC,
    RECORDS_AT,
    crc32c,
)
from penstock.shared.common.byte_copies import copy_bytes
from penstock.shared.common.compiled import compiled
from penstock.shared.common.packed_bytes import PackedBytes, read_only
from penstock.shared.common.records import NO_TIMESTAMP, Int64Array
from penstock.shared.common.varints import put_varint, varint_size, zigzag

SINGLE_RECORD_BATCH_OVERHEAD_MAX = RECORDS_AT + 21 + 5 + 5 + 1
"""An upper bound of the bytes of a batch with one record, besides key, value and headers: the batch's header, the
record's length, attributes and deltas (21), two lengths of at most 5 bytes, and one byte for the number of headers."""
NO_HEADERS = PackedBytes.of([])
"""Stands for the headers of records that all have none."""

POSITION, COUNT, FIRST_TIMESTAMP, MAX_TIMESTAMP = range(4)
"""Indices in a builder's state."""

_NO_LEADER_EPOCH = -1
_TRANSACTIONAL = 16
_header = struct.Struct(">qiibIhiqqqhii")
_crc = struct.Struct(">I")


@compiled
def encode_records(
    out: Any,
    state: Any,
    batch_size: Any,
    key_data: Any,
    key_offsets: Any,
    key_lengths: Any,
    value_data: Any,
    value_offsets: Any,
    value_lengths: Any,
    header_data: Any,
    header_offsets: Any,
    header_lengths: Any,
    timestamps: Any,
    rows: Any,
    first: Any,
    stop: Any,
) -> Any:
    """Append records of the columns to those in `out`, as many as fit: those at the indices `rows[first:stop]`, in this
    order. Returns the position in `rows` of the first record that was not appended, or `stop`.

    A record fits if the batch with it ends within `out` and has fewer than `batch_size` bytes. The first record of a
    batch only has to end within `out`. Each call updates `state`: position, number of records and timestamps.

    The header bytes of a record begin with the number of headers. A record has no headers if its value in
    `header_lengths` is 0 or less, or if `header_lengths` is empty.
    """
    position = state[POSITION]
    count = state[COUNT]
    first_timestamp = state[FIRST_TIMESTAMP]
    max_timestamp = state[MAX_TIMESTAMP]
    capacity = len(out)
    has_headers = len(header_lengths) > 0
    headers_length = np.int64(0)
    at = first
    while at < stop:
        row = rows[at]
        key_length = key_lengths[row]
        value_length = value_lengths[row]
        timestamp = timestamps[row]
        if count == 0:
            first_timestamp = timestamp
            max_timestamp = timestamp
        # 1. Compute the size, since a record begins with its length. That length is a varint, so its own size varies.
        delta = zigzag(timestamp - first_timestamp)
        number = zigzag(count)
        key_size = zigzag(key_length)
        value_size = zigzag(value_length)
        if has_headers:
            headers_length = header_lengths[row]
        # Attributes take one byte. So does the number of headers if there are none.
        size = 2 + varint_size(delta) + varint_size(number) + varint_size(key_size) + varint_size(value_size)
        if headers_length > 0:
            size += headers_length - 1
        if key_length > 0:
            size += key_length
        if value_length > 0:
            size += value_length
        length = zigzag(size)
        end = position + varint_size(length) + size
        # 2. Stop at the same record as aiokafka's builder. The first record is taken even if it is larger than a batch.
        if end > capacity or (count > 0 and end >= batch_size):
            break
        # 3. Write the record.
        position = put_varint(out, position, length)
        out[position] = 0
        position = put_varint(out, position + 1, delta)
        position = put_varint(out, position, number)
        position = put_varint(out, position, key_size)
        if key_length > 0:
            copy_bytes(out, position, key_data, key_offsets[row], key_length)
            position += key_length
        position = put_varint(out, position, value_size)
        if value_length > 0:
            copy_bytes(out, position, value_data, value_offsets[row], value_length)
            position += value_length
        if headers_length > 0:
            copy_bytes(out, position, header_data, header_offsets[row], headers_length)
            position += headers_length
        else:
            out[position] = 0
            position += 1
        max_timestamp = max(max_timestamp, timestamp)
        count += 1
        at += 1
    state[POSITION] = position
    state[COUNT] = count
    state[FIRST_TIMESTAMP] = first_timestamp
    state[MAX_TIMESTAMP] = max_timestamp
    return at


class EncodableColumns(NamedTuple):
    """Keys, values, headers and timestamps (ms, none negative) in the only form that the kernel is compiled for."""

    key_data: NDArray[np.uint8]
    key_offsets: Int64Array
    key_lengths: Int64Array
    value_data: NDArray[np.uint8]
    value_offsets: Int64Array
    value_lengths: Int64Array
    header_data: NDArray[np.uint8]
    header_offsets: Int64Array
    header_lengths: Int64Array
    timestamps: Int64Array

    @classmethod
    def of(
        cls, keys: PackedBytes, values: PackedBytes, timestamps: Int64Array, headers: PackedBytes = NO_HEADERS
    ) -> EncodableColumns:
        """Return the columns for a `ColumnBatchBuilder`. They must have the same length.

        `headers` are as in `PackedHeaders`, or NO_HEADERS.
        """
        return cls(*keys.arrays, *values.arrays, *headers.arrays, read_only(timestamps, np.int64))


class ColumnBatchBuilder:
    """Builds one record batch from columns. `seal_batch` seals it like a batch of aiokafka's builder."""

    __slots__ = ("_batch_size", "_buffer", "_producer_state", "_state", "_transactional")

    def __init__(self, capacity: int, batch_size: int, *, transactional: bool) -> None:
        """It takes records until `batch_size` bytes are full, or one larger record if it fits into `capacity` bytes."""
        self._buffer = np.empty(max(capacity, RECORDS_AT), np.uint8)
        self._batch_size = batch_size
        self._transactional = transactional
        self._state = np.array([RECORDS_AT, 0, NO_TIMESTAMP, NO_TIMESTAMP], np.int64)
        self._producer_state = (-1, -1, -1)

    def __repr__(self) -> str:
        return f"<ColumnBatchBuilder {self.count} records, {self.size()} of {self._batch_size} bytes>"

    @property
    def count(self) -> int:
        """The number of records so far."""
        return int(self._state[COUNT])

    def size(self) -> int:
        """Return the bytes so far, including the header."""
        return int(self._state[POSITION])

    def extend(self, columns: EncodableColumns, rows: Int64Array, first: int, stop: int) -> int:
        """Add records of the columns to the batch, as many as fit.

        `rows` has the records' indices in the columns. Only `rows[first:stop]` are added. Returns the position in
        `rows` of the first record that does not fit, or `stop`.
        """
        return int(encode_records(self._buffer, self._state, self._batch_size, *columns, rows, first, stop))

    def append(self, *_: object) -> None:
        """Add nothing: single records go into a batch of aiokafka's builder."""

    def set_producer_state(self, producer_id: int, epoch: int, base_sequence: int) -> None:
        """Set the producer state for the header."""
        self._producer_state = producer_id, epoch, base_sequence

    def build(self) -> memoryview:
        """Return the batch with header and checksum, in the builder's own buffer."""
        position, count, first_timestamp, max_timestamp = self._state.tolist()
        sealed = self._buffer.data[:position]
        attributes = _TRANSACTIONAL if self._transactional else 0
        _header.pack_into(
            sealed,
            0,
            0,
            position - LENGTH_FROM,
            _NO_LEADER_EPOCH,
            MAGIC,
            0,
            attributes,
            max(count - 1, 0),
            first_timestamp,
            max_timestamp,
            *self._producer_state,
            count,
        )
        _crc.pack_into(sealed, CRC_AT, crc32c(sealed[ATTRIBUTES_AT:]))
        return sealed
