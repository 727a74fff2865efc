"""The records of the status topic: keys, and values as JSON, as Kafka Connect writes them.

    status-connector-<name>                  {"state", "trace", "worker_id", "generation", "version"}
    status-task-<name>-<n>                   the same
    status-topic-<topic>:connector-<name>    {"topic": {"name", "connector", "task", "discoverTimestamp"}}

A tombstone removes the status of its key.

>>> encode(Status("o", State.PAUSED, "a:8083", 4, "1.0"))
(b'status-connector-o', b'{"state":"PAUSED","trace":null,"worker_id":"a:8083","generation":4,"version":"1.0"}')
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from penstock.shared.common.errors import SerializationError
from penstock.shared.common.json_decoding import decode_json
from penstock.shared.connect.runtime.states import ConnectorTaskId, State
from penstock.shared.connect.runtime.status_listener import Id
from penstock.shared.connect.storage.config_records import parse_task

CONNECTOR = "status-connector-"
TASK = "status-task-"
TOPIC = "status-topic-"
TOPIC_SEPARATOR = ":connector-"


@dataclass(frozen=True, slots=True)
class Status:
    """The state of a connector or task on a worker in a generation of the group. `trace` is the error of a failure."""

    id: Id
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

    what: Id | tuple[str, str]
    """The connector, the task, or (topic, connector)."""


StatusRecord = Status | TopicStatus | Forgotten


def _key(what: Id | tuple[str, str]) -> bytes:
    """Return the key of the status of a connector, a task, or a (topic, connector)."""
    match what:
        case (topic, connector):
            return f"{TOPIC}{topic}{TOPIC_SEPARATOR}{connector}".encode()
        case ConnectorTaskId():
            return f"{TASK}{what}".encode()
    return f"{CONNECTOR}{what}".encode()


def encode(record: StatusRecord) -> tuple[bytes, bytes | None]:
    """Return the key and value of a record of the status topic."""
    match record:
        case Status(id):
            status = {
                "state": record.state,
                "trace": record.trace,
                "worker_id": record.worker_id,
                "generation": record.generation,
                "version": record.version,
            }
            return _key(id), msgspec.json.encode(status)
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
        id: Id
        if name.startswith(TASK):
            id = parse_task(name[len(TASK) :])
        elif name.startswith(CONNECTOR) and len(name) > len(CONNECTOR):
            id = name[len(CONNECTOR) :]
        else:
            return None
        if value is None:
            return Forgotten(id)
        fields = decode_json(value)
        return Status(
            id,
            State(fields["state"]),
            str(fields["worker_id"]),
            int(fields["generation"]),
            fields.get("version"),
            fields.get("trace"),
        )
    except (ValueError, KeyError, TypeError) as e:
        raise SerializationError(f"{name}: {type(e).__name__}: {e}") from None
