"""The records of the status topic: keys, and values as JSON, as Kafka Connect writes them.

    status-connector-<name>                  {"state", "trace", "worker_id", "generation", "version"}
    status-task-<name>-<n>                   the same
    status-topic-<topic>:connector-<name>    {"topic": {"name", "connector", "task", "discoverTimestamp"}}

A tombstone removes the status of its key.

>>> encode(ConnectorStatus("o", State.PAUSED, "a:8083", 4, "1.0"))
(b'status-connector-o', b'{"state":"PAUSED","trace":null,"worker_id":"a:8083","generation":4,"version":"1.0"}')
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.shared.common.errors import SerializationError
from penstock.shared.common.json_decoding import decode_json
from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.storage.config_records import parse_task

CONNECTOR = "status-connector-"
TASK = "status-task-"
TOPIC = "status-topic-"
TOPIC_SEPARATOR = ":connector-"


@dataclass(frozen=True, slots=True)
class ConnectorStatus:
    """The state of a connector on a worker in a generation of the group. `trace` is the error of a failure."""

    connector: str
    state: State
    worker_id: str
    generation: int
    version: str | None = None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class TaskStatus:
    """The state of a task on a worker in a generation of the group. `trace` is the error of a failure."""

    task: ConnectorTaskId
    state: State
    worker_id: str
    generation: int
    version: str | None = None
    trace: str | None = None


@dataclass(frozen=True, slots=True)
class TopicStatus:
    """A topic that a connector has used, and the task that reported it."""

    topic: str
    connector: str
    task: int
    discovered_ms: int


@dataclass(frozen=True, slots=True)
class Forgotten:
    """A tombstone of a status: of a connector, a task, or a connector's topic."""

    what: str | ConnectorTaskId | tuple[str, str]
    """The connector, the task, or (topic, connector)."""


StatusRecord = ConnectorStatus | TaskStatus | TopicStatus | Forgotten


def _key(what: str | ConnectorTaskId | tuple[str, str]) -> bytes:
    """Return the key of the status of a connector, a task, or a (topic, connector)."""
    match what:
        case (topic, connector):
            return f"{TOPIC}{topic}{TOPIC_SEPARATOR}{connector}".encode()
        case ConnectorTaskId():
            return f"{TASK}{what}".encode()
    return f"{CONNECTOR}{what}".encode()


def encode(record: StatusRecord) -> tuple[bytes, bytes | None]:
    """Return the key and value of a record of the status topic. The status DESTROYED becomes a tombstone."""
    match record:
        case ConnectorStatus(connector):
            return _key(connector), _encode_status(record)
        case TaskStatus(task):
            return _key(task), _encode_status(record)
        case TopicStatus(topic, connector, number, discovered_ms):
            fields = {"name": topic, "connector": connector, "task": number, "discoverTimestamp": discovered_ms}
            return _key((topic, connector)), msgspec.json.encode({"topic": fields})
        case Forgotten(what):
            return _key(what), None


def decode(key: bytes | None, value: bytes | None) -> StatusRecord | None:
    """Return the record with this key and value in the status topic, or None if the key is unknown.

    Raises SerializationError if the record is invalid.
    """
    name = (key or b"").decode(errors="replace")
    try:
        if name.startswith(TOPIC):
            topic, separator, connector = name[len(TOPIC) :].partition(TOPIC_SEPARATOR)
            if not separator or not topic or not connector:
                raise SerializationError(f"{name}: is not the key of a topic status")
            if value is None:
                return Forgotten((topic, connector))
            fields = decode_json(value)["topic"]
            return TopicStatus(
                str(fields["name"]), str(fields["connector"]), int(fields["task"]), int(fields["discoverTimestamp"])
            )
        if name.startswith(TASK):
            task = parse_task(name[len(TASK) :])
            return Forgotten(task) if value is None else TaskStatus(task, **_decode_common_status_fields(value))
        if name.startswith(CONNECTOR) and len(name) > len(CONNECTOR):
            connector = name[len(CONNECTOR) :]
            return (
                Forgotten(connector)
                if value is None
                else ConnectorStatus(connector, **_decode_common_status_fields(value))
            )
    except (ValueError, KeyError, TypeError) as e:
        raise SerializationError(f"{name}: {type(e).__name__}: {e}") from None
    return None


def _encode_status(status: ConnectorStatus | TaskStatus) -> bytes | None:
    if status.state is State.DESTROYED:
        return None
    return msgspec.json.encode(
        {
            "state": status.state,
            "trace": status.trace,
            "worker_id": status.worker_id,
            "generation": status.generation,
            "version": status.version,
        }
    )


def _decode_common_status_fields(value: bytes) -> dict[str, Any]:
    """Return the fields that the statuses of connectors and tasks have in common, by name."""
    fields = decode_json(value)
    return {
        "state": State(fields["state"]),
        "worker_id": str(fields["worker_id"]),
        "generation": int(fields["generation"]),
        "version": fields.get("version"),
        "trace": fields.get("trace"),
    }
