"""The demo's verdict."""

from __future__ import annotations

import pytest

from penstock.services.local.demo.replay import ReplayCounts
from penstock.services.local.demo.scenario import DemoOutcome


@pytest.mark.parametrize(
    ("audit_ok", "dead_letters", "unfit", "rejected", "ok"),
    [
        (True, 17, 17, 0, True),
        (True, 0, 0, 0, True),
        (False, 17, 17, 0, False),
        (True, 18, 17, 0, False),
        (True, 16, 17, 0, False),
        (True, 16, 17, 1, True),
        (True, 15, 17, 1, False),
        (True, 18, 17, 1, False),
    ],
)
def test_dead_letters_must_equal_the_invalid_events(
    audit_ok: bool, dead_letters: int, unfit: int, rejected: int, ok: bool
) -> None:
    """A valid event among the dead letters fails the demo although the audit passes, as does a missing invalid one."""
    outcome = DemoOutcome(ReplayCounts(rejected=rejected), unfit=unfit, audit_ok=audit_ok)
    outcome.audit, outcome.batch = {"dead_letters": dead_letters}, {"batch_rows": 1, "batch_differences": 0}
    assert outcome.ok is ok


@pytest.mark.parametrize(
    ("batch", "ok"),
    [
        ({"batch_rows": 9, "batch_differences": 0}, True),
        ({"batch_rows": 9, "batch_differences": 1}, False),
        ({"batch_rows": 0, "batch_differences": 0}, False),
        ({}, False),
    ],
)
def test_the_batch_must_have_the_same_results(batch: dict[str, int], ok: bool) -> None:
    """A row that differs fails the demo, as does a batch without rows."""
    outcome = DemoOutcome(ReplayCounts(), unfit=0, audit_ok=True, audit={"dead_letters": 0}, batch=batch)
    assert outcome.ok is ok
