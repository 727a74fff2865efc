"""The result that a job prints last."""

from __future__ import annotations

from services.local.jobs import last_object


def test_the_last_object_counts() -> None:
    """Text after it, arrays and broken lines are passed over; without any it is empty."""
    assert last_object(['{"a":1}', '{"b":2}', "[3]", "{broken", "done"]) == {"b": 2}
    assert last_object(["nothing"]) == {}
