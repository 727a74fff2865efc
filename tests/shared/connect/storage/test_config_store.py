"""The records and changes of each method of the config store."""

from __future__ import annotations

from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.storage.cluster_config_state import (
    ConfigChange,
    ConnectorChanged,
    ConnectorRemoved,
    TargetStateChanged,
    TasksChanged,
)
from penstock.shared.connect.storage.config_records import LoggerLevel, RestartRequest, SessionKey
from penstock.shared.connect.storage.config_store import MemoryConfigStore


async def started() -> tuple[MemoryConfigStore, list[ConfigChange]]:
    changes: list[ConfigChange] = []
    store = MemoryConfigStore(changes.append)
    await store.start()
    return store, changes


async def test_each_change_is_read_back_when_its_call_returns() -> None:
    """Each change is in the snapshot when its method returns."""
    store, changes = await started()
    await store.put_connector("c", {"x": "1"})
    await store.put_tasks("c", [{"t": "0"}, {"t": "1"}])
    await store.put_target_state("c", TargetState.PAUSED)
    snapshot = store.snapshot()
    assert snapshot.configs["c"] == {"x": "1"}
    assert [dict(config) for config in snapshot.all_task_configs("c")] == [{"t": "0"}, {"t": "1"}]
    assert snapshot.target_state("c") is TargetState.PAUSED
    await store.remove_connector("c")
    assert store.snapshot().connectors() == []
    tasks = (ConnectorTaskId("c", 0), ConnectorTaskId("c", 1))
    assert changes == [
        ConnectorChanged("c", is_new=True),
        TasksChanged("c", tasks),
        TargetStateChanged("c"),
        ConnectorRemoved("c"),
    ]


async def test_a_connector_can_be_created_stopped() -> None:
    """A target state given with a new connector is written before the config."""
    store, changes = await started()
    await store.put_connector("c", {}, TargetState.STOPPED)
    assert store.snapshot().target_state("c") is TargetState.STOPPED
    assert changes == [ConnectorChanged("c", is_new=True)]


async def test_requests_and_keys_are_changes() -> None:
    """Restart requests, session keys and logger levels are changes; task counts are in the snapshot."""
    store, changes = await started()
    request, key, level = RestartRequest("c", True, True), SessionKey(b"k", "a", 1), LoggerLevel("root", "INFO")
    await store.put_restart(request)
    await store.put_session_key(key)
    await store.put_logger_level(level)
    await store.put_task_count("c", 2)
    assert changes == [request, key, level]
    assert store.snapshot().task_count_records == {"c": 2}


async def test_before_the_start_there_are_no_changes() -> None:
    """Records before the start are not reported as changes."""
    changes: list[ConfigChange] = []
    store = MemoryConfigStore(changes.append)
    await store.put_connector("c", {})
    assert changes == []
