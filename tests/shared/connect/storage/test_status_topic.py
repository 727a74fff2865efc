"""The latest statuses, and which may be overwritten."""

from __future__ import annotations

import pytest

from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.status_cache import StatusCache
from penstock.shared.connect.storage.status_records import ConnectorStatus, Forgotten, TaskStatus, TopicStatus

TASK = ConnectorTaskId("c", 1)


def test_the_newest_counts() -> None:
    """The latest status of each connector, task and topic is kept."""
    cache = StatusCache()
    for record in (
        ConnectorStatus("c", State.RUNNING, "w", 1),
        ConnectorStatus("c", State.PAUSED, "w", 1),
        TaskStatus(TASK, State.RUNNING, "w", 1),
        TaskStatus(ConnectorTaskId("c", 0), State.FAILED, "v", 1, trace="why"),
        TopicStatus("t", "c", 0, 5),
    ):
        cache.apply(record)
    status = cache.connector("c")
    assert status is not None
    assert status.state is State.PAUSED
    assert [t.task.task for t in cache.tasks("c")] == [0, 1]
    assert [t.topic for t in cache.topics("c")] == ["t"]
    assert cache.connectors() == ["c"]


def test_tombstones_delete_statuses() -> None:
    """A tombstone or DESTROYED deletes a status; for an unknown one it does nothing."""
    cache = StatusCache()
    cache.apply(TaskStatus(TASK, State.RUNNING, "w", 1))
    cache.apply(ConnectorStatus("c", State.RUNNING, "w", 1))
    cache.apply(TopicStatus("t", "c", 0, 5))
    for record in (
        TaskStatus(TASK, State.DESTROYED, "w", 1),
        Forgotten("c"),
        Forgotten(("t", "c")),
        Forgotten(TASK),
        Forgotten("x"),
    ):
        cache.apply(record)
    assert (cache.connector("c"), cache.task(TASK), cache.tasks("c"), cache.topics("c")) == (None, None, [], [])


@pytest.mark.parametrize(
    ("worker", "generation", "may"), [("me", 1, True), ("other", 1, True), ("other", 2, True), ("other", 3, False)]
)
def test_a_safe_status_never_overwrites_a_later_owner(worker: str, generation: int, may: bool) -> None:
    """A status may overwrite the worker's own or one of no later generation."""
    cache = StatusCache()
    cache.apply(TaskStatus(TASK, State.RUNNING, worker, generation))
    assert cache.may_write(TaskStatus(TASK, State.UNASSIGNED, "me", 2)) is may
    assert cache.may_write(ConnectorStatus("c", State.UNASSIGNED, "me", 2))
