"""Statuses with a generation from the events that a worker reports."""

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
    """Each status has its worker and the group's generation."""
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


def test_a_late_end_does_not_overwrite_the_next_owner() -> None:
    """UNASSIGNED and FAILED of a former owner do not overwrite RUNNING of a later generation."""
    store = StatusStore()
    store.put(TaskStatus(TASK, State.RUNNING, "other", 4))
    reporter(store).on_event(TASK, Event.SHUTDOWN)
    reporter(store).on_event(TASK, Event.FAILURE, "why")
    assert store.cache.task(TASK) == TaskStatus(TASK, State.RUNNING, "other", 4)


def test_topics_are_recorded_once() -> None:
    """An active topic is written once, and again after the list was reset."""
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


def test_a_forgotten_connector_leaves_nothing() -> None:
    """`forget_connector` deletes the statuses of the connector, its tasks and its topics."""
    store = StatusStore()
    reports = reporter(store)
    reports.on_event("c", Event.STARTUP)
    reports.on_event(TASK, Event.STARTUP)
    reports.on_topic_used(TASK, "t")
    reports.forget_connector("c")
    assert (store.cache.connectors(), store.cache.tasks("c"), store.cache.topics("c")) == ([], [], [])
