"""The content of the state stores of the tasks that run here, as plain values for REST.

Rows are read on the event loop, which does nothing else meanwhile. So a search scans at most ROWS_LOOKED_AT_MAX rows.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from itertools import chain, islice
from typing import Any, NamedTuple

from penstock.api.streams.task_views import WindowRow
from penstock.services.aggregator.key_filter import KeyFilter, key_text
from penstock.shared.common.records import INT64_MAX
from penstock.shared.common.row_positions import OpenPosition
from penstock.shared.streams.changelog.store_schema import WINDOWED
from penstock.shared.streams.runtime.queries import results_of
from penstock.shared.streams.runtime.worker_tasks import OwnedTask
from penstock.shared.streams.state.store_builder import StoreBuilder
from penstock.shared.streams.state_store import StateStoreRow, is_open

ROWS_LOOKED_AT_MAX = 20_000
"""The most rows that one request reads. The event loop is blocked meanwhile."""


def describe_live_stores(tasks: Mapping[int, OwnedTask]) -> list[dict[str, Any]]:
    """Return each store of the tasks that run here, with its number of live rows by partition."""
    rows: dict[str, dict[str, int]] = {}
    for partition, owned in sorted(tasks.items()):
        if owned.task is not None:
            for name, store in owned.task.stores.items():
                rows.setdefault(name, {})[str(partition)] = len(store)
    return [{"store": name, "rows": own, "total": sum(own.values())} for name, own in sorted(rows.items())]


class FoundOpenWindows(NamedTuple):
    """Windows, the last window's position if there are more, and the number of rows that were not scanned."""

    windows: list[WindowRow]
    last: OpenPosition | None
    unseen: int


def open_windows(
    tasks: Mapping[int, OwnedTask],
    store: str | None,
    key_filter: KeyFilter,
    limit: int,
    after: OpenPosition | None = None,
) -> FoundOpenWindows:
    """Return at most `limit` open windows whose keys match, latest end first, after the position `after`. If `store` is
    None, all stores are searched.

    Scans at most ROWS_LOOKED_AT_MAX rows, divided among the stores of all partitions (at least one row of each). Also
    looks up the keys of `KeyFilter.exact`, of each only the rows that the page may need. `unseen` counts the rows that
    were not scanned, even if a look-up returned them.
    """
    searched = [
        (name, partition, owned.task.topology.stores[name], kept)
        for partition, owned in tasks.items()
        if owned.task is not None
        for name, kept in owned.task.stores.items()
        if store in (None, name) and owned.task.topology.stores[name].schema.kind in WINDOWED
    ]
    builders = {name: builder for name, _, builder, _ in searched}
    found: dict[OpenPosition, StateStoreRow] = {}
    unseen = 0
    # Small stores come first, so that larger ones get the rows that these leave of their shares.
    searched.sort(key=lambda one: len(one[-1]))
    left = ROWS_LOOKED_AT_MAX
    # One row of a key may end with the last row of the page before, and be on that page.
    end_max = INT64_MAX if after is None else -after.negated_end_ms
    exact_max = limit + 2
    for i, (name, partition, builder, kept) in enumerate(searched):
        share = max(1, left // (len(searched) - i))
        windowed: Any = kept
        exact = [
            row for key in key_filter.exact(builder.schema.key) for row in windowed.latest_rows(key, end_max, exact_max)
        ]
        # The rows are in no defined order. The call for the next page reads the same rows again.
        first = list(islice(kept.rows(), share))
        left -= len(first)
        if len(first) == share:
            unseen += max(0, len(kept) - len(first))
        matching = chain(exact, (row for row in first if key_filter.has(row.key)))
        positioned = {_open_position(name, partition, row): row for row in matching if is_open(row)}
        wanted = (position for position in positioned if after is None or position > after)
        found |= {position: positioned[position] for position in heapq.nsmallest(limit + 1, wanted)}
    positions = heapq.nsmallest(limit + 1, found)
    last = positions[limit - 1] if len(positions) > limit else None
    windows = [_open_window_as_json(at, found[at], builders[at.store]) for at in positions[:limit]]
    return FoundOpenWindows(windows, last, unseen)


def _open_position(store: str, partition: int, row: StateStoreRow) -> OpenPosition:
    return OpenPosition(-row.end, store, partition, key_text(row.key), row.start)


def _open_window_as_json(position: OpenPosition, row: StateStoreRow, builder: StoreBuilder) -> WindowRow:
    return WindowRow(
        store=position.store,
        partition=position.partition,
        key=position.key,
        start_ms=row.start,
        end_ms=row.end,
        results=result_as_json(results_of(row, builder)),
    )


def result_as_json(result: Any) -> Any:
    """Return results of an open window as JSON values.

    Bytes become text. Any other value without JSON form becomes its type's name.

    >>> result_as_json({"a": [1, b"a", None], "b": object()})
    {'a': [1, 'a', None], 'b': '<object>'}
    """
    if result is None or isinstance(result, str | int | float | bool):
        return result
    if isinstance(result, bytes):
        return result.decode(errors="backslashreplace")
    if isinstance(result, list | tuple):
        return [result_as_json(each) for each in result]
    if isinstance(result, dict):
        return {str(name): result_as_json(each) for name, each in result.items()}
    return f"<{type(result).__name__}>"
