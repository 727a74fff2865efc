"""The connectors and tasks that a restart request restarts. The plan depends only on the request and the statuses.

The leader of a group may write the status RESTARTING for everything in the plan before the workers make their plans.
So a plan treats RESTARTING as FAILED.

>>> connector = Status("orders", State.RUNNING, "a:8083", 1)
>>> states = {ConnectorTaskId("orders", 0): State.FAILED, ConnectorTaskId("orders", 1): State.RUNNING}
>>> tasks = {task: Status(task, state, "a:8083", 1) for task, state in states.items()}
>>> plan_restart(RestartRequest("orders", only_failed=True, include_tasks=True), connector, tasks)
RestartPlan(connector=False, tasks=(ConnectorTaskId(connector='orders', task=0),))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.config_records import RestartRequest
from penstock.shared.connect.storage.status_records import Status

TO_RESTART = (State.FAILED, State.RESTARTING)
"""The states that `only_failed` selects. The leader's announcement has turned FAILED into RESTARTING."""


@dataclass(frozen=True, slots=True)
class RestartPlan:
    """Whether the connector is restarted, and which of its tasks."""

    connector: bool
    tasks: tuple[ConnectorTaskId, ...]


def plan_restart(request: RestartRequest, connector: Status, tasks: Mapping[ConnectorTaskId, Status]) -> RestartPlan:
    """Return the restarts of a request, given the statuses of the connector and its tasks."""

    def is_chosen(status: Status) -> bool:
        return not request.only_failed or status.state in TO_RESTART

    chosen = [task for task, status in tasks.items() if request.include_tasks and is_chosen(status)]
    return RestartPlan(is_chosen(connector), tuple(chosen))


def merge_restart_requests(pending: RestartRequest | None, request: RestartRequest) -> RestartRequest:
    """Return one restart request for a connector. It restarts all that either request restarts, and possibly more."""
    if pending is None:
        return request
    return RestartRequest(
        request.connector, pending.only_failed and request.only_failed, pending.include_tasks or request.include_tasks
    )
