"""A sink task as the worker runs it: passes records from Kafka to `put`, and commits the offsets that `pre_commit`
returns.

`SinkTaskState` decides; `WorkerSinkTask` does the I/O. The group rebalances inside polls. A due commit, a pause or
a stop cancels a poll, but not a call of the rebalance listener that has begun. A lock therefore keeps the loop and the
listener from running at the same time. The loop never holds the lock while it polls.

While a conversion waits for long, the loop polls with all partitions paused, so that the task stays in its group. If a
partition is revoked and assigned again meanwhile, its polled records are dropped. They are read again from the
committed offset.
"""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Awaitable, Iterable, Mapping, Sequence
from typing import TypeVar

from penstock.shared.clients.consumer import Consumer, RebalanceListener
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition
from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.runtime.conversion import Conversion
from penstock.shared.connect.runtime.error_handling import Interrupted
from penstock.shared.connect.runtime.error_reporting import ErrorReporters, RawRecords
from penstock.shared.connect.runtime.sink_task_state import Partitions, SinkTaskState
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State
from penstock.shared.connect.runtime.status_listener import StatusListener
from penstock.shared.connect.runtime.task_metrics import TaskMetrics
from penstock.shared.connect.runtime.worker_task import WorkerTask
from penstock.shared.connect.task import ErrantRecordReporter, SinkTask

log = get_logger(__name__)

T = TypeVar("T")

Polled = dict[TopicPartition, Columns]
CLOSE_TIMEOUT_MS = 30_000
"""How long the last commit and leaving the group may take together."""
CONVERSION_PATIENCE_MS = 1_000
"""How long a conversion may wait, for example for a schema, before polls continue beside it."""
LEAVE_TIMEOUT_MS = 1_000
"""How long a cancelled task may take to leave the group. Otherwise its partitions wait for the session timeout."""


class WorkerSinkTask(WorkerTask, RebalanceListener):
    """Runs one sink task. It is also the rebalance listener of the task's consumer."""

    def __init__(
        self,
        *,
        id: ConnectorTaskId,
        listener: StatusListener,
        task: SinkTask,
        props: Mapping[str, str],
        topics: Sequence[str] | re.Pattern[str],
        consumer: Consumer,
        conversion: Conversion,
        sink_state: SinkTaskState,
        reporters: ErrorReporters,
        metrics: TaskMetrics,
        clock: Clock,
    ) -> None:
        super().__init__(id, listener, metrics, clock)
        self.task = task
        self.sink_state = sink_state
        self._props = dict(props)
        self._topics = topics
        self._consumer = consumer
        self._conversion = conversion
        self._reporters = reporters
        self._turn = asyncio.Lock()
        self.raw = RawRecords()
        self._initialized = False
        self._is_converting = False
        self._commit_answered = asyncio.Event()
        self._bind_retry_waits(conversion.waits)
        self.context: WorkerSinkTaskContext

    async def _start_task(self) -> None:
        await self._reporters.start()
        self._initialized = True
        await self._call_task(self.task.initialize, self.context, like=self.task.start)
        await self._call_task(self.task.start, self._props)
        self._consumer.subscribe(self._topics, self)
        await self._consumer.start()

    async def _execute_task(self) -> None:
        if self.should_pause:
            # A task that starts paused must pause its consumer in the first iteration.
            self._changed.set()
        while not self.stopping:
            await self.iteration()

    async def iteration(self) -> None:
        """Run one turn: commit if it is due, poll, and deliver the records.

        The order is that of Kafka Connect's `WorkerSinkTask.iteration` and `poll`.
        """
        now_ms = self._clock.monotonic_ms()
        # 1. Under the lock: pause or resume, begin a commit if it is due, end one that takes too long, rewind.
        async with self._turn:
            self._follow_target()
            if self.sink_state.commit_is_due(now_ms):
                await self._begin_offset_commit(now_ms)
            if self.sink_state.commit_expired(now_ms):
                self.metrics.add("offset_commit_failure_total")
                log.warning("commit of offsets timed out", task=str(self.id), failures=self.sink_state.commit_failures)
            self._seek_rewound_partitions()
            timeout_ms = self.sink_state.poll_timeout_ms(now_ms)
        # 2. Without the lock, so that the rebalance listener can run: poll and convert.
        polled = await self._poll_until_due(timeout_ms)
        if polled is None:
            return
        polled_batches, resets = polled
        converted = await self._convert_beside_polls(polled_batches)
        # 3. Under the lock: drop the records of partitions that were revoked, or whose position was reset, since the
        #    poll, and deliver the others.
        async with self._turn:
            ours = {tp: columns for tp, columns in polled_batches.items() if self.sink_state.is_still_ours(tp, resets)}
            # A pause or a stop ended the conversion. The polled records are read again.
            if converted is None:
                for tp, columns in ours.items():
                    self._consumer.seek(tp, int(columns.offsets[0]))
                return
            lists = [converted[tp] for tp in ours]
            self._add_to_batch(ours, lists[0] if len(lists) == 1 else list(itertools.chain.from_iterable(lists)))
            # A task may store offsets in `put`, which pass the records that failed before these.
            if self.sink_state.batch:
                await self._reporters.flush()
            await self._put_batch()

    @property
    def holds_all(self) -> bool:
        """Return whether all partitions must stay paused, whatever the connector's task resumes."""
        return self.should_pause or self._is_converting

    def _follow_target(self) -> None:
        """Pause or resume if the target state has changed."""
        if not self._changed.is_set() or self.stopping:
            return
        self._changed.clear()
        if self.should_pause:
            self._consumer.pause(*self.sink_state.assigned)
            if self.state is not State.PAUSED:
                self.moved(Event.PAUSED)
            # As in WorkerSinkTask: a pause may last long, so delivered records are committed before it.
            self.sink_state.commit_requested = True
        else:
            # During a redelivery the partitions stay paused until `put` takes the batch.
            if not self.sink_state.paused_for_redelivery:
                self._consumer.resume(*self.sink_state.resumable())
            if self.state is State.PAUSED:
                self.moved(Event.RUNNING)

    async def _poll_consumer(self, timeout_ms: int) -> tuple[Polled, int]:
        """Return records, with the number of resets at the time of the poll."""
        return await self._consumer.poll(timeout_ms), self.sink_state.resets

    async def _poll_until_due(self, timeout_ms: int) -> tuple[Polled, int] | None:
        """Poll until there are records, the timeout is over, or a commit is due. The result may be without records.

        Returns None if a new target state or a stop ends the poll.
        """
        # Buffered records are taken without the three asyncio tasks below.
        polled_batches = await self._poll_consumer(0)
        if polled_batches[0] or timeout_ms <= 0:
            return polled_batches
        poll = asyncio.ensure_future(self._poll_consumer(timeout_ms))
        changed = asyncio.ensure_future(self._changed.wait())
        answered = asyncio.ensure_future(self._commit_answered.wait())
        try:
            await asyncio.wait((poll, changed, answered), return_when=asyncio.FIRST_COMPLETED)
            if not poll.done() and not changed.done():
                # The commit has ended, so the next one may be due before the poll times out.
                due_ms = self.sink_state.next_commit_in_ms(self._clock.monotonic_ms())
                await asyncio.wait((poll, changed), timeout=due_ms / 1000, return_when=asyncio.FIRST_COMPLETED)
            if poll.done():
                return poll.result()
            return None if changed.done() else ({}, self.sink_state.resets)
        finally:
            for one in (poll, changed, answered):
                if not one.done():
                    one.cancel()
            await asyncio.gather(poll, changed, answered, return_exceptions=True)

    async def _convert_beside_polls(self, polled: Polled) -> dict[TopicPartition, list[SinkRecord]] | None:
        """Convert the polled records without holding the lock. A conversion waits while a schema registry is down.

        If it takes longer than CONVERSION_PATIENCE_MS, pause all partitions and continue to poll, so that the task
        stays in its group. Returns None if a stop or a pause ends the conversion.
        """
        converting = asyncio.ensure_future(self._convert_polled_records(polled))
        try:
            await asyncio.wait({converting}, timeout=CONVERSION_PATIENCE_MS / 1000)
            if converting.done():
                return converting.result()
            # Polls keep the worker in the group (max.poll.interval.ms). All partitions are paused, so they return no
            # records that would overtake these.
            self._is_converting = True
            self._consumer.pause(*self._consumer.assignment())
            while not converting.done():
                poll = asyncio.ensure_future(self._consumer.poll(CONVERSION_PATIENCE_MS))
                await asyncio.wait({converting, poll}, return_when=asyncio.FIRST_COMPLETED)
                if not poll.done():
                    poll.cancel()
                    await asyncio.wait({poll})
                else:
                    poll.result()
            async with self._turn:
                self._is_converting = False
                if not (self.should_pause or self.sink_state.paused_for_redelivery):
                    self._consumer.resume(*self.sink_state.resumable())
            return converting.result()
        finally:
            self._is_converting = False
            if not converting.done():
                converting.cancel()
                await asyncio.wait({converting})

    async def _convert_polled_records(self, polled: Polled) -> dict[TopicPartition, list[SinkRecord]] | None:
        """Return the records of each partition, or None if the task is to stop or pause while a conversion waits."""
        try:
            return {tp: await self._conversion.sink_records(columns) for tp, columns in polled.items()}
        except Interrupted:
            return None

    def _add_to_batch(self, polled: Polled, batch: list[SinkRecord]) -> None:
        if not polled:
            return
        if self.context.errant_record_reporter is not None:
            self.raw.add(polled)
        count = sum(map(len, polled.values()))
        # As in Kafka Connect, the offsets also pass records that a transform or a tolerated error dropped. Otherwise a
        # partition with only such records would never be committed.
        self.sink_state.received({tp: int(columns.offsets[-1]) + 1 for tp, columns in polled.items()})
        self.metrics.add("sink_record_read_total", count)
        self.metrics.sized("batch_size", count)
        for topic in {tp.topic for tp in polled}:
            self._listener.on_topic_used(self.id, topic)
        self.sink_state.batch = batch
        self._report_batch()

    def _report_batch(self) -> None:
        self.metrics.active(len(self.sink_state.batch))
        self.metrics.set("sink_record_lag_max", self.sink_state.lag_max())

    async def _put_batch(self) -> None:
        batch = self.sink_state.batch
        started_ms = self._clock.monotonic_ms()
        try:
            # Called without records too, as in Kafka Connect: some tasks write by time in `put`.
            await self._call_task(self.task.put, list(batch))
        except RetriableError as e:
            # As in WorkerSinkTask: the same batch is delivered again. Meanwhile polls of paused partitions keep the
            # worker in the group.
            log.warning("put will be retried", task=str(self.id), error=self.mask(f"{type(e).__name__}: {e}"))
            self._consumer.pause(*self.sink_state.delivery_failed())
            return
        if batch:
            self.metrics.timed("put_batch", self._clock.monotonic_ms() - started_ms)
            self.metrics.add("sink_record_send_total", len(batch))
            self.metrics.active(0)
            self.metrics.set("sink_record_lag_max", 0)
        if (resumed := self.sink_state.delivered()) and not self.should_pause:
            self._consumer.resume(*resumed)

    def _seek_rewound_partitions(self) -> dict[TopicPartition, int]:
        rewinds = self.sink_state.take_rewinds()
        for tp, offset in rewinds.items():
            self._consumer.seek(tp, offset)
        return rewinds

    async def _begin_offset_commit(self, now_ms: int) -> None:
        """Call `pre_commit`, and commit the offsets that it returns without waiting for the response."""
        # An offset may pass a failed record only once its dead letter is stored.
        await self._reporters.flush()
        begun = self.sink_state.begin_commit(now_ms)
        if begun is None:
            return
        seqno, wanted = begun
        self._commit_answered.clear()
        try:
            provided = await self._call_task(self.task.pre_commit, dict(wanted))
        except Exception as e:
            log.error(
                "offset commit failed, reading again", task=str(self.id), error=self.mask(f"{type(e).__name__}: {e}")
            )
            self._read_again(self.sink_state.assigned)
            self._offset_commit_completed(seqno, e, None)
            return
        # `pre_commit` may have reported errors, which must be handled before the commit.
        await self._reporters.flush()
        offsets = self.sink_state.committable(provided or {})
        if not offsets:
            self._offset_commit_completed(seqno, None, None)
            return
        self._consumer.commit_async(
            offsets, lambda _offsets, error: self._offset_commit_completed(seqno, error, offsets)
        )

    def _read_again(self, partitions: Iterable[TopicPartition]) -> None:
        """Go back to the last commit in these partitions: the task could not flush the records since then."""
        offsets = self.sink_state.pre_commit_failed()
        for tp in offsets.keys() & set(partitions):
            self._consumer.seek(tp, offsets[tp])

    def _offset_commit_completed(
        self, seqno: int, error: Exception | None, offsets: Mapping[TopicPartition, OffsetAndMetadata] | None
    ) -> None:
        took_ms = self.sink_state.commit_completed(seqno, error, offsets, self._clock.monotonic_ms())
        # A late response to an earlier commit must not end the wait for the newest one.
        if not self.sink_state.committing:
            self._commit_answered.set()
        self.metrics.set("offset_commit_seq_no", self.sink_state.commit_seqno)
        if took_ms is None:
            # The response came after a newer commit had begun.
            self.metrics.add("offset_commit_skip_total")
        elif error is not None:
            self.metrics.add("offset_commit_failure_total")
            log.error("offset commit failed", task=str(self.id), error=self.mask(f"{type(error).__name__}: {error}"))
        else:
            self.raw.committed(offsets or {})
            self.metrics.timed("offset_commit", took_ms)
            self.metrics.add("offset_commit_success_total")
            self.metrics.add("offset_commit_completion_total")

    async def on_partitions_assigned(self, partitions: Partitions) -> None:
        """Take the positions of new partitions from the consumer, and let the task open them."""
        async with self._turn:
            positions = {tp: await self._consumer.position(tp) for tp in sorted(partitions)}
            paused = self.sink_state.opened(positions)
            self.metrics.set("partition_count", len(self.sink_state.assigned))
            self._consumer.pause(*(self.sink_state.assigned if self.holds_all else paused))
            if partitions:
                await self._call_task(self.task.open, frozenset(partitions))
                # Before the first poll: an exactly-once sink requests the offsets of its target system in `open`.
                for tp, offset in self._seek_rewound_partitions().items():
                    if tp in positions and positions[tp] != offset:
                        log.info(
                            "the task begins at an offset of its own, not at the group's", task=str(self.id),
                            partition=str(tp), offset=offset, group_offset=positions[tp],
                        )  # fmt: skip

    async def on_partitions_revoked(self, partitions: Partitions) -> None:
        """Let the task finish the partitions, and commit."""
        async with self._turn:
            await self._close_partitions(partitions, lost=False)

    async def on_partitions_lost(self, partitions: Partitions) -> None:
        """Let the task close the partitions, without a commit: it would be rejected."""
        async with self._turn:
            await self._close_partitions(partitions, lost=True)

    async def _close_partitions(self, partitions: Partitions, *, lost: bool) -> None:
        partitions = frozenset(partitions) & frozenset(self.sink_state.assigned)
        # A cancelled task is abandoned: it neither commits nor calls the connector any more.
        if not partitions or self.cancelled:
            return
        try:
            if not lost:
                await self._commit_before_revocation(partitions)
        finally:
            try:
                await self._call_task(self.task.close, partitions)
            finally:
                self.sink_state.closed(partitions)
                self.raw.forget(partitions)
                self.metrics.set("partition_count", len(self.sink_state.assigned))
                self._report_batch()

    async def _commit_before_revocation(self, partitions: Partitions) -> None:
        """Commit before partitions are revoked. If the task cannot flush, their next owner reads the records again, and
        this task those of the partitions that it keeps.
        """
        begun = self.sink_state.begin_commit(self._clock.monotonic_ms(), partitions)
        if begun is None:
            return
        seqno, wanted = begun
        offsets: dict[TopicPartition, OffsetAndMetadata] = {}
        try:
            await self._reporters.flush()
            try:
                provided = await self._call_task(self.task.pre_commit, dict(wanted))
            except Exception:
                self._read_again(self.sink_state.assigned.keys() - partitions)
                raise
            # `pre_commit` may have reported errors, which must be handled before the commit.
            await self._reporters.flush()
            if offsets := self.sink_state.committable(provided or {}):
                await self._consumer.commit(offsets)
        except Exception as e:
            # The next owner reads the uncommitted records again.
            self._offset_commit_completed(seqno, e, None)
        else:
            self._offset_commit_completed(seqno, None, offsets)

    async def _close_task(self) -> None:
        try:
            # Before `stop`: leaving the group revokes all partitions, for which the task must flush and close them.
            await self._consumer.close(LEAVE_TIMEOUT_MS if self.cancelled else CLOSE_TIMEOUT_MS)
        finally:
            try:
                if self._initialized:
                    await self._call_stop(self.task.stop)
            finally:
                self._conversion.chain.close(self.mask)
                await self._reporters.close()


class WorkerSinkTaskContext:
    """The context of a sink task; see `SinkTaskContext`."""

    def __init__(self, task: WorkerSinkTask, props: Mapping[str, str], files: AllowedFiles, consumer: Consumer) -> None:
        self._task = task
        self._state = task.sink_state
        self._consumer = consumer
        self.files = files
        self.configs = dict(props)
        self.errant_record_reporter: ErrantRecordReporter | None = None

    def assignment(self) -> frozenset[TopicPartition]:
        return frozenset(self._state.assigned)

    def offset(self, tp: TopicPartition, offset: int) -> None:
        if offset < 0:
            raise ValueError(f"{tp}: cannot continue from offset {offset}")
        self._state.rewinds[tp] = offset

    def pause(self, *partitions: TopicPartition) -> None:
        self._task.thread.on_loop(self._pause_partitions, partitions)

    def _pause_partitions(self, partitions: Sequence[TopicPartition]) -> None:
        self._check_assigned(partitions)
        self._state.paused_by_task.update(partitions)
        if not self._task.should_pause:
            self._consumer.pause(*partitions)

    def resume(self, *partitions: TopicPartition) -> None:
        self._task.thread.on_loop(self._resume_partitions, partitions)

    def _resume_partitions(self, partitions: Sequence[TopicPartition]) -> None:
        self._check_assigned(partitions)
        self._state.paused_by_task.difference_update(partitions)
        if not self._task.holds_all and not self._state.paused_for_redelivery:
            self._consumer.resume(*partitions)

    def timeout(self, timeout_ms: int) -> None:
        self._state.retry_timeout_ms = timeout_ms

    def wait_for(self, awaitable: Awaitable[T]) -> T:
        return self._task.thread.wait_for(awaitable)

    def request_commit(self) -> None:
        self._state.commit_requested = True

    def _check_assigned(self, partitions: Sequence[TopicPartition]) -> None:
        if foreign := [str(tp) for tp in partitions if tp not in self._state.assigned]:
            raise ConnectError(f"partitions that are not assigned to this task: {', '.join(foreign)}")
