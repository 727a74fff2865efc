"""Chooses the partition of a record, and finds the partition's queue.

The built-in partitioner sends a record with a key to a partition by Java's murmur2 of the key. Records without a key
share a sticky partition (KIP-480, KIP-794), which changes after `batch_size` bytes. The next one is drawn among the
partitions that have a leader, or among all if none has one. The fewer batches a partition has queued, the more often it
is drawn. With a `partitioner_availability_timeout_ms`, a partition is skipped if a batch has been ready for its broker
for longer, unless that is so for all partitions.

`ProducerPartitioner` has the partitions of each topic in the metadata, their queues, and the sticky partition.

>>> for_key(b"21", 7)
3
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import accumulate

import numpy as np
from murmurhash2 import murmurhash2

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.clients.producer.record_accumulator import PartitionQueue, RecordAccumulator
from penstock.shared.clients.producer.record_validation import check_partition
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.common.records import Int64Array, ProducerRecord, TopicPartition

Partitioner = Callable[[str, bytes | None, bytes | None, Sequence[int]], int | None]
"""A custom partitioner: topic, key, value and the topic's partitions to one of them.

If it returns None, the built-in partitioner chooses.
"""

KEY_CACHE_MAX = 65_536
"""Keys of a topic whose partition is cached, since a lookup is cheaper than a hash. A full cache is cleared."""

CACHED_KEY_BYTES_MAX = 128
"""A longer key is hashed each time, so that the cache of a topic stays below about 16 MiB."""

RECORD_OVERHEAD = 12
"""Typical bytes of a record besides key, value and headers. If a run's records have more, its last ones open another
batch."""

_SEED = 0x9747B28C


def for_key(key: bytes, partition_count: int) -> int:
    """Return `(murmur2(key) & 0x7fffffff) % partition_count`, over all partitions with or without a leader."""
    return int((murmurhash2(key, _SEED) & 0x7FFFFFFF) % partition_count)


class StickyPartition:
    """One topic's choice for records without a key (KIP-480, KIP-794)."""

    def __init__(self, batch_size: int, *, adaptive: bool, rng: random.Random | None = None) -> None:
        self._batch_size = batch_size
        self._adaptive = adaptive
        self._random = rng or random.Random()  # noqa: S311 - spreads load, protects nothing
        self.partition: int | None = None
        self._bytes = 0

    def __repr__(self) -> str:
        return f"<StickyPartition {self.partition}, {self._bytes} bytes>"

    def produced(self, size: int) -> None:
        """Count bytes that went to the current choice."""
        self._bytes += size

    def choose(
        self,
        topic: str,
        available: Sequence[int],
        all_partitions: Sequence[int],
        queued: Callable[[TopicPartition], int],
        slow: Callable[[TopicPartition], bool],
    ) -> int:
        """Return the partition for the next batch: the current one until it has received `batch_size` bytes or is no
        longer a candidate, then a random candidate.

        Candidates are the partitions with a leader (`available`), or all if there are none. Adaptive partitioning
        prefers those with few batches (`queued`), and skips `slow` ones unless all are slow.
        """
        choices = available or all_partitions
        # Stay until the partition has had `batch_size` bytes, in however many batches. A slow broker fills larger
        # batches, so a change with each batch would send it more records (KIP-794). A partition that lost its leader is
        # left, unless none has a leader.
        if self.partition in choices and self._bytes < self._batch_size:
            return self.partition  # type: ignore[return-value]
        self._bytes = 0
        if not self._adaptive:
            self.partition = self._random.choice(choices)
            return self.partition
        # A partition with fewer queued batches is drawn more often (Java: `BuiltInPartitioner`). For example the queue
        # lengths 2, 0, 1 have the weights 1, 3, 2, with the running sums 1, 4, 6. Of the numbers 0 to 5, one draws the
        # first partition (0), three the second (1, 2, 3) and two the third (4, 5).
        quick = [p for p in choices if not slow(TopicPartition(topic, p))] or choices
        sizes = [queued(TopicPartition(topic, p)) for p in quick]
        weights = list(accumulate(max(sizes) + 1 - size for size in sizes))
        self.partition = quick[bisect_right(weights, self._random.randrange(weights[-1]))]
        return self.partition


class PartitionedTopic:
    """A topic's partitions, those with a leader, the cached partitions of keys, and the sticky choice."""

    __slots__ = (
        "available",
        "by_key",
        "is_used",
        "name",
        "numbers",
        "queues",
        "sticky",
        "sticky_batch",
        "sticky_queue",
        "used_ms",
    )

    def __init__(self, name: str, queues: dict[int, PartitionQueue], sticky: StickyPartition) -> None:
        self.name = name
        self.queues = queues
        self.numbers = list(queues)
        self.available = self.numbers
        self.by_key: dict[bytes, PartitionQueue] = {}
        self.sticky = sticky
        self.sticky_queue: PartitionQueue | None = None
        self.sticky_batch: ProducerBatch | None = None
        self.is_used = True
        self.used_ms = 0

    def for_key(self, key: bytes) -> PartitionQueue:
        """Return the queue of the partition that the built-in partitioner chooses for a key. Raises TypeError if it is
        not bytes."""
        queue = self.by_key.get(key)
        if queue is None:
            # murmurhash2 takes any buffer.
            if not isinstance(key, bytes):
                raise TypeError(f"a key must be bytes, got {type(key).__name__}")
            queue = self.queues[self.numbers[for_key(key, len(self.numbers))]]
            if len(key) <= CACHED_KEY_BYTES_MAX:
                if len(self.by_key) >= KEY_CACHE_MAX:
                    self.by_key.clear()
                self.by_key[key] = queue
        return queue


class ProducerPartitioner:
    """Chooses the partition of each record of a producer, and knows the topics that it sends to."""

    def __init__(
        self,
        connection: Connection,
        accumulator: RecordAccumulator,
        settings: ProducerSettings,
        partitioner: Partitioner | None,
        is_slow: Callable[[TopicPartition], bool],
    ) -> None:
        self._connection = connection
        self._accumulator = accumulator
        self._settings = settings
        self._partitioner = partitioner
        self._is_slow = is_slow
        self._topics: dict[str, PartitionedTopic] = {}

    def topic(self, name: str) -> PartitionedTopic | None:
        """Return a topic with the partitions from which to choose, or None while the metadata lacks it."""
        numbers = self._connection.partitions(name)
        if numbers is None:
            return None
        known = self._topics.get(name)
        # New partitions move keys, so the cached partitions of keys are void. The queues themselves stay the same.
        if known is None or known.numbers != numbers:
            queues = {number: self._accumulator.queue(TopicPartition(name, number)) for number in numbers}
            adaptive = self._settings.partitioner_adaptive_partitioning_enable
            known = PartitionedTopic(name, queues, StickyPartition(self._settings.batch_size, adaptive=adaptive))
            self._topics[name] = known
            self._connection.watch(name)
        known.is_used = True
        known.available = self._connection.available_partitions(name)
        return known

    def forget_idle(self, now_ms: int) -> None:
        """Called with fresh metadata: stop watching topics that were not used for `metadata_max_idle_ms`."""
        # A producer that sends to changing topics would otherwise fetch the metadata of all of them for ever (KIP-526).
        for name, known in list(self._topics.items()):
            if known.is_used or any(queue.held for queue in known.queues.values()):
                known.is_used = False
                known.used_ms = now_ms
            elif now_ms - known.used_ms > self._settings.metadata_max_idle_ms and self._connection.unwatch(name):
                del self._topics[name]
                # The sequence numbers stay: the broker would take a number that is used twice for a duplicate.
                self._accumulator.drop(name)

    def number_for(
        self, topic: PartitionedTopic, record: ProducerRecord, key: bytes | None, value: bytes | None
    ) -> int | None:
        """Return the partition that the record names or the custom partitioner chooses, None if neither does.

        Raises DataError if the custom partitioner returns neither None nor an integer from 0 to 2^31 - 1. The partition
        need not exist.
        """
        if record.partition is not None or self._partitioner is None:
            return record.partition
        number = self._partitioner(topic.name, key, value, topic.numbers)
        check_partition(topic.name, number)
        return number

    def queue_for(self, topic: PartitionedTopic, number: int | None, key: bytes | None) -> PartitionQueue | None:
        """Return the queue of a partition; if `number` is None, of the one that the built-in partitioner chooses.

        Returns None if there is no such partition.
        """
        # There are four cases.
        # 1. The record or the partitioner has chosen.
        if number is not None:
            return topic.queues.get(number)
        # 2. The key decides. `partitioner.ignore.keys` is from KIP-794.
        if key is not None and not self._settings.partitioner_ignore_keys:
            return topic.for_key(key)
        # 3. The sticky choice stays while its batch is open (KIP-480).
        queue = topic.sticky_queue
        if queue is not None and queue.open is not None and queue.open is topic.sticky_batch:
            return queue
        # 4. That batch was sent, or there was none.
        return self._choose_sticky_partition(topic)

    def spread(self, topic: PartitionedTopic, sizes: Int64Array) -> list[tuple[int, int]]:
        """Choose partitions for records without a key, from their sizes in bytes.

        Returns for each run of records the index of its partition in `topic.numbers`, and the index after its last
        record. A run takes at most the rest of the sticky batch, or a whole batch, but at least one record. The size of
        a record in a batch is estimated as its size in bytes plus `RECORD_OVERHEAD`.
        """
        batch_size = self._accumulator.batch_size
        queue = topic.sticky_queue
        if queue is None or queue.open is None or queue.open is not topic.sticky_batch:
            queue = self._choose_sticky_partition(topic)
        batch = queue.open
        ends = np.cumsum(sizes + RECORD_OVERHEAD)
        # A batch of single records takes no columns: the first run then opens a batch of its own.
        room = batch_size - (batch.size() if batch is not None and batch.takes_columns else 0)
        runs: list[tuple[int, int]] = []
        before = 0
        end = 0
        while True:
            # At least one record: a record that is larger than a batch gets a batch alone.
            end = max(end + 1, int(np.searchsorted(ends, before + room, "right")))
            runs.append((topic.numbers.index(queue.tp.partition), end))
            if end >= len(ends):
                return runs
            topic.sticky.produced(int(ends[end - 1]) - before)
            queue = self._choose_sticky_partition(topic)
            before = int(ends[end - 1])
            room = batch_size

    def slice_taken(self, topic: PartitionedTopic) -> None:
        """Note that the records were appended to the partitions that `spread` chose.

        The current sticky partition, usually the last of these, stays while its batch is open.
        """
        if topic.sticky_queue is not None:
            topic.sticky_batch = topic.sticky_queue.open

    def after_full(
        self, topic: PartitionedTopic, number: int | None, key: bytes | None, queue: PartitionQueue
    ) -> PartitionQueue:
        """Return the queue for a record that does not fit into its queue's open batch. `number` is that of
        `number_for`."""
        # A full batch is the moment at which the sticky choice may move on (KIP-480): within a batch a move would only
        # make smaller batches.
        if queue is topic.sticky_queue and self._uses_sticky_partition(number, key):
            return self._choose_sticky_partition(topic)
        return queue

    def opened(self, topic: PartitionedTopic, number: int | None, key: bytes | None, batch: ProducerBatch) -> None:
        """Note that a record opened or joined a batch: the sticky partition stays while that batch is open."""
        if (
            self._uses_sticky_partition(number, key)
            and topic.sticky_queue is not None
            and topic.sticky_queue.tp == batch.tp
        ):
            topic.sticky_batch = batch

    def _uses_sticky_partition(self, number: int | None, key: bytes | None) -> bool:
        return number is None and (key is None or self._settings.partitioner_ignore_keys)

    def _choose_sticky_partition(self, topic: PartitionedTopic) -> PartitionQueue:
        # Bytes are counted for a whole batch, since the choice does not change within one.
        if topic.sticky_batch is not None:
            topic.sticky.produced(topic.sticky_batch.size())
        number = topic.sticky.choose(
            topic.name, topic.available, topic.numbers, self._accumulator.queued_batches, self._is_slow
        )
        queue = topic.queues[number]
        topic.sticky_queue = queue
        topic.sticky_batch = queue.open
        return queue
