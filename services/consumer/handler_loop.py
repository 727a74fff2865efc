"""The handler loop: polls, lets the scheduler decide, runs handlers and commits finished records.

One turn is `run_once`: apply pauses, poll, deliver, start executions, commit if due. Each handler call is a task. When
a call ends, the next one starts at once, so a poll that waits for records delays no handler.

Only the owner of a partition commits its records. When a partition is revoked, no further call for it starts. The loop
waits for its calls in flight (`drain_timeout_ms`), cancels the remaining ones, commits the finished records and then
releases the partition. When a partition is lost, its calls are cancelled at once and nothing is committed. The next
owner handles uncommitted records again (at least once). `commits` defines what a commit includes: offsets alone, or the
handlers' output too.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import Hashable, Iterable
from dataclasses import dataclass

from penstock.services.consumer.commits import Commits, OffsetCommits
from penstock.services.consumer.executor import Executor, Outcome
from penstock.services.consumer.progress_watch import ProgressWatch
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.shared.clients.consumer import Consumer, RebalanceListener
from penstock.shared.clients.parallel_consumer.key_scheduler import Execution, KeyScheduler
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import DataError, IllegalState, PenstockError, RetriableError
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import Columns, OffsetAndMetadata, TopicPartition

log = get_logger(__name__)

POLL_TIMEOUT_MS = 200
"""The longest wait of a turn for records. A commit, pause or lag measurement waits for the end of the turn."""
GIVE_UP_COMMIT_TIMEOUT_MS = 2_500
"""How long the last commit of revoked partitions may take, and after a commit the close of the commits."""
LAG_TIMEOUT_MS = 2_000
"""How long the request for a topic's end offsets may take."""
CANCEL_TIMEOUT_MS = 2_000
"""How long cancelled handlers may take to end. After that their partition is released regardless."""


@dataclass(frozen=True, slots=True)
class HandlerLoopOptions:
    """The loop's limits, in ms."""

    commit_interval_ms: int = 5_000
    drain_timeout_ms: int = 20_000
    lag_interval_ms: int = 5_000
    stuck_after_ms: int = 60_000


class HandlerLoop(RebalanceListener):
    """Drives one Consumer that is started and not yet subscribed. It belongs to a single event loop."""

    def __init__(
        self,
        consumer: Consumer,
        scheduler: KeyScheduler,
        executor: Executor,
        metrics: RunnerMetrics,
        clock: Clock,
        options: HandlerLoopOptions = HandlerLoopOptions(),
        commits: Commits | None = None,
    ) -> None:
        """Without `commits`, only offsets are committed (at least once)."""
        self.scheduler = scheduler
        self.options = options
        self.progress = ProgressWatch(options.stuck_after_ms)
        self.finished = 0
        self._finished_of: Counter[Hashable] = Counter()
        self._consumer = consumer
        self._executor = executor
        self._metrics = metrics
        self._clock = clock
        self._commits: Commits = commits or OffsetCommits(consumer, scheduler, metrics)
        self._tasks: dict[Execution, asyncio.Task[None]] = {}
        self._paused: set[TopicPartition] = set()
        # The registry may outlive the loop, so the metric refers only to `_tasks`.
        metrics.in_flight.set_function(self._tasks.__len__)
        self._stopping = False
        self._crash: BaseException | None = None
        self._retry_timer: asyncio.TimerHandle | None = None
        self._retry_due_ms: int | None = None
        self._measuring: asyncio.Task[None] | None = None
        self._committing: asyncio.Task[None] | None = None
        self._commit_due_ms: float = clock.monotonic_ms() + options.commit_interval_ms
        self._lag_due_ms = clock.monotonic_ms()

    def __repr__(self) -> str:
        return f"HandlerLoop({self.scheduler}, {self.finished} finished, {self.progress})"

    def unwritten(self) -> str:
        """Return a text about the dead letters that repeatedly could not be written, "" if there are none."""
        return "; ".join(sorted(self._executor.unwritten.values()))

    # Life

    def subscribe(self, topics: Iterable[str]) -> None:
        """Join the group for these topics, as the listener of its rebalances."""
        self._consumer.subscribe(list(topics), self)

    async def run(self) -> None:
        """Run turns until cancelled. Raises an error after which the loop cannot continue."""
        while True:
            await self.run_once()

    async def run_once(self) -> None:
        """Run one turn."""
        if self._crash is not None:
            raise self._crash
        self._apply_pauses()
        now_ms = self._clock.monotonic_ms()
        # The poll does not wait for a running commit. The next commit is due an interval after its end.
        due_in_ms = self.options.commit_interval_ms if self._is_commit_running else self._commit_due_ms - now_ms
        wait_ms = max(0, min(POLL_TIMEOUT_MS, due_in_ms))
        for columns in (await self._consumer.poll(wait_ms)).values():
            self._deliver_to_scheduler(columns)
        self._start_executions()
        now_ms = self._clock.monotonic_ms()
        if self._pass_over():
            # A partition's first position must be committed at once (see `_pass_over`).
            self._commit_due_ms = now_ms
        if (now_ms >= self._commit_due_ms or self._commits.is_full) and not self._is_commit_running:
            # A first position that comes during the commit makes the next one due.
            self._commit_due_ms = math.inf
            self._committing = asyncio.create_task(self._commit_offsets())
        if now_ms >= self._lag_due_ms and (self._measuring is None or self._measuring.done()):
            self._measuring = asyncio.create_task(self._measure_lag())
            self._lag_due_ms = now_ms + self.options.lag_interval_ms

    async def stop(self, drain_timeout_ms: int) -> None:
        """Drain within the timeout, commit, and release all partitions. The caller closes the consumer."""
        self._stopping = True
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        for task in (self._measuring, self._committing):
            if task is not None:
                task.cancel()
        is_committed = False
        try:
            is_committed = await self._drain_and_release_partitions(self.scheduler.partitions, drain_timeout_ms)
        finally:
            # A commit that was given up has had this time already.
            await self._commits.close(GIVE_UP_COMMIT_TIMEOUT_MS if is_committed else 0)

    # Records

    def _deliver_to_scheduler(self, columns: Columns) -> None:
        if columns.topic_partition not in self.scheduler.partitions:
            # The records were polled just before the partition was revoked. They are not committed, so the next owner
            # handles them.
            return
        # The log was truncated. Unfinished records before the truncation are still in the log: read them again.
        if (first := self.scheduler.truncate(columns.topic_partition, columns.offsets.item(0))) is not None:
            self._consumer.seek(columns.topic_partition, first)
            return
        if skipped := self.scheduler.deliver(columns):
            self._metrics.skipped(columns.topic).inc(skipped)

    def _pass_over(self) -> bool:
        """Mark offsets as finished that the consumer's position passed without returning a record, such as those of
        transaction markers.

        Returns True if a partition had no committed position before. Its position must be committed at once.
        """
        is_new = False
        assigned = self._consumer.assignment()
        for partition in self.scheduler.partitions & assigned:
            if (position := self._consumer.known_position(partition)) is not None:
                # Without a committed position, after a crash `auto_offset_reset` might choose a later one and skip
                # records.
                is_new |= self.scheduler.pass_over(partition, position)
        return is_new

    def _start_executions(self) -> None:
        """Start all executions that may run now, and set the timer for the next retry."""
        if self._stopping:
            return
        now_ms = self._clock.monotonic_ms()
        create_task = asyncio.get_running_loop().create_task
        while not self._commits.is_full and (execution := self.scheduler.take(now_ms)):
            self._tasks[execution] = create_task(self._run_execution(execution), name="handler")
        # While the output is full no retry starts. The next commit calls this method when it ends.
        due_ms = None if self._commits.is_full else self.scheduler.next_due_ms()
        if due_ms == self._retry_due_ms:
            return
        if self._retry_timer is not None:
            self._retry_timer.cancel()
        self._retry_due_ms = due_ms
        if due_ms is not None:
            self._retry_timer = asyncio.get_running_loop().call_later(
                max(0, due_ms - now_ms) / 1000, self._start_due_retries
            )

    def _start_due_retries(self) -> None:
        self._retry_due_ms = None
        self._start_executions()

    async def _run_execution(self, execution: Execution) -> None:
        outcome = None
        try:
            outcome = await self._executor.run(execution)
        except Exception as e:
            # The executor handles errors of the handler. After any other error the loop cannot continue.
            self._crash = e
            self._stopping = True
        finally:
            del self._tasks[execution]
            self._settle_execution(execution, outcome or Outcome(retry=list(execution.works)))
            self._start_executions()

    def _settle_execution(self, execution: Execution, outcome: Outcome) -> None:
        partition = execution.topic_partition
        due_ms = self._clock.monotonic_ms() + outcome.after_ms if outcome.retry else 0
        if self.scheduler.settle(execution, outcome.finished, outcome.retry, due_ms):
            self.finished += len(outcome.finished)
            self._finished_of[partition] += len(outcome.finished)
            self._commits.settled(execution, outcome)
        # The partition was lost while the handler ran. Its next owner handles the records again.
        else:
            self._metrics.ignored(partition.topic).inc(len(execution.works))
        if partition in self._paused and not self._stopping and self.scheduler.is_wanted(partition):
            self._apply_pauses()

    def _apply_pauses(self) -> None:
        # A lost partition leaves the consumer's assignment before the scheduler forgets it.
        assigned = self._consumer.assignment()
        wanted = {p: why for p, why in self.scheduler.paused().items() if p in assigned}
        for partition in (self._paused - wanted.keys()) & assigned:
            self._consumer.resume(partition)
            self._metrics.paused(*partition, False)
        for partition in wanted.keys() - self._paused:
            self._consumer.pause(partition)
            self._metrics.paused(*partition, True)
            if wanted[partition] == "metadata":
                log.warning(
                    "paused: no more offsets finished out of order fit into the commit metadata",
                    partition=str(partition),
                    first_unfinished=repr(self.scheduler.committable([partition]).get(partition)),
                )
        self._paused = set(wanted)

    # Offsets

    @property
    def _is_commit_running(self) -> bool:
        return self._committing is not None and not self._committing.done()

    async def _commit_offsets(self) -> None:
        """Commit concurrently with the polls."""
        try:
            await self._commits.commit()
        except Exception as e:
            self._crash = e
            self._stopping = True
        self._commit_due_ms = min(self._commit_due_ms, self._clock.monotonic_ms() + self.options.commit_interval_ms)
        self._start_executions()

    async def _measure_lag(self) -> None:
        """Measure the lag of each partition.

        Each topic's end offsets are requested separately. If a request fails, for example because the topic is gone,
        the lag behind the last end offsets that a fetch returned is used.
        """
        topics: dict[str, list[TopicPartition]] = {}
        for partition in self.scheduler.partitions:
            topics.setdefault(partition.topic, []).append(partition)
        ends: dict[TopicPartition, int] = {}
        for found in await asyncio.gather(*(self._end_offsets(partitions) for partitions in topics.values())):
            ends.update(found)
        lags: dict[Hashable, int] = {}
        for partition in self.scheduler.partitions:
            try:
                position = self._consumer.known_position(partition)
                fetched_lag = self._consumer.known_lag(partition)
            except IllegalState:
                # The consumer was closed meanwhile.
                return
            behind = ends[partition] - position if partition in ends and position is not None else fetched_lag
            lag = max(0, behind or 0) + self.scheduler.unfinished(partition)
            lags[partition] = lag
            self._metrics.lag(*partition, lag)
        now_ms = self._clock.monotonic_ms()
        self.progress.observe(now_ms, lags, self._finished_of)
        self.progress.observe_uncommitted(now_ms, self._commits.pending_records, self.finished)

    async def _end_offsets(self, partitions: list[TopicPartition]) -> dict[TopicPartition, int]:
        try:
            async with asyncio.timeout(LAG_TIMEOUT_MS / 1000):
                return await self._consumer.end_offsets(partitions)
        except (PenstockError, TimeoutError) as e:
            log.info("end offsets unknown", topic=partitions[0].topic, reason=str(e) or "no response")
            return {}

    # Rebalances

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        added = sorted(partitions - self.scheduler.partitions)
        while True:
            try:
                found = await self._consumer.committed(added)
                break
            # The coordinator is not available, or a transaction of the previous owner is open.
            # `listener_timeout_ms` limits the repetition.
            except RetriableError as e:
                if self._stopping:
                    return
                log.warning("committed offsets unknown", partitions=list(map(str, added)), reason=str(e))
        if self._stopping:
            # `stop` has released all partitions, and closed what commits their offsets.
            return
        for partition, committed in found.items():
            try:
                self.scheduler.assign(partition, committed)
            # The commit metadata has the offsets that were finished out of order. If it cannot be decoded, their
            # records are handled again.
            except DataError as e:
                log.warning(
                    "finished offsets beyond the committed one are unknown", partition=str(partition), reason=str(e)
                )
                assert committed is not None
                self.scheduler.assign(partition, OffsetAndMetadata(committed.offset))

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        await self._drain_and_release_partitions(partitions, self.options.drain_timeout_ms)

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        in_flight = self.scheduler.lost(partitions)
        await self._cancel_handlers(in_flight)
        self._forget_partitions(partitions)
        log.warning("lost", partitions=sorted(map(str, partitions)), cancelled=len(in_flight))

    async def _drain_and_release_partitions(self, partitions: frozenset[TopicPartition], drain_timeout_ms: int) -> bool:
        """Drain these partitions, commit their finished records and release the partitions.

        Returns whether the commit is known to have succeeded; True also if none of the partitions is held.
        """
        partitions &= self.scheduler.partitions
        if not partitions:
            return True
        # 1. No further call of these partitions starts. 2. Calls in flight may finish, within the limit. 3. The rest is
        # cancelled. 4. What is finished is committed, while the member still owns the partitions.
        self._pass_over()
        in_flight = self.scheduler.revoke(partitions)
        tasks = [self._tasks[execution] for execution in in_flight if execution in self._tasks]
        left: set[asyncio.Task[None]] = set()
        committed = False
        try:
            if tasks:
                _, left = await asyncio.wait(tasks, timeout=drain_timeout_ms / 1000)
            await self._cancel_handlers([execution for execution in in_flight if self._tasks.get(execution) in left])
            committed = await self._commits.commit(partitions, GIVE_UP_COMMIT_TIMEOUT_MS)
        finally:
            # Even after an error, the partitions belong to the next owner now.
            self.scheduler.lost(partitions)
            self._forget_partitions(partitions)
        log.info(
            "revoked", partitions=sorted(map(str, partitions)), drained=len(tasks) - len(left), cancelled=len(left),
            committed=committed,
        )  # fmt: skip
        return committed

    async def _cancel_handlers(self, executions: Iterable[Execution]) -> None:
        tasks = {execution: self._tasks[execution] for execution in executions if execution in self._tasks}
        for task in tasks.values():
            task.cancel()
        if tasks:
            _, stubborn = await asyncio.wait(tasks.values(), timeout=CANCEL_TIMEOUT_MS / 1000)
            if stubborn:
                log.error("cancelled handlers did not end, their results will be ignored", count=len(stubborn))
        for execution, task in tasks.items():
            if task.done() and execution in self._tasks:
                # The task was cancelled before its first step, so its own cleanup did not run.
                del self._tasks[execution]
                self._settle_execution(execution, Outcome(retry=list(execution.works)))

    def _forget_partitions(self, partitions: Iterable[TopicPartition]) -> None:
        self._paused -= set(partitions)
        for partition in partitions:
            self._metrics.forget(*partition)
            self._executor.unwritten.pop(partition, None)
            self._finished_of.pop(partition, None)
