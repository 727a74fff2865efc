"""The last two Spark jobs, without Spark."""

from __future__ import annotations

import pytest

from penstock.services.local.demo import closing
from penstock.services.spark.main import AUDIT_FAILED


def test_a_compaction_that_fails_is_followed_by_no_audit(capsys: pytest.CaptureFixture[str]) -> None:
    """The audit would only report what the compaction did not do: its failure is the one that is said."""
    assert closing.main(closing.Jobs("no/name", "lake", "store", "m:f", {}, 1, {}).arguments()) == AUDIT_FAILED
    said = capsys.readouterr().err
    assert "penstock compact" in said
    assert "penstock audit" not in said
