"""The messages between a worker and its processes: JSON objects, one a line.

Either side sends a question with a number under `ask`. The other side's `answer` has that number, with the result or an
error: `error` with its `kind`, `class` and `trace`.

| to either process | |
|---|---|
| (the first) | the worker's settings, its log's, and the task's or the connector's |
| `level` | a logger's name, and its new level |

| to a task's process | |
|---|---|
| `target` | pause or resume |
| `stop` | end in order |

| from a task's process | |
|---|---|
| `event` | an event of the task, by `Event`'s names; `failure` with its `trace` |
| `topic` | a topic that the task uses |
| `stats` | every metric, with `call_ms`: the duration of the current call |
| `ask` | with `get`, `set` or `of`: a question to the worker's offset store |

| to a connector's process | |
|---|---|
| `ask` | with `do`: a method of the connector, or `validate`, and the method's arguments |

| from a connector's process | |
|---|---|
| `reconfigure` | reconfigure the tasks |
| `failed` | the connector has failed outside a question: an error |

>>> unpack(pack({"ask": 1, "set": to_pairs({b"k": None})}))
{'ask': 1, 'set': [['aw==', None]]}
>>> from_pairs([["aw==", None]])
{b'k': None}
"""

from __future__ import annotations

import base64
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.errors import (
    ConfigError,
    ConfigErrorThere,
    ConnectError,
    ConnectErrorThere,
    DataError,
    FailedThere,
    RetriableError,
    RetriableThere,
    trace_of,
)

LINE_BYTES_MAX = 16 * 1024 * 1024
"""A longer message ends the connection: traces and offsets are far below."""
STATS_MS = 500
"""How often a process sends its metrics. If none arrive for much longer, the worker counts the process as stalled."""

Message = dict[str, Any]
Pairs = list[list[str | None]]


def pack(message: Mapping[str, Any]) -> bytes:
    """Returns a message as a line."""
    return msgspec.json.encode(message) + b"\n"


def unpack(line: bytes) -> Message:
    """Returns the message of a line. Raises DataError if it is invalid."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise DataError(f"no message of a process: {e}") from None


def to_pairs(values: Mapping[bytes, bytes | None]) -> Pairs:
    """Returns bytes in a form that JSON can contain."""
    return [[encoded(key), None if value is None else encoded(value)] for key, value in values.items()]


def from_pairs(pairs: Iterable[Iterable[str | None]]) -> dict[bytes, bytes | None]:
    """Returns the bytes again."""
    return {
        base64.b64decode(key or ""): None if value is None else base64.b64decode(value)
        for key, value in ((*pair,) for pair in pairs)
    }


def encoded(data: bytes) -> str:
    """Returns bytes as text."""
    return base64.b64encode(data).decode()


KINDS: dict[str, tuple[type[Exception], type[FailedThere]]] = {
    "retriable": (RetriableError, RetriableThere),
    "config": (ConfigError, ConfigErrorThere),
    "connect": (ConnectError, ConnectErrorThere),
    "other": (Exception, FailedThere),
}
"""The error classes that the other side distinguishes. The first match applies."""


def error_message(error: Exception) -> Message:
    """Returns an error as a message."""
    kind = next(name for name, (here, _) in KINDS.items() if isinstance(error, here))
    return {"error": str(error), "kind": kind, "class": type(error).__name__, "trace": trace_of(error)}


def error_of(message: Message) -> FailedThere:
    """Returns the error of a message.

    >>> error_of(error_message(ConfigError("no such column")))
    ConfigErrorThere('no such column')
    """
    return KINDS[message["kind"]][1](message["error"], message["class"], message["trace"])


def to_rows(offsets: Mapping[TopicPartition, int | None]) -> list[list[Any]]:
    """Returns a sink's offsets in a form that JSON can contain.

    >>> to_rows({TopicPartition("t", 0): 7})
    [['t', 0, 7]]
    """
    return [[tp.topic, tp.partition, at] for tp, at in offsets.items()]


def from_rows(rows: Iterable[list[Any]]) -> dict[TopicPartition, int | None]:
    """Returns the offsets again."""
    return {TopicPartition(topic, partition): at for topic, partition, at in rows}
