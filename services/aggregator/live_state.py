"""What is in the state stores of the tasks that run here, as plain values for REST.

It is read between two turns of the loop and waits for nothing, so it looks at a bounded number of rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice
from typing import Any

from api.state import WindowRow
from shared.streams.owned_task import OwnedTask
from shared.streams.state.store import LiveRow

ROWS_LOOKED_AT_MAX = 20_000
"""Rows of one store that one request goes through: it holds the loop up meanwhile."""


def describe_stores(tasks: Mapping[int, OwnedTask]) -> list[dict[str, Any]]:
    """Each store with its live rows by partition."""
    rows: dict[str, dict[str, int]] = {}
    for partition, owned in sorted(tasks.items()):
        if owned.task is not None:
            for name, store in owned.task.stores.items():
                rows.setdefault(name, {})[str(partition)] = len(store)
    return [{"store": name, "rows": own, "total": sum(own.values())} for name, own in sorted(rows.items())]


def live_windows(tasks: Mapping[int, OwnedTask], store: str | None, key: str, limit: int) -> list[WindowRow]:
    """The live windows that end last, of all tasks; with `key` those of that key, or whose key contains it."""
    found: list[tuple[int, str, int, LiveRow]] = []
    for partition, owned in tasks.items():
        if owned.task is None:
            continue
        for name, kept in owned.task.stores.items():
            if store in (None, name):
                rows: Iterable[LiveRow] = _matching(kept.rows(), key)
                last = heapq.nlargest(limit, rows, key=_end)
                found += [(row.end, name, partition, row) for row in last]
    newest = heapq.nlargest(limit, found, key=lambda each: each[0])
    return [
        WindowRow(
            store=name,
            partition=partition,
            key=key_text(row.key),
            start_ms=row.start,
            end_ms=row.end,
            states=[plain(state) for state in row.states],
        )
        for _, name, partition, row in newest
    ]


def _end(row: LiveRow) -> int:
    return row.end


def _matching(rows: Iterator[LiveRow], key: str) -> Iterator[LiveRow]:
    looked_at = islice(rows, ROWS_LOOKED_AT_MAX)
    return (row for row in looked_at if key in key_text(row.key)) if key else looked_at


def key_text(key: Any) -> str:
    """A key as text.

    >>> key_text(b"UA-EWR"), key_text(7), key_text(b"\\xff")
    ('UA-EWR', '7', '\\\\xff')
    """
    return key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key)


def plain(state: Any) -> Any:
    """A state as JSON can have it; what has no such form is its type's name.

    >>> plain([1, b"a", None]), plain(object())
    ([1, 'a', None], '<object>')
    """
    if state is None or isinstance(state, str | int | float | bool):
        return state
    if isinstance(state, bytes):
        return state.decode(errors="backslashreplace")
    if isinstance(state, list | tuple):
        return [plain(each) for each in state]
    if isinstance(state, dict):
        return {str(name): plain(each) for name, each in state.items()}
    return f"<{type(state).__name__}>"
