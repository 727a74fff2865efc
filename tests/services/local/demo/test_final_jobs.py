"""The demo's last Spark jobs, without Spark, and their results in the child's output."""

from __future__ import annotations

import pytest

from penstock.services.local.demo import final_jobs
from penstock.services.local.demo.final_jobs import last_object
from penstock.services.spark.main import AUDIT_FAILED


def test_no_audit_after_a_failed_compaction(capsys: pytest.CaptureFixture[str]) -> None:
    """After a failed compaction the audit does not run, and only the compaction's error is reported."""
    assert (
        final_jobs.main(final_jobs.FinalJobs("no/name", "lake", "store", "m:f", {}, 1, {}).arguments()) == AUDIT_FAILED
    )
    output = capsys.readouterr().err
    assert "penstock compact" in output
    assert "penstock audit" not in output


def test_the_last_object_counts() -> None:
    """The last JSON object with the field is the result; other lines are ignored, and without one it is empty."""
    lines = ['{"a":1}', '{"a":2}', '{"event":"bye"}', "[3]", "{broken", '{"a":' * 100_000, "done"]
    assert last_object(lines, "a") == {"a": 2}
    assert last_object(["nothing"], "a") == {}
