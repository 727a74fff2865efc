"""Statuses: their records from a worker's events, the views of REST, and which instances a restart request restarts."""

from __future__ import annotations

import pytest

from penstock.shared.connect.errors import ConnectorNotFound, trace_of
from penstock.shared.connect.herder.restart_plan import RestartPlan, plan_restart
from penstock.shared.connect.herder.status_reporter import TRACE_LENGTH_MAX, StatusReporter
from penstock.shared.connect.herder.views import (
    active_topics,
    connector_info,
    connector_status,
    task_infos,
    task_status,
)
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, Event, State
from penstock.shared.connect.storage.cluster_config_state import ConfigSnapshot
from penstock.shared.connect.storage.config_records import RestartRequest
from penstock.shared.connect.storage.status_cache import StatusCache
from penstock.shared.connect.storage.status_records import Status, TopicStatus
from penstock.shared.connect.storage.status_store import StatusStore
from penstock.shared.testing.manual_clock import ManualClock

TASK = ConnectorTaskId("c", 0)

SRC_TASK = ConnectorTaskId("src", 0)
CONFIG = {"connector.class": "FileStreamSource", "name": "src"}
SNAPSHOT = ConfigSnapshot(configs={"src": CONFIG}, task_counts={"src": 1}, task_configs={SRC_TASK: {"file": "x"}})

STATES = (State.RUNNING, State.FAILED, State.PAUSED)
TASKS = {
    task: Status(task, state, "w", 1)
    for task, state in zip((ConnectorTaskId("c", n) for n in range(3)), STATES, strict=True)
}


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
        assert store.cache.get("c") == Status("c", state, "me", 3, "1.0")
    reports.on_event(TASK, Event.FAILURE, "why")
    assert store.cache.get(TASK) == Status(TASK, State.FAILED, "me", 3, "1.0", "why")


def test_a_long_trace_is_cut() -> None:
    """The middle of a long trace is left out, since a status must fit into a record. Its end names the error."""
    try:
        try:
            raise ValueError("x" * 2_000_000)
        except ValueError as e:
            raise KeyError("orders") from e
    except KeyError as e:
        trace = trace_of(e)
    store = StatusStore()
    reporter(store).on_event(TASK, Event.FAILURE, trace)
    status = store.cache.get(TASK)
    assert status is not None
    assert status.trace is not None
    assert (status.state, len(status.trace)) == (State.FAILED, TRACE_LENGTH_MAX)
    assert status.trace.startswith("Traceback")
    assert status.trace.endswith("KeyError: 'orders'")


def test_a_late_end_does_not_overwrite_the_next_owner() -> None:
    """UNASSIGNED and FAILED of a former owner do not overwrite RUNNING of a later generation."""
    store = StatusStore()
    store.put(Status(TASK, State.RUNNING, "other", 4))
    reporter(store).on_event(TASK, Event.SHUTDOWN)
    reporter(store).on_event(TASK, Event.FAILURE, "why")
    assert store.cache.get(TASK) == Status(TASK, State.RUNNING, "other", 4)


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
    assert (store.cache.connectors(), store.cache.tasks("c"), store.cache.topics("c")) == ([], {}, [])


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.installed()


@pytest.fixture
def statuses() -> StatusCache:
    cache = StatusCache()
    cache.apply(Status("src", State.RUNNING, "w:1", 1, "4.1.1"))
    cache.apply(Status(SRC_TASK, State.FAILED, "w:2", 1, None, "Traceback"))
    cache.apply(TopicStatus("lines", "src", 0, 1))
    return cache


def test_a_connector_is_shown_with_its_tasks(plugins: Plugins) -> None:
    """A connector is shown with name, config, task ids and type."""
    assert connector_info(SNAPSHOT, plugins, "src") == {
        "name": "src",
        "config": CONFIG,
        "tasks": [{"connector": "src", "task": 0}],
        "type": "source",
    }
    assert task_infos(SNAPSHOT, "src") == [{"id": {"connector": "src", "task": 0}, "config": {"file": "x"}}]


def test_a_class_that_is_not_installed_is_unknown(plugins: Plugins) -> None:
    """A connector whose class is not installed has the type `unknown`."""
    snapshot = ConfigSnapshot(configs={"a": {"connector.class": "no.such"}, "b": {}})
    assert connector_info(snapshot, plugins, "a")["type"] == "unknown"
    assert connector_info(snapshot, plugins, "b")["type"] == "unknown"


def test_statuses_are_shown(plugins: Plugins, statuses: StatusCache) -> None:
    """Statuses have state and worker, the version if known, and the trace of a failure."""
    assert connector_status(SNAPSHOT, statuses, plugins, "src") == {
        "name": "src",
        "connector": {"state": "RUNNING", "worker_id": "w:1", "version": "4.1.1"},
        "tasks": [{"id": 0, "state": "FAILED", "worker_id": "w:2", "trace": "Traceback"}],
        "type": "source",
    }
    assert task_status(statuses, SRC_TASK)["state"] == "FAILED"
    assert active_topics(statuses, "src") == {"src": {"topics": ["lines"]}}


def test_restarting_instances_are_shown(plugins: Plugins, statuses: StatusCache) -> None:
    """The response to a restart shows RESTARTING for the planned instances, without the old trace."""
    shown = connector_status(SNAPSHOT, statuses, plugins, "src", RestartPlan(False, (SRC_TASK,)))
    assert shown["connector"]["state"] == "RUNNING"
    assert shown["tasks"] == [{"id": 0, "state": "RESTARTING", "worker_id": "w:2"}]


def test_unknown_connectors_and_tasks_are_not_found(plugins: Plugins, statuses: StatusCache) -> None:
    """Unknown connectors and tasks are errors with Kafka Connect's messages; a deleted connector has no status."""
    with pytest.raises(ConnectorNotFound, match=r"^Connector x not found$"):
        connector_info(SNAPSHOT, plugins, "x")
    with pytest.raises(ConnectorNotFound, match=r"connector x$"):
        connector_status(SNAPSHOT, statuses, plugins, "x")
    with pytest.raises(ConnectorNotFound, match=r"connector src$"):
        connector_status(ConfigSnapshot(), statuses, plugins, "src")
    with pytest.raises(ConnectorNotFound, match=r"task src-7$"):
        task_status(statuses, ConnectorTaskId("src", 7))


@pytest.mark.parametrize(
    ("only_failed", "include_tasks", "state", "connector", "tasks"),
    [
        (False, False, State.RUNNING, True, []),
        (False, True, State.RUNNING, True, [0, 1, 2]),
        (True, True, State.RUNNING, False, [1]),
        (True, True, State.FAILED, True, [1]),
        (True, False, State.RUNNING, False, []),
    ],
)
def test_restart_plans(only_failed: bool, include_tasks: bool, state: State, connector: bool, tasks: list[int]) -> None:
    """Tasks are restarted only with `includeTasks`, and with `onlyFailed` only failed instances."""
    request = RestartRequest("c", only_failed, include_tasks)
    plan = plan_restart(request, Status("c", state, "w", 1), TASKS)
    assert (plan.connector, [task.task for task in plan.tasks]) == (connector, tasks)
