"""What a worker and a task's process say to each other: JSON objects, one a line.

| to the process | |
|---|---|
| `start` | first: the worker's settings, the task's, and its target state |
| `target` | pause, or go on |
| `stop` | end in order |
| `level` | a logger's name, and the level that it has from now on |
| `answer` | to `ask`, by its number: `values`, or `error` with `kind` |

| to the worker | |
|---|---|
| `event` | of the task's life, by `Event`'s names; `failure` with its `trace` |
| `topic` | a topic that the task uses |
| `stats` | every metric, with `call_ms`: how long it has been inside one call |
| `ask` | a number, with `get` or `set`: the offset store is the worker's |

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

from shared.common.errors import DataError, PenstockError, RetriableError

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
        raise DataError(f"no message of a task's process: {e}") from None


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


def error_kind(error: Exception) -> str:
    """What of an error matters on the other side: whether to try again."""
    return "retriable" if isinstance(error, RetriableError) else "final"


def error_of(kind: str, said: str) -> PenstockError:
    """The error again."""
    return RetriableError(said) if kind == "retriable" else PenstockError(said)
