"""The result that a job prints last."""

from __future__ import annotations

from penstock.services.local.demo.spark_job import last_object


def test_the_last_object_counts() -> None:
    """Log lines, text, arrays and broken lines after it are passed over; without any it is empty."""
    lines = ['{"a":1}', '{"a":2}', '{"event":"bye"}', "[3]", "{broken", "done"]
    assert last_object(lines, "a") == {"a": 2}
    assert last_object(["nothing"], "a") == {}
