"""Commits of one instance's tasks: concurrent, and independent of each other.

The size of every record was checked when the record was made (`stream_task`). If the producer or the broker still
rejects a record, the commit fails, and the worker stops with an error that names the record. Possible causes are
that the topic's size limit is lower than the application's, or that the topic rejects the timestamp.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from penstock.shared.clients.consumer import Consumer
from penstock.shared.common.clock import Clock
from penstock.shared.common.errors import (
    IllegalState,
    KafkaTimeout,
    PenstockError,
    ProcessingFailed,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.metrics import histogram
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.runtime.changelog_partition import LogReplaced, RecordRejected
from penstock.shared.streams.runtime.source_positions import committed_position
from penstock.shared.streams.runtime.turn_time import log_if_blocking
from penstock.shared.streams.runtime.worker_tasks import OwnedTask
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.outputs import TaskCommit
from penstock.shared.streams.task.stream_task import StreamTask

log = get_logger(__name__)

YIELD_MS = 1
COMMIT_YIELD_MS = 10
"""The longest time that a busy worker leaves to the event loop in a turn while a commit is in progress. Without
one it is YIELD_MS."""

Failure = tuple[OwnedTask, BaseException]
Prepared = tuple[OwnedTask, StreamTask, TaskCommit | Exception]
"""A task and the content of its commit, or the error that prevents the commit."""


class EndedCommits(NamedTuple):
    """The outcome of commits: those that succeeded, and the tasks that must be discarded, each with its error."""

    held: list[tuple[OwnedTask, TaskCommit]]
    failed: list[Failure]


class TaskCommits:
    """Commits tasks concurrently and reports the outcome of each commit."""

    def __init__(self, settings: StreamsSettings, clock: Clock, registry: CollectorRegistry) -> None:
        self._settings = settings
        self._clock = clock
        self._in_progress: asyncio.Task[EndedCommits] | None = None
        self._seconds = histogram(registry, "streams_commit_seconds", "Duration of a commit.")

    async def commit(self, owned: Sequence[OwnedTask], consumer: Consumer) -> EndedCommits:
        """Commit the tasks that have something to commit, and wait for the outcome.

        Tasks with a commit in progress, and those whose last commit has failed, are left out.
        """
        return await self._write_commits(self.prepare(owned), consumer)

    def begin(self, owned: Sequence[OwnedTask], consumer: Consumer) -> None:
        """Begin, in the background, to commit the tasks that have something to commit. `settle` returns the outcome.

        The tasks continue meanwhile. A task has at most one commit in progress.
        """
        assert self._in_progress is None, "a commit is under way"
        if prepared := self.prepare(owned):
            self._in_progress = asyncio.create_task(self._write_commits(prepared, consumer), name="commit")

    @property
    def has_ended(self) -> bool:
        """Return whether a commit has ended whose outcome `settle` has not returned yet."""
        return self._in_progress is not None and self._in_progress.done()

    async def yield_to_commit(self) -> None:
        """Let other work of the event loop run until the commit in progress ends, at most for COMMIT_YIELD_MS.

        Without a commit in progress, let it run for YIELD_MS.
        """
        if self._in_progress is None:
            await asyncio.sleep(YIELD_MS / 1000)
        else:
            await asyncio.wait({self._in_progress}, timeout=COMMIT_YIELD_MS / 1000)

    async def settle(self) -> EndedCommits:
        """Wait for the commit in progress, if any, and return its outcome."""
        if self._in_progress is None:
            return EndedCommits([], [])
        # A transaction that is cancelled midway can be neither continued nor repeated.
        ended = await asyncio.shield(self._in_progress)
        self._in_progress = None
        return ended

    def prepare(self, owned: Sequence[OwnedTask]) -> list[Prepared]:
        """Take the content of the next commit from each task that has one and has no commit in progress."""
        prepared: list[Prepared] = []
        for one in owned:
            task = one.task
            # A task whose commit fails is discarded. So its next commit is prepared only after this one has succeeded.
            if task is None or not task.needs_commit or task.is_committing:
                continue
            step = f"the preparation of partition {one.partition}'s commit"
            try:
                with log_if_blocking(step, self._clock, self._settings.blocking_ms_max):
                    commit = task.prepare_commit(self._clock.now_ms())
                prepared.append((one, task, commit))
            except Exception as e:
                prepared.append((one, task, e))
        return prepared

    async def _write_commits(self, prepared: Sequence[Prepared], consumer: Consumer) -> EndedCommits:
        if not prepared:
            return EndedCommits([], [])
        started = self._clock.monotonic_ms()
        # The tasks are independent: one that fails does not keep the others from committing.
        errors = await asyncio.gather(*(self._write_commit(*one, consumer) for one in prepared), return_exceptions=True)
        self._seconds.observe((self._clock.monotonic_ms() - started) / 1000)
        ended = EndedCommits([], [])
        for (owned, _, commit), error in zip(prepared, errors, strict=True):
            if error is not None:
                ended.failed.append((owned, error))
            elif isinstance(commit, TaskCommit):
                ended.held.append((owned, commit))
        # With exactly_once, each transaction contains its offsets.
        if self._settings.processing_guarantee == "at_least_once":
            await self._commit_group_offsets(ended.held, consumer)
        return ended

    async def last(
        self,
        commit: asyncio.Task[list[Failure]],
        tasks: Mapping[int, OwnedTask],
        timeout_ms: float,
    ) -> None:
        """Wait at most `timeout_ms` for `commit`, the last commit of `tasks` (by partition), which has begun already.

        Log the partitions that were not committed, with the errors.
        """
        await asyncio.wait({commit}, timeout=timeout_ms / 1000)
        errors: list[BaseException] = []
        if not commit.done():
            errors = [KafkaTimeout(f"not done within {timeout_ms:.0f} ms")]
        elif (error := commit.exception()) is not None:
            errors = [error]
        else:
            errors = [error for _, error in commit.result()]
        undone = []
        for partition, owned in tasks.items():
            if owned.task is not None and (owned.task.needs_commit or owned.task.failed is not None):
                undone.append(partition)
            elif owned.task is not None:
                owned.rejection_log.report(owned.task.metrics.totals(), self._clock.monotonic_ms(), at_once=True)
        if undone:
            log.error(
                "the last commit failed: records since the previous commit are processed again at the next start",
                partitions=sorted(undone),
                reason="; ".join(dict.fromkeys(f"{type(e).__name__}: {e}" for e in errors)) or "the task has failed",
            )

    async def _write_commit(
        self, owned: OwnedTask, task: StreamTask, commit: TaskCommit | Exception, consumer: Consumer
    ) -> None:
        if isinstance(commit, Exception):
            raise commit
        try:
            position = await owned.changelog.commit(commit, consumer.group_metadata())
        except RecordRejected as e:
            # A restored task would make the same record again. So the error ends the worker.
            before = ", ".join(f"{topic}-{task.partition}@{to}" for topic, to in sorted(commit.sources.items()))
            raise ProcessingFailed(f"the commit of the records before {before}: {e}") from e
        except LogReplaced as e:
            # The rows on disk are of the log that was replaced.
            owned.discard_reason = str(e)
            raise
        task.commit_succeeded(position)
        owned.rejection_log.report(task.metrics.committed, self._clock.monotonic_ms())

    async def _commit_group_offsets(self, held: Sequence[tuple[OwnedTask, TaskCommit]], consumer: Consumer) -> None:
        """Commit the group's offsets to show the lag; the task itself resumes from its progress record."""
        offsets = {
            TopicPartition(topic, owned.partition): committed_position(at)
            for owned, commit in held
            for topic, at in commit.sources.items()
        }
        if not offsets:
            return
        try:
            await consumer.commit(offsets)
        except PenstockError as e:
            # In a later generation these offsets might include commits that a new owner has overtaken. A closed
            # consumer raises IllegalState, and sends no offsets any more.
            with contextlib.suppress(IllegalState):
                consumer.forget_commits()
            log.warning("group offsets not committed", reason=str(e))
