"""Rejected records are logged at once, then once an interval, and with the commit or the end of the task."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry
from structlog.testing import capture_logs

from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.records import Columns, ConsumerRecord, GroupMetadata, TopicPartition
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.changelog_partition import LogReplaced
from penstock.shared.streams.runtime.rejection_log import LOG_INTERVAL_MS, RejectionLog
from penstock.shared.streams.runtime.task_commits import TaskCommits
from penstock.shared.streams.runtime.worker_tasks import OwnedTask
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.state.checkpoint import CommitPosition
from penstock.shared.streams.task.metrics import StreamTaskMetrics, Totals
from penstock.shared.streams.task.stream_task import StreamTask
from tests.shared.streams.runtime.test_commits import Member


@pytest.fixture
def logged() -> Iterator[list[Any]]:
    with capture_logs() as lines:
        yield lines


def metrics() -> StreamTaskMetrics:
    return StreamTaskMetrics(None, 3)


def test_without_rejections_nothing_is_logged(logged: list[Any]) -> None:
    """Without a rejected record there is no line, also not at the end."""
    log = RejectionLog(3)
    log.report(Totals(), 0)
    log.report(Totals(), 0, at_once=True)
    assert logged == []


def test_a_burst_of_rejections_is_logged_in_two_lines(logged: list[Any]) -> None:
    """The first rejection is logged at once, the others after the interval, with the coordinates of the last one."""
    log, task = RejectionLog(3), metrics()
    task.skipped("null key")
    task.rejected_at["skipped"] = "in-3@0"
    log.report(task.totals(), 1_000)
    assert len(logged) == 1
    for offset in range(1, 5):
        task.late("in", 1)
        task.rejected_at["late"] = f"in-3@{offset}"
        log.report(task.totals(), 1_000 + LOG_INTERVAL_MS - offset)
    assert len(logged) == 1
    log.report(task.totals(), 1_000 + LOG_INTERVAL_MS)
    log.report(task.totals(), 1_000 + 2 * LOG_INTERVAL_MS)
    first, second = ({k: v for k, v in line.items() if k not in ("event", "log_level")} for line in logged)
    assert first == {"partition": 3, "late": 0, "dead_letters": 0, "skipped": 1, "last_skipped": "in-3@0"}
    assert second == {"partition": 3, "late": 4, "dead_letters": 0, "skipped": 0, "last_late": "in-3@4"}


def test_pending_rejections_are_logged_at_the_end(logged: list[Any]) -> None:
    """Rejections that are not logged yet are logged when the task ends."""
    log, task = RejectionLog(3), metrics()
    task.dead_letter("in", "process")
    log.report(task.totals(), 0)
    task.dead_letter("in", "process")
    log.report(task.totals(), 1, at_once=True)
    assert [line["dead_letters"] for line in logged] == [1, 1]


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
        return CommitPosition("id", 7)


async def test_rejections_are_logged_with_the_commit_that_contains_them() -> None:
    """A record that is rejected while a commit is written is not logged with it. If the next commit fails, it is
    processed again, and would be logged twice."""
    builder, changelog, member = StreamsBuilder(), Working(), Member()
    builder.stream("in").to("out")
    owned = OwnedTask(changelog)  # type: ignore[arg-type]
    changelog.task = task = StreamTask(builder.build(), 0, application="app")
    owned.begin(task, StreamsSettings(), 0)
    task.initialize(0)
    commits = TaskCommits(StreamsSettings(), SYSTEM_CLOCK, CollectorRegistry())
    changelog.reject_one()
    with capture_logs() as logged:
        await commits.commit([owned], member)  # type: ignore[arg-type]
        ended = await commits.commit([owned], member)  # type: ignore[arg-type]
    assert (len(ended.failed), task.metrics.dead_letters_total) == (1, 2)
    lines = [line for line in logged if line["event"] == "records rejected"]
    assert [(line["dead_letters"], line["last_dead_letters"]) for line in lines] == [(1, "in-0@0")]
