"""What a worker reports becomes statuses of its generation."""

from __future__ import annotations

from penstock.shared.connect.herder.status_reporter import StatusReporter
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State
from penstock.shared.connect.storage.status_records import ConnectorStatus, TaskStatus
from penstock.shared.connect.storage.status_store import StatusStore
from penstock.shared.testing.manual_clock import ManualClock

TASK = ConnectorTaskId("c", 0)


def reporter(store: StatusStore, *, generation: int = 3, tracks_topics: bool = True) -> StatusReporter:
    return StatusReporter(
        store, "me", ManualClock(), generation=lambda: generation, version=lambda _: "1.0", tracks_topics=tracks_topics
    )


def test_states_carry_worker_and_generation() -> None:
    """Each report stands with who made it and when in the group's history."""
    store = StatusStore()
    reports = reporter(store)
    for event, state in (
        (Event.STARTUP, State.RUNNING),
        (Event.PAUSED, State.PAUSED),
        (Event.RUNNING, State.RUNNING),
        (Event.STOPPED, State.STOPPED),
        (Event.RESTART, State.RESTARTING),
        (Event.SHUTDOWN, State.UNASSIGNED),
    ):
        reports.on_event("c", event)
        assert store.cache.connector("c") == ConnectorStatus("c", state, "me", 3, "1.0")
    reports.on_event(TASK, Event.FAILURE, "why")
    assert store.cache.task(TASK) == TaskStatus(TASK, State.FAILED, "me", 3, "1.0", "why")


def test_a_late_end_does_not_hide_the_next_owner() -> None:
    """UNASSIGNED and FAILED of a worker that has lost the task are not written over a later generation's RUNNING."""
    store = StatusStore()
    store.put(TaskStatus(TASK, State.RUNNING, "other", 4))
    reporter(store).on_event(TASK, Event.SHUTDOWN)
    reporter(store).on_event(TASK, Event.FAILURE, "why")
    assert store.cache.task(TASK) == TaskStatus(TASK, State.RUNNING, "other", 4)


def test_topics_are_noted_once() -> None:
    """A task says a topic with every batch; it is written when it is new, and again when the list was emptied."""
    store = StatusStore()
    reports = reporter(store)
    reports.on_topic_used(TASK, "t")
    first = store.cache.topic("c", "t")
    reports.on_topic_used(ConnectorTaskId("c", 1), "t")
    assert store.cache.topic("c", "t") is first
    assert first is not None
    reports.forget_topics("c")
    assert store.cache.topics("c") == []
    reports.on_topic_used(TASK, "t")
    assert [status.topic for status in store.cache.topics("c")] == ["t"]
    reporter(store, tracks_topics=False).on_topic_used(TASK, "u")
    assert len(store.cache.topics("c")) == 1


def test_a_connector_that_is_gone_leaves_nothing() -> None:
    """Its own status, its tasks' and its topics' go."""
    store = StatusStore()
    reports = reporter(store)
    reports.on_event("c", Event.STARTUP)
    reports.on_event(TASK, Event.STARTUP)
    reports.on_topic_used(TASK, "t")
    reports.forget_connector("c")
    assert (store.cache.connectors(), store.cache.tasks("c"), store.cache.topics("c")) == ([], [], [])
