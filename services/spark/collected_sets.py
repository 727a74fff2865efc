"""Merges the states of CollectSet: JSON arrays of different values, in the order in which each came first.

Runs in Spark's Python workers, which need pyarrow and msgspec, but not Penstock. Values are the same if their JSON is,
whatever the order of an object's fields; the text of a value stays as it was written.

>>> union([b'[1,{"a":1,"b":2}]', b'[{"b":2,"a":1},"x",1]'], 3)
b'[1,{"a":1,"b":2},"x"]'
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import msgspec
import pyarrow as pa


def union(sets: Sequence[bytes], limit: int) -> bytes:
    """The first `limit` different values of several sets."""
    found: dict[bytes, bytes] = {}
    for one in sets:
        for value in msgspec.json.decode(one, type=list[msgspec.Raw]):
            identity = msgspec.json.encode(msgspec.json.decode(value), order="deterministic")
            found.setdefault(identity, bytes(value))
    return b"[" + b",".join(list(found.values())[:limit]) + b"]"


def merged(limits: Mapping[str, int]) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: columns that are lists of states in order (structs with a `value`) become one state each."""

    def one(states: Sequence[Mapping[str, Any]] | None, limit: int) -> bytes | None:
        if states is None:
            return None
        return states[0]["value"] if len(states) == 1 else union([state["value"] for state in states], limit)

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = [
                pa.array([one(states, limits[name]) for states in batch.column(name).to_pylist()], pa.binary())
                if name in limits
                else batch.column(name)
                for name in batch.schema.names
            ]
            yield pa.record_batch(columns, names=batch.schema.names)

    return run
