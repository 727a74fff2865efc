"""What a worker and a process of its own say to each other: JSON objects, one a line.

Either side asks with a number under `ask`; the other's `answer` has that number, and what came of it or an error:
`error` with its `kind`, `class` and `trace`.

| to either process | |
|---|---|
| (the first) | the worker's settings, its log's, and the task's or the connector's |
| `level` | a logger's name, and the level that it has from now on |

| to a task's process | |
|---|---|
| `target` | pause, or go on |
| `stop` | end in order |

| from a task's process | |
|---|---|
| `event` | of the task's life, by `Event`'s names; `failure` with its `trace` |
| `topic` | a topic that the task uses |
| `stats` | every metric, with `call_ms`: how long it has been inside one call |
| `ask` | with `get`, `set` or `of`: the offset store is the worker's |

| to a connector's process | |
|---|---|
| `ask` | with `do`: a method of the connector's, or `validate`, beside what the method takes |

| from a connector's process | |
|---|---|
| `reconfigure` | have the tasks configured anew |
| `failed` | the connector has failed by itself: an error |

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
"""How often a process says its metrics; a worker that hears nothing for much longer knows that it is held up."""

Message = dict[str, Any]
Pairs = list[list[str | None]]


def pack(message: Mapping[str, Any]) -> bytes:
    """A message as a line."""
    return msgspec.json.encode(message) + b"\n"


def unpack(line: bytes) -> Message:
    """The message of a line; DataError where it is none."""
    try:
        return msgspec.json.decode(line, type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise DataError(f"no message of a process: {e}") from None


def to_pairs(values: Mapping[bytes, bytes | None]) -> Pairs:
    """Bytes that JSON can have."""
    return [[encoded(key), None if value is None else encoded(value)] for key, value in values.items()]


def from_pairs(pairs: Iterable[Iterable[str | None]]) -> dict[bytes, bytes | None]:
    """What they were."""
    return {
        base64.b64decode(key or ""): None if value is None else base64.b64decode(value)
        for key, value in ((*pair,) for pair in pairs)
    }


def encoded(data: bytes) -> str:
    """Bytes as text."""
    return base64.b64encode(data).decode()


KINDS: dict[str, tuple[type[Exception], type[FailedThere]]] = {
    "retriable": (RetriableError, RetriableThere),
    "config": (ConfigError, ConfigErrorThere),
    "connect": (ConnectError, ConnectErrorThere),
    "other": (Exception, FailedThere),
}
"""What of an error's class matters on the other side; the first that it is of."""


def error_message(error: Exception) -> Message:
    """An error as a message has it."""
    kind = next(name for name, (here, _) in KINDS.items() if isinstance(error, here))
    return {"error": str(error), "kind": kind, "class": type(error).__name__, "trace": trace_of(error)}


def error_of(message: Message) -> FailedThere:
    """The error again.

    >>> error_of(error_message(ConfigError("no such column")))
    ConfigErrorThere('no such column')
    """
    return KINDS[message["kind"]][1](message["error"], message["class"], message["trace"])


def to_rows(offsets: Mapping[TopicPartition, int | None]) -> list[list[Any]]:
    """A sink's offsets as JSON can have them.

    >>> to_rows({TopicPartition("t", 0): 7})
    [['t', 0, 7]]
    """
    return [[tp.topic, tp.partition, at] for tp, at in offsets.items()]


def from_rows(rows: Iterable[list[Any]]) -> dict[TopicPartition, int | None]:
    """What they were."""
    return {TopicPartition(topic, partition): at for topic, partition, at in rows}
