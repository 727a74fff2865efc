"""Which partition a record goes to: Java's murmur2 for keys, the sticky choice for records without one (KIP-794).

The sticky choice stays with a partition for `batch_size` bytes. The next one is drawn among the partitions that have a
leader, those with fewer batches queued more often; a broker that has left what was ready for it lying for longer than
`partitioner_availability_timeout_ms` is passed over.

>>> murmur2(b"21")
-973932308
>>> for_key(b"21", 7)
3
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

from murmurhash2 import murmurhash2

from penstock.shared.common.records import TopicPartition

Partitioner = Callable[[str, bytes | None, bytes | None, Sequence[int]], int | None]
"""A user's own: topic, key, value and the topic's partitions to one of them; None leaves it to the built-in choice."""

_SEED = 0x9747B28C


def murmur2(data: bytes) -> int:
    """Kafka's `Utils.murmur2`: a signed 32-bit hash."""
    h: int = murmurhash2(data, _SEED)
    return h - 0x1_0000_0000 if h & 0x8000_0000 else h


def for_key(key: bytes, partition_count: int) -> int:
    """`(murmur2(key) & 0x7fffffff) % partition_count`, over all partitions whether they have a leader or not."""
    return int((murmurhash2(key, _SEED) & 0x7FFFFFFF) % partition_count)


class StickyPartition:
    """One topic's choice for records without a key."""

    def __init__(self, batch_size: int, *, adaptive: bool, rng: random.Random | None = None) -> None:
        self._batch_size, self._adaptive = batch_size, adaptive
        self._random = rng or random.Random()  # noqa: S311 - spreads load, protects nothing
        self.partition: int | None = None
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<StickyPartition {self.partition}, {self._bytes} bytes>"

    def produced(self, size: int) -> None:
        """Note bytes that went to the present choice."""
        self._bytes += size

    def choose(
        self,
        topic: str,
        available: Sequence[int],
        all_partitions: Sequence[int],
        queued: Callable[[TopicPartition], int],
        slow: Callable[[TopicPartition], bool],
    ) -> int:
        """The partition for the next batch: the present one until it has had `batch_size` bytes, then another draw.

        Among the available ones that are not slow; among all available, or all there are, where that leaves none.
        """
        choices = available or all_partitions
        if self.partition in choices and self._bytes < self._batch_size:
            return self.partition  # type: ignore[return-value]
        self._bytes = 0
        if not self._adaptive:
            self.partition = self._random.choice(choices)
            return self.partition
        quick = [p for p in choices if not slow(TopicPartition(topic, p))] or choices
        sizes = [queued(TopicPartition(topic, p)) for p in quick]
        weights = list(accumulate(max(sizes) + 1 - size for size in sizes))
        self.partition = quick[bisect_right(weights, self._random.randrange(weights[-1]))]
        return self.partition
