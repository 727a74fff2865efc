"""The demo's last two Spark jobs, compaction and audit, without Spark."""

from __future__ import annotations

import pytest

from penstock.services.local.demo import closing
from penstock.services.spark.main import AUDIT_FAILED


def test_no_audit_after_a_failed_compaction(capsys: pytest.CaptureFixture[str]) -> None:
    """After a failed compaction the audit does not run, and only the compaction's error is reported."""
    assert closing.main(closing.Jobs("no/name", "lake", "store", "m:f", {}, 1, {}).arguments()) == AUDIT_FAILED
    output = capsys.readouterr().err
    assert "penstock compact" in output
    assert "penstock audit" not in output
