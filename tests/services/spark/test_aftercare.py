"""What follows a run: a step that fails hides neither the run nor the other steps."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.spark.aftercare import Aftercare
from penstock.services.spark.failures import CompactionConflict
from penstock.services.spark.fold import Fold, Plan, Summary
from penstock.services.spark.kafka import TopicOffsets
from penstock.services.spark.settings import CompactSettings
from penstock.shared.common.errors import AuthorizationFailed

DONE = Summary(7, 1, 5, 4, 3, 2, 1, {0: 0}, {0: 9}, 7, 0.0)


class Steps(Aftercare):
    """Upkeep that another job got ahead of."""

    def look_after(self, *paths: Any) -> dict[str, Any]:
        return {
            "optimized_partitions": self.attempt(
                "OPTIMIZE of x", lambda: fail(CompactionConflict("x")), 0, is_upkeep=True
            )
        }


class Job(Fold):
    """A run that counts, and may not delete from the changelog."""

    def __init__(self, say: Any, error: Exception | None) -> None:
        settings = CompactSettings(application="a", lake="lake")
        super().__init__(None, settings, say)  # type: ignore[arg-type]  # it has no session, and needs none
        self.after, self.error = Steps(None, settings, say), error  # type: ignore[arg-type]

    def plan(self) -> Plan:
        return Plan(7, {}, TopicOffsets("t", "id", {0: 0}, {0: 9}), {0: 0}, {0: 9}, False, {0: 9})

    def records(self, plan: Plan) -> Any:
        raise AssertionError

    def _fold(self, plan: Plan) -> tuple[Plan, Summary]:
        return plan, DONE

    def _known_stores(self, covered: Any) -> list[str]:
        return []

    def after_merge(self, plan: Plan, summary: Summary) -> None:
        if self.error is not None:
            self.after.attempt("the deletion from the changelog", lambda: fail(self.error), None)


def fail(error: Any) -> Any:
    raise error


def test_a_run_that_counts_is_told_though_the_deletion_failed() -> None:
    """With what failed, after the upkeep was tried, and before the error is raised."""
    said, told = list[str](), list[Summary]()
    with pytest.raises(AuthorizationFailed, match="no DELETE"):
        Job(said.append, AuthorizationFailed("no DELETE")).run(told.append)
    (summary,) = told
    assert (summary.run, summary.merged_rows) == (7, 3)
    assert summary.failed == ("the deletion from the changelog: AuthorizationFailed: no DELETE",)
    assert said == [
        "the deletion from the changelog failed: no DELETE",
        "OPTIMIZE of x: another job was first; it is left to the next run",
    ]


def test_an_optimize_that_was_lost_is_no_failure() -> None:
    """The run counts, and the next one looks after the files. Late records may be lost to another job."""
    told = list[Summary]()
    assert Job(lambda text: None, None).run(told.append).failed == ()
    with pytest.raises(CompactionConflict):
        Job(lambda text: None, CompactionConflict("late")).run(told.append)
    assert [len(summary.failed) for summary in told] == [0, 1]
