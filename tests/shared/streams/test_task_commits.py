"""Commits of one instance's tasks, as far as no broker is needed to see what they do."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from shared.common.clock import SYSTEM_CLOCK
from shared.common.errors import IllegalState, PenstockError, UnknownMember
from shared.common.records import OffsetAndMetadata, TopicPartition
from shared.streams.settings import StreamsSettings
from shared.streams.task_commits import TaskCommits


class Member:
    """A group's member as a commit sees it: takes offsets, or refuses them, and keeps what it could not commit."""

    def __init__(self, refuses: PenstockError | None = None, *, is_closed: bool = False) -> None:
        self._refuses, self._is_closed = refuses, is_closed
        self.pending: dict[TopicPartition, OffsetAndMetadata] = {}
        self.committed: dict[TopicPartition, OffsetAndMetadata] = {}

    async def commit(self, offsets: dict[TopicPartition, OffsetAndMetadata]) -> None:
        if self._refuses is not None:
            self.pending |= offsets
            raise self._refuses
        self.committed |= offsets

    def forget_commits(self) -> None:
        if self._is_closed:
            raise IllegalState("closed")
        self.pending.clear()


async def group_offsets(member: Any) -> None:
    """Commit what two tasks' commits hold, at least once."""
    commits = TaskCommits(StreamsSettings(processing_guarantee="at_least_once"), SYSTEM_CLOCK, CollectorRegistry())
    held: Any = [(SimpleNamespace(partition=p), SimpleNamespace(sources={"in": 10 + p})) for p in range(2)]
    await commits._commit_group_offsets(held, member)


async def test_group_offsets_follow_the_progress_records() -> None:
    """Without transactions each task's position is committed after its commit holds."""
    member = Member()
    await group_offsets(member)
    assert {at.partition: to.offset for at, to in member.committed.items()} == {0: 10, 1: 11}


@pytest.mark.parametrize("is_closed", [False, True])
async def test_group_offsets_that_were_refused_are_not_sent_later(is_closed: bool) -> None:
    """In a later generation they would tell of commits that a new owner has overtaken: it could not restore."""
    member = Member(UnknownMember("gone"), is_closed=is_closed)
    await group_offsets(member)
    assert (member.committed, bool(member.pending)) == ({}, is_closed)
