"""The sender sends due batches to their leaders.

`run_once(now_ms)` is one turn: expire batches, settle sequence numbers, prepare (the producer id, the partitions of the
transaction). Then it drains and sends until no batch is due or no node takes another request. It returns the ms until
the next turn is due merely because time passes. Every other event (a full batch, a response, a flush) calls `wake`.
batch_completion.py handles the responses.

A batch is put into a request only if its node is connected. An unreachable node therefore does not cost the batch an
attempt, and leaves no doubt whether the batch is in the log.
"""

from __future__ import annotations

import asyncio
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine
from typing import Any

from penstock.shared.clients.connection import Connection
from penstock.shared.clients.producer.batch_completion import RETRY_BACKOFF_JITTER, BatchCompletion
from penstock.shared.clients.producer.buffer_pool import BufferPool
from penstock.shared.clients.producer.metrics import ProducerMetrics
from penstock.shared.clients.producer.producer_batch import ProducerBatch
from penstock.shared.clients.producer.record_accumulator import RecordAccumulator
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.producer.transaction_manager import Transaction, TxnState
from penstock.shared.clients.producer.transaction_requests import TransactionRequests
from penstock.shared.clients.protocol.errors import NO_ERROR
from penstock.shared.clients.protocol.produce import PartitionProduceResponse, ProduceResponse, produce_request
from penstock.shared.clients.protocol.record_batches import SealedBatch
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import (
    BrokerNotAvailable,
    KafkaTimeout,
    PenstockError,
    RetriableError,
    TransactionAborted,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition

log = get_logger(__name__)

CLOCK_GRAIN_MS = 1
"""The resolution of the clock that gives a turn its `now_ms`."""

ACKS_ALL = -1
"""The number that stands for acks=all in a Produce request."""
ACKNOWLEDGED_UNSEEN = PartitionProduceResponse(NO_ERROR)
"""Used as the response with acks=0: the request was written to the socket."""


class _Node:
    """The sender's state of one broker."""

    __slots__ = ("attempts", "connecting", "requests", "usable_at_ms")

    def __init__(self) -> None:
        self.requests = 0
        self.attempts = 0
        self.usable_at_ms = 0
        self.connecting = False


class Sender:
    """Sends the due batches of one producer. Runs on the producer's event loop."""

    def __init__(
        self,
        connection: Connection,
        accumulator: RecordAccumulator,
        memory: BufferPool,
        settings: ProducerSettings,
        transaction: Transaction | None,
        metrics: ProducerMetrics,
        clock: Clock,
    ) -> None:
        self._connection = connection
        self._accumulator = accumulator
        self._memory = memory
        self._settings = settings
        self._transaction = transaction
        self._metrics = metrics
        self._clock = clock
        self._acks = ACKS_ALL if settings.acks == "all" else int(settings.acks)
        retry_backoff_ms = connection.settings.retry_backoff_ms
        self.completion = BatchCompletion(accumulator, memory, settings, transaction, metrics, retry_backoff_ms)
        self.transaction_requests = TransactionRequests(connection, settings, self.completion.ledger, transaction)
        self._nodes: dict[int, _Node] = defaultdict(_Node)
        self._tasks: set[asyncio.Task[None]] = set()
        self._producing: set[asyncio.Task[None]] = set()
        """The tasks that have a produce request in flight."""
        self._preparing: asyncio.Task[None] | None = None
        self._refresh_at_ms = 0
        self._scheduled = False
        self._timer: asyncio.TimerHandle | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._on_broken: Callable[[Exception], None] | None = None
        self.batches_since_turn = 0

    def __repr__(self) -> str:
        return f"<Sender {self._accumulator!r}, {self.requests} requests, {self.completion.ledger!r}>"

    def start(self, on_broken: Callable[[Exception], None]) -> None:
        """From now on `wake` schedules a turn (`run_once`) on the event loop. If a turn raises an error, the turns end
        and `on_broken` is called with the error."""
        self._loop = asyncio.get_running_loop()
        self._on_broken = on_broken

    def wake(self) -> None:
        """Take a turn soon, since something other than time has changed."""
        if not self._scheduled and self._loop is not None:
            self._scheduled = True
            self._loop.call_soon(self._run_turn)

    def _run_turn(self) -> None:
        self._scheduled = False
        self.batches_since_turn = 0
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is None:
            return
        try:
            delay_ms = self.run_once(self._clock.monotonic_ms())
        except Exception as e:
            # A bug. Without turns every send and flush would wait for ever, so the producer must fail them.
            self._loop = None
            assert self._on_broken is not None
            self._on_broken(e)
            return
        if delay_ms is not None:
            self._timer = self._loop.call_later(delay_ms / 1000, self._run_turn)

    def run_once(self, now_ms: int) -> float | None:
        """Take one turn. Returns the ms until the next turn is due, or None if only `wake` can make one due."""
        # 1. Expire before draining: a batch that is over its time must not be sent once more.
        self.completion.expire(now_ms)
        # 2. Settle before a number is assigned: an expired batch may have left a gap.
        self.completion.settle()
        # 3. Without a producer id no batch can get a number. Only the expiry of a batch depends on time then.
        if not self._is_ready_to_drain():
            return self._accumulator.delay_ms(now_ms, lambda queue: True)
        # 4. Drain and send. Each round takes at most one batch of a partition, so several rounds fill the pipeline.
        leaderless = False
        while True:
            drained = self._accumulator.drain(
                now_ms,
                self._connection.leader,
                lambda node: self._is_node_usable(node, now_ms),
                self._connection.connected,
                self.completion.may_send,
                hurry=self._memory.waiting > 0,
            )
            # The topic may have been idle for so long that its metadata was dropped (KIP-526). Java's
            # `Sender.sendProducerData` adds it again too.
            for topic in drained.leaderless:
                self._connection.watch(topic)
                leaderless = True
            for batch in drained.emptied:
                self.completion.emptied(batch)
            for node, batches in drained.requests.items():
                self._nodes[node].requests += 1
                task = self._start_task(
                    self._send_produce_request(node, batches, self._make_produce_request(batches, now_ms), now_ms)
                )
                self._producing.add(task)
                task.add_done_callback(self._producing.discard)
            if not drained.requests and not drained.emptied:
                break
        delay_ms = self._accumulator.delay_ms(now_ms, self.completion.waiting)
        # 5. Refresh stale metadata. A leaderless partition also needs another turn, since a refresh that finds no
        #    leader must be repeated.
        if leaderless:
            self.completion.metadata_is_stale = True
        if self.completion.metadata_is_stale:
            retry_ms = self._refresh_metadata(now_ms)
            if leaderless:
                delay_ms = retry_ms if delay_ms is None else min(delay_ms, retry_ms)
        return delay_ms

    @property
    def requests(self) -> int:
        """The number of produce requests in flight."""
        return sum(node.requests for node in self._nodes.values())

    async def close(self) -> None:
        """Stop every task; requests in flight are abandoned."""
        self._loop = None
        if self._timer is not None:
            self._timer.cancel()
        tasks = [*self._tasks, *([self._preparing] if self._preparing else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def is_slow(self, tp: TopicPartition) -> bool:
        """Whether a partition's due batch has waited longer than `partitioner_availability_timeout_ms` (0: never)."""
        limit_ms = self._settings.partitioner_availability_timeout_ms
        since_ms = self._accumulator.queue(tp).ready_since_ms
        return limit_ms > 0 and since_ms is not None and self._clock.monotonic_ms() - since_ms > limit_ms

    def is_away(self, tp: TopicPartition) -> bool:
        """Whether the last attempt to connect to a partition's leader has failed, and it is still not connected."""
        node = self._connection.leader(tp)
        if node is None or node not in self._nodes or self._nodes[node].attempts == 0:
            return False
        return not self._connection.connected(node)

    async def until_landed(self, timeout_ms: float) -> None:
        """Wait until no produce request is in flight and no partition is being added to the transaction.

        Raises KafkaTimeout after `timeout_ms`.
        """
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                while waited_for := [*self._producing, *([self._preparing] if self._preparing else [])]:
                    await asyncio.wait(waited_for)
        except TimeoutError:
            adding = ", partitions not added" if self._preparing else ""
            raise KafkaTimeout(
                f"{self.requests} produce requests not answered{adding} after {timeout_ms:.0f} ms"
            ) from None

    async def until_prepared(self) -> None:
        """Wait until no partition is being added to the transaction."""
        while self._preparing is not None:
            await asyncio.wait([self._preparing])

    def _start_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _is_node_usable(self, node: int, now_ms: int) -> bool:
        known = self._nodes[node]
        if known.requests >= self._settings.max_in_flight_requests_per_connection:
            return False
        if now_ms < known.usable_at_ms or known.connecting:
            return False
        if self._connection.connected(node):
            # Another request may have connected to the node.
            known.attempts = 0
            return True
        # Connect first, in the background. A batch that is drained for an unreachable node would use up an attempt.
        known.connecting = True
        self._start_task(self._connect_to_node(node, known))
        return False

    async def _connect_to_node(self, node: int, known: _Node) -> None:
        try:
            reached = await self._connection.connect(node)
        except PenstockError as e:
            reached = False
            log.warning("cannot connect", node=node, reason=str(e))
        except Exception:
            # Whatever the error is, `connecting` must be reset, or the node is never used again.
            reached = False
            log.exception("cannot connect", node=node)
        known.connecting = False
        if reached:
            known.attempts = 0
        else:
            settings = self._connection.settings
            backoff = ExponentialBackoff(
                settings.reconnect_backoff_ms, settings.reconnect_backoff_max_ms, jitter=RETRY_BACKOFF_JITTER
            )
            known.attempts += 1
            # The partition may have a leader on another node by now.
            self.completion.metadata_is_stale = True
            self._pause_node(known, round(backoff.wait_ms(known.attempts, random.random())))  # noqa: S311
        self.wake()

    def _pause_node(self, known: _Node, wait_ms: int) -> None:
        known.usable_at_ms = self._clock.monotonic_ms() + wait_ms
        assert self._loop is not None
        # An event loop may fire a timer slightly early: without the extra ms the turn could find the node unusable
        # still.
        self._loop.call_later((wait_ms + CLOCK_GRAIN_MS) / 1000, self.wake)

    def _refresh_metadata(self, now_ms: int) -> float:
        wait_ms = float(self._connection.settings.retry_backoff_ms)
        # At most one refresh in `retry_backoff_ms`: while a partition has no leader, every turn wants one.
        if now_ms >= self._refresh_at_ms:
            self.completion.metadata_is_stale = False
            self._refresh_at_ms = now_ms + self._connection.settings.retry_backoff_ms
            self._connection.refresh_metadata()
        return wait_ms

    def _is_ready_to_drain(self) -> bool:
        """Return whether batches may be drained: an idempotent producer needs a producer id first.

        Starts the request that is missing: for a producer id, or for partitions that must be added to the transaction.
        """
        ledger = self.completion.ledger
        if self._transaction is not None:
            if self._transaction.state in (TxnState.IN_TRANSACTION, TxnState.COMMITTING):
                self._transaction.want(set(self._accumulator.queued()))
                # One request at a time: the coordinator answers concurrent changes with CONCURRENT_TRANSACTIONS. The
                # partitions that get records meanwhile go into the next one.
                if self._transaction.pending and self._preparing is None:
                    self._preparing = asyncio.ensure_future(self._add_partitions(set(self._transaction.pending)))
            # Batches of the partitions already added may be sent meanwhile; `may_send` holds back the others.
            return ledger.ready
        # The id is missing at the start, and after the last epoch (`SequenceLedger.bump`).
        if self._settings.enable_idempotence and not ledger.ready:
            if self._preparing is None and self._accumulator.incomplete:
                self._preparing = asyncio.ensure_future(self._fetch_producer_id())
            return False
        return True

    async def _fetch_producer_id(self) -> None:
        try:
            await self.transaction_requests.init_producer_id()
        except PenstockError as e:
            log.warning("no producer id", client_id=self._connection.client_id, reason=str(e))
            # Without an id (for example CLUSTER_AUTHORIZATION_FAILED) nothing can be sent: fail the records now, not
            # after `delivery_timeout_ms`.
            if not isinstance(e, RetriableError):
                self.completion.fail_all(e, out=False)
            await asyncio.sleep(self._connection.settings.retry_backoff_ms / 1000)
        except Exception:
            log.exception("no producer id", client_id=self._connection.client_id)
            await asyncio.sleep(self._connection.settings.retry_backoff_ms / 1000)
        finally:
            self._preparing = None
            self.wake()

    async def _add_partitions(self, partitions: set[TopicPartition]) -> None:
        assert self._transaction is not None
        try:
            await self.transaction_requests.add_partitions(partitions, first=self._transaction.adding())
            self._transaction.added |= partitions
        except PenstockError as e:
            self.completion.fail_transaction(e)
        except Exception as e:
            log.exception("partitions not added to the transaction", client_id=self._connection.client_id)
            self.completion.fail_transaction(TransactionAborted(f"partitions not added to the transaction: {e!r}"))
        # Also after an error: a partition left in `pending` would be requested again in the next turn.
        finally:
            self._transaction.pending -= partitions
            self._preparing = None
            self.wake()

    def _make_produce_request(self, batches: list[ProducerBatch], now_ms: int) -> Any:
        topics: dict[str, list[tuple[int, bytes | SealedBatch]]] = defaultdict(list)
        for batch in batches:
            topics[batch.tp.topic].append((batch.tp.partition, self.completion.sent(batch, now_ms)))
        return produce_request(
            self._settings.transactional_id,
            self._acks,
            self._connection.settings.request_timeout_ms,
            list(topics.items()),
        )

    async def _send_produce_request(self, node: int, batches: list[ProducerBatch], request: Any, now_ms: int) -> None:
        response: ProduceResponse | None = None
        failure: PenstockError | None = None
        known = self._nodes[node]
        try:
            self._metrics.in_flight.inc()
            response = await self._connection.send(node, request, f"produce to node {node}")
        except PenstockError as e:
            failure = e
        except asyncio.CancelledError:
            # `close` gives up the request and then fails the batches. They must not count as in flight any more. They
            # may be in the log.
            for batch in batches:
                self._accumulator.landed(batch)
                batch.fate_unknown = True
            raise
        except Exception as e:
            # Whatever the error is, the batches must not stay in flight for ever.
            log.exception("a produce request failed", node=node)
            failure = BrokerNotAvailable(f"produce to node {node}: {e!r}")
        finally:
            self._metrics.in_flight.dec()
            known.requests -= 1
            landed_ms = self._clock.monotonic_ms()
            self._metrics.requested(landed_ms - now_ms)
            self.wake()
        if response is not None:
            self._metrics.throttled(response.throttle_ms)
            # The broker answers first, then does not read from this connection for so long (KIP-219). A request sent in
            # that time waits unread, while its timeout runs.
            if response.throttle_ms > 0:
                self._pause_node(known, response.throttle_ms)
        self._complete_produce_request(batches, response, failure, landed_ms)

    def _complete_produce_request(
        self, batches: list[ProducerBatch], response: ProduceResponse | None, failure: PenstockError | None, now_ms: int
    ) -> None:
        # Addresses first: `leader_moved` ignores a leader without one (KIP-951).
        if response is not None and response.endpoints:
            self._connection.add_brokers(response.endpoints)
        with self._memory.together():
            for batch in batches:
                # There are three cases.
                # 1. No response came.
                if failure is not None:
                    self.completion.unanswered(batch, failure, now_ms)
                    continue
                # 2. The response has the batch. With acks=0 there is none, and a written request counts as
                #    acknowledged.
                own = ACKNOWLEDGED_UNSEEN if response is None else response.partitions.get(batch.tp)
                # 3. The response leaves the batch out: as without a response, it may be in the log.
                if own is None:
                    missing = BrokerNotAvailable("missing in the response")
                    self.completion.unanswered(batch, missing, now_ms)
                    continue
                if own.leader is not None:
                    self._connection.leader_moved(batch.tp, own.leader)
                self.completion.answered(batch, own, now_ms)
