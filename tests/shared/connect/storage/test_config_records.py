"""The config topic's records: equal to what a real Kafka Connect wrote."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

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

RECORDING = Path(__file__).parents[3] / "data" / "kafka_connect_topics.jsonl.gz"


def recorded(topic: str) -> list[dict[str, Any]]:
    with gzip.open(RECORDING, "rt", encoding="utf-8") as lines:
        return [row for row in map(json.loads, lines) if row["topic"] == topic]


def as_bytes(text: str | None) -> bytes | None:
    return None if text is None else text.encode()


def test_recorded_configs_are_read_and_written_alike() -> None:
    """Every record of the recorded config topic is understood, and written again byte for byte."""
    rows = [row for row in recorded("connect-configs") if row["key"] != "session-key"]
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
def test_records_survive_the_topic(record: ConfigRecord) -> None:
    """What is written is read as what it was."""
    assert decode(*encode(record)) == record


def test_a_stopped_connector_is_paused_for_older_workers() -> None:
    """A worker that knows no STOPPED keeps the connector paused; of a record by such a one the old field counts."""
    assert json.loads(encode(TargetStateRecord("a", TargetState.STOPPED))[1] or b"") == {
        "state": "PAUSED",
        "state.v2": "STOPPED",
    }
    assert decode(b"target-state-a", b'{"state":"PAUSED"}') == TargetStateRecord("a", TargetState.PAUSED)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        (b"connector-a", b"not json"),
        (b"connector-a", b'{"properties": 3}'),
        (b"connector-a", b"[]"),
        (b"task-a-x", b'{"properties": {}}'),
        (b"commit-a", b'{"tasks": -1}'),
        (b"commit-a", b'{"tasks": true}'),
        (b"target-state-a", b'{"state": "SLEEPING"}'),
        (b"session-key", b'{"key": "not base64!", "algorithm": "x", "creation-timestamp": 1}'),
    ],
)
def test_malformed_records_are_refused(key: bytes, value: bytes) -> None:
    """What cannot be read is said, with the key and never a session key's bytes."""
    with pytest.raises(SerializationError) as raised:
        decode(key, value)
    assert "not base64" not in str(raised.value)


def test_foreign_keys_are_nothing() -> None:
    """A key of a kind that is not known here is passed over."""
    assert decode(b"something-else", b"{}") is None
    assert decode(None, None) is None
    assert decode(b"connector-", b"{}") is None


def test_task_names_without_a_number_are_refused() -> None:
    """A task is a connector's name, a dash and a number."""
    assert parse_task("a-0") == ConnectorTaskId("a", 0)
    for text in ("a", "-1", "a-", "a-b", "a-²"):
        with pytest.raises(SerializationError):
            parse_task(text)


def test_a_session_key_does_not_show_itself() -> None:
    """The key's bytes are in no repr, so in no log."""
    assert "secret" not in repr(SessionKey(b"secret", "HmacSHA256", 17))
