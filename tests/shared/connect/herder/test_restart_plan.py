"""Which of a connector and its tasks a restart request restarts."""

from __future__ import annotations

import pytest

from penstock.shared.connect.herder.restart_plan import plan_restart
from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.config_records import RestartRequest
from penstock.shared.connect.storage.status_records import ConnectorStatus, TaskStatus

TASKS = [
    TaskStatus(ConnectorTaskId("c", n), state, "w", 1)
    for n, state in enumerate((State.RUNNING, State.FAILED, State.PAUSED))
]


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
    plan = plan_restart(request, ConnectorStatus("c", state, "w", 1), TASKS)
    assert (plan.connector, [task.task for task in plan.tasks]) == (connector, tasks)
    assert bool(plan) is bool(connector or tasks)
