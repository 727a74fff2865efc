"""Commits of one instance's tasks: side by side, each for itself.

Everything that a commit writes was measured when it was made (`stream_task`). Where the producer or the broker refuses
a record in spite of that, nothing of the commit holds, and the worker stops with an error that names the record: the
limit of its topic is lower than that of the application, or its timestamp is none that the topic takes.
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
from penstock.shared.streams.changelog.partition import RecordRefused
from penstock.shared.streams.runtime.owned_task import OwnedTask
from penstock.shared.streams.runtime.source_offsets import own_offset
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import LogReplaced
from penstock.shared.streams.task.outputs import TaskCommit
from penstock.shared.streams.task.stream_task import StreamTask

log = get_logger(__name__)

YIELD_MS = 1
COMMIT_YIELD_MS = 10
"""What a worker that has more to do than it has time for leaves the loop after each turn; a commit takes a few."""

Failure = tuple[OwnedTask, BaseException]
Prepared = tuple[OwnedTask, StreamTask, TaskCommit | Exception]
"""A task and what its commit is to write, or why that cannot be."""


class Ended(NamedTuple):
    """What came of commits: those that hold, and the tasks that have to be discarded, each with its error."""

    held: list[tuple[OwnedTask, TaskCommit]]
    failed: list[Failure]


class TaskCommits:
    """Commits tasks, all at once, and says what came of each."""

    def __init__(self, settings: StreamsSettings, clock: Clock, registry: CollectorRegistry) -> None:
        self._settings, self._clock = settings, clock
        self._under_way: asyncio.Task[Ended] | None = None
        self._seconds = histogram(registry, "streams_commit_seconds", "Duration of a commit.")

    async def commit(self, owned: Sequence[OwnedTask], consumer: Consumer) -> Ended:
        """Commit those that have something to, and wait until it is known what came of it."""
        return await self._write_all(self.prepare(owned), consumer)

    def begin(self, owned: Sequence[OwnedTask], consumer: Consumer) -> None:
        """Have those that have something to commit do so, beside whatever the caller does next; then comes `settle`.

        The tasks go on meanwhile. A task has one commit under way at a time.
        """
        assert self._under_way is None, "a commit is under way"
        if prepared := self.prepare(owned):
            self._under_way = asyncio.create_task(self._write_all(prepared, consumer), name="commit")

    @property
    def has_ended(self) -> bool:
        """Whether a commit that was begun has come to its end."""
        return self._under_way is not None and self._under_way.done()

    async def may_go_on(self) -> None:
        """Let the loop do what waits in it, and the commit that was begun, if there is one, get further."""
        if self._under_way is None:
            await asyncio.sleep(YIELD_MS / 1000)
        else:
            await asyncio.wait({self._under_way}, timeout=COMMIT_YIELD_MS / 1000)

    async def settle(self) -> Ended:
        """Wait for the commit that was begun, if there is one: what came of it."""
        if self._under_way is None:
            return Ended([], [])
        # A transaction that is cancelled halfway can be neither gone on with nor done again.
        ended = await asyncio.shield(self._under_way)
        self._under_way = None
        return ended

    def prepare(self, owned: Sequence[OwnedTask]) -> list[Prepared]:
        """Take out what there is to write, of those whose commit before this one holds."""
        prepared: list[Prepared] = []
        for one in owned:
            task = one.task
            if task is None or not task.needs_commit or task.is_committing:
                continue
            try:
                prepared.append((one, task, task.prepare_commit(self._clock.now_ms())))
            except Exception as e:
                prepared.append((one, task, e))
        return prepared

    async def _write_all(self, prepared: Sequence[Prepared], consumer: Consumer) -> Ended:
        if not prepared:
            return Ended([], [])
        started = self._clock.monotonic_ms()
        errors = await asyncio.gather(*(self._write(*one, consumer) for one in prepared), return_exceptions=True)
        self._seconds.observe((self._clock.monotonic_ms() - started) / 1000)
        ended = Ended([], [])
        for (owned, _, commit), error in zip(prepared, errors, strict=True):
            if error is not None:
                ended.failed.append((owned, error))
            elif isinstance(commit, TaskCommit):
                ended.held.append((owned, commit))
        if self._settings.processing_guarantee == "at_least_once":
            await self._commit_group_offsets(ended.held, consumer)
        return ended

    async def last(
        self,
        commit: asyncio.Task[list[Failure]],
        tasks: Mapping[int, OwnedTask],
        timeout_ms: float,
    ) -> None:
        """Wait for the last commit of `tasks` (by partition) and, `timeout_ms` later at most, say what it did not do.

        What it raised is in the log line.
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
                owned.refusals.say(owned.task.metrics, self._clock.monotonic_ms(), at_once=True)
        if undone:
            log.error(
                "the last commit failed: what came since the commit before is processed again at the next start",
                partitions=sorted(undone),
                reason="; ".join(dict.fromkeys(f"{type(e).__name__}: {e}" for e in errors)) or "the task has failed",
            )

    async def _write(
        self, owned: OwnedTask, task: StreamTask, commit: TaskCommit | Exception, consumer: Consumer
    ) -> None:
        if isinstance(commit, Exception):
            raise commit
        try:
            place = await owned.changelog.commit(commit, consumer.group_metadata())
        except RecordRefused as e:
            before = ", ".join(f"{topic}-{task.partition}@{to}" for topic, to in sorted(commit.sources.items()))
            raise ProcessingFailed(f"the commit of what lies before {before}: {e}") from e
        except LogReplaced as e:
            owned.half_processed = str(e)
            raise
        task.commit_succeeded(place)
        owned.refusals.say(task.metrics, self._clock.monotonic_ms())

    async def _commit_group_offsets(self, held: Sequence[tuple[OwnedTask, TaskCommit]], consumer: Consumer) -> None:
        """For lag to be seen; the task itself resumes from its progress record."""
        offsets = {
            TopicPartition(topic, owned.partition): own_offset(at)
            for owned, commit in held
            for topic, at in commit.sources.items()
        }
        if not offsets:
            return
        try:
            await consumer.commit(offsets)
        except PenstockError as e:
            # Carried into a later generation they might tell of commits that a new owner has overtaken.
            with contextlib.suppress(IllegalState):  # closed, it sends nothing more
                consumer.forget_commits()
            log.warning("group offsets not committed", reason=str(e))
