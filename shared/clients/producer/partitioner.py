"""Which partition a record goes to: Java's murmur2 for keys, the sticky choice for records without one.

>>> murmur2(b"21")
-973932308
>>> Partitioner(16_384).for_key(b"21", 7)
3
"""

from __future__ import annotations

import random
from collections.abc import Sequence

KEY_CACHE_MAX = 65_536
"""Hashes kept for keys seen before; a hash in Python costs twenty times a look-up. Full, the cache starts anew."""

_SEED, _M, _R, _MASK = 0x9747B28C, 0x5BD1E995, 24, 0xFFFFFFFF


def murmur2(data: bytes) -> int:
    """Kafka's `Utils.murmur2`: a signed 32-bit hash."""
    length = len(data)
    h = _SEED ^ length
    whole = length & ~3
    for i in range(0, whole, 4):
        k = int.from_bytes(data[i : i + 4], "little") * _M & _MASK
        k = (k ^ k >> _R) * _M & _MASK
        h = (h * _M & _MASK) ^ k
    if whole != length:
        h = (h ^ int.from_bytes(data[whole:], "little")) * _M & _MASK
    h = (h ^ h >> 13) * _M & _MASK
    h ^= h >> 15
    return h - 0x1_0000_0000 if h & 0x8000_0000 else h


class Partitioner:
    """Remembers the hashes of keys, and for each topic the partition that records without a key stick to."""

    def __init__(self, batch_size: int, rng: random.Random | None = None) -> None:
        self._batch_size = batch_size
        self._random = rng or random.Random()  # noqa: S311 - spreads load, protects nothing
        self._hashes: dict[bytes, int] = {}
        self._sticky: dict[str, tuple[int, int]] = {}

    def for_key(self, key: bytes, partition_count: int) -> int:
        """`(murmur2(key) & 0x7fffffff) % partition_count`, over all partitions whether they have a leader or not."""
        positive = self._hashes.get(key)
        if positive is None:
            if len(self._hashes) >= KEY_CACHE_MAX:
                self._hashes.clear()
            positive = self._hashes[key] = murmur2(key) & 0x7FFFFFFF
        return positive % partition_count

    def sticky(self, topic: str, size: int, available: Sequence[int], all_partitions: Sequence[int]) -> int:
        """The topic's sticky partition, a random other one after every `batch_size` bytes.

        It is chosen among the available ones, among all where none is available.
        """
        partition, used = self._sticky.get(topic, (-1, 0))
        choices = available or all_partitions
        if used >= self._batch_size or partition not in choices:
            others = [p for p in choices if p != partition]
            partition, used = self._random.choice(others or choices), 0
        self._sticky[topic] = (partition, used + size)
        return partition
