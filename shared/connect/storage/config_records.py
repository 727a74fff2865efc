"""The records of the config topic, with their keys and JSON values, as Kafka Connect writes them.

    connector-<name>          {"properties": {…}}; a tombstone removes the connector
    task-<name>-<n>           {"properties": {…}}; counts only from the next commit on
    commit-<name>             {"tasks": n}: the n task configs written before it are complete
    target-state-<name>       {"state": …, "state.v2": …}; the first has no STOPPED, for workers that do not know it
    tasks-fencing-<name>      {"task-count": n}: older producers are fenced, and those of n tasks may be active
    restart-connector-<name>  {"include-tasks": …, "only-failed": …}
    session-key               {"key": base64, "algorithm": …, "creation-timestamp": ms}
    logger-cluster-<name>     {"level": …}

>>> encode(TargetStateRecord("orders", TargetState.STOPPED))
(b'target-state-orders', b'{"state":"PAUSED","state.v2":"STOPPED"}')
>>> decode(b"commit-orders", b'{"tasks":2}')
TaskCommitRecord(connector='orders', tasks=2)
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from penstock.shared.common.errors import SerializationError
from penstock.shared.common.serialization import json_deserializer
from penstock.shared.connect.properties import properties_from_values
from penstock.shared.connect.runtime.states import ConnectorTaskId, TargetState

Config = Mapping[str, str]
"""The settings of a connector or task: names and values are texts."""

SESSION_KEY = "session-key"
CONNECTOR = "connector-"
TASK = "task-"
COMMIT = "commit-"
TARGET_STATE = "target-state-"
FENCING = "tasks-fencing-"
RESTART = "restart-connector-"
LOGGER = "logger-cluster-"


@dataclass(frozen=True, slots=True)
class ConnectorRecord:
    """A connector's config, or None if the connector is removed."""

    connector: str
    config: Config | None


@dataclass(frozen=True, slots=True)
class TaskRecord:
    """The config of one task. It takes effect with the connector's next commit record if all task configs are there."""

    task: ConnectorTaskId
    config: Config


@dataclass(frozen=True, slots=True)
class TaskCommitRecord:
    """The number of the connector's tasks, whose configs precede this record."""

    connector: str
    tasks: int


@dataclass(frozen=True, slots=True)
class TargetStateRecord:
    """A connector's target state, or None if it is removed."""

    connector: str
    state: TargetState | None


@dataclass(frozen=True, slots=True)
class TaskCountRecord:
    """The number of tasks that may start, since older ones are fenced; None if the record is removed."""

    connector: str
    tasks: int | None


@dataclass(frozen=True, slots=True)
class RestartRequest:
    """A request to restart a connector, and with `include_tasks` also its tasks.

    With `only_failed`, only those of them that have failed are restarted.
    """

    connector: str
    only_failed: bool
    include_tasks: bool


@dataclass(frozen=True, slots=True)
class SessionKey:
    """The key with which workers sign the requests between them. `created_ms` is ms since the epoch."""

    key: bytes
    algorithm: str
    created_ms: int

    def __repr__(self) -> str:
        return f"SessionKey({self.algorithm}, created_ms={self.created_ms})"


@dataclass(frozen=True, slots=True)
class LoggerLevel:
    """A logger's level on every worker of the cluster."""

    logger: str
    level: str


ConfigRecord = (
    ConnectorRecord
    | TaskRecord
    | TaskCommitRecord
    | TargetStateRecord
    | TaskCountRecord
    | RestartRequest
    | SessionKey
    | LoggerLevel
)


def parse_task(text: str) -> ConnectorTaskId:
    """Return the task in `<connector>-<number>`. Raises SerializationError if the text does not have this form.

    >>> parse_task("two-part-name-7")
    ConnectorTaskId(connector='two-part-name', task=7)
    """
    connector, dash, task = text.rpartition("-")
    if not dash or not connector or not (task.isascii() and task.isdigit()):
        raise SerializationError(f"{text!r} is not the id of a task")
    return ConnectorTaskId(connector, int(task))


def encode(record: ConfigRecord) -> tuple[bytes, bytes | None]:
    """Return the key and value of a record of the config topic. The value of a tombstone is None."""
    match record:
        case ConnectorRecord(connector, config):
            return _encode_config_record(
                f"{CONNECTOR}{connector}", None if config is None else {"properties": dict(config)}
            )
        case TaskRecord(task, config):
            return _encode_config_record(f"{TASK}{task}", {"properties": dict(config)})
        case TaskCommitRecord(connector, tasks):
            return _encode_config_record(f"{COMMIT}{connector}", {"tasks": tasks})
        case TargetStateRecord(connector, state):
            # As in Kafka Connect (KIP-875): workers of versions without STOPPED pause such a connector.
            older = TargetState.PAUSED if state is TargetState.STOPPED else state
            return _encode_config_record(f"{TARGET_STATE}{connector}", state and {"state": older, "state.v2": state})
        case TaskCountRecord(connector, count):
            return _encode_config_record(f"{FENCING}{connector}", None if count is None else {"task-count": count})
        case RestartRequest(connector, only_failed, include_tasks):
            return _encode_config_record(
                f"{RESTART}{connector}", {"include-tasks": include_tasks, "only-failed": only_failed}
            )
        case SessionKey(key, algorithm, created_ms):
            text = base64.b64encode(key).decode()
            return _encode_config_record(
                SESSION_KEY, {"key": text, "algorithm": algorithm, "creation-timestamp": created_ms}
            )
        case LoggerLevel(logger, level):
            return _encode_config_record(f"{LOGGER}{logger}", {"level": level})


def decode(key: bytes | None, value: bytes | None) -> ConfigRecord | None:
    """Return the record with this key and value in the config topic. Returns None if the key is unknown, or for a
    tombstone that has no effect.

    Raises SerializationError if the record is invalid.
    """
    name = (key or b"").decode(errors="replace")
    if name == SESSION_KEY:
        return _decode_session_key(_decode_json_fields(name, value)) if value is not None else None
    for prefix, read in _READERS:
        if name.startswith(prefix) and len(name) > len(prefix):
            fields = None if value is None else _decode_json_fields(name, value)
            try:
                return read(name[len(prefix) :], fields)
            except (KeyError, TypeError, ValueError) as e:
                raise SerializationError(f"{name}: {type(e).__name__}: {e}") from None
    return None


def _decode_connector_record(name: str, fields: Mapping[str, Any] | None) -> ConfigRecord:
    return ConnectorRecord(name, None if fields is None else _decode_config_properties(fields))


def _decode_task_record(name: str, fields: Mapping[str, Any] | None) -> ConfigRecord | None:
    # A task's config is removed with its connector's. A tombstone of its own adds nothing.
    return None if fields is None else TaskRecord(parse_task(name), _decode_config_properties(fields))


def _decode_task_commit(name: str, fields: Mapping[str, Any] | None) -> ConfigRecord | None:
    return None if fields is None else TaskCommitRecord(name, _number_of_tasks(fields["tasks"]))


def _decode_target_state(name: str, fields: Mapping[str, Any] | None) -> ConfigRecord:
    if fields is None:
        return TargetStateRecord(name, None)
    return TargetStateRecord(name, TargetState(fields.get("state.v2") or fields["state"]))


def _decode_task_count(name: str, fields: Mapping[str, Any] | None) -> ConfigRecord:
    return TaskCountRecord(name, None if fields is None else _number_of_tasks(fields["task-count"]))


def _decode_restart_request(name: str, fields: Mapping[str, Any] | None) -> ConfigRecord | None:
    if fields is None:
        return None
    return RestartRequest(name, bool(fields.get("only-failed", False)), bool(fields.get("include-tasks", False)))


def _decode_logger_level(name: str, fields: Mapping[str, Any] | None) -> ConfigRecord | None:
    return None if fields is None else LoggerLevel(name, str(fields["level"]))


_READERS: tuple[tuple[str, Callable[[str, Mapping[str, Any] | None], ConfigRecord | None]], ...] = (
    (CONNECTOR, _decode_connector_record),
    (TASK, _decode_task_record),
    (COMMIT, _decode_task_commit),
    (TARGET_STATE, _decode_target_state),
    (FENCING, _decode_task_count),
    (RESTART, _decode_restart_request),
    (LOGGER, _decode_logger_level),
)


def _decode_session_key(fields: Mapping[str, Any]) -> SessionKey:
    try:
        key = base64.b64decode(str(fields["key"]), validate=True)
        return SessionKey(key, str(fields["algorithm"]), int(fields["creation-timestamp"]))
    except (KeyError, TypeError, ValueError, binascii.Error) as e:
        # The message names only the error's class, so that it cannot show the key.
        raise SerializationError(f"{SESSION_KEY}: {type(e).__name__}") from None


def _decode_config_properties(fields: Mapping[str, Any]) -> Config:
    properties = fields["properties"]
    if not isinstance(properties, Mapping):
        raise TypeError("properties is not an object")
    return properties_from_values(properties)


def _number_of_tasks(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is not a number of tasks")
    return value


def _decode_json_fields(name: str, value: bytes | None) -> Mapping[str, Any]:
    fields = json_deserializer(name, value or b"")
    if not isinstance(fields, dict):
        raise SerializationError(f"{name}: its value is not a JSON object")
    return fields


def _encode_config_record(key: str, fields: Mapping[str, Any] | None) -> tuple[bytes, bytes | None]:
    return key.encode(), None if fields is None else msgspec.json.encode(fields)
