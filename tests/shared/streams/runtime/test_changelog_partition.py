"""The ownership of a changelog partition, and the position at which its owner writes."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.runtime.changelog_partition import ChangelogPartition, ChangelogPosition, LogReplaced
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.task.stream_task import StreamTask
from penstock.shared.testing.fake_broker import FakeCluster
from tests.integration.test_stream_worker import chain_of, commit, owner, process_records, topology


def test_commits_end_to_end_prove_one_owner() -> None:
    """While each commit begins where the previous one ended, all of it is verified. After a gap nothing more is."""
    position = ChangelogPosition("id", 5, marks=0)
    assert position.written(0, 5) == CommitPosition("id", 6, 6)
    assert position.written(2, 8) == CommitPosition("id", 9, 9)
    assert position.written(2, 12) == CommitPosition("id", 13, 9)
    assert position.written(2, 15) == CommitPosition("id", 16, 9)


def test_a_commit_before_the_end_of_the_one_before_is_in_another_log() -> None:
    """A log with the earlier commit has no room for it there. An unknown offset proves nothing."""
    position = ChangelogPosition("id", 5, marks=1)
    position.written(2, 7)
    assert position.between(2, -1) == range(9, 9)
    assert position.written(2, -1) == CommitPosition("id", 0, 8)
    assert position.between(2, 14) == range(9, 14)
    with pytest.raises(LogReplaced, match=r"offset 10.*11.*before"):
        position.between(2, 10)


async def test_state_that_does_not_fit_is_reported_with_its_partition() -> None:
    """The error of a takeover names the changelog's topic and partition, and the difference."""
    async with FakeCluster() as cluster, chain_of(cluster, "clicks", 1) as chain:
        async with owner(chain, "exactly_once") as (changelog, task):
            process_records(task, chain, 0, 10)
            await commit(changelog, task, chain)
        other = ChangelogPartition(chain.kafka, chain.settings(), 0, "other")
        await other.open()
        with pytest.raises(SchemaMismatch, match=r"^clicks-changelog-0: .*'s'.*sum"):
            await other.take_over(lambda: StreamTask(topology("clicks", sum=Count()), 0, application="clicks"))
        await other.close()
