"""The messages between a worker and a connector's process: JSON objects, one a line.

The worker sends commands, and the process sends events. The response to a command with a `correlation_id` is an event
with the same `correlation_id`, and with `value` or the error: `error`, `kind`, `class` and `trace`.

| to the process | |
|---|---|
| (the first) | `connector`: its name; `worker`, `log`: the worker's settings and log settings; `levels`: of loggers |
| `do: start_connector` | start it with `config`, and bring it to `target` |
| `do: start_task` | start the task of `spec`, and bring it to `target` |
| `do: stop` | stop these `tasks`, where null is the connector itself |
| `do: target` | bring the connector and its tasks to `target` |
| `do: task_configs` | the task configurations of the running connector with this `config` |
| `do: validate` | validate a `config` |
| `do: alter_offsets` | let the connector with this `config` check the offsets in `rows`; `sink`: whether it is a sink |
| `do: level` | set the level of the logger `name` to `level` |

| from the process | |
|---|---|
| `event` | an event of a `task`, or of the connector if that is null, by `Event`'s values; a failure with its `trace` |
| `metrics` | each task with its metrics; `topics`: each task with a topic that it has used since the last time |
| `reconfigure` | the connector requests a reconfiguration of its tasks |

>>> unpack(pack({"do": "stop", "tasks": [None, 0]}))
{'do': 'stop', 'tasks': [None, 0]}
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from penstock.shared.common.errors import ConfigError, DataError, error_text
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.connect.errors import (
    ConfigErrorThere,
    ConnectError,
    ConnectErrorThere,
    ConnectorNotFound,
    ConnectorNotFoundThere,
    FailedThere,
    TooManyTasks,
    TooManyTasksThere,
    encodable,
    trace_of,
)

LINE_BYTES_MAX = 16 * 1024 * 1024
"""A longer message from the process ends it: configurations and traces are far below."""
METRICS_MS = 500
"""How often a process sends its metrics. If none arrive for much longer, its event loop is blocked."""

Message = dict[str, Any]


def pack(message: Mapping[str, Any]) -> bytes:
    """Return a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def unpack(line: bytes) -> Message:
    """Return the message of a line. Raises DataError if it is invalid."""
    try:
        return decode_json(line, dict[str, Any])
    except InvalidJson as e:
        raise DataError(f"not a message of a connector process: {e}") from None


KINDS: dict[str, tuple[type[Exception], type[FailedThere]]] = {
    "config": (ConfigError, ConfigErrorThere),
    "not found": (ConnectorNotFound, ConnectorNotFoundThere),
    "too many tasks": (TooManyTasks, TooManyTasksThere),
    "connect": (ConnectError, ConnectErrorThere),
    "other": (Exception, FailedThere),
}
"""The error classes that the worker distinguishes. The first match applies."""


def error_message(error: Exception) -> Message:
    """Return an error as a message."""
    kind = next(name for name, (here, _) in KINDS.items() if isinstance(error, here))
    return {
        "error": encodable(error_text(error)),
        "kind": kind,
        "class": type(error).__name__,
        "trace": trace_of(error),
    }


def error_of(message: Message) -> FailedThere:
    """Return the error of a message.

    >>> error_of(error_message(ConfigError("no such column")))
    ConfigErrorThere('no such column')
    """
    return KINDS[message["kind"]][1](message["error"], message["class"], message["trace"])
