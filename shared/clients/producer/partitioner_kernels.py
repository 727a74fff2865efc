"""The built-in partitioner for keys in columns, as kernels: the partition of each key, and the rows of each partition.

`partitioner` chooses the same partitions for single records, and does not load numba.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.shared.common.compiled import compiled
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array

NO_PARTITION = -1
"""The partition number of a record without a key."""

_MULTIPLIER = 0x5BD1E995
_SEED = 0x9747B28C
_LOW = 0xFFFFFFFF


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
    """A stable counting sort: `out[ends[p - 1]:ends[p]]` are the rows of partition p in order."""
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
