"""The config topic: its records, their state with complete task sets, and the store that writes them.

The records are compared with those of a real Kafka Connect.
"""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import SerializationError
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
from penstock.shared.connect.storage.cluster_config_state import (
    ConfigChange,
    ConfigState,
    ConnectorChanged,
    ConnectorRemoved,
    TargetStateChanged,
    TasksChanged,
)
from penstock.shared.connect.storage.config_records import (
    ConfigRecord,
    ConnectorRecord,
    LoggerLevel,
    RestartRequest,
    SessionKey,
    TargetStateRecord,
    TaskCommitRecord,
    TaskCountRecord,
    TaskRecord,
    decode,
    encode,
    parse_task,
)
from penstock.shared.connect.storage.config_store import ConfigStore
from tests.shared.connect.recordings import recorded_records


def as_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def test_recorded_configs_are_read_and_written_alike() -> None:
    """Every recorded config record is decoded and encoded to the same bytes."""
    rows = [row for row in recorded_records("connect-configs") if row["key"] != "session-key"]
    assert len(rows) > 35
    for row in rows:
        key, value = row["key"].encode(), as_bytes(row["value"])
        record = decode(key, value)
        assert record is not None, row
        assert encode(record) == (key, value)


@pytest.mark.parametrize(
    "record",
    [
        ConnectorRecord("a-b", {"x": "ü"}),
        ConnectorRecord("a", None),
        TaskRecord(ConnectorTaskId("a-b", 12), {}),
        TaskCommitRecord("a", 0),
        TargetStateRecord("a", TargetState.STOPPED),
        TargetStateRecord("a", None),
        TaskCountRecord("a", 3),
        TaskCountRecord("a", None),
        RestartRequest("a", only_failed=True, include_tasks=False),
        SessionKey(b"secret", "HmacSHA256", 17),
        LoggerLevel("root", "DEBUG"),
    ],
)
def test_records_round_trip(record: ConfigRecord) -> None:
    """A record is decoded unchanged."""
    assert decode(*encode(record)) == record


def test_a_stopped_connector_is_paused_for_older_workers() -> None:
    """STOPPED is written as PAUSED for older workers, and an older worker's record is read by the old field."""
    assert json.loads(encode(TargetStateRecord("a", TargetState.STOPPED))[1] or b"") == {
        "state": "PAUSED",
        "state.v2": "STOPPED",
    }
    assert decode(b"target-state-a", b'{"state":"PAUSED"}') == TargetStateRecord("a", TargetState.PAUSED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"connector-a", b"not json"),
        (b"connector-a", b"[" * 100_000),
        (b"connector-a", b'{"properties": 3}'),
        (b"connector-a", b"[]"),
        (b"task-a-x", b'{"properties": {}}'),
        (b"commit-a", b'{"tasks": -1}'),
        (b"commit-a", b'{"tasks": true}'),
        (b"target-state-a", b'{"state": "SLEEPING"}'),
        (b"session-key", b'{"key": "not base64!", "algorithm": "x", "creation-timestamp": 1}'),
    ],
)
def test_malformed_records_are_errors(key: bytes, value: bytes) -> None:
    """A malformed record is a SerializationError without the session key's bytes."""
    with pytest.raises(SerializationError) as raised:
        decode(key, value)
    assert "not base64" not in str(raised.value)


def test_null_settings_are_left_out() -> None:
    """Kafka Connect stores a null of a config, which is no value. Numbers and booleans have their JSON form."""
    properties = b'{"properties": {"topics.regex": null, "tasks.max": 1, "auto.create": true}}'
    config = {"tasks.max": "1", "auto.create": "true"}
    assert decode(b"connector-a", properties) == ConnectorRecord("a", config)
    assert decode(b"task-a-0", properties) == TaskRecord(ConnectorTaskId("a", 0), config)


def test_unknown_keys_are_ignored() -> None:
    """Records with keys of unknown types are ignored."""
    assert decode(b"something-else", b"{}") is None
    assert decode(None, None) is None
    assert decode(b"connector-", b"{}") is None


def test_task_names_without_a_number_are_errors() -> None:
    """A task name without a connector name, a dash and a number is an error."""
    assert parse_task("a-0") == ConnectorTaskId("a", 0)
    for text in ("a", "-1", "a-", "a-b", "a-²"):
        with pytest.raises(SerializationError):
            parse_task(text)


def test_a_session_keys_repr_hides_its_bytes() -> None:
    """A session key's repr does not contain its bytes."""
    assert "secret" not in repr(SessionKey(b"secret", "HmacSHA256", 17))


def task(number: int, connector: str = "c") -> ConnectorTaskId:
    return ConnectorTaskId(connector, number)


def read(*records: object) -> tuple[ConfigState, list[ConfigChange | None]]:
    state = ConfigState()
    return state, [state.apply(record, offset) for offset, record in enumerate(records)]  # type: ignore[arg-type]


def test_the_recording_ends_without_connectors() -> None:
    """The recorded topic ends without connectors, and has the recorded task counts on the way."""
    state, counts = ConfigState(), []
    rows = recorded_records("connect-configs")
    for offset, row in enumerate(rows):
        record = (
            None if row["key"] == "session-key" else decode(row["key"].encode(), row["value"] and row["value"].encode())
        )
        if record is None:
            state.passed(offset)
        else:
            state.apply(record, offset)
        counts.append(len(state.snapshot().tasks("snk")))
    assert state.snapshot().connectors() == []
    assert state.snapshot().offset == len(rows)
    assert [n for before, n in zip([0, *counts], counts, strict=False) if n != before] == [2, 1, 2, 0, 2, 0]


def test_the_offset_is_that_of_the_next_record() -> None:
    """A snapshot has the offset of the next record, or -1 if there was none. The offset that a Java worker sends to
    its leader has this meaning.
    """
    state, _ = read()
    assert state.snapshot().offset == -1
    state.apply(ConnectorRecord("c", {}), 7)
    assert state.snapshot().offset == 8
    state.passed(8)
    assert state.snapshot().offset == 9


def test_tasks_count_only_with_their_commit() -> None:
    """Task configs apply only with the commit record that has their number."""
    state, changes = read(ConnectorRecord("c", {"v": "1"}), TaskRecord(task(0), {"t": "0"}), TaskRecord(task(1), {}))
    assert state.snapshot().tasks("c") == ()
    assert state.apply(TaskCommitRecord("c", 2), 3) == TasksChanged("c", (task(0), task(1)))
    snapshot = state.snapshot()
    assert snapshot.tasks("c") == (task(0), task(1))
    assert snapshot.all_task_configs("c") == [{"t": "0"}, {}]
    assert snapshot.applied_configs["c"] == {"v": "1"}
    assert changes == [ConnectorChanged("c", is_new=True), None, None]


def test_a_task_set_with_a_hole_makes_the_connector_inconsistent() -> None:
    """After an incomplete task set the connector has no tasks until a complete set is written."""
    state, changes = read(ConnectorRecord("c", {}), TaskRecord(task(1), {}), TaskCommitRecord("c", 2))
    assert changes[-1] is None
    assert state.snapshot().inconsistent == {"c"}
    assert state.snapshot().tasks("c") == ()
    for offset, record in enumerate((TaskRecord(task(0), {}), TaskRecord(task(1), {}), TaskCommitRecord("c", 2)), 3):
        state.apply(record, offset)
    assert state.snapshot().inconsistent == frozenset()
    assert len(state.snapshot().tasks("c")) == 2


def test_an_older_set_does_not_fill_a_hole() -> None:
    """Configs of an earlier commit do not complete a later set."""
    state, _ = read(
        ConnectorRecord("c", {}), TaskRecord(task(0), {}), TaskCommitRecord("c", 1), TaskCommitRecord("c", 1)
    )
    assert state.snapshot().inconsistent == {"c"}


def test_removal_forgets_everything() -> None:
    """After a tombstone neither config nor tasks remain, and a late commit is ignored."""
    state, _ = read(ConnectorRecord("c", {}), TaskRecord(task(0), {}), TaskCommitRecord("c", 1))
    assert state.apply(ConnectorRecord("c", None), 3) == ConnectorRemoved("c")
    state.apply(TaskRecord(task(0), {}), 4)
    assert state.apply(TaskCommitRecord("c", 1), 5) is None
    snapshot = state.snapshot()
    assert (snapshot.configs, snapshot.task_configs, snapshot.task_counts) == ({}, {}, {})


def test_only_the_first_config_is_new() -> None:
    """A connector is new with its first config, and again after a removal."""
    _, changes = read(*(ConnectorRecord("c", config) for config in ({}, {"v": "1"}, None, {})))
    assert changes == [
        ConnectorChanged("c", is_new=True),
        ConnectorChanged("c", is_new=False),
        ConnectorRemoved("c"),
        ConnectorChanged("c", is_new=True),
    ]


def test_only_changed_target_states_are_changes() -> None:
    """A target state is a change only if it differs and its connector exists."""
    state, changes = read(
        TargetStateRecord("c", TargetState.STOPPED),
        ConnectorRecord("c", {}),
        TargetStateRecord("c", TargetState.STOPPED),
        TargetStateRecord("c", TargetState.STARTED),
        TargetStateRecord("c", None),
    )
    assert changes == [None, ConnectorChanged("c", is_new=True), None, TargetStateChanged("c"), None]
    assert state.snapshot().target_state("c") is TargetState.STARTED


def test_a_connector_can_be_created_stopped() -> None:
    """A target state before the connector's config is kept."""
    state, _ = read(TargetStateRecord("c", TargetState.STOPPED), ConnectorRecord("c", {}))
    assert state.snapshot().target_state("c") is TargetState.STOPPED


def test_fencing_is_pending_from_commit_to_count() -> None:
    """A new task set is pending fencing until the task count record is written."""
    state, _ = read(ConnectorRecord("c", {}), TaskRecord(task(0), {}), TaskCommitRecord("c", 1))
    assert state.snapshot().pending_fencing == {"c"}
    state.apply(TaskCountRecord("c", 1), 3)
    assert state.snapshot().pending_fencing == frozenset()
    assert state.snapshot().task_count_records == {"c": 1}
    state.apply(TaskCountRecord("c", None), 4)
    assert state.snapshot().task_count_records == {}


def test_requests_and_keys_are_passed_on() -> None:
    """Restart requests, session keys and logger levels are changes; the newest key is in the snapshot."""
    key, request, level = SessionKey(b"k", "a", 1), RestartRequest("c", True, True), LoggerLevel("root", "INFO")
    state, changes = read(key, request, level)
    assert changes == [key, request, level]
    assert state.snapshot().session_key == key


def test_snapshots_are_values() -> None:
    """A snapshot is immutable, and is the same object until a change."""
    state, _ = read(ConnectorRecord("c", {}))
    before = state.snapshot()
    assert state.snapshot() is before
    state.apply(ConnectorRecord("d", {}), 1)
    assert before.connectors() == ["c"]
    assert state.snapshot().connectors() == ["c", "d"]


@given(
    st.lists(
        st.one_of(
            st.builds(TaskRecord, st.integers(0, 3).map(task), st.just({})),
            st.builds(TaskCommitRecord, st.just("c"), st.integers(0, 4)),
        )
    )
)
def test_tasks_are_always_whole(records: list[TaskRecord | TaskCommitRecord]) -> None:
    """Whichever records remain, a connector's tasks are 0 to n - 1, each with a config, or none."""
    state = ConfigState()
    state.apply(ConnectorRecord("c", {}), 0)
    for offset, record in enumerate(records, 1):
        state.apply(record, offset)
        snapshot = state.snapshot()
        tasks = snapshot.tasks("c")
        assert [t.task for t in tasks] == list(range(len(tasks)))
        assert all(t in snapshot.task_configs for t in tasks)


async def started() -> tuple[ConfigStore, list[ConfigChange]]:
    changes: list[ConfigChange] = []
    store = ConfigStore(changes.append)
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


async def test_a_target_state_is_stored_with_a_new_connector() -> None:
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
    store = ConfigStore(changes.append)
    await store.put_connector("c", {})
    assert changes == []
