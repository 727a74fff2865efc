"""A compaction in its own process. It is killed with its JVM (SIGKILL) at a given point, or waits until another job
overtakes it. A test runs it."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pyspark.sql import SparkSession

from penstock.services.exit_status import ExitStatus
from penstock.services.spark.compaction import compact, delta_writer, table_maintenance
from penstock.services.spark.compaction.compact import CompactionJob, CompactionPlan, CompactionReport
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.main import compact_main
from penstock.services.spark.spark_session import spark_session
from penstock.services.spark.topic_offsets import run_with_timeout
from penstock.shared.clients.admin import Admin
from penstock.shared.common.records import TopicPartition

POLL_SECONDS = 0.001


def die() -> None:
    """Kill this process and all that it started."""
    os.killpg(0, signal.SIGKILL)


class BeforeRead(CompactionJob):
    """Killed with the plan made and nothing read."""

    def _compact_and_commit(self, plan: CompactionPlan) -> CompactionReport:
        die()
        return super()._compact_and_commit(plan)


class BeforeCommit(CompactionJob):
    """Killed with all files written and none committed."""

    def _commit_tables(self, *given: Any) -> CompactionReport:
        die()
        return super()._commit_tables(*given)


class AfterClosed(CompactionJob):
    """Killed with `closed` committed, and nothing else."""

    def _ensure_table(self, plan: CompactionPlan, name: str, schema: Any) -> Any:
        if not name.startswith("closed"):
            die()
        return super()._ensure_table(plan, name, schema)


class BeforeState(CompactionJob):
    """Killed with all tables but `state` committed."""

    def _ensure_table(self, plan: CompactionPlan, name: str, schema: Any) -> Any:
        if name == "state":
            die()
        return super()._ensure_table(plan, name, schema)


class BeforeRewrite(CompactionJob):
    """Killed with the run committed and `state` not rewritten."""

    def _rewrite_due_partitions(self, plan: CompactionPlan) -> int:
        die()
        return 0


class DuringRewrite(CompactionJob):
    """Killed with the files of a rewrite written and not committed."""

    def _run_tasks(self, items: Any, size: Any, step: Any) -> Any:
        done = super()._run_tasks(items, size, step)
        if type(items[0]).__name__ == "RewriteInput":
            die()
        return done


class BeforeDelete(CompactionJob):
    """Killed with the run committed and no changelog record deleted."""

    def _delete_covered_records(self, plan: CompactionPlan) -> None:
        die()


class DuringDelete(CompactionJob):
    """Killed with one partition's records deleted and the other's not."""

    def _delete_covered_records(self, plan: CompactionPlan) -> None:
        partition = min(plan.newest)
        before = {TopicPartition(plan.offsets.topic, partition): plan.newest[partition]["changelog_offset"]}

        async def delete() -> None:
            async with Admin(self.settings.kafka) as admin:
                await admin.delete_records(before)

        run_with_timeout(delete(), self.settings.kafka, self.settings.kafka_timeout_ms)
        die()


def dying_optimize(*, is_committed: bool) -> None:
    """Make every OPTIMIZE due, and let it die before or after its commit."""
    commit = delta_writer.commit

    def dying_commit(table: Any, added: Any, removed: Any, metadata: Any) -> int:
        if metadata["kind"] != table_maintenance.OPTIMIZE:
            return commit(table, added, removed, metadata)
        if is_committed:
            commit(table, added, removed, metadata)
        die()
        return 0

    delta_writer.commit = dying_commit
    table_maintenance.is_optimize_due = lambda history, appends_max: True


class BeforeOptimize(CompactionJob):
    """Killed with the merged file of an OPTIMIZE written and not committed."""

    def _maintain_tables(self, plan: CompactionPlan, report: CompactionReport) -> CompactionReport:
        dying_optimize(is_committed=False)
        return super()._maintain_tables(plan, report)


class AfterOptimize(CompactionJob):
    """Killed with one table's OPTIMIZE committed, and the other table's not begun."""

    def _maintain_tables(self, plan: CompactionPlan, report: CompactionReport) -> CompactionReport:
        dying_optimize(is_committed=True)
        return super()._maintain_tables(plan, report)


def wait() -> None:
    """Creates a file once the job has started, and waits until another file exists."""
    Path(os.environ["THERE"]).touch()
    while not Path(os.environ["OVERTAKEN"]).exists():
        time.sleep(POLL_SECONDS)


class WithPlan(CompactionJob):
    """Waits with its plan made and nothing read."""

    def plan(self) -> CompactionPlan:
        plan = super().plan()
        wait()
        return plan


class WithClosed(CompactionJob):
    """Waits after its closed windows are committed. To the other job this looks like a crash."""

    def _ensure_table(self, plan: CompactionPlan, name: str, schema: Any) -> Any:
        if name == "state":
            wait()
        return super()._ensure_table(plan, name, schema)


OVERTAKEN = {kind.__name__: kind for kind in (WithPlan, WithClosed)}
POINTS: dict[str, Callable[..., CompactionJob]] = {
    kind.__name__: kind
    for kind in (
        *(BeforeRead, BeforeCommit, AfterClosed, BeforeState, BeforeRewrite, DuringRewrite),
        *(BeforeDelete, DuringDelete, BeforeOptimize, AfterOptimize),
    )
}


def main(arguments: list[str]) -> int:
    """Takes the point, then the flags of `penstock compact`. Returns the exit status of a job that is not killed."""
    compact.REWRITE_ROWS_MIN = 0
    if arguments[0] in OVERTAKEN:
        compact.CompactionJob = OVERTAKEN[arguments[0]]  # type: ignore[misc]
        return compact_main(arguments[1:])
    settings = CompactSettings.load(arguments[1:])
    with spark_session(settings.spark, "crashing", settings.tables) as spark:
        assert isinstance(spark, SparkSession)
        POINTS[arguments[0]](spark, settings, print).run()
    return ExitStatus.OK


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
