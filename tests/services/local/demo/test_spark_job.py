"""Reading a Spark job's result from its output."""

from __future__ import annotations

from penstock.services.local.demo.spark_job import last_object


def test_the_last_object_counts() -> None:
    """The last JSON object with the field is the result; other lines are ignored, and without one it is empty."""
    lines = ['{"a":1}', '{"a":2}', '{"event":"bye"}', "[3]", "{broken", "done"]
    assert last_object(lines, "a") == {"a": 2}
    assert last_object(["nothing"], "a") == {}
