"""Answers of several instances as one: each partition from the instance that has it, and from no other.

An instance that does not know yet that it has lost a partition tells of it all the same; what it says of that one is
left out.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from typing import Any, NamedTuple


class Part(NamedTuple):
    """What one instance answered, and for which partitions it was asked."""

    partitions: Collection[int]
    answer: Mapping[str, Any]


def missing_rows(missing: Mapping[int, str]) -> list[dict[str, Any]]:
    """The missing partitions as they are told."""
    return [{"partition": partition, "reason": reason} for partition, reason in sorted(missing.items())]


def merge_stores(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Live rows of each store by partition.

    >>> of_a = Part([0], {"stores": [{"store": "s", "rows": {"0": 2, "1": 9}, "total": 11}]})
    >>> of_b = Part([1], {"stores": [{"store": "s", "rows": {"1": 3}, "total": 3}]})
    >>> merge_stores([of_a, of_b])
    [{'store': 's', 'rows': {'0': 2, '1': 3}, 'total': 5}]
    """
    rows: dict[str, dict[str, int]] = {}
    for partitions, answer in parts:
        for store in answer["stores"]:
            own = {p: n for p, n in store["rows"].items() if int(p) in partitions}
            rows.setdefault(store["store"], {}).update(own)
    ordered = {name: dict(sorted(own.items(), key=lambda row: int(row[0]))) for name, own in sorted(rows.items())}
    return [{"store": name, "rows": own, "total": sum(own.values())} for name, own in ordered.items()]


def merge_windows(parts: Iterable[Part], limit: int) -> list[Mapping[str, Any]]:
    """The windows that end last, of all."""
    found = (row for partitions, answer in parts for row in answer["windows"] if row["partition"] in partitions)
    return heapq.nlargest(limit, found, key=lambda row: row["end_ms"])


def merge_tasks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """All tasks by partition, each with the instance that runs or restores it."""
    found = [
        {**task, "instance": answer.get("instance", "")}
        for partitions, answer in parts
        for task in answer.get("tasks", ())
        if task["partition"] in partitions
    ]
    return sorted(found, key=lambda task: task["partition"])


def merge_standbys(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """All standbys by partition, each with the instance that it is of.

    >>> merge_standbys([Part([0], {"instance": "a", "standbys": [{"partition": 1, "lag": 0}]}), Part([1], {})])
    [{'partition': 1, 'lag': 0, 'instance': 'a'}]
    """
    found = [
        {**standby, "instance": answer.get("instance", "")}
        for _, answer in parts
        for standby in answer.get("standbys", ())
    ]
    return sorted(found, key=lambda standby: (standby["partition"], standby["instance"]))


def merge_rows(parts: Iterable[Part], missing: dict[int, str], rows_max: int) -> dict[str, Any]:
    """Rows of a store, at most `rows_max`, and positions; a partition without one is added to `missing`.

    >>> of_a = Part([0], {"store": "s", "kind": "session", "rows": [{"partition": 0, "key": "k"}],
    ...                   "position": {"0": {"in": 7}}, "is_cut": False})
    >>> of_b = Part([1], {"store": "s", "kind": "session", "rows": [], "position": {}, "is_cut": False})
    >>> missing = {}
    >>> merge_rows([of_a, of_b], missing, 10)["position"], missing
    ({'0': {'in': 7}}, {1: 'its task has just gone'})
    """
    rows: list[Any] = []
    position: dict[str, Any] = {}
    store, kind, is_cut = "", "", False
    for partitions, answer in parts:
        rows += [row for row in answer["rows"] if row["partition"] in partitions]
        at = {p: offsets for p, offsets in answer["position"].items() if int(p) in partitions}
        missing |= {p: "its task has just gone" for p in partitions if str(p) not in at}
        position |= at
        store, kind, is_cut = answer["store"], answer["kind"], is_cut or answer["is_cut"]
    rows.sort(key=lambda row: row["partition"])
    return {
        "store": store,
        "kind": kind,
        "rows": rows[:rows_max],
        "position": dict(sorted(position.items(), key=lambda each: int(each[0]))),
        "is_cut": is_cut or len(rows) > rows_max,
    }
