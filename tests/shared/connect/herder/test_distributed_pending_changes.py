"""Changes of the config topic that the herder has not processed yet."""

from __future__ import annotations

from penstock.shared.connect.herder.distributed import PendingChanges
from penstock.shared.connect.runtime.states import ConnectorTaskId
from penstock.shared.connect.storage.cluster_config_state import (
    ConnectorChanged,
    ConnectorRemoved,
    TargetStateChanged,
    TasksChanged,
)
from penstock.shared.connect.storage.config_records import LoggerLevel, RestartRequest, SessionKey

TASK = ConnectorTaskId("c", 0)


def test_only_a_new_connector_needs_a_rebalance() -> None:
    """A changed connector is restarted; a new one needs a rebalance."""
    pending = PendingChanges()
    pending.add(ConnectorChanged("c", is_new=False), 1)
    assert (pending.take().connectors, pending.rejoin) == ({"c"}, None)
    pending.add(ConnectorChanged("d", is_new=True), 2)
    assert pending.take_rejoin() == "connector d is new"
    assert pending.take_rejoin() is None
    assert not pending


def test_a_removed_connector_is_not_restarted() -> None:
    """A removal discards earlier changes of the connector and needs a rebalance."""
    pending = PendingChanges()
    pending.add(ConnectorChanged("c", is_new=False), 1)
    pending.add(TargetStateChanged("c"), 2)
    pending.add(ConnectorRemoved("c"), 3)
    changes = pending.take()
    assert (changes.connectors, changes.targets) == (set(), set())
    assert pending.rejoin is not None


def test_an_assignment_covers_changes_up_to_its_offset() -> None:
    """A rebalance covers changes up to its config offset; later changes need another one."""
    pending = PendingChanges()
    pending.add(TasksChanged("c", (TASK,)), 7)
    pending.assigned(6)
    assert pending.rejoin is not None
    pending.assigned(7)
    assert pending.rejoin is None
    assert pending.take().tasks == {TASK}


def test_restart_requests_are_merged() -> None:
    """Of two pending restart requests the wider one remains."""
    pending = PendingChanges()
    pending.add(RestartRequest("c", only_failed=True, include_tasks=False), 1)
    pending.add(RestartRequest("c", only_failed=False, include_tasks=True), 2)
    assert pending.take().restarts == {"c": RestartRequest("c", only_failed=False, include_tasks=True)}
    assert not pending.take()


def test_levels_of_loggers_are_taken_once_and_in_order() -> None:
    """Logger levels are taken once and in order, and neither they nor session keys need a rebalance."""
    pending = PendingChanges()
    levels = [LoggerLevel("root", "DEBUG"), LoggerLevel("root", "INFO")]
    for at, level in enumerate(levels):
        pending.add(level, at)
    pending.add(SessionKey(b"k", "a", 1), 4)
    assert pending.rejoin is None
    assert pending.take().loggers == levels
    assert not pending.take()
