"""The store of an aggregation without windows: one row a key, which never closes.

It is a window store in which each key has one window, from 0 to 0. Joins, processors and queries read its rows: dicts
of the key and its results by name.

>>> import numpy as np
>>> from penstock.shared.streams.aggregations.aggregation import Count
>>> from penstock.shared.streams.aggregations.latest import Latest
>>> store = AggregateStore("totals", [LATEST, "n"], StateColumns([Latest(), Count()]), text_keys=True)
>>> codes = store.index.codes_of([b"ann", b"ann", b"bob"])
>>> outcome = store.take(np.array([20, 10, 30]), codes, store.columns.no_values(3), [])
>>> store.get("ann"), store.get("cat"), len(store)
({'key': 'ann', 'n': 2}, None, 2)
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.shared.streams.aggregations.latest import LATEST
from penstock.shared.streams.state_store import StateStoreRow
from penstock.shared.streams.user_code import user_copy
from penstock.shared.streams.windows.key_index import NONE
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_rule import WindowRule
from penstock.shared.streams.windows.window_store import LiveWindow, WindowStore


def key_in_aggregate_row(key: str | bytes) -> str:
    """Return a key as the row of an aggregation without windows has it: as in JSON, even before it is written.

    >>> key_in_aggregate_row("ann"), key_in_aggregate_row(b"ann")
    ('ann', 'YW5u')
    """
    return key if isinstance(key, str) else base64.b64encode(key).decode()


class AggregateRows:
    """Reads the rows of an aggregation without windows, in memory or on disk; readers get copies."""

    names: Sequence[str]
    """The names of all aggregations; LATEST is the first."""
    columns: StateColumns

    @abstractmethod
    def rows(self) -> Iterator[StateStoreRow]:
        """As a store's `rows`."""

    @abstractmethod
    def rows_of(self, key: Any) -> Iterable[StateStoreRow]:
        """As a store's `rows_of`."""

    def get(self, key: Any) -> dict[str, Any] | None:
        """Return the key's row, or None."""
        key = self._key_in_store_type(key)
        rows = self.rows_of(key) if isinstance(key, str | bytes) else ()
        return next(map(self._result_row, rows), None)

    def items(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """Yield all keys and rows."""
        return ((row.key, self._result_row(row)) for row in self.rows())

    def _key_in_store_type(self, key: Any) -> Any:
        """Return a key in the store's type of keys."""
        return key

    def _result_row(self, row: StateStoreRow) -> dict[str, Any]:
        named = zip(self.names, self.columns.aggregations, row.states, strict=True)
        results = {name: user_copy(one.result(state)) for name, one, state in named if name != LATEST}
        return {"key": key_in_aggregate_row(row.key), **results}


class AggregateStore(WindowStore, AggregateRows):
    """The store of an aggregation without windows, in memory: one row for each key."""

    def __init__(self, name: str, names: Sequence[str], columns: StateColumns, *, text_keys: bool) -> None:
        super().__init__(name, WindowRule("table"), columns, text_keys=text_keys)
        self.names = names

    def rows_of(self, key: Any) -> list[LiveWindow]:
        """As `WindowStore.rows_of`, but without arrays for the only row, because joins call it for each record."""
        code = self._find_key_code(key)
        if code == NONE:
            return []
        own = key if isinstance(key, str) == self._text_keys else self.key_of(self.index.key(code))
        row = self.table.latest_row(code)
        return [] if row == NONE else [LiveWindow(own, 0, 0, self._states_of_window(row))]
