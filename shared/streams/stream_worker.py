"""The stream worker: polls, restores, processes, punctuates and commits, one turn at a time.

It is a member of the application's consumer group and runs one task a partition that it owns. An assigned partition
is paused until its task is restored, in the background, so that the others go on. On revocation what was processed is
committed before the partition is let go; a task that comes straight back is kept. A commit that fails costs the task
its state, which is then restored from the changelog: what is in memory is never ahead of the log for long.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
from collections.abc import Callable
from typing import Any

from prometheus_client import CollectorRegistry

from shared.clients.consumer import Consumer, ConsumerSettings, RebalanceListener
from shared.common.clock import SYSTEM_CLOCK, Clock
from shared.common.errors import (
    ChangelogHole,
    ConfigError,
    DataError,
    FatalError,
    PenstockError,
    ProducerFenced,
)
from shared.common.log import get_logger
from shared.common.metrics import gauge, histogram
from shared.common.records import OffsetAndMetadata, TopicPartition
from shared.common.settings import KafkaSettings
from shared.streams.changelog import ChangelogPartition
from shared.streams.owned_task import OwnedTask
from shared.streams.settings import StreamsSettings
from shared.streams.stream_task import StreamTask
from shared.streams.topics import prepare_topics
from shared.streams.topology import Topology

log = get_logger(__name__)

RETRY_BACKOFF_MS = 500
REFUSED_LOG_MS = 10_000  # between two lines that say how many records were late or refused

OnTask = Callable[[StreamTask], None]
"""Called with each task once it is restored, before its first record: the place to schedule punctuation."""


class StreamWorker:
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
        self._kafka, self._settings, self.topology, self._clock = kafka, settings, topology, clock
        self._on_task = on_task or (lambda task: None)
        self._registry = registry or CollectorRegistry()
        self.instance = f"{socket.gethostname()}-{os.getpid()}"
        self._owned: dict[int, OwnedTask] = {}
        self._suspended: dict[int, OwnedTask] = {}
        self._failures: dict[int, int] = {}
        self._fenced = False
        self._lock = asyncio.Lock()
        self._last_commit_ms = clock.monotonic_ms()
        self._consumer = self._make_consumer()
        self._restore_ms = gauge(self._registry, "streams_restore_ms", "How long the last restore took.", "partition")
        self._restored = gauge(self._registry, "streams_restored_records", "Windows and records restored.", "partition")
        self._commit_seconds = histogram(self._registry, "streams_commit_seconds", "Time of one commit.")
        self._refused: dict[int, tuple[int, int, int]] = {}

    # --- life ---

    async def startup(self) -> None:
        """Wait for the source topics, create the others, join the group.

        Raises UnknownTopicOrPartition naming the source topics that did not appear in time.
        """
        await prepare_topics(self._kafka, self._settings, self.topology, self._clock)
        await self._join()

    async def run_once(self) -> None:
        """One turn: poll, restore what is done restoring, process, punctuate, commit if it is time."""
        settings = self._settings
        batches = await self._consumer.poll(settings.poll_ms, settings.max_poll_records)
        async with self._lock:
            # Rebalances happen beside the poll, and one may have come and gone within it. Nothing is given out while
            # one goes on, and what is being restored is paused: so what came is for the tasks that run now, and none
            # of it may be left out, since the consumer's position is past it.
            ready = {p: owned for p, owned in self._owned.items() if owned.task is not None and owned.restoring is None}
            await self._collect_restored()
            for at, columns in batches.items():
                owned = ready.get(at.partition)
                if owned is not None and owned is self._owned.get(at.partition) and owned.task is not None:
                    owned.task.process(columns, self._clock.now_ms())
            now_ms = self._clock.now_ms()
            for owned in self._running():
                assert owned.task is not None
                owned.task.punctuate_wall_clock(now_ms)
            if self._clock.monotonic_ms() - self._last_commit_ms >= settings.commit_interval_ms:
                await self._commit_all(self._running())
                self._last_commit_ms = self._clock.monotonic_ms()
        if self._fenced:
            await self._rejoin()

    async def shutdown(self) -> None:
        """Commit what was processed and leave the group."""
        with contextlib.suppress(PenstockError):
            async with self._lock:
                await self._commit_all(self._running())
        await self._consumer.close()
        async with self._lock:
            await self._close_all()

    # --- what others see ---

    def tasks(self) -> dict[int, OwnedTask]:
        """The tasks owned now, by partition."""
        return dict(self._owned)

    def describe(self) -> dict[str, Any]:
        """The tasks as plain values, for REST and the dashboard."""
        return {
            "application_id": self._settings.application_id,
            "instance": self.instance,
            "processing_guarantee": self._settings.processing_guarantee,
            "topology": self.topology.describe(),
            "tasks": [owned.describe(partition) for partition, owned in sorted(self._owned.items())],
        }

    # --- group membership ---

    def _make_consumer(self) -> Consumer:
        settings = ConsumerSettings(
            group_id=self._settings.application_id,
            group_instance_id=self._settings.group_instance_id,
            session_timeout_ms=self._settings.session_timeout_ms,
            heartbeat_interval_ms=self._settings.heartbeat_interval_ms,
            auto_offset_reset="earliest",
            isolation_level="read_committed",
            commit_strategy="none",
        )
        return Consumer(self._kafka, settings, registry=self._registry)

    async def _join(self) -> None:
        await self._consumer.__aenter__()
        self._consumer.subscribe(self.topology.source_topics(), _Listener(self))

    async def _rejoin(self) -> None:
        """Leave and join again with nothing in hand: another instance owns what we thought was ours."""
        async with self._lock:
            await self._close_all()
        await self._consumer.close()
        self._fenced = False
        self._consumer = self._make_consumer()
        await self._join()

    async def on_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        """Keep what came straight back, close what did not, restore what is new."""
        async with self._lock:
            assigned = {at.partition for at in partitions}
            for partition, owned in list(self._suspended.items()):
                if partition not in assigned:
                    await owned.close()
            for partition in assigned:
                if partition in self._suspended:
                    self._owned[partition] = self._suspended[partition]
                    self._seek_to_task(partition)
                else:
                    self._start_restore(partition)
            self._suspended.clear()
            log.info("partitions assigned", partitions=sorted(assigned))

    async def on_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        """Commit what was processed and set the tasks aside."""
        async with self._lock:
            revoked = {at.partition for at in partitions} & self._owned.keys()
            await self._commit_all([self._owned[p] for p in revoked if self._owned[p].task is not None])
            for partition in revoked & self._owned.keys():
                owned = self._owned.pop(partition)
                if owned.task is None:
                    await owned.close()
                else:
                    self._suspended[partition] = owned
            log.info("partitions revoked", partitions=sorted(revoked))

    async def on_lost(self, partitions: frozenset[TopicPartition]) -> None:
        """Discard the tasks: another instance may have taken them over already."""
        async with self._lock:
            log.warning("partitions lost", partitions=sorted(at.partition for at in partitions))
            await self._close_all()

    # --- restoring ---

    def _start_restore(self, partition: int) -> None:
        self._pause(partition)
        self._refused.pop(partition, None)
        owned = OwnedTask(ChangelogPartition(self._kafka, self._settings, partition, self.instance, self._clock))
        self._owned[partition] = owned
        owned.restoring = asyncio.create_task(self._restore(partition, owned), name=f"restore-{partition}")

    async def _restore(self, partition: int, owned: OwnedTask) -> None:
        if failures := self._failures.get(partition, 0):
            await asyncio.sleep(RETRY_BACKOFF_MS * 2 ** (failures - 1) / 1000)
        await owned.changelog.open()
        task, owned.report = await owned.changelog.take_over(lambda: self._make_task(partition))
        report = owned.report
        owned.starts = await self._starts(task)
        task.initialize(self._clock.now_ms())
        self._on_task(task)
        owned.task = task
        self._restore_ms.labels(partition=partition).set(report.milliseconds)
        self._restored.labels(partition=partition).set(report.snapshot_windows + report.changelog_records)
        log.info(
            "task restored",
            partition=partition,
            epoch=task.epoch,
            sources=task.sources,
            snapshot_version=report.snapshot_version,
            snapshot_windows=report.snapshot_windows,
            changelog_records=report.changelog_records,
            restore_ms=report.milliseconds,
        )

    async def _starts(self, task: StreamTask) -> dict[TopicPartition, int]:
        """Where to read on: where the changelog says, else at the group's offsets, else at the beginning.

        ChangelogHole where the group's offsets say that more was done than the changelog knows of. Both are written
        together; a group that is ahead means that state was lost, or that somebody set its offsets.
        """
        starts = {}
        for at in self._partitions_of(task.partition):
            committed, known = await self._consumer.committed(at), task.sources.get(at.topic)
            if committed is None or committed.offset == (known or 0):
                pass
            elif committed.offset < (known or 0):
                log.warning(
                    "the group's offset was set back: going on where the changelog says", topic_partition=str(at)
                )
            elif known or not self._settings.start_from_group_offsets:
                raise ChangelogHole(
                    f"{at}: group {self._settings.application_id} has committed offset {committed.offset}, but the "
                    f"changelog knows of {known or 0} only: state was lost, or the offset was set by hand. To start "
                    "with empty state, delete the group's offsets, or set streams.start_from_group_offsets to go on "
                    "at them."
                )
            if known is not None:
                starts[at] = known
            elif committed is not None:
                starts[at] = committed.offset
            else:
                starts[at] = (await self._consumer.beginning_offsets([at]))[at]
        return starts

    def _make_task(self, partition: int) -> StreamTask:
        return StreamTask(
            self.topology,
            partition,
            application=self._settings.application_id,
            guarantee=self._settings.processing_guarantee,
            registry=self._registry,
        )

    async def _collect_restored(self) -> None:
        for partition, owned in list(self._owned.items()):
            if owned.restoring is None or not owned.restoring.done():
                continue
            error, owned.restoring = owned.restoring.exception(), None
            if error is None:
                self._go_on_from(partition, owned.starts)
            else:
                await self._task_failed(partition, error)

    def _seek_to_task(self, partition: int) -> None:
        task = self._owned[partition].task
        assert task is not None
        self._go_on_from(partition, {TopicPartition(topic, partition): at for topic, at in task.sources.items()})

    def _go_on_from(self, partition: int, offsets: dict[TopicPartition, int]) -> None:
        for at, offset in offsets.items():
            self._consumer.seek(at, offset)
        self._consumer.resume(*self._partitions_of(partition))

    def _pause(self, partition: int) -> None:
        self._consumer.pause(*self._partitions_of(partition))

    def _partitions_of(self, partition: int) -> list[TopicPartition]:
        assigned = self._consumer.assignment()
        return [at for at in assigned if at.partition == partition]

    # --- committing ---

    def _running(self) -> list[OwnedTask]:
        return [owned for owned in self._owned.values() if owned.task is not None]

    async def _commit_all(self, owned: list[OwnedTask]) -> None:
        due = [o for o in owned if o.task is not None and o.task.needs_commit]
        if not due:
            return
        started = self._clock.monotonic_ms()
        errors = await asyncio.gather(*(self._commit_one(o) for o in due), return_exceptions=True)
        self._commit_seconds.observe((self._clock.monotonic_ms() - started) / 1000)
        for one, error in zip(due, errors, strict=True):
            if error is not None:
                assert one.task is not None
                await self._task_failed(one.task.partition, error)
        if self._settings.processing_guarantee == "at_least_once":
            done = [o for o, error in zip(due, errors, strict=True) if error is None]
            await self._commit_group_offsets(done)

    async def _commit_one(self, owned: OwnedTask) -> None:
        task = owned.task
        assert task is not None
        await owned.changelog.commit(task.prepare_commit(self._clock.now_ms()), self._consumer.group_metadata())
        task.commit_succeeded()
        self._failures.pop(task.partition, None)
        self._log_refused(task)

    async def _commit_group_offsets(self, owned: list[OwnedTask]) -> None:
        """For lag to be seen; the task itself resumes from its progress record."""
        offsets = {
            TopicPartition(topic, o.task.partition): OffsetAndMetadata(at)
            for o in owned
            if o.task is not None
            for topic, at in o.task.sources.items()
        }
        try:
            await self._consumer.commit(offsets)
        except PenstockError as e:
            log.warning("group offsets not committed", reason=str(e))

    async def _task_failed(self, partition: int, error: BaseException) -> None:
        """Discard a task whose commit or restore failed; restore it again, or rejoin where it has a new owner."""
        if isinstance(error, ProducerFenced):
            log.warning("fenced: another instance owns the partition", partition=partition, reason=str(error))
            self._fenced = True
            return
        if not isinstance(error, PenstockError) or isinstance(error, FatalError | DataError | ConfigError):
            raise error
        failures = self._failures[partition] = self._failures.get(partition, 0) + 1
        if failures > self._settings.restore_attempts_max:
            raise error
        log.warning("task failed: restoring it", partition=partition, attempt=failures, reason=str(error))
        owned = self._owned.pop(partition, None)
        if owned is not None:
            await owned.close()
            self._start_restore(partition)

    async def _close_all(self) -> None:
        for owned in [*self._owned.values(), *self._suspended.values()]:
            await owned.close()
        self._owned.clear()
        self._suspended.clear()

    def _log_refused(self, task: StreamTask) -> None:
        """Say what was refused since the last time, at most once in REFUSED_LOG_MS a partition."""
        now_ms = self._clock.monotonic_ms()
        late, dead = task.metrics.late_total, task.metrics.dead_letters_total
        said_late, said_dead, said_ms = self._refused.get(task.partition, (0, 0, -REFUSED_LOG_MS))
        if (late > said_late or dead > said_dead) and now_ms - said_ms >= REFUSED_LOG_MS:
            self._refused[task.partition] = (late, dead, now_ms)
            log.info("records refused", partition=task.partition, late=late - said_late, dead_letters=dead - said_dead)


class _Listener(RebalanceListener):
    def __init__(self, worker: StreamWorker) -> None:
        self._worker = worker

    async def on_partitions_assigned(self, partitions: frozenset[TopicPartition]) -> None:
        await self._worker.on_assigned(partitions)

    async def on_partitions_revoked(self, partitions: frozenset[TopicPartition]) -> None:
        await self._worker.on_revoked(partitions)

    async def on_partitions_lost(self, partitions: frozenset[TopicPartition]) -> None:
        await self._worker.on_lost(partitions)
