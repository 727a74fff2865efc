"""Slices of columns: kernels move thousands of their records at once into batches, without an object for each record.

The kernels also choose the partitions of keys, as `partitioner` does for single records. producer.py loads this module
only if numba is installed and columns are sent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.shared.clients.producer.delivery import Span
from penstock.shared.clients.producer.record_validation import checked_headers
from penstock.shared.clients.protocol.column_batch_builder import (
    NO_HEADERS,
    SINGLE_RECORD_BATCH_OVERHEAD_MAX,
    ColumnBatchBuilder,
    EncodableColumns,
)
from penstock.shared.clients.protocol.packed_headers import PackedHeaders, header_block
from penstock.shared.common.compiled import compiled
from penstock.shared.common.errors import SerializationError
from penstock.shared.common.packed_bytes import NULL, PackedBytes, lengths_of
from penstock.shared.common.records import Int64Array, RecordColumns, header_pairs

if TYPE_CHECKING:
    from penstock.shared.clients.producer.producer_batch import ProducerBatch
    from penstock.shared.clients.producer.record_accumulator import PartitionQueue

SLICE_RECORDS = 16_384
"""The most records of a slice. Appending them blocks the event loop for some milliseconds."""

SLICE_BYTES = 4 * 1024 * 1024
"""Bytes of lists that are copied into one buffer at once, in addition to the buffer memory."""

# Error codes that `_measure_slice` returns instead of the largest record's size.
WRONG_KEYS = -1
WRONG_VALUES = -2
WRONG_HEADERS = -3
WRONG_TIMESTAMP = -4
OUTSIDE = {WRONG_KEYS: "keys", WRONG_VALUES: "values", WRONG_HEADERS: "headers"}

NO_PARTITION = -1
"""The partition number of a record without a key."""

_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C
_LOW = 0xFFFFFFFF

new_builder = ColumnBatchBuilder


# --- the partitions of keys ---


@compiled
def murmur2_kernel(data: Any, offset: Any, length: Any) -> Any:
    """Return Kafka's `Utils.murmur2` of a key, unsigned: 32 bits in an int64, in which no product overflows."""
    h = np.int64(_SEED) ^ length
    at = offset
    end = offset + (length & ~3)
    while at < end:
        k = np.int64(data[at])
        k |= np.int64(data[at + 1]) << 8
        k |= np.int64(data[at + 2]) << 16
        k |= np.int64(data[at + 3]) << 24
        k = (k * _MULTIPLIER) & _LOW
        k ^= k >> 24
        k = (k * _MULTIPLIER) & _LOW
        h = ((h * _MULTIPLIER) & _LOW) ^ k
        at += 4
    rest = length & 3
    if rest == 3:
        h ^= np.int64(data[end + 2]) << 16
    if rest >= 2:
        h ^= np.int64(data[end + 1]) << 8
    if rest >= 1:
        h ^= np.int64(data[end])
        h = (h * _MULTIPLIER) & _LOW
    h ^= h >> 13
    h = (h * _MULTIPLIER) & _LOW
    return h ^ (h >> 15)


@compiled
def _partitions_kernel(data: Any, offsets: Any, lengths: Any, partition_count: Any, out: Any) -> None:
    for row in range(len(lengths)):
        if lengths[row] < 0:
            out[row] = NO_PARTITION
        else:
            out[row] = (murmur2_kernel(data, offsets[row], lengths[row]) & 0x7FFFFFFF) % partition_count


@compiled
def _sort_kernel(partitions: Any, ends: Any, out: Any) -> None:
    """A stable counting sort: `out` gets the rows of partition 0 in order, then those of 1 …; `ends` are their ends."""
    # 1. Count the rows of each partition.
    for row in range(len(partitions)):
        ends[partitions[row]] += 1
    # 2. Turn the counts into the positions at which the partitions begin.
    begin = 0
    for number in range(len(ends)):
        count = ends[number]
        ends[number] = begin
        begin += count
    # 3. Put each row at its position. The begin of a partition moves with each of its rows, and so becomes its end.
    for row in range(len(partitions)):
        number = partitions[row]
        out[ends[number]] = row
        ends[number] += 1


def partitions_of_keys(keys: PackedBytes, partition_count: int) -> Int64Array:
    """Run the partitioner's kernel: return the partition of each key, or NO_PARTITION for a record without a key.

    The partition is the one that `partitioner.for_key` chooses.

    >>> keys = PackedBytes.of([b"21", None, b"ann", b"21"])
    >>> partitions = partitions_of_keys(keys, 7)
    >>> partitions.tolist()
    [3, -1, 0, 3]
    >>> partitions[1] = 4
    >>> [(number, rows.tolist()) for number, rows in rows_by_partition(partitions, 7)]
    [(0, [2]), (3, [0, 3]), (4, [1])]
    """
    out = np.empty(len(keys), np.int64)
    _partitions_kernel(*keys.arrays, partition_count, out)
    return out


def rows_by_partition(partitions: Int64Array, partition_count: int) -> list[tuple[int, Int64Array]]:
    """Run the partitioner's sort kernel: return the partitions that occur, ascending, each with its rows in order."""
    ends = np.zeros(partition_count, np.int64)
    rows = np.empty(len(partitions), np.int64)
    _sort_kernel(partitions, ends, rows)
    found = list[tuple[int, Int64Array]]()
    begin = 0
    for number, end in enumerate(ends.tolist()):
        if end > begin:
            found.append((number, rows[begin:end]))
            begin = end
    return found


# --- the slices ---


@compiled
def _measure_slice(
    key_bytes: Any,
    key_offsets: Any,
    key_lengths: Any,
    value_bytes: Any,
    value_offsets: Any,
    value_lengths: Any,
    header_bytes: Any,
    header_offsets: Any,
    header_lengths: Any,
    timestamps: Any,
    sizes: Any,
) -> Any:
    """Check a slice's columns: the positions of the strings, and the timestamps.

    Write to `sizes` for each record the bytes of its key, value and headers together. Returns the largest of these
    sums, or a negative error code.
    """
    largest = np.int64(0)
    has_headers = len(header_lengths) > 0
    for row in range(len(sizes)):
        key = key_lengths[row]
        value = value_lengths[row]
        # The caller may have built the columns itself. A kernel checks no bounds: a string outside of its buffer would
        # send foreign memory to the broker.
        if key < NULL or key_offsets[row] < 0 or key_offsets[row] + key > key_bytes:
            return np.int64(WRONG_KEYS)
        if value < NULL or value_offsets[row] < 0 or value_offsets[row] + value > value_bytes:
            return np.int64(WRONG_VALUES)
        if timestamps[row] < 0:
            return np.int64(WRONG_TIMESTAMP)
        sizes[row] = max(key, 0) + max(value, 0)
        if has_headers:
            headers = header_lengths[row]
            if headers < NULL or header_offsets[row] < 0 or header_offsets[row] + headers > header_bytes:
                return np.int64(WRONG_HEADERS)
            # SINGLE_RECORD_BATCH_OVERHEAD_MAX includes the byte for the number of headers.
            sizes[row] += max(headers - 1, 0)
        largest = max(largest, sizes[row])
    return largest


class PartitionSlice:
    """The records of a slice for one partition.

    `rows[at:]` are not in a batch yet. The batch `full` takes no more of them: it is the last one passed to `fill`.
    """

    __slots__ = ("at", "full", "of", "queue", "rows")

    def __init__(self, of: ColumnSlice, queue: PartitionQueue, rows: Int64Array) -> None:
        self.of = of
        self.queue = queue
        self.rows = rows
        self.at = 0
        self.full: ProducerBatch | None = None

    def __repr__(self) -> str:
        return f"<PartitionSlice of {len(self.rows)} records for {self.queue.tp}, {self.left} left>"

    @property
    def left(self) -> int:
        """The number of records that are not in a batch."""
        return len(self.rows) - self.at

    def next_size(self) -> int:
        """Return an upper bound of the bytes of a batch with the next record alone."""
        return SINGLE_RECORD_BATCH_OVERHEAD_MAX + int(self.of.sizes[self.rows[self.at]])

    def fill(self, batch: ProducerBatch | None) -> int:
        """Move records into a batch, as many as fit. Returns their number."""
        if batch is None or batch is self.full:
            return 0
        # Whatever fits goes in now, so no later call needs to try this batch again.
        self.full = batch
        first = self.at
        index = batch.count
        self.at = batch.extend(self.of.columns, self.rows, first)
        if self.at > first:
            self.of.spans.append((batch, index, self.rows[first : self.at]))
        return self.at - first


class ColumnSlice:
    """Consecutive records of columns, in the form that the kernels take.

    Each `Span` in `spans` has the records of one partition that were moved into a batch together or failed together.
    """

    __slots__ = ("columns", "groups", "keys", "largest", "sizes", "spans")

    def __init__(
        self, keys: PackedBytes, values: PackedBytes, timestamps: Int64Array, headers: PackedBytes = NO_HEADERS
    ) -> None:
        self.keys = keys
        columns = EncodableColumns.of(keys, values, timestamps, headers)
        self.columns = columns
        self.sizes = np.empty(len(keys), np.int64)
        self.largest = int(
            _measure_slice(
                len(columns.key_data),
                columns.key_offsets,
                columns.key_lengths,
                len(columns.value_data),
                columns.value_offsets,
                columns.value_lengths,
                len(columns.header_data),
                columns.header_offsets,
                columns.header_lengths,
                columns.timestamps,
                self.sizes,
            )
        )
        self.groups: list[PartitionSlice] = []
        self.spans: list[Span] = []

    def __repr__(self) -> str:
        return f"<ColumnSlice of {len(self)} records, {sum(group.left for group in self.groups)} left>"

    def __len__(self) -> int:
        return len(self.sizes)

    def to_partition(self, queue: PartitionQueue) -> None:
        """Route all records to one partition."""
        self.groups = [PartitionSlice(self, queue, np.arange(len(self)))]

    def by_key(
        self, queues: Sequence[PartitionQueue], without_key: Callable[[Int64Array], list[tuple[int, int]]]
    ) -> bool:
        """Choose a partition for each record by its key. Returns whether some records have no key.

        If there are any, `without_key` is called with the sizes of the records without a key, and divides these records
        into runs. For each run its result has the partition's index in `queues`, and the index after the run's last
        size.
        """
        partitions = partitions_of_keys(self.keys, len(queues))
        keyless = np.flatnonzero(partitions == NO_PARTITION)
        if len(keyless):
            begin = 0
            for partition, end in without_key(self.sizes[keyless]):
                partitions[keyless[begin:end]] = partition
                begin = end
        self.groups = [
            PartitionSlice(self, queues[at], rows) for at, rows in rows_by_partition(partitions, len(queues))
        ]
        return len(keyless) > 0

    def fail(self, error: Exception) -> int:
        """Fail the records that are not in a batch yet. Returns their number."""
        failed = sum(group.left for group in self.groups)
        for group in self.groups:
            if group.left:
                self.spans.append((error, -1, group.rows[group.at :]))
                group.at = len(group.rows)
        return failed


def slice_of(columns: RecordColumns, first: int, timestamp: int, size_max: int) -> ColumnSlice | None:
    """Return a slice of at most SLICE_RECORDS records from `first` on. If a column is a list, the slice has only
    about SLICE_BYTES of it.

    Returns None if any of these records must be sent alone: it is not bytes, has an invalid timestamp or header, or may
    exceed `size_max` bytes. Raises ValueError if a packed column refers to bytes outside its buffer. `timestamp` is for
    columns without timestamps.
    """
    stop = min(first + SLICE_RECORDS, len(columns))
    try:
        values = _pack_slice(columns.values[first:stop])
        keys = _pack_slice(columns.keys[first : first + len(values)])
    except (TypeError, BufferError):
        return None
    headers = _slice_headers(columns, first, first + len(keys))
    if headers is None:
        return None
    count = len(keys) if headers is NO_HEADERS else len(headers)
    timestamps = _slice_timestamps(columns.timestamps, first, first + count, timestamp)
    if timestamps is None or not count:
        return None
    part = ColumnSlice(keys[:count], values[:count], timestamps, headers)
    if (what := OUTSIDE.get(part.largest)) is not None:
        raise ValueError(f"topic {columns.topic}: the {what} have strings outside of their buffer")
    return part if 0 <= part.largest <= size_max - SINGLE_RECORD_BATCH_OVERHEAD_MAX else None


def _pack_slice(strings: Sequence[bytes | None]) -> PackedBytes:
    """Pack the keys or values of a slice; of a list only the first ones, with at most about SLICE_BYTES together."""
    if isinstance(strings, PackedBytes):
        return strings
    lengths = lengths_of(strings)
    ends = np.cumsum(np.maximum(lengths, 0))
    if len(ends) > 1 and ends[-1] > SLICE_BYTES:
        count = max(1, int(np.searchsorted(ends, SLICE_BYTES, "right")))
        strings = strings[:count]
        lengths = lengths[:count]
    return PackedBytes.of(strings, lengths)


def _slice_timestamps(
    timestamps: Sequence[int] | Int64Array | None, first: int, stop: int, default: int
) -> Int64Array | None:
    """Return the timestamps of some records: `default` for all if there is no column. Returns None if one of them is
    not an int64."""
    if timestamps is None:
        return np.full(stop - first, default, np.int64)
    some = timestamps[first:stop]
    if not isinstance(some, np.ndarray):
        if set(map(type, some)) != {int}:
            return None
        try:
            some = np.array(some, np.int64)
        except OverflowError:
            return None
    return some if some.dtype == np.int64 and len(some) == stop - first else None


def _slice_headers(columns: RecordColumns, first: int, stop: int) -> PackedBytes | None:
    """Return the headers of these records. If the column is not packed, the result ends with the record whose headers
    bring the sum above SLICE_BYTES.

    Returns None if a record's headers are invalid, or are no tuple, list or dict.
    """
    if columns.headers is None:
        return NO_HEADERS
    some = columns.headers[first:stop]
    if isinstance(some, PackedHeaders):
        return some.blocks
    blocks = list[bytes]()
    size = 0
    for own in some:
        # An iterator can be read only once. After None the caller takes the record alone, and would find it empty.
        if not isinstance(own, tuple | list | dict):
            return None
        try:
            blocks.append(header_block(checked_headers(columns.topic, header_pairs(own))))
        except SerializationError:
            return None
        size += len(blocks[-1])
        if size > SLICE_BYTES:
            break
    return PackedBytes.of(blocks)


def compile_kernels() -> None:
    """Compile the kernels for slices of columns, or load them from the cache of compiled code."""
    some = PackedBytes.of([b"k", None])
    rows_by_partition(np.abs(partitions_of_keys(some, 2)), 2)
    part = ColumnSlice(some, some, np.array([1, 2], np.int64))
    new_builder(1_000, 1_000, transactional=False).extend(part.columns, np.arange(2), 0, 2)
