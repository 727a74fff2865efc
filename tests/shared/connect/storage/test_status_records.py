"""The status topic's records, compared with those of a real Kafka Connect."""

from __future__ import annotations

import pytest

from penstock.shared.common.errors import SerializationError
from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.status_records import (
    ConnectorStatus,
    Forgotten,
    StatusRecord,
    TaskStatus,
    TopicStatus,
    decode,
    encode,
)
from tests.shared.connect.recordings import recorded_records


def test_recorded_statuses_are_read_and_written_alike() -> None:
    """Every recorded status record is decoded and encoded to the same bytes."""
    rows = recorded_records("connect-status")
    assert len(rows) > 70
    for row in rows:
        key, value = row["key"].encode(), row["value"] and row["value"].encode()
        record = decode(key, value)
        assert record is not None
        assert encode(record) == (key, value)


@pytest.mark.parametrize(
    "record",
    [
        ConnectorStatus("a-b", State.FAILED, "w", 3, None, "Traceback"),
        TaskStatus(ConnectorTaskId("a-b", 2), State.RUNNING, "w", 3, "1.0"),
        TopicStatus("t:x", "c", 0, 17),
        Forgotten("a"),
        Forgotten(ConnectorTaskId("a", 1)),
        Forgotten(("t", "c")),
    ],
)
def test_statuses_round_trip(record: StatusRecord) -> None:
    """A status record is decoded unchanged."""
    assert decode(*encode(record)) == record


def test_destroyed_is_a_tombstone() -> None:
    """A DESTROYED status is written as a tombstone."""
    assert encode(ConnectorStatus("a", State.DESTROYED, "w", 1)) == (b"status-connector-a", None)


def test_malformed_statuses_are_errors() -> None:
    """A malformed status is a SerializationError, and keys of other types are ignored."""
    for key, value in (
        (b"status-task-x", b"{}"),
        (b"status-connector-a", b"{}"),
        (b"status-connector-a", b'{"state":"ASLEEP","worker_id":"w","generation":1}'),
        (b"status-topic-no-connector", b"{}"),
        (b"status-connector-a", b"\xff"),
        (b"status-connector-a", b"[" * 100_000),
    ):
        with pytest.raises(SerializationError):
            decode(key, value)
    assert decode(b"else", b"{}") is None
