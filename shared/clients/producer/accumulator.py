"""The record accumulator: a queue of batches for each partition, and the decision which are due.

A partition's first batch is due when it is full (a second one is behind it), has lingered, is wanted by a flush, or
when somebody waits for buffer memory; a batch that is tried again is due after its backoff. While one batch of a
partition is in flight the partition is left alone, so its order is kept whatever is retried.

Time comes in as `now_ms` of a monotonic clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from shared.clients.connection import COMPRESSION
from shared.clients.producer.batch import Batch, BatchState
from shared.clients.producer.settings import ProducerSettings
from shared.common.records import TopicPartition


class RecordAccumulator:
    """Batches on their way: queued by partition, in flight, and all that are not done (`incomplete`)."""

    def __init__(self, settings: ProducerSettings) -> None:
        self._settings = settings
        self._compression = COMPRESSION[settings.compression_type]
        self._queues: dict[TopicPartition, deque[Batch]] = {}
        self.in_flight: dict[TopicPartition, Batch] = {}
        self.incomplete: dict[Batch, None] = {}
        self.flushes = 0

    def __repr__(self) -> str:
        queued = sum(map(len, self._queues.values()))
        return f"<RecordAccumulator {queued} batches queued, {len(self.in_flight)} in flight>"

    def append(
        self, tp: TopicPartition, key: bytes | None, value: bytes | None, headers: Any, timestamp: int, now_ms: int
    ) -> tuple[Batch, bool]:
        """Add a record to its partition's last batch; gives the batch and whether the sender has news."""
        queue = self._queues.get(tp)
        if queue is None:
            queue = self._queues[tp] = deque()
        if queue:
            batch = queue[-1]
            if batch.state is BatchState.OPEN and batch.append(key, value, headers, timestamp):
                return batch, False
        settings = self._settings
        batch = Batch(tp, settings.batch_size, self._compression, settings.transactional_id is not None, now_ms)
        appended = batch.append(key, value, headers, timestamp)
        assert appended, "the first record of a batch always fits"
        queue.append(batch)
        self.incomplete[batch] = None
        return batch, True

    def queued(self) -> Iterable[TopicPartition]:
        """The partitions that have something queued."""
        return [tp for tp, queue in self._queues.items() if queue]

    def drain(
        self,
        now_ms: int,
        leader_of: Callable[[TopicPartition], int | None],
        usable: Callable[[int], bool],
        muted: Callable[[TopicPartition], bool],
        hurry: bool,
    ) -> tuple[dict[int, list[Batch]], set[str]]:
        """The due batches by leader, marked as in flight, and the topics of those due that have no leader.

        `usable` says which nodes take another request. One node's batches share a request up to `max_request_size`;
        partitions take turns in being first, so that the bound starves none.
        """
        requests: dict[int, list[Batch]] = {}
        sizes: dict[int, int] = {}
        leaderless: set[str] = set()
        for tp in list(self._queues):
            queue = self._queues[tp]
            if not queue:
                del self._queues[tp]
                continue
            if tp in self.in_flight or muted(tp) or not self._due(queue, now_ms, hurry):
                continue
            node = leader_of(tp)
            if node is None:
                leaderless.add(tp.topic)
                continue
            size = sizes.get(node, 0) + queue[0].size()
            if not usable(node) or (node in requests and size > self._settings.max_request_size):
                continue
            sizes[node] = size
            batch = queue.popleft()
            batch.state = BatchState.DRAINED
            self.in_flight[tp] = batch
            requests.setdefault(node, []).append(batch)
            self._queues[tp] = self._queues.pop(tp)
        return requests, leaderless

    def landed(self, batch: Batch) -> None:
        """The batch's request is over: its partition may be drained again."""
        assert self.in_flight.get(batch.tp) is batch, f"{batch!r} was not in flight"
        del self.in_flight[batch.tp]

    def reenqueue(self, batch: Batch, retry_at_ms: int) -> None:
        """Put a batch back in front of its partition, to be sent again from `retry_at_ms`."""
        batch.state = BatchState.QUEUED
        batch.retry_at_ms = retry_at_ms
        self._queues.setdefault(batch.tp, deque()).appendleft(batch)

    def expire(self, now_ms: int) -> list[Batch]:
        """The batches whose `delivery_timeout_ms` has passed: taken out of the queues, those in flight as well."""
        oldest = now_ms - self._settings.delivery_timeout_ms
        # `incomplete` is in order of creation, so the first young one ends the search.
        expired = []
        for batch in self.incomplete:
            if batch.created_ms > oldest:
                break
            expired.append(batch)
        for batch in expired:
            queue = self._queues.get(batch.tp)
            if queue and batch in queue:
                queue.remove(batch)
        return expired

    def forget(self, batch: Batch) -> None:
        """The batch is done."""
        self.incomplete.pop(batch, None)

    def take_all(self) -> list[Batch]:
        """Every batch that is not done, out of the queues."""
        self._queues.clear()
        return list(self.incomplete)

    def delay_ms(self, now_ms: int, muted: Callable[[TopicPartition], bool]) -> float | None:
        """How long until time alone makes something due or expire; None where time alone changes nothing."""
        delays: list[float] = []
        if self.incomplete:
            delays.append(next(iter(self.incomplete)).created_ms + self._settings.delivery_timeout_ms - now_ms)
        for tp, queue in self._queues.items():
            if queue and tp not in self.in_flight and not muted(tp):
                head = queue[0]
                at = head.retry_at_ms if head.attempts else head.created_ms + self._settings.linger_ms
                if at > now_ms:
                    delays.append(at - now_ms)
        return max(0.0, min(delays)) if delays else None

    def _due(self, queue: deque[Batch], now_ms: int, hurry: bool) -> bool:
        head = queue[0]
        if head.attempts:
            return now_ms >= head.retry_at_ms
        if hurry or self.flushes or len(queue) > 1 or head.size() >= self._settings.batch_size:
            return True
        return now_ms - head.created_ms >= self._settings.linger_ms
