"""The record accumulator: a queue of batches for each partition, and the decision which batches are due.

The first batch of a partition is due in one of these cases: it is full, a second batch is behind it, `linger_ms` has
passed, it must be flushed, or a send waits for buffer memory. A retried batch is due after its backoff, or at once for
a new leader that it was not sent to. It is sent while no other batch of its partition is in flight, so that the
response shows the fate of this batch alone. A partition that waits does not delay other partitions.

Times are `now_ms` of a monotonic clock, which the caller passes.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Iterable
from itertools import takewhile
from typing import Any, NamedTuple

from penstock.shared.clients.producer.producer_batch import BatchState, ProducerBatch
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.protocol.record_batches import compression_of
from penstock.shared.common.errors import SendCancelled
from penstock.shared.common.records import TopicPartition

HELD_UP_MS = 100
"""A partition makes no progress if its oldest batch has waited longer than this for its node or for a response."""


class PartitionQueue:
    """One partition's batches: `queued` in the order of the records, and `out` in a request.

    `open` is the last queued batch, if it still takes records. `held` is the buffer memory in bytes of all batches, and
    of the sends that wait for it (`HeldUpShare.acquire`).
    `batches` is the number of batches since the start, and `batches_at_ack` that number at the last acknowledgement.
    """

    __slots__ = (
        "batches",
        "batches_at_ack",
        "held",
        "in_flight_max",
        "open",
        "out",
        "queued",
        "ready_since_ms",
        "tp",
        "unreachable",
    )

    def __init__(self, tp: TopicPartition, in_flight_max: int) -> None:
        self.tp = tp
        self.in_flight_max = in_flight_max
        self.queued: deque[ProducerBatch] = deque()
        self.open: ProducerBatch | None = None
        self.out: list[ProducerBatch] = []
        self.ready_since_ms: int | None = None
        self.unreachable = ""
        """The reason why its first batch, which is due, cannot be sent; empty if there is none."""
        self.batches = 0
        self.batches_at_ack = 0
        self.held = 0

    def __repr__(self) -> str:
        return f"<PartitionQueue {self.tp}, {len(self.queued)} queued, {len(self.out)} out>"

    def retried(self) -> ProducerBatch | None:
        """Return the partition's first batch (in flight before queued) if it is a retry and not done, else None."""
        first = self.out[0] if self.out else self.queued[0] if self.queued else None
        # A batch that has failed in flight stays in `out` until its request is over, and is not sent again.
        if first is None or first.state is BatchState.DONE:
            return None
        # Sending counts an attempt: the first attempt of a batch in flight is no retry.
        return first if first.attempts > (1 if self.out else 0) else None

    def is_held_up(self, now_ms: int) -> bool:
        """Whether the partition makes no progress, as far as is known."""
        # There are four cases.
        # 1. Its leader is unreachable, or a batch of it is retried.
        if self.unreachable or self.retried() is not None:
            return True
        # 2. It has more batches than may be in flight, and all are newer than the last acknowledgement. A burst of
        #    sends to a silent broker shows here, before HELD_UP_MS has passed.
        if len(self.out) + len(self.queued) > self.in_flight_max:
            oldest = self.out[0] if self.out else self.queued[0]
            if oldest.order[0] >= self.batches_at_ack:
                return True
        # 3. The broker does not respond.
        if self.out and now_ms - self.out[0].sent_ms > HELD_UP_MS:
            return True
        # 4. A due batch waits for its node, which takes no more requests.
        return self.ready_since_ms is not None and now_ms - self.ready_since_ms > HELD_UP_MS

    def earlier_pending(self, batch: ProducerBatch) -> bool:
        """Whether an earlier batch is still pending. If `batch` has a sequence number, the earlier one has one too."""
        return any(other.order < batch.order for other in (*self.out, *self.queued))


class Drained(NamedTuple):
    """Batches by leader, topics of due batches without a leader, and batches whose records were all cancelled."""

    requests: dict[int, list[ProducerBatch]]
    leaderless: set[str]
    emptied: list[ProducerBatch]


class RecordAccumulator:
    """The queues of all partitions, and all batches that are not done (`incomplete`)."""

    def __init__(self, settings: ProducerSettings) -> None:
        self._settings = settings
        self._compression = compression_of(settings.compression_type, settings.compression_level)
        # A record that fits into an open batch is not measured again. The minimum keeps a batch within every size
        # limit.
        self.batch_size = min(settings.batch_size, settings.max_request_size, settings.buffer_memory)
        self._transactional = settings.transactional_id is not None
        self._queues: dict[TopicPartition, PartitionQueue] = {}
        self._active: dict[PartitionQueue, None] = {}
        self.incomplete: dict[ProducerBatch, None] = {}
        self.flushes = 0
        self.on_cancelled: Callable[[SendCancelled], None] | None = None
        self.check_waiter: Callable[[], None] | None = None
        self._in_flight_max = settings.max_in_flight_requests_per_connection

    def __repr__(self) -> str:
        queued = sum(len(queue.queued) for queue in self._active)
        out = sum(len(queue.out) for queue in self._queues.values())
        return f"<RecordAccumulator {queued} batches queued, {out} out>"

    def queue(self, tp: TopicPartition) -> PartitionQueue:
        """Return a partition's queue; it stays the same until `drop`."""
        queue = self._queues.get(tp)
        if queue is None:
            queue = PartitionQueue(tp, self._in_flight_max)
            self._queues[tp] = queue
        return queue

    def drop(self, topic: str) -> None:
        """Drop the empty queues of a topic that is not used."""
        for tp, queue in list(self._queues.items()):
            if tp.topic == topic and not queue.held and not queue.queued and not queue.out:
                del self._queues[tp]

    @property
    def partitions(self) -> int:
        """The number of partitions that have a queue."""
        return len(self._queues)

    def open_batch(
        self, queue: PartitionQueue, memory: int, now_ms: int, new_builder: Callable[..., Any] | None = None
    ) -> ProducerBatch:
        """Open a new batch at the end of a queue. The batch holds `memory` bytes of the buffer. The caller fills it.

        For columns `new_builder` is ColumnBatchBuilder. The previously open batch takes no more records.
        """
        # The caller may have waited for memory, and `drop` may have removed the queue in the meantime.
        queue = self.queue(queue.tp)
        builder = new_builder and new_builder(memory, self.batch_size, transactional=self._transactional)
        batch = ProducerBatch(queue.tp, self.batch_size, self._compression, self._transactional, now_ms, builder)
        batch.memory = memory
        batch.on_cancelled = self.on_cancelled
        batch.check_waiter = self.check_waiter
        queue.held += memory
        batch.order = (queue.batches, 0)
        queue.batches += 1
        queue.queued.append(batch)
        queue.open = batch
        self._active[queue] = None
        self.incomplete[batch] = None
        return batch

    def freed(self, batch: ProducerBatch) -> None:
        """Note that the batch's memory was released."""
        self._queues[batch.tp].held -= batch.memory

    def held_up_bytes(self, now_ms: int) -> int:
        """Return the bytes held by all partitions that make no progress."""
        return sum(queue.held for queue in self._queues.values() if queue.held and queue.is_held_up(now_ms))

    def queued(self) -> Iterable[TopicPartition]:
        """The partitions with queued batches."""
        return [queue.tp for queue in self._active]

    def queued_batches(self, tp: TopicPartition) -> int:
        """Return the number of queued batches of a partition."""
        queue = self._queues.get(tp)
        return len(queue.queued) if queue else 0

    def drain(
        self,
        now_ms: int,
        node_for: Callable[[TopicPartition], int | None],
        usable: Callable[[int], bool],
        reachable: Callable[[int], bool],
        may_send: Callable[[PartitionQueue], bool],
        hurry: bool,
    ) -> Drained:
        """Take due batches, one of each partition, and group them into one request for each node.

        `may_send` returns whether a partition may send, `usable` whether a node takes another request now. If not, the
        batch stays queued. `reachable` returns whether a node is connected. It decides only whether the queue notes the
        node as `unreachable`. The batches of a request have at most `max_request_size` bytes. If `hurry` is True, no
        batch lingers.
        """
        requests: dict[int, list[ProducerBatch]] = {}
        sizes: dict[int, int] = {}
        leaderless: set[str] = set()
        emptied: list[ProducerBatch] = []
        for queue in list(self._active):
            batch = queue.queued[0]
            # A retry goes to a new leader at once: the backoff is meant for the node that failed (KIP-951).
            if not self._is_batch_due(queue, now_ms, hurry) and not _has_untried_leader(batch, node_for):
                continue
            # A record batch without records is invalid (every record was cancelled), so it never goes to a broker.
            if not batch.attempts and len(batch.removed) == batch.count:
                self._pop_batch(queue)
                batch.state = BatchState.OUT
                emptied.append(batch)
                continue
            if not self._may_send_from(queue) or not may_send(queue):
                continue
            # From here on the batch waits only for its node. A long wait shows a slow broker: see `is_held_up`, and
            # `is_slow` of the sender (KIP-794).
            if queue.ready_since_ms is None:
                queue.ready_since_ms = now_ms
            node = node_for(queue.tp)
            queue.unreachable = (
                "no leader" if node is None else "" if reachable(node) else f"node {node} was not reached"
            )
            if node is None:
                leaderless.add(queue.tp.topic)
                continue
            size = sizes.get(node, 0) + batch.size()
            if not usable(node) or (node in requests and size > self._settings.max_request_size):
                continue
            self._pop_batch(queue)
            batch.state = BatchState.OUT
            if node not in batch.nodes:
                batch.nodes = (*batch.nodes, node)
            # Only before the first attempt: afterwards the bytes are sealed.
            if not batch.attempts:
                batch.without_removed()
            sizes[node] = size
            queue.out.append(batch)
            requests.setdefault(node, []).append(batch)
        return Drained(requests, leaderless, emptied)

    def _pop_batch(self, queue: PartitionQueue) -> None:
        batch = queue.queued.popleft()
        if queue.open is batch:
            queue.open = None
        queue.ready_since_ms = None
        # Go to the end of the order in which `drain` visits the partitions (Java: `drainIndex`). So partitions take
        # turns to be first, and the limit of a request does not starve any.
        del self._active[queue]
        if queue.queued:
            self._active[queue] = None

    def landed(self, batch: ProducerBatch) -> None:
        """Note that the batch's request is over."""
        self._queues[batch.tp].out.remove(batch)

    def is_out(self, batch: ProducerBatch) -> bool:
        """Whether a batch is in a request."""
        return batch in self._queues[batch.tp].out

    def reenqueue(self, batch: ProducerBatch, retry_at_ms: int) -> None:
        """Put a batch back into its partition's queue, in the order of the records. `retry_at_ms` ends its backoff."""
        batch.state = BatchState.QUEUED
        batch.retry_at_ms = retry_at_ms
        queue = self._queues[batch.tp]
        # Not at the front: with several batches in flight a later one may fail first (Java: `insertInSequenceOrder`).
        insort(queue.queued, batch, key=lambda each: each.order)
        self._active[queue] = None

    def replace(self, batch: ProducerBatch, parts: list[ProducerBatch]) -> None:
        """Replace a batch by its parts. The caller then calls `reenqueue` for those to send."""
        # The parts take the batch's position, since `expire` relies on the order of age.
        self.incomplete = {each: None for known in self.incomplete for each in (parts if known is batch else (known,))}

    def renumber(self, tp: TopicPartition) -> None:
        """Clear the sequence numbers of a partition's queued batches."""
        for batch in self._queues[tp].queued:
            batch.forget_state()

    def expire(self, now_ms: int) -> list[ProducerBatch]:
        """Return the batches whose `delivery_timeout_ms` has passed, including those in a request.

        Queued batches are removed from `queued`. Those in a request stay in `out` until it is over.
        """
        oldest = now_ms - self._settings.delivery_timeout_ms
        # `incomplete` is in order of age.
        expired = list(takewhile(lambda batch: batch.created_ms <= oldest, self.incomplete))
        # First note the reasons: removing the first batch of a partition clears the partition's reason.
        for batch in expired:
            if not self.is_out(batch):
                batch.held_up_by = self._queues[batch.tp].unreachable
        for batch in expired:
            self._unqueue_batch(batch)
        return expired

    def _unqueue_batch(self, batch: ProducerBatch) -> None:
        queue = self._queues[batch.tp]
        if batch in queue.queued:
            queue.queued.remove(batch)
            queue.ready_since_ms = None
            queue.unreachable = ""
            if queue.open is batch:
                queue.open = None
            if not queue.queued:
                self._active.pop(queue, None)

    def forget(self, batch: ProducerBatch) -> None:
        """Forget a batch that is done."""
        self.incomplete.pop(batch, None)

    def take_all(self, *, out: bool) -> list[ProducerBatch]:
        """Remove all queued batches from their queues and return them. With `out`, also return those in a request."""
        taken = [batch for batch in self.incomplete if out or not self.is_out(batch)]
        for batch in taken:
            self._unqueue_batch(batch)
        return taken

    def delay_ms(self, now_ms: int, waiting: Callable[[PartitionQueue], bool]) -> float | None:
        """Return the ms until a batch becomes due or expires merely because time passes. Returns None if there is none.

        `waiting` returns whether a partition waits for something other than time. Of such a partition only the expiry
        of its batches counts.
        """
        delays: list[float] = []
        if self.incomplete:
            oldest = next(iter(self.incomplete)).created_ms
            delays.append(max(0, oldest + self._settings.delivery_timeout_ms - now_ms))
        for queue in self._active:
            if self._may_send_from(queue) and not waiting(queue):
                head = queue.queued[0]
                at = head.retry_at_ms if head.attempts else head.created_ms + self._settings.linger_ms
                if at > now_ms:
                    delays.append(at - now_ms)
        return min(delays) if delays else None

    def _may_send_from(self, queue: PartitionQueue) -> bool:
        if not queue.out:
            return True
        # A retry is sent only when nothing is in flight, and nothing else is sent until it is answered. This keeps the
        # order of the records, and the response shows whether there is a gap. Java has it in
        # `shouldStopDrainBatchesForPartition`.
        if queue.queued[0].attempts or len(queue.out) >= self._in_flight_max:
            return False
        return all(batch.attempts == 1 for batch in queue.out)

    def _is_batch_due(self, queue: PartitionQueue, now_ms: int, hurry: bool) -> bool:
        head = queue.queued[0]
        if head.attempts:
            return now_ms >= head.retry_at_ms
        if hurry or self.flushes or len(queue.queued) > 1:
            return True
        return now_ms - head.created_ms >= self._settings.linger_ms or head.size() >= self.batch_size


def _has_untried_leader(batch: ProducerBatch, node_for: Callable[[TopicPartition], int | None]) -> bool:
    # A node that was tried before does not count. Otherwise two nodes that name each other as the leader would get the
    # batch in turn without any backoff.
    return bool(batch.attempts) and node_for(batch.tp) not in (None, *batch.nodes)
