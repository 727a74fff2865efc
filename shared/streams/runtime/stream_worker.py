"""The stream worker: polls, restores, processes, punctuates and commits, one turn at a time.

The worker is a member of the application's consumer group and runs one task for each partition that it owns. An
assigned partition is paused while its task is restored in the background; the other tasks continue. On revocation, the
worker commits the processed records before it releases the partition. If the next assignment returns the partition, its
task continues. After a commit that failed, the task is discarded and restored from the changelog, unless the error ends
the worker. The consumer never resets a position: `source_positions` decides where tasks resume.
"""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import TypedDict

from prometheus_client import CollectorRegistry

from penstock.shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from penstock.shared.clients.consumer.assignors import Assignor
from penstock.shared.clients.protocol.requests import NO_GENERATION
from penstock.shared.common.backoff import ExponentialBackoff
from penstock.shared.common.clock import SYSTEM_CLOCK, Clock
from penstock.shared.common.errors import (
    PRODUCER_LOST,
    ConfigError,
    DataError,
    FatalError,
    IllegalState,
    InconsistentGroupProtocol,
    LogTruncation,
    OffsetOutOfRange,
    PenstockError,
    ProducerFenced,
    RetriableError,
    SourceTopicChanged,
)
from penstock.shared.common.kernel_loading import loaded
from penstock.shared.common.log import get_logger
from penstock.shared.common.records import TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import require_whole_input
from penstock.shared.streams.compile_kernels import compile_kernels
from penstock.shared.streams.runtime.application_topics import prepare_topics
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition
from penstock.shared.streams.runtime.foreign_members import foreign_members_error
from penstock.shared.streams.runtime.global_tables import GlobalTableRows, GlobalTables
from penstock.shared.streams.runtime.repartition_purge import RepartitionPurge
from penstock.shared.streams.runtime.source_positions import START_AFRESH, GroupAhead, SourcePositions
from penstock.shared.streams.runtime.standby_assignor import STRATEGIES
from penstock.shared.streams.runtime.standbys import StandbyDescription, Standbys
from penstock.shared.streams.runtime.stream_task_factory import StreamTaskFactory
from penstock.shared.streams.runtime.task_commits import EndedCommits, Failure, TaskCommits
from penstock.shared.streams.runtime.turn_time import TurnTime, log_if_blocking
from penstock.shared.streams.runtime.worker_tasks import (
    OwnedTask,
    RunningTask,
    RunningTasks,
    TaskDescription,
    WorkerTasks,
)
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.idleness import advance_idle_time
from penstock.shared.streams.task.metrics import RestoreMetrics
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.streams.task.task_context import Guarantee
from penstock.shared.streams.topology import Topology

log = get_logger(__name__)

RESTORE_BACKOFF = ExponentialBackoff(500, 30_000)
QUIET_MS = 300_000
"""After running this long, a task with nothing to commit counts as healthy: its earlier failures are forgotten.

It is as long as the default of Kafka Streams' `task.timeout.ms`.
"""
SHUTDOWN_TIMEOUT_MS = 30_000
# Shares of the remaining shutdown time.
COMMIT_SHARE = 0.5
LEAVE_SHARE = 0.5

OnTask = Callable[[StreamTask], None]
"""Called with each task once it is restored, before its first record; here punctuation can be scheduled."""


class WorkerDescription(TypedDict):
    """A stream worker as plain values. `topology` is the text of `Topology.describe`."""

    application_id: str
    instance: str
    processing_guarantee: Guarantee
    topology: str
    tasks: list[TaskDescription]
    standbys: list[StandbyDescription]


class StreamWorker(RebalanceListener):
    """Runs a topology's tasks for the partitions that the group assigns to it."""

    def __init__(
        self,
        kafka: KafkaSettings,
        settings: StreamsSettings,
        topology: Topology,
        *,
        on_task: OnTask | None = None,
        clock: Clock = SYSTEM_CLOCK,
        registry: CollectorRegistry | None = None,
    ) -> None:
        self.topology = topology.of_application(settings.application_id)
        settings = settings.for_topology(self.topology.internal_topics())
        self._kafka = kafka
        self._settings = settings
        self._clock = clock
        self._on_task = on_task or (lambda task: None)
        self._registry = registry or CollectorRegistry()
        self.instance = f"{socket.gethostname()}-{os.getpid()}"
        self._tasks = WorkerTasks()
        self._owned = self._tasks.owned
        self._suspended = self._tasks.suspended
        self.holds = self._tasks.holds
        self._failures: dict[int, int] = {}
        self._fenced = False
        self._revoked_in = NO_GENERATION
        self._time = TurnTime(clock)
        self._lock = asyncio.Lock()
        self._commit_due_ms = clock.monotonic_ms() + settings.commit_interval_ms
        self._restores = RestoreMetrics(self._registry)
        self._positions = SourcePositions(kafka, settings, self._registry)
        self._commits = TaskCommits(settings, clock, self._registry)
        self._task_factory = StreamTaskFactory(settings, self.topology, clock, self._registry)
        self._standbys = Standbys(kafka, settings, self._task_factory, clock, self._registry)
        replicas = settings.num_standby_replicas
        strategy = settings.partition_assignment_strategy
        self._assignor = STRATEGIES[strategy](replicas, self._standbys.warm)
        self._consumer = _create_group_member(kafka, settings, self._registry, self._assignor)
        self._tables = GlobalTables(kafka, self.topology, clock)
        self._purge = RepartitionPurge(kafka, self.topology, clock, settings.repartition_purge_interval_ms)
        self._is_started = False
        self._leaving = False
        self._closing: asyncio.Task[None] | None = None
        self._is_assigned = False
        self._is_accepted = False
        self._waits_for = "Kafka"
        self.source_partitions = 0
        """The number of partitions of the source topics; 0 until they are known."""

    # --- lifecycle ---

    async def startup(self) -> None:
        """Wait for the topics that the topology only reads, create its others, load global tables, and join the group.

        Raises UnknownTopicOrPartition with the topics that did not appear in time, ConfigError if the topics or the
        state directory are unsuitable, and KafkaTimeout or OffsetOutOfRange if a global table cannot be loaded. Raises
        IllegalState if the worker was started before.
        """
        if self._is_started:
            raise IllegalState("the worker was started already; make a new one")
        self._task_factory.startup()
        # Compiling may take some seconds, in which a member of the group could miss heartbeats.
        await loaded(compile_kernels, "the kernels")
        self.source_partitions = await prepare_topics(
            self._kafka, self._settings, self.topology, self._clock, self._wait_for_topics
        )
        self._waits_for = "the global tables"
        await self._tables.load()
        self._waits_for = "the group's assignment"
        await self._join_group()
        self._is_started = True

    async def run_once(self, now_ms: int | None = None) -> None:
        """Do one turn: poll, collect restored tasks, process, punctuate, and begin a commit if one is due.

        `now_ms` is this turn's wall-clock time in ms since the epoch, by default the clock's. The call may be cancelled
        at any moment: a commit in progress continues, and `shutdown` can still commit.

        An error ends the worker: call `shutdown`, and start a new worker. OffsetOutOfRange is raised if a global
        table's topic lacks the position. IllegalState is raised before `startup` has ended.
        """
        if not self._is_started:
            raise IllegalState("the worker is new; call startup() first")
        # 1. Join the group again if another instance took a partition over in an earlier turn.
        if self._fenced:
            await self._rejoin_group()
        # 2. Fetch. The group's callbacks, such as `on_partitions_revoked`, are called in here.
        await self._poll_records()
        await self._tables.poll()
        async with self._lock:
            # 3. Handle the outcomes of the background commit and of background restores.
            if self._commits.has_ended:
                await self._handle_ended_commits(await self._commits.settle())
            await self._collect_restored_tasks()
            running = self._tasks.running()
            # 4. Process the records, then advance the times that do not depend on records.
            now_ms = self._clock.now_ms() if now_ms is None else now_ms
            _process_waiting_records(running, self._consumer, now_ms, self._time, self._settings.input_buffer_max_bytes)
            _advance_past_transaction_markers(running, self._consumer)
            blocking_ms_max = self._settings.blocking_ms_max
            _advance_idle_tasks(running, self._consumer, self.source_partitions, blocking_ms_max, self._clock)
            _punctuate_wall_clock_of_all(self._owned.values(), now_ms, blocking_ms_max, self._clock)
            self._is_accepted = not self.waits_for
        # 5. Begin the next commit. It is prepared here, and written in the background of the next turns.
        if self._clock.monotonic_ms() >= self._commit_due_ms:
            await self._begin_commit()
            await self._purge.run()
            self._task_factory.clean()

    async def _poll_records(self) -> None:
        """Fetch records, and add them to the inputs of their tasks."""
        try:
            tasks = self._tasks.running().values()
            wait_ms = _poll_wait_ms(self._settings, tasks, self._commit_due_ms - self._clock.monotonic_ms())
            # A busy worker does not wait in `poll`, but its commit needs the event loop.
            if not wait_ms:
                await self._commits.yield_to_commit()
            batches = await self._consumer.poll(wait_ms, self._settings.max_poll_records)
        except InconsistentGroupProtocol as e:
            # The members that are described afterwards are then all others.
            await self._consumer.close()
            raise await foreign_members_error(self._kafka, self._settings.application_id, self._assignor.name, e) from e
        except LogTruncation as e:
            # The state contains the lost records. A comparison with the partition's end would not detect that, once
            # the log has grown past the position.
            raise SourceTopicChanged(f"{e}. {START_AFRESH}") from e
        except OffsetOutOfRange as e:
            # With `auto_offset_reset` other than none, the consumer would skip or repeat records silently.
            log.warning("a position is out of range", reason=str(e))
        else:
            # Add them before the next await: the consumer's position is past the records, so a cancellation there would
            # lose them. Rebalances happen inside the poll, and the poll returns records only after its listener has
            # returned. Partitions in restore are paused. So all records belong to the tasks that run now.
            running = self._tasks.running()
            for at, columns in batches.items():
                if (one := running.get(at.partition)) is not None:
                    one.inputs.add(columns)
            return
        async with self._lock:
            for partition, one in self._tasks.running().items():
                try:
                    await self._positions.check(one.task, self._consumer, self._assigned_partitions_of(partition))
                except RetriableError as e:
                    # The next poll reports again that the position is out of range.
                    log.warning("the source's offsets cannot be looked up", partition=partition, reason=str(e))
                self._seek_to_task(partition)

    async def shutdown(self, timeout_ms: float = SHUTDOWN_TIMEOUT_MS) -> None:
        """Commit what was processed, leave the group and close everything. All waits for Kafka end within `timeout_ms`.

        If the last commit fails, or Kafka does not answer, an error line names the partitions. Their records since the
        previous commit are processed again at the next start.

        If the call is cancelled, all this continues in the background. A second call waits for its end.
        """
        if self._closing is None:
            # A task of its own, which a cancellation of the caller does not reach.
            self._closing = asyncio.create_task(self._leave_and_close(timeout_ms), name="shutdown")
        await asyncio.shield(self._closing)

    async def _leave_and_close(self, timeout_ms: float) -> None:
        deadline_ms = self._clock.monotonic_ms() + timeout_ms

        def timeout_left_ms(share: float = 1.0) -> float:
            return max(0.0, deadline_ms - self._clock.monotonic_ms()) * share

        # From here on the callbacks do nothing: the last commit covers them.
        self._leaving = True
        last = asyncio.create_task(self._commit_to_leave(), name="last-commit")
        try:
            try:
                await self._commits.last(last, self._owned, timeout_left_ms(COMMIT_SHARE))
            finally:
                await self._consumer.close(timeout_left_ms(LEAVE_SHARE))
        finally:
            # Without a limit: global tables and standbys do not wait for Kafka when they close. A standby writes its
            # state to disk.
            await self._tables.close()
            # Concurrently, because each may wait for the broker.
            closing = (owned.close(timeout_left_ms() * 0.8) for owned in self._tasks.all())
            self._tasks.closed(await asyncio.gather(*closing, return_exceptions=True))
            await self._standbys.close()
            self._task_factory.shutdown()
            last.cancel()
            await asyncio.wait({last}, timeout=timeout_left_ms() / 1000)

    async def _commit_to_leave(self) -> list[Failure]:
        async with self._lock:
            before = await self._commits.settle()
            return before.failed + (await self._commits.commit(list(self._owned.values()), self._consumer)).failed

    # --- views for others ---

    @property
    def consumer(self) -> Consumer:
        """The group's member; it is replaced after it was fenced."""
        return self._consumer

    @property
    def waits_for(self) -> str:
        """The condition that the worker waits for; "" once its topology is known to fit its first partitions."""
        if self._is_accepted:
            return ""
        if not self._is_assigned:
            return self._waits_for
        unknown = sorted(partition for partition, owned in self._owned.items() if not owned.is_accepted)
        return f"the state of partitions {unknown}, which the topology has to fit" if unknown else ""

    def missing_source_topics(self) -> list[str]:
        """The source topics that are not in Kafka's metadata, sorted. They were deleted, or a broker had an error."""
        return sorted(self._consumer.missing_topics()) if self._is_assigned else []

    @property
    def global_tables(self) -> dict[str, GlobalTableRows]:
        """This instance's copies of the global tables by name."""
        return self._tables.rows

    def tasks(self) -> dict[int, OwnedTask]:
        """The tasks owned now, by partition."""
        return dict(self._owned)

    def describe(self) -> WorkerDescription:
        """Return the tasks as plain values, for REST and the dashboard."""
        return {
            "application_id": self._settings.application_id,
            "instance": self.instance,
            "processing_guarantee": self._settings.processing_guarantee,
            "topology": self.topology.describe(),
            "tasks": self._tasks.describe(),
            "standbys": self._standbys.describe(),
        }

    def _wait_for_topics(self, topics: list[str]) -> None:
        self._waits_for = f"the topic{'s'[: len(topics) != 1]} {', '.join(topics)}, which Kafka does not have"

    # --- group membership ---

    async def _join_group(self) -> None:
        await self._consumer.__aenter__()
        self._consumer.subscribe(self.topology.source_topics(), self)

    async def _rejoin_group(self) -> None:
        """Leave and join again without tasks, because the producer of a task was fenced."""
        async with self._lock:
            await self._close_all_tasks()
        await self._consumer.close()
        self._consumer = _create_group_member(self._kafka, self._settings, self._registry, self._assignor)
        await self._join_group()
        # Only now, so that the next turn repeats this if it was cancelled.
        self._fenced = False

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Resume suspended tasks whose partitions are assigned again, close the others, and restore the new ones.

        A suspended task is restored instead if this member missed a generation, if the task has no position in one of
        its source topics, or if the ids of these topics cannot be looked up. Raises SourceTopicChanged if a topic of a
        task that continues was deleted and created again, and ConfigError if a source topic got more partitions.
        """
        if self._leaving:
            return
        if added := {at.topic for at in partitions if at.partition >= self.source_partitions}:
            raise ConfigError(
                f"{', '.join(sorted(added))} got more partitions, but the application was started for "
                f"{self.source_partitions}. Start it again: it then checks its topics, and says what to do"
            )
        async with self._lock:
            await self._handle_ended_commits(await self._commits.settle())
            assigned = {at.partition for at in partitions}
            # Difference 0: a cooperative member revokes and is assigned in one generation. 1: an eager member joins the
            # next one. Otherwise another member may have owned the partition in between, and no broker fences a writer
            # without transactions.
            is_next = self._consumer.group_metadata().generation_id - self._revoked_in in (0, 1)
            for partition, owned in list(self._suspended.items()):
                if partition not in assigned:
                    await owned.close()
            # Other members own the other partitions now: the next failure there is the first in a row.
            owned_now = assigned | self._owned.keys()
            self._failures = {partition: count for partition, count in self._failures.items() if partition in owned_now}
            resumed = {
                partition: owned
                for partition, owned in self._suspended.items()
                if is_next and partition in assigned and self._knows_all_positions(owned, partition)
            }
            continuing = [owned.task for owned in (*self._owned.values(), *resumed.values()) if owned.task is not None]
            try:
                # The rebalance may be due to a source topic that was created again.
                await self._positions.check_topics(continuing, self._consumer)
            except RetriableError as e:
                # A restore repeats the lookup for its task.
                log.warning("the source topics cannot be looked up", restored=sorted(resumed), reason=str(e))
                resumed = {}
            for partition in assigned:
                if partition in resumed:
                    self._owned[partition] = resumed[partition]
                    self._seek_to_task(partition)
                else:
                    if partition in self._suspended:
                        await self._suspended[partition].close()
                    self._start_restore(partition)
            self._suspended.clear()
            await self._standbys.stand_by(self._assignor.standbys, self._owned)
            self._is_assigned = True
            log.info("partitions assigned", partitions=sorted(assigned))
            if missing := self.missing_source_topics():
                log.warning("source topics are not in Kafka's metadata", topics=missing)

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Commit the revoked tasks and set them aside. Those that do not run are closed."""
        if self._leaving:
            # The last commit of `shutdown` covers these tasks.
            return
        async with self._lock:
            self._is_assigned = False
            await self._handle_ended_commits(await self._commits.settle())
            # The generation in which this member still owned the partitions, for `on_partitions_assigned`.
            self._revoked_in = self._consumer.group_metadata().generation_id
            revoked = {at.partition for at in partitions} & self._owned.keys()
            # As TaskManager.handleRevocation. Each partition has a transaction of its own, so only revoked tasks must
            # be committed.
            await self._handle_ended_commits(
                await self._commits.commit([self._owned[p] for p in revoked], self._consumer)
            )
            for partition in revoked & self._owned.keys():
                owned = self._owned.pop(partition)
                # The task is not running: it is being restored, perhaps because its commit has just failed, its restore
                # was not collected yet, or its restore has failed.
                if owned.task is None:
                    await owned.close()
                else:
                    self._suspended[partition] = owned
                    owned.rejection_log.report(owned.task.metrics.totals(), self._clock.monotonic_ms(), at_once=True)
            log.info("partitions revoked", partitions=sorted(revoked))

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Discard the tasks, because another instance may have taken them over already."""
        if self._leaving:
            return
        async with self._lock:
            self._is_assigned = False
            log.warning("partitions lost", partitions=sorted(at.partition for at in partitions))
            # No reader counts commits that a new owner has overtaken. If they were sent, the group would seem ahead.
            self._consumer.forget_commits()
            await self._close_all_tasks()

    # --- restoring ---

    def _start_restore(self, partition: int) -> None:
        for at in self._assigned_partitions_of(partition):
            self._consumer.pause(at)
            # A consumer without a position would look one up, and may not reset it.
            self._consumer.seek(at, 0)
        changelog = ChangelogPartition(
            self._kafka,
            self._settings,
            partition,
            self.instance,
            clock=self._clock,
            metrics=self._restores,
        )
        owned = OwnedTask(changelog)
        self._owned[partition] = owned
        owned.restoring = asyncio.create_task(self._restore_task(partition, owned), name=f"restore-{partition}")

    async def _restore_task(self, partition: int, owned: OwnedTask) -> StreamTask:
        # 1. Wait, if the partition has failed before.
        if failures := self._failures.get(partition, 0):
            await asyncio.sleep(RESTORE_BACKOFF.wait_ms(failures) / 1000)
        # 2. Fence the former owner (exactly_once).
        await owned.changelog.open()
        # 3. Begin with the standby here, or with the state on disk. A standby's database is open, and RocksDB lets
        # nobody else open its folder.
        standby = await self._standbys.hand_over(partition)
        owned.local = self._task_factory.open_state(partition) if standby is None else standby.task.local
        # 4. Restore, and become the only writer.
        make_task = partial(self._task_factory.task, partition, owned.local)
        task, owned.report = await owned.changelog.take_over(make_task, standby)
        require_whole_input(task.application, partition, task.input)
        # 5. Find the positions in the source topics.
        await self._positions.find(task, self._consumer, self._assigned_partitions_of(partition))
        return task

    async def _collect_restored_tasks(self) -> None:
        for partition, owned in list(self._owned.items()):
            restoring = owned.restoring
            if restoring is None or not restoring.done():
                continue
            owned.restoring = None
            try:
                task = restoring.result()
                self._task_factory.start(task, self._tables.rows)
                # It may schedule punctuation before the first record.
                self._on_task(task)
            except GroupAhead as e:
                owned.ahead = e
            except Exception as e:
                await self._handle_failed_task(partition, e)
            else:
                owned.begin(task, self._settings, self._clock.monotonic_ms())
                owned.log_restored(self._restores)
                self._seek_to_task(partition)
        ahead = [one.ahead for one in self._owned.values() if one.ahead is not None]
        # Reported once for all partitions of this instance, because one command sets all of them back.
        if ahead and not any(owned.restoring is not None for owned in self._owned.values()):
            raise GroupAhead(self._settings.application_id, [one for error in ahead for one in error.ahead])

    def _seek_to_task(self, partition: int) -> None:
        running = self._owned[partition].running
        assert running is not None
        running.inputs.clear()
        partitions = self._assigned_partitions_of(partition)
        for at in partitions:
            self._consumer.seek(at, running.task.sources[at.topic])
        self._consumer.resume(*partitions)

    def _knows_all_positions(self, owned: OwnedTask, partition: int) -> bool:
        """Return whether the task has a position in each topic; a topic may have got its partition later."""
        return owned.task is not None and all(
            at.topic in owned.task.sources for at in self._assigned_partitions_of(partition)
        )

    def _assigned_partitions_of(self, partition: int) -> list[TopicPartition]:
        assigned = self._consumer.assignment()
        return [at for at in assigned if at.partition == partition]

    # --- committing ---

    async def _begin_commit(self) -> None:
        """Wait for the previous commit to end, then begin to commit in the background of the next turns."""
        async with self._lock:
            await self._handle_ended_commits(await self._commits.settle())
            now_ms = self._clock.monotonic_ms()
            for partition, running in self._tasks.running().items():
                # A quiet task commits nothing that could end its failures in a row.
                if not running.task.needs_commit and now_ms - running.begun_ms >= QUIET_MS:
                    self._failures.pop(partition, None)
            self._commit_due_ms = now_ms + self._settings.commit_interval_ms
            self._commits.begin(list(self._owned.values()), self._consumer)

    async def _handle_ended_commits(self, ended: EndedCommits) -> None:
        for owned, commit in ended.held:
            self._purge.committed(owned.partition, commit.sources)
            # Only failures in a row count.
            self._failures.pop(owned.partition, None)
        for owned, error in ended.failed:
            await self._handle_failed_task(owned.partition, error)

    async def _handle_failed_task(self, partition: int, error: BaseException) -> None:
        """Discard and restore a task whose commit or restore failed with `error`, or raise `error` if that cannot help.

        After the last attempt, and while the worker leaves, `error` is raised in any case. Otherwise, after
        ProducerFenced, the worker joins its group again at the end of the turn.
        """
        is_temporary = isinstance(error, PenstockError) and not isinstance(error, FatalError | DataError | ConfigError)
        # A restored task has a new producer.
        restore_can_help = is_temporary or isinstance(error, PRODUCER_LOST)
        attempt = self._failures.get(partition, 0) + 1
        self._failures[partition] = attempt
        # 1. This was the last attempt, the worker is leaving, or a restore cannot help: raise the error.
        if not restore_can_help or self._leaving or attempt > self._settings.restore_attempts_max:
            raise error
        # 2. There is a new owner, or a transaction took too long. The task is closed with all others in
        # `_rejoin_group`.
        if isinstance(error, ProducerFenced):
            log.warning(
                "fenced: the instance joins its group again", partition=partition, attempt=attempt, reason=str(error)
            )
            self._fenced = True
            return
        # 3. Discard the task and restore it.
        log.warning("task failed: restoring it", partition=partition, attempt=attempt, reason=str(error))
        if (owned := self._owned.get(partition)) is not None:
            await owned.close()
            self._start_restore(partition)

    async def _close_all_tasks(self) -> None:
        await self._commits.settle()
        for owned in self._tasks.all():
            await owned.close()
        self._tasks.clear()


def _create_group_member(
    kafka: KafkaSettings, settings: StreamsSettings, registry: CollectorRegistry, assignor: Assignor
) -> Consumer:
    """Create the application's member of its group; it is not open yet."""
    own = ConsumerSettings(
        group_id=settings.application_id,
        group_instance_id=settings.group_instance_id,
        session_timeout_ms=settings.session_timeout_ms,
        heartbeat_interval_ms=settings.heartbeat_interval_ms,
        max_poll_interval_ms=settings.max_poll_interval_ms,
        # A revocation waits for a commit, which may take as long as the producer's `delivery_timeout_ms`.
        listener_timeout_ms=settings.max_poll_interval_ms,
        auto_offset_reset="none",
        isolation_level="read_committed",
        commit_strategy="none",
    )
    return Consumer(kafka, own, registry=registry, assignor=assignor)


def _poll_wait_ms(settings: StreamsSettings, running: Collection[RunningTask], commit_due_ms: int) -> int:
    """Return how long the next poll may wait for records: 0 if the previous turn had no time for some records.

    If there is something to commit, the poll ends when the commit is due, or after `poll_ms` if that is earlier.
    """
    if any(one.inputs.is_cut for one in running):
        return 0
    waits = any(one.task.needs_commit for one in running)
    return max(1, min(settings.poll_ms, commit_due_ms)) if waits else settings.poll_ms


def _process_waiting_records(
    running: RunningTasks, consumer: Consumer, now_ms: int, time: TurnTime, bytes_max: int
) -> None:
    """Let the tasks process the records in their inputs within the turn's time, and pause full partitions."""
    assignment = consumer.assignment()
    time.begin(sum(one.inputs.waiting for one in running.values()))
    for partition, one in running.items():
        own = [at for at in assignment if at.partition == partition]
        one.inputs.process(now_ms, {at.topic: consumer.known_lag(at) for at in own}, time)
    pause_full_partitions(running, consumer, bytes_max)


def _punctuate_wall_clock_of_all(tasks: Iterable[OwnedTask], now_ms: int, blocking_ms_max: int, clock: Clock) -> None:
    """Evaluate the WALL_CLOCK_TIME schedules of running tasks; log each task that blocks heartbeats too long."""
    for owned in tasks:
        if owned.task is None:
            continue
        with log_if_blocking(
            f"the WALL_CLOCK_TIME punctuations of partition {owned.partition}", clock, blocking_ms_max
        ):
            owned.task.punctuate_wall_clock(now_ms)
        # If there is something to commit, the commit reports the rejected records (`TaskCommits`).
        if not owned.task.needs_commit:
            owned.rejection_log.report(owned.task.metrics.totals(), clock.monotonic_ms())


def pause_full_partitions(running: RunningTasks, consumer: Consumer, bytes_max: int) -> None:
    """Pause the consumer's partitions whose inputs are full, and resume those that have room again.

    If the inputs of all tasks together hold more than `bytes_max` bytes, every partition that has records in them
    counts as full.
    """
    paused = consumer.paused()
    is_over = sum(one.inputs.bytes for one in running.values()) > bytes_max
    for at in consumer.assignment():
        one = running.get(at.partition)
        if one is None:
            continue
        # A partition without records in the inputs never counts as full: its task may wait for its records before it
        # processes those of other topics.
        is_full = one.inputs.is_full(at.topic) or (is_over and one.inputs.holds(at.topic))
        if is_full and at not in paused:
            consumer.pause(at)
        elif at in paused and not is_full:
            consumer.resume(at)


def _advance_idle_tasks(
    running: RunningTasks, consumer: Consumer, tasks: int, blocking_ms_max: int, clock: Clock
) -> None:
    """Advance the times of tasks that have read everything and are idle long enough, and send the watermarks that are
    due. Log each task for which this takes longer than `blocking_ms_max`. `tasks` is the number of the application's
    tasks.
    """
    for partition, one in running.items():
        if one.idle is None:
            continue
        # Also the topics that are not assigned, because Kafka's metadata lacks them: they may have unread records.
        topics = {source.topic for source in one.task.topology.sources() if not source.is_internal}
        read = [at for at in consumer.assignment() if at.partition == partition and at.topic in topics]
        ages = [None if one.inputs.holds(at.topic) else consumer.end_age_ms(at) for at in read]
        known = [age for age in ages if age is not None]
        at_end = len(known) == len(topics)
        age_ms = max(known, default=0)
        with log_if_blocking(f"the advance of partition {partition}'s idle time", clock, blocking_ms_max):
            advance_idle_time(one.idle, one.task, clock.monotonic_ms(), at_end=at_end, tasks=tasks, age_ms=age_ms)


def _advance_past_transaction_markers(running: RunningTasks, consumer: Consumer) -> None:
    """Advance the tasks' positions past transaction markers, which no poll returns.

    Otherwise, once the topic's retention has deleted the markers, they would look like records that were never read.
    """
    for at in consumer.assignment():
        one = running.get(at.partition)
        if one is None or one.inputs.holds(at.topic):
            continue
        # Kafka Streams commits the consumer's position there too, so that the lag becomes 0 (KAFKA-6607).
        if (position := consumer.known_position(at)) is not None:
            one.task.advance_position(at.topic, position)
