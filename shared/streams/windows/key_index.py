"""A hash index that gives record keys numbers, called codes in names, and owns the keys' bytes.

With numbers instead of keys, a window is a row of numbers, and a key needs no Python object. A key has its number until
`release` frees it. Then another key may get the number.

>>> keys = KeyIndex()
>>> data = np.frombuffer(b"annbobann", np.uint8)
>>> codes = keys.codes(data, np.array([0, 3, 6]), np.array([3, 3, 3]))
>>> codes.tolist(), keys.key(int(codes[1])), keys.code(b"ann"), keys.code(b"eve")
([0, 1, 0], b'bob', 0, -1)
>>> keys.release(np.array([0]), np.array([True, True])); keys.code(b"ann"), len(keys)
(0, 2)
>>> keys.release(np.array([0]), np.array([False, True])); keys.code(b"ann"), len(keys)
(-1, 1)
"""

# ruff: noqa: SIM110
# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.byte_copies import copied, copy_bytes
from penstock.shared.common.compiled import compiled
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array

NONE = -1
SLOTS_MIN = 256
BYTES_MIN = 4_096
GROWTH = 1.125

Bytes = NDArray[np.uint8]
Int32Array = NDArray[np.int32]

# Indexes of `counts`.
_USED, _FREE, _BYTES, _GARBAGE, _OCCUPIED = range(5)


@compiled
def hash_of(data, at, length):
    """Return a 64-bit hash of bytes, eight at a time; each step mixes the high bits into the low ones."""
    h = np.uint64(0x9E3779B97F4A7C15) ^ np.uint64(length)
    i = 0
    while i + 8 <= length:
        word = np.uint64(0)
        for j in range(8):
            word |= np.uint64(data[at + i + j]) << np.uint64(8 * j)
        h = (h ^ word) * np.uint64(0xBF58476D1CE4E5B9)
        h ^= h >> np.uint64(29)
        i += 8
    word = np.uint64(0)
    j = 0
    while i < length:
        word |= np.uint64(data[at + i]) << np.uint64(8 * j)
        i += 1
        j += 1
    h = (h ^ word) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(32))


def _crc_table() -> NDArray[np.uint32]:
    table = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        table = np.where(table & 1, table >> 1 ^ np.uint32(0xEDB88320), table >> 1).astype(np.uint32)
    return table


_CRC_TABLE = _crc_table()


@compiled
def _stored_hash(h, data, at, length):
    """Return the number that the index keeps for a key: its CRC-32 above the low half of its hash.

    The CRC-32 is the key's `key_hash`, by which queries read a store in order.
    """
    crc = np.uint32(0xFFFFFFFF)
    for i in range(at, at + length):
        crc = _CRC_TABLE[(crc ^ data[i]) & np.uint32(0xFF)] ^ (crc >> np.uint32(8))
    return (np.uint64(crc ^ np.uint32(0xFFFFFFFF)) << np.uint64(32)) | np.uint64(np.uint32(h))


@compiled
def _is_same_key(a, a_at, b, b_at, length):
    for j in range(length):
        if a[a_at + j] != b[b_at + j]:
            return False
    return True


@compiled
def take_codes(data, offsets, lengths, first, codes, slots, hashes, arena, key_offsets, sizes, free, counts):
    """Write the number of each key to `codes`, from the position `first` on. A new key is added to the index.

    If there is no room for a new key, return the position of this key, else the length of `offsets`. A missing key (of
    negative length) has the number NONE.
    """
    mask = np.uint64(len(slots) - 1)
    for i in range(first, len(offsets)):
        length = lengths[i]
        if length < 0:
            codes[i] = NONE
            continue
        at = offsets[i]
        h = hash_of(data, at, length)
        slot = np.int64(h & mask)
        while True:
            code = slots[slot]
            if code == NONE:
                # Stop before anything is written, so that the caller can make room and call again with this key.
                if counts[_BYTES] + length > len(arena) or (counts[_FREE] == 0 and counts[_USED] == len(hashes)):
                    return i
                # At most half of the slots are used, or linear probing becomes slow.
                if 2 * (counts[_OCCUPIED] + 1) > len(slots):
                    return i
                if counts[_FREE]:
                    counts[_FREE] -= 1
                    code = free[counts[_FREE]]
                else:
                    code = np.int32(counts[_USED])
                    counts[_USED] += 1
                counts[_OCCUPIED] += 1
                slots[slot] = code
                hashes[code] = _stored_hash(h, data, at, length)
                key_offsets[code] = counts[_BYTES]
                sizes[code] = length
                copy_bytes(arena, counts[_BYTES], data, at, length)
                counts[_BYTES] += length
                codes[i] = code
                break
            is_alike = np.uint32(hashes[code]) == np.uint32(h) and sizes[code] == length
            if is_alike and _is_same_key(arena, key_offsets[code], data, at, length):
                codes[i] = code
                break
            slot = (slot + 1) & np.int64(mask)
    return len(offsets)


@compiled
def _find_key_slot(data, length, slots, hashes, arena, key_offsets, sizes):
    mask = np.uint64(len(slots) - 1)
    h = hash_of(data, 0, length)
    slot = np.int64(h & mask)
    while True:
        code = slots[slot]
        if code == NONE:
            return NONE
        is_alike = np.uint32(hashes[code]) == np.uint32(h) and sizes[code] == length
        if is_alike and _is_same_key(arena, key_offsets[code], data, 0, length):
            return code
        slot = (slot + 1) & np.int64(mask)


@compiled
def _drop_unused_keys(candidates, is_used, slots, hashes, sizes, free, counts):
    """Free the numbers of the candidates that are not used, and close the gaps that they leave in the slots."""
    mask = np.int64(len(slots) - 1)
    for code in candidates:
        if is_used[code] or sizes[code] == NONE:
            continue
        slot = np.int64(hashes[code] & np.uint64(mask))
        while slots[slot] != code:
            slot = (slot + 1) & mask
        hole = slot
        while True:
            slot = (slot + 1) & mask
            other = slots[slot]
            if other == NONE:
                break
            home = np.int64(hashes[other] & np.uint64(mask))
            # A key must be found from its home slot without passing an empty one. It moves into the hole if the hole
            # lies between its home and its slot.
            if ((slot - home) & mask) >= ((slot - hole) & mask):
                slots[hole] = other
                hole = slot
        slots[hole] = NONE
        counts[_GARBAGE] += sizes[code]
        sizes[code] = NONE
        free[counts[_FREE]] = code
        counts[_FREE] += 1
        counts[_OCCUPIED] -= 1


@compiled
def _rehash_keys(slots, hashes, sizes, used):
    mask = np.int64(len(slots) - 1)
    for code in range(used):
        if sizes[code] == NONE:
            continue
        slot = np.int64(hashes[code] & np.uint64(mask))
        while slots[slot] != NONE:
            slot = (slot + 1) & mask
        slots[slot] = code


@compiled
def _compact_key_bytes(arena, packed, key_offsets, sizes, used):
    at = 0
    for code in range(used):
        size = sizes[code]
        if size > 0:
            copy_bytes(packed, at, arena, key_offsets[code], size)
        key_offsets[code] = at
        at += max(size, 0)
    return at


@compiled
def _are_ascii(data, offsets, lengths):
    for i in range(len(offsets)):
        for j in range(offsets[i], offsets[i] + lengths[i]):
            if data[j] >= 128:
                return False
    return True


def are_ascii(keys: PackedBytes) -> bool:
    """Return whether all keys consist of ASCII.

    >>> are_ascii(PackedBytes.of([b"ann", None])), are_ascii(PackedBytes.of([b"\\xff"]))
    (True, False)
    """
    return bool(_are_ascii(keys.data, keys.offsets, keys.lengths))


class KeyIndex:
    """Gives each key a number below `capacity`. The number of a released key is used again."""

    def __init__(self) -> None:
        self.capacity = SLOTS_MIN // 2
        self.slots: Int32Array = np.full(SLOTS_MIN, NONE, np.int32)
        self.hashes: NDArray[np.uint64] = np.zeros(self.capacity, np.uint64)
        self.offsets: Int64Array = np.zeros(self.capacity, np.int64)
        self.sizes: Int32Array = np.full(self.capacity, NONE, np.int32)
        self.arena: Bytes = np.zeros(BYTES_MIN, np.uint8)
        self._free: Int32Array = np.zeros(self.capacity, np.int32)
        self._counts: Int64Array = np.zeros(5, np.int64)

    def __len__(self) -> int:
        return int(self._counts[_OCCUPIED])

    def __repr__(self) -> str:
        return f"<KeyIndex of {len(self)} keys, {int(self._counts[_BYTES])} bytes>"

    def codes(self, data: Bytes, offsets: Int64Array, lengths: Int64Array) -> Int32Array:
        """Return the numbers of the keys in `data`. New keys get one; a negative length has no key and gets NONE."""
        codes = np.empty(len(offsets), np.int32)
        done = 0
        while True:
            done = take_codes(
                data, offsets, lengths, done, codes,
                self.slots, self.hashes, self.arena, self.offsets, self.sizes, self._free, self._counts,
            )  # fmt: skip
            if done == len(offsets):
                return codes
            self._grow_arena(int(lengths[done]))

    def codes_of(self, keys: Sequence[bytes | None]) -> Int32Array:
        """As `codes`, for any sequence of keys."""
        packed = PackedBytes.of(keys)
        return self.codes(packed.data, packed.offsets, packed.lengths)

    def code(self, key: bytes) -> int:
        """Return the number of a key, or NONE."""
        data = np.frombuffer(key, np.uint8)
        return int(_find_key_slot(data, len(key), self.slots, self.hashes, self.arena, self.offsets, self.sizes))

    def key(self, code: int) -> bytes:
        """Return the key with this number."""
        at = self.offsets[code]
        return self.arena[at : at + self.sizes[code]].tobytes()

    def keys(self, codes: NDArray[Any]) -> PackedBytes:
        """Return a copy of the keys with these numbers, because the index may change."""
        return copied(PackedBytes(self.arena, self.offsets[codes], self.sizes[codes]))

    def codes_between(self, low: int, high: int) -> NDArray[np.int64]:
        """Return the numbers of the keys whose `key_hash` is from `low` to `high`, in no order.

        Released numbers are included. No key is copied, and no Python object is made for a key.
        """
        hashes = self.hashes[: self._counts[_USED]]
        return np.flatnonzero((hashes >= np.uint64(low << 32)) & (hashes <= np.uint64(high << 32 | 0xFFFFFFFF)))

    def release(self, candidates: NDArray[Any], is_used: NDArray[np.bool_]) -> None:
        """Free the numbers in `candidates` that are not used; `is_used` is indexed by number."""
        _drop_unused_keys(candidates, is_used, self.slots, self.hashes, self.sizes, self._free, self._counts)
        # Bytes of released keys stay until they are more than half of all bytes.
        if 2 * self._counts[_GARBAGE] > self._counts[_BYTES] and self._counts[_GARBAGE] > BYTES_MIN:
            self.repack()

    def repack(self, size: int | None = None) -> None:
        """Compact the remaining bytes, in memory of this size; the default is the current size."""
        packed = np.zeros(len(self.arena) if size is None else size, np.uint8)
        self._counts[_BYTES] = _compact_key_bytes(
            self.arena, packed, self.offsets, self.sizes, int(self._counts[_USED])
        )
        self._counts[_GARBAGE] = 0
        self.arena = packed

    def _grow_arena(self, length: int) -> None:
        """Make room for at least one more key of this length: for its bytes, its number and its slot."""
        if self._counts[_BYTES] + length > len(self.arena):
            least = int(self._counts[_BYTES] - self._counts[_GARBAGE]) + length
            self.repack(max(len(self.arena), int(least * GROWTH)))
        if not self._counts[_FREE] and self._counts[_USED] == self.capacity:
            self.capacity = int(self.capacity * GROWTH)
            self.hashes = grown_array(self.hashes, self.capacity)
            self.offsets = grown_array(self.offsets, self.capacity)
            self.sizes = grown_array(self.sizes, self.capacity, NONE)
            self._free = grown_array(self._free, self.capacity)
        if 2 * (self._counts[_OCCUPIED] + 1) > len(self.slots):
            self.slots = np.full(2 * len(self.slots), NONE, np.int32)
            _rehash_keys(self.slots, self.hashes, self.sizes, int(self._counts[_USED]))


def grown_array(array: NDArray[Any], size: int, fill: int = 0) -> NDArray[Any]:
    """Return a copy of an array with `size` elements, of which the new ones are `fill`."""
    shape = (size, *array.shape[1:])
    # Zeros take no memory before they are written.
    larger = np.full(shape, fill, array.dtype) if fill else np.zeros(shape, array.dtype)
    larger[: len(array)] = array
    return larger


def compile_key_index() -> None:
    """Compile the kernels of the key index, or load them from numba's cache."""
    index = KeyIndex()
    # With this many keys, the index also compiles the kernel that rehashes.
    index.codes_of([b"%d" % number for number in range(SLOTS_MIN)])
    index.release(np.arange(len(index)), np.zeros(index.capacity, np.bool_))
    index.repack()
