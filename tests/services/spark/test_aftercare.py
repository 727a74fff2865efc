"""What follows a run: a step that fails hides neither the run nor the other steps."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.services.spark.aftercare import Aftercare
from penstock.services.spark.compact import Compaction, Plan, Summary
from penstock.services.spark.delta import CompactionConflict
from penstock.services.spark.settings import CompactSettings
from penstock.services.spark.topic_offsets import TopicOffsets
from penstock.shared.common.errors import AuthorizationFailed

DONE = Summary(1, 5, 4, 1, 2, 0, {0: 0}, {0: 9}, 7, 0.0)


class Steps(Aftercare):
    """Upkeep that another job got ahead of."""

    def run_upkeep(self, *paths: Any) -> dict[str, Any]:
        return {"optimized_tables": self.attempt("OPTIMIZE of x", lost, 0, is_upkeep=True)}


class Job(Compaction):
    """A run that counts, and may not delete from the changelog."""

    def __init__(self, say: Any, error: Exception | None) -> None:
        settings = CompactSettings(application="a", lake="lake", delete_covered=True)
        super().__init__(None, settings, say)  # type: ignore[arg-type]  # it has no session, and needs none
        self.after, self.error = Steps(settings, say), error

    def plan(self) -> Plan:
        return Plan(TopicOffsets("t", "id", {0: 0}, {0: 9}), {}, {}, [])

    def _fold(self, plan: Plan) -> Summary:
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
    """With what failed, after the upkeep was tried; who asks for it gets the error."""
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
        job.after.require_done()


def test_an_optimize_that_was_lost_is_no_failure() -> None:
    """The run counts, and the next one looks after the files. A deletion that was lost is a failure."""
    job = Job(lambda text: None, None)
    assert job.run().failed == ()
    job.after.require_done()
    job = Job(lambda text: None, CompactionConflict("late"))
    assert len(job.run().failed) == 1
    with pytest.raises(CompactionConflict):
        job.after.require_done()
