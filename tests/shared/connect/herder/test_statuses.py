"""The views of REST, from configs and statuses."""

from __future__ import annotations

import pytest

from penstock.shared.connect.errors import ConnectorNotFound
from penstock.shared.connect.herder.restart_plan import RestartPlan
from penstock.shared.connect.herder.views import (
    active_topics,
    connector_info,
    connector_status,
    task_infos,
    task_status,
)
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.cluster_config_state import ConfigSnapshot
from penstock.shared.connect.storage.status_cache import StatusCache
from penstock.shared.connect.storage.status_records import ConnectorStatus, TaskStatus, TopicStatus

TASK = ConnectorTaskId("src", 0)
CONFIG = {"connector.class": "FileStreamSource", "name": "src"}
SNAPSHOT = ConfigSnapshot(configs={"src": CONFIG}, task_counts={"src": 1}, task_configs={TASK: {"file": "x"}})


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.installed()


@pytest.fixture
def statuses() -> StatusCache:
    cache = StatusCache()
    cache.apply(ConnectorStatus("src", State.RUNNING, "w:1", 1, "4.1.1"))
    cache.apply(TaskStatus(TASK, State.FAILED, "w:2", 1, None, "Traceback"))
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
    assert task_status(statuses, TASK)["state"] == "FAILED"
    assert active_topics(statuses, "src") == {"src": {"topics": ["lines"]}}


def test_restarting_instances_are_shown(plugins: Plugins, statuses: StatusCache) -> None:
    """The response to a restart shows RESTARTING for the planned instances, without the old trace."""
    shown = connector_status(SNAPSHOT, statuses, plugins, "src", RestartPlan(False, (TASK,)))
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
