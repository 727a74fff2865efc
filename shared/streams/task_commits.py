"""Commits of one instance's tasks: side by side, each for itself.

A record that the producer or the broker refuses cannot be left out of a transaction that is open. The task is restored
instead and takes the record's source record anew, this time as one whose processing failed: it becomes a dead letter
if no store took it, and otherwise ends the worker with its place. A window's state that cannot be encoded, or is too
large to be written, has no such record: the next task encodes states with every record, and so finds it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from prometheus_client import CollectorRegistry

from shared.clients.consumer import Consumer
from shared.common.clock import Clock
from shared.common.errors import DataError, KafkaTimeout, PenstockError, RecordTooLarge
from shared.common.log import get_logger
from shared.common.metrics import histogram
from shared.common.records import OffsetAndMetadata, TopicPartition
from shared.streams.changelog import RecordRefused
from shared.streams.owned_task import OwnedTask
from shared.streams.processor import ProcessingFailed, RecordMetadata, StateRefused
from shared.streams.settings import StreamsSettings
from shared.streams.stream_task import Refusals, StreamTask
from shared.streams.task_outputs import TaskCommit
from shared.streams.window_limits import name_window

log = get_logger(__name__)

Failure = tuple[OwnedTask, BaseException]


class SourceRefused(PenstockError):
    """A commit did not hold because of one source record; a task restored as `TaskCommits` says does without it."""


class TaskCommits:
    """Commits tasks and remembers the source records that kept a commit from holding."""

    def __init__(self, settings: StreamsSettings, clock: Clock, registry: CollectorRegistry) -> None:
        self._settings, self._clock = settings, clock
        self._refused: dict[int, dict[RecordMetadata, DataError]] = {}
        self._check_states: set[int] = set()
        self._seconds = histogram(registry, "streams_commit_seconds", "Time of one commit.")

    def refused(self, partition: int) -> Refusals:
        """What a task of this partition has to refuse."""
        return dict(self._refused.get(partition, {}))

    def checks_states(self, partition: int) -> bool:
        """Whether a task of this partition has to look for the record whose state cannot be written."""
        return partition in self._check_states

    async def commit(self, owned: Sequence[OwnedTask], consumer: Consumer) -> list[Failure]:
        """Commit those that have something to; the ones that failed, each with its error."""
        due = [o for o in owned if o.task is not None and o.task.needs_commit]
        if not due:
            return []
        started = self._clock.monotonic_ms()
        errors = await asyncio.gather(*(self._commit_one(o, consumer) for o in due), return_exceptions=True)
        self._seconds.observe((self._clock.monotonic_ms() - started) / 1000)
        failed = [(o, error) for o, error in zip(due, errors, strict=True) if error is not None]
        if self._settings.processing_guarantee == "at_least_once":
            bad = [o for o, _ in failed]
            await self._commit_group_offsets([o for o in due if o not in bad], consumer)
        return failed

    async def last(
        self,
        commit: asyncio.Task[list[Failure]],
        earlier: asyncio.Task[None] | None,
        tasks: Mapping[int, OwnedTask],
        timeout_ms: float,
    ) -> None:
        """Wait for the last commit of `tasks` (by partition) and, `timeout_ms` later at most, say what it did not do.

        `earlier` is the commit before, which nobody may have waited for. What they raised is in the log line.
        """
        await asyncio.wait({commit}, timeout=timeout_ms / 1000)
        errors: list[BaseException] = []
        if not commit.done():
            errors = [KafkaTimeout(f"not done within {timeout_ms:.0f} ms")]
        elif (error := commit.exception()) is not None:
            errors = [error]
        else:
            errors = [error for _, error in commit.result()]
        if earlier is not None and earlier.done() and not earlier.cancelled() and (error := earlier.exception()):
            errors.append(error)
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

    async def _commit_one(self, owned: OwnedTask, consumer: Consumer) -> None:
        task = owned.task
        assert task is not None
        try:
            commit = task.prepare_commit(self._clock.now_ms())
        except StateRefused as e:
            raise self._look_for_record(task, e) from e
        try:
            await owned.changelog.commit(commit, consumer.group_metadata())
        except RecordRefused as e:
            raise self._refuse(task, commit, e) from e
        task.commit_succeeded()
        self._refused.pop(task.partition, None)
        self._check_states.discard(task.partition)
        owned.refusals.say(task.metrics, self._clock.monotonic_ms())

    def _look_for_record(self, task: StreamTask, error: PenstockError) -> PenstockError:
        if task.check_states:
            return error
        self._check_states.add(task.partition)
        return SourceRefused(f"{error}; the record that made it so is looked for")

    def _refuse(self, task: StreamTask, commit: TaskCommit, error: RecordRefused) -> PenstockError:
        origin, window = commit.source_of(error.record)
        known = self._refused.setdefault(task.partition, {})
        if origin is None or origin in known:
            before = ", ".join(f"{topic}-{task.partition}@{to}" for topic, to in sorted(commit.sources.items()))
            failed = ProcessingFailed(f"the commit of what lies before {before}: {error}")
            is_entry = error.record.topic == self._settings.changelog_topic
            is_entry &= isinstance(error.__cause__, RecordTooLarge)
            return self._look_for_record(task, failed) if is_entry else failed
        known[origin] = error
        if window is not None:
            error.add_note(f"the result of {name_window(None, *window)}")
        place = f"{origin.topic}-{origin.partition}@{origin.offset}"
        return SourceRefused(f"{place}: what came of it was refused: {error}")

    async def _commit_group_offsets(self, owned: Sequence[OwnedTask], consumer: Consumer) -> None:
        """For lag to be seen; the task itself resumes from its progress record."""
        offsets = {
            TopicPartition(topic, o.task.partition): OffsetAndMetadata(at)
            for o in owned
            if o.task is not None
            for topic, at in o.task.sources.items()
        }
        if not offsets:
            return
        try:
            await consumer.commit(offsets)
        except PenstockError as e:
            log.warning("group offsets not committed", reason=str(e))
