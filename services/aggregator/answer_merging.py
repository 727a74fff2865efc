"""Merges the answers of several instances: each partition comes only from the instance that owns it.

An instance that does not know yet that it lost a partition still reports it. That part of its answer is dropped.
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Iterable, Mapping, Sequence
from operator import itemgetter
from typing import Any, NamedTuple, TypeVar

from penstock.shared.common.continuation import (
    Continuations,
    LivePosition,
    RowOrder,
    RowPosition,
    live_order,
    row_order,
)

OrderT = TypeVar("OrderT", bound=tuple[Any, ...])
RowT = TypeVar("RowT")


class Part(NamedTuple):
    """The answer of one instance, and the partitions that it was queried for."""

    partitions: Collection[int]
    answer: Mapping[str, Any]


def missing_rows(missing: Mapping[int, str]) -> list[dict[str, Any]]:
    """Return the missing partitions as answers list them."""
    return [{"partition": partition, "reason": reason} for partition, reason in sorted(missing.items())]


def merge_stores(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return the live rows of each store by partition.

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


def merge_windows(parts: Sequence[Part], limit: int, pages: Continuations[LivePosition]) -> dict[str, Any]:
    """Return the windows of all instances, latest end first."""
    rows = [
        (live_order(LivePosition(row["end_ms"], row["store"], row["partition"], row["key"], row["start_ms"])), row)
        for partitions, answer in parts
        for row in answer["windows"]
        if row["partition"] in partitions
    ]
    ends = [live_order(position) for _, answer in parts if (position := pages.position(answer["continuation"]))]
    found, last = _select_first_rows(rows, limit, ends)
    position = None if last is None else LivePosition(-last[0], *last[1:])
    unseen = sum(answer["unseen"] for _, answer in parts)
    return {"windows": found, "continuation": pages.text(position), "unseen": unseen}


def _select_first_rows(
    rows: list[tuple[OrderT, RowT]], limit: int, ends: Sequence[OrderT]
) -> tuple[list[RowT], OrderT | None]:
    """Return the first rows in their order, and the position after which the next ones come; None if there are none.

    `ends` are the positions up to which cut answers are complete. Rows of other answers behind the first of them wait
    until all answers have reached it.
    """
    end = min(ends, default=None)
    known = sorted((one for one in rows if end is None or one[0] <= end), key=itemgetter(0))
    last = known[limit - 1][0] if len(known) > limit else end
    return [row for _, row in known[:limit]], last


def merge_tasks(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return all tasks by partition, each with the instance that runs or restores it."""
    found = [
        {**task, "instance": answer.get("instance", "")}
        for partitions, answer in parts
        for task in answer.get("tasks", ())
        if task["partition"] in partitions
    ]
    return sorted(found, key=lambda task: task["partition"])


def merge_standbys(parts: Iterable[Part]) -> list[dict[str, Any]]:
    """Return all standbys by partition, each with its instance.

    >>> merge_standbys([Part([0], {"instance": "a", "standbys": [{"partition": 1, "lag": 0}]}), Part([1], {})])
    [{'partition': 1, 'lag': 0, 'instance': 'a'}]
    """
    found = [
        {**standby, "instance": answer.get("instance", "")}
        for _, answer in parts
        for standby in answer.get("standbys", ())
    ]
    return sorted(found, key=lambda standby: (standby["partition"], standby["instance"]))


def merge_rows(
    parts: Sequence[Part], missing: dict[int, str], rows_max: int, pages: Continuations[RowPosition]
) -> dict[str, Any]:
    """Return at most `rows_max` rows of a store, and positions. A partition without position is added to `missing`.

    >>> said = {"store": "s", "kind": "table", "key_type": "string", "continuation": None}
    >>> of_a = Part([0], {**said, "rows": [{"partition": 0, "key": "k"}], "position": {"0": {"in": 7}}})
    >>> of_b, missing = Part([1], {**said, "rows": [], "position": {}}), {}
    >>> merge_rows([of_a, of_b], missing, 10, Continuations(RowPosition, "s"))["position"], missing
    ({'0': {'in': 7}}, {1: 'its task has just gone'})
    """
    rows: list[tuple[tuple[int, RowOrder], Any]] = []
    source_positions: dict[str, Any] = {}
    first_answer = parts[0].answer
    positions: dict[tuple[int, RowOrder], RowPosition] = {}
    ends = []
    for partitions, answer in parts:
        for row in answer["rows"]:
            if row["partition"] in partitions:
                own = _row_position(row, first_answer["key_type"])
                order = own.partition, row_order(own.key, own.start)
                positions[order] = own
                rows.append((order, row))
        if end := pages.position(answer["continuation"]):
            order = end.partition, row_order(end.key, end.start)
            positions[order] = end
            ends.append(order)
        at = {p: offsets for p, offsets in answer["position"].items() if int(p) in partitions}
        missing |= {p: "its task has just gone" for p in partitions if str(p) not in at}
        source_positions |= at
    found, last = _select_first_rows(rows, rows_max, ends)
    return {
        "store": first_answer["store"],
        "kind": first_answer["kind"],
        "key_type": first_answer["key_type"],
        "rows": found,
        "position": dict(sorted(source_positions.items(), key=lambda each: int(each[0]))),
        "is_cut": last is not None,
        "continuation": None if last is None else pages.text(positions[last]),
    }


def _row_position(row: Mapping[str, Any], key_type: str) -> RowPosition:
    key = base64.b64decode(row["key"]) if key_type == "bytes" else row["key"].encode()
    return RowPosition(row["partition"], key, row.get("start", 0))
