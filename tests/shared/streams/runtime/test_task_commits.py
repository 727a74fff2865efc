"""Commits of one instance's tasks, without a broker."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import IllegalState, PenstockError, UnknownMember
from penstock.shared.common.records import Columns, ConsumerRecord, GroupMetadata, OffsetAndMetadata, TopicPartition
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.changelog_partition import LogReplaced
from penstock.shared.streams.runtime.owned_task import OwnedTask
from penstock.shared.streams.runtime.task_commits import TaskCommits
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.state.state_directory import StateDirectory
from penstock.shared.streams.task.stream_task import StreamTask


class Member:
    """A group member as commits see it: it accepts or rejects offsets, and keeps those that it could not commit."""

    def __init__(self, error: PenstockError | None = None, *, is_closed: bool = False) -> None:
        self._error, self._is_closed = error, is_closed
        self.pending: dict[TopicPartition, OffsetAndMetadata] = {}
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}

    def group_metadata(self) -> GroupMetadata:
        return GroupMetadata("app")

    async def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        if self._error is not None:
            self.pending |= offsets
            raise self._error
        self.committed |= offsets

    def forget_commits(self) -> None:
        if self._is_closed:
            raise IllegalState("closed")
        self.pending.clear()


async def group_offsets(member: Any) -> None:
    """Commit the offsets of two tasks under at-least-once."""
    commits = TaskCommits(StreamsSettings(processing_guarantee="at_least_once"), SYSTEM_CLOCK, CollectorRegistry())
    held: Any = [(SimpleNamespace(partition=p), SimpleNamespace(sources={"in": 10 + p})) for p in range(2)]
    await commits._commit_group_offsets(held, member)


async def test_group_offsets_follow_the_progress_records() -> None:
    """Without transactions a task's position is committed after its progress record is written."""
    member = Member()
    await group_offsets(member)
    assert {at.partition: to.offset for at, to in member.committed.items()} == {0: 10, 1: 11}


@pytest.mark.parametrize("is_closed", [False, True])
async def test_group_offsets_that_were_refused_are_not_sent_later(is_closed: bool) -> None:
    """In a later generation they would be from commits that a new owner has overtaken, and it could not restore."""
    member = Member(UnknownMember("gone"), is_closed=is_closed)
    await group_offsets(member)
    assert (member.committed, bool(member.pending)) == ({}, is_closed)


class Elsewhere:
    """A changelog partition whose topic was replaced by another."""

    topic_partition = TopicPartition("app-changelog", 0)

    async def commit(self, commit: object, group: GroupMetadata) -> CommitPosition:
        raise LogReplaced("made again")

    async def close(self, timeout_ms: float | None = None) -> None:
        pass


async def test_what_is_on_disk_goes_with_its_log(tmp_path: Path) -> None:
    """If a log has lost its end, the offsets on disk belong to other records, so the state on disk is deleted."""
    state = StateDirectory(str(tmp_path), "app", memory_bytes_max=4 * 1024 * 1024, cache_bytes_max=0)
    builder, elsewhere, member = StreamsBuilder(), Elsewhere(), Member()
    builder.stream("in").group_by_key().session_window(10).aggregate("s", n=Count()).on_close().to("out")
    owned = OwnedTask(elsewhere)  # type: ignore[arg-type]
    owned.local = state.state_of(0)
    task = StreamTask(builder.build(), 0, application="app", local=owned.local)
    owned.begin(task, StreamsSettings())
    task.initialize(0)
    task.process(Columns.of([ConsumerRecord("in", 0, 0, 5, b"a", b"{}")]), 0)
    task.prepare_commit(0)
    task.commit_succeeded(CommitPosition("id", 7, 7))
    commits = TaskCommits(StreamsSettings(), SYSTEM_CLOCK, CollectorRegistry())
    with pytest.raises(LogReplaced):
        await commits._write_commit(owned, task, task.prepare_commit(0), member)  # type: ignore[arg-type]
    assert owned.local.checkpoint is not None
    await owned.close()
    again = state.state_of(0)
    assert again.checkpoint is None
    again.close()


class Working:
    """A changelog partition: its task rejects one more record while a commit is written. The second commit fails."""

    topic_partition = TopicPartition("app-changelog", 0)

    def __init__(self) -> None:
        self.task: Any = None
        self.offset = 0

    def reject_one(self) -> None:
        self.task.process(Columns.of([ConsumerRecord("in", 0, self.offset, 5, b"a", b"{")]), 0)
        self.offset += 1

    async def commit(self, commit: object, group: GroupMetadata) -> CommitPosition:
        if self.offset > 1:
            raise LogReplaced("made again")
        self.reject_one()
        return CommitPosition("id", 7, 7)


async def test_rejections_are_logged_with_the_commit_that_contains_them() -> None:
    """A record that is rejected while a commit is written is not logged with it. If the next commit fails, it is
    processed again, and would be logged twice."""
    builder, changelog, member = StreamsBuilder(), Working(), Member()
    builder.stream("in").to("out")
    owned = OwnedTask(changelog)  # type: ignore[arg-type]
    changelog.task = task = StreamTask(builder.build(), 0, application="app")
    owned.begin(task, StreamsSettings())
    task.initialize(0)
    commits = TaskCommits(StreamsSettings(), SYSTEM_CLOCK, CollectorRegistry())
    changelog.reject_one()
    with capture_logs() as logged:
        await commits.commit([owned], member)  # type: ignore[arg-type]
        ended = await commits.commit([owned], member)  # type: ignore[arg-type]
    assert (len(ended.failed), task.metrics.dead_letters_total) == (1, 2)
    lines = [line for line in logged if line["event"] == "records rejected"]
    assert [(line["dead_letters"], line["last_dead_letters"]) for line in lines] == [(1, "in-0@0")]
