"""The config topic's records, compared with those of a real Kafka Connect."""

from __future__ import annotations

import json

import pytest

from penstock.shared.common.errors import SerializationError
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState
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
