"""The steps after a compaction: a failed step hides neither the compaction nor the other steps."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.spark.compaction.compact import Compaction, CompactionReport, Plan
from penstock.services.spark.compaction.delta_writer import CompactionConflict
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.compaction.table_maintenance import TableMaintenance, is_optimize_due, is_vacuum_due
from penstock.services.spark.topic_offsets import TopicOffsets
from penstock.shared.common.errors import AuthorizationFailed

RUN = {"operation": "WRITE", "kind": "compaction"}
REWRITE = {"operation": "WRITE", "kind": "rewrite"}
STARTED, ENDED, OPTIMIZED = ({"operation": name} for name in ("VACUUM START", "VACUUM END", "OPTIMIZE"))
DONE = CompactionReport(1, 5, 4, 1, 2, 0, {0: 0}, {0: 9}, 7, 0.0)


class Steps(TableMaintenance):
    """Table maintenance that loses to another job."""

    def maintain(self, *paths: Any) -> dict[str, Any]:
        return {"optimized_tables": self.attempt("OPTIMIZE of x", lost, 0, may_conflict=True)}


class Job(Compaction):
    """A compaction that is committed and may not delete from the changelog."""

    def __init__(self, say: Any, error: Exception | None) -> None:
        settings = CompactSettings(application="a", lake="lake", delete_covered=True)
        super().__init__(None, settings, say)  # type: ignore[arg-type]  # it has no session, and needs none
        self.maintenance, self.error = Steps(settings, say), error

    def plan(self) -> Plan:
        return Plan(TopicOffsets("t", "id", {0: 0}, {0: 9}), {}, {}, [])

    def _fold(self, plan: Plan) -> CompactionReport:
        return DONE

    def _rewrite(self, plan: Plan) -> int:
        return 1

    def _others(self) -> dict[str, str]:
        return {}

    def _delete_covered(self, plan: Plan) -> None:
        if self.error is not None:
            raise self.error


def lost() -> Any:
    raise CompactionConflict("x")


def test_a_run_counts_though_the_deletion_failed() -> None:
    """The report lists the failed step, and maintenance was still tried. `require_done` raises the error."""
    said = list[str]()
    job = Job(said.append, AuthorizationFailed("no DELETE"))
    summary = job.run()
    assert (summary.live_rows, summary.rewritten_partitions) == (4, 1)
    assert summary.failed == ("the deletion from the changelog: AuthorizationFailed: no DELETE",)
    assert said == [
        "the deletion from the changelog failed: no DELETE",
        "OPTIMIZE of x: another job was first; it is left to the next run",
    ]
    with pytest.raises(AuthorizationFailed, match="no DELETE"):
        job.maintenance.require_done()


def test_an_optimize_that_was_lost_is_no_failure() -> None:
    """The compaction stays committed, and the next one optimizes. A lost deletion is a failure."""
    job = Job(lambda text: None, None)
    assert job.run().failed == ()
    job.maintenance.require_done()
    job = Job(lambda text: None, CompactionConflict("late"))
    assert len(job.run().failed) == 1
    with pytest.raises(CompactionConflict):
        job.maintenance.require_done()


@pytest.mark.parametrize(
    ("history", "due"),
    [
        ([RUN] * 19, False),
        ([RUN] * 20, True),
        ([RUN] * 21, True),  # one that was missed is not put off
        ([*[RUN] * 10, OPTIMIZED, REWRITE, *[RUN] * 9, ENDED, *[RUN] * 9], False),
        ([*[RUN] * 5, STARTED, *[RUN] * 15, ENDED], True),  # one that did not end
        ([ENDED, *[RUN] * 60], False),
        ([], False),
    ],
)
def test_a_vacuum_is_due_so_many_runs_after_the_last(history: list[dict[str, Any]], due: bool) -> None:
    """Rewrites, maintenance and a VACUUM that did not end do not count."""
    assert is_vacuum_due(history, 20) is due


@pytest.mark.parametrize(
    ("history", "due"),
    [([RUN] * 3, True), ([RUN] * 2, False), ([RUN, RUN, OPTIMIZED, RUN], False), ([], False), ([STARTED], False)],
)
def test_an_optimize_is_due_after_so_many_appends(history: list[dict[str, Any]], due: bool) -> None:
    """Appends before the last OPTIMIZE do not count."""
    assert is_optimize_due(history, 2) is due
