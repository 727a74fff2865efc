"""REST's views of connectors, as plain values: made from configs and statuses, without waiting."""

from __future__ import annotations

from typing import Any

from penstock.shared.connect.errors import ConnectorNotFound
from penstock.shared.connect.herder.restart_plan import RestartPlan
from penstock.shared.connect.runtime.plugins import Plugins, connector_type
from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.cluster_config_state import ConfigSnapshot
from penstock.shared.connect.storage.config_records import Config
from penstock.shared.connect.storage.status_cache import StatusCache
from penstock.shared.connect.storage.status_records import Status

Json = dict[str, Any]


def kind_of_connector(plugins: Plugins, config: Config | None) -> str:
    """Return `source` or `sink`, or `unknown` without a config or if the class is not installed on this worker."""
    found = None if config is None else plugins.class_of_config(config)
    return "unknown" if found is None else connector_type(found)


def config_of(snapshot: ConfigSnapshot, name: str) -> Config:
    """Return a connector's config. Raises ConnectorNotFound."""
    config = snapshot.configs.get(name)
    if config is None:
        raise ConnectorNotFound(f"Connector {name} not found")
    return config


def connector_info(snapshot: ConfigSnapshot, plugins: Plugins, name: str) -> Json:
    """Return a connector's name, config and type, and its tasks' ids. Raises ConnectorNotFound."""
    config = config_of(snapshot, name)
    return {
        "name": name,
        "config": dict(config),
        "tasks": [_task_id_as_json(task) for task in snapshot.tasks(name)],
        "type": kind_of_connector(plugins, config),
    }


def task_infos(snapshot: ConfigSnapshot, name: str) -> list[Json]:
    """Return the tasks of a connector with their configs. Raises ConnectorNotFound."""
    config_of(snapshot, name)
    return [
        {"id": _task_id_as_json(task), "config": dict(snapshot.task_configs[task])} for task in snapshot.tasks(name)
    ]


def connector_status(
    snapshot: ConfigSnapshot, statuses: StatusCache, plugins: Plugins, name: str, restarting: RestartPlan | None = None
) -> Json:
    """Return the states of a connector and its tasks. Those in the plan `restarting` have the state RESTARTING.

    Raises ConnectorNotFound if the connector has no config, or no status.
    """
    status = statuses.get(name)
    if status is None or name not in snapshot.configs:
        raise ConnectorNotFound(f"No status found for connector {name}")
    plan = restarting or RestartPlan(False, ())
    return {
        "name": name,
        "connector": _shown_status(status, restarting=plan.connector),
        "tasks": [
            {"id": task.task, **_shown_status(status, restarting=task in plan.tasks)}
            for task, status in statuses.tasks(name).items()
        ],
        "type": kind_of_connector(plugins, snapshot.configs.get(name)),
    }


def task_status(statuses: StatusCache, task: ConnectorTaskId) -> Json:
    """Return the state of one task. Raises ConnectorNotFound if no status is known."""
    status = statuses.get(task)
    if status is None:
        raise ConnectorNotFound(f"No status found for task {task}")
    return {"id": task.task, **_shown_status(status, restarting=False)}


def active_topics(statuses: StatusCache, name: str) -> Json:
    """Return the topics that a connector has used since it was created or the list was emptied."""
    return {name: {"topics": [status.topic for status in statuses.topics(name)]}}


def _shown_status(status: Status, *, restarting: bool) -> Json:
    shown: Json = {
        "state": State.RESTARTING.value if restarting else status.state.value,
        "worker_id": status.worker_id,
    }
    if status.version is not None:
        shown["version"] = status.version
    if status.trace and not restarting:
        shown["trace"] = status.trace
    return shown


def _task_id_as_json(task: ConnectorTaskId) -> Json:
    return {"connector": task.connector, "task": task.task}
