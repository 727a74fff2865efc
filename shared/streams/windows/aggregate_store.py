"""The store of an aggregation without windows: one row a key, which no time closes.

It is a store of windows in which each key has one, from 0 to 0. Joins, processors and queries read its rows: a key and
its results by name, as one flat object.

>>> import numpy as np
>>> from penstock.shared.streams.aggregations.aggregation import Count
>>> from penstock.shared.streams.aggregations.latest import Latest
>>> from penstock.shared.streams.windows.window_table import Values
>>> store = AggregateStore("totals", [LATEST, "n"], StateColumns([Latest(), Count()]), text_keys=True)
>>> codes = store.index.codes_of([b"ann", b"ann", b"bob"])
>>> taken = store.take(np.array([20, 10, 30]), codes, Values.none(3), [])
>>> store.get("ann"), store.get("cat"), len(store)
({'key': 'ann', 'n': 2}, None, 2)
"""

from __future__ import annotations

import base64
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from penstock.shared.streams.aggregations.latest import LATEST
from penstock.shared.streams.state.detached import detached
from penstock.shared.streams.state.store import LiveRow
from penstock.shared.streams.windows.keys import NONE
from penstock.shared.streams.windows.kinds import Rule
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_store import LiveWindow, WindowStore


def key_in_row(key: str | bytes) -> str:
    """A key as its row has it: what JSON has for it, also before the row was ever written.

    >>> key_in_row("ann"), key_in_row(b"ann")
    ('ann', 'YW5u')
    """
    return key if isinstance(key, str) else base64.b64encode(key).decode()


class AggregateRows:
    """How rows are read, wherever they are kept. What is handed out are copies."""

    names: Sequence[str]
    """Of all aggregations, LATEST the first of them."""
    columns: StateColumns

    @abstractmethod
    def rows(self) -> Iterator[LiveRow]:
        """As a store's."""

    @abstractmethod
    def rows_of(self, key: Any) -> Iterable[LiveRow]:
        """As a store's."""

    def get(self, key: Any) -> dict[str, Any] | None:
        """The key's row, None where there is none."""
        key = self._own(key)
        rows = self.rows_of(key) if isinstance(key, str | bytes) else ()
        return next(map(self._row_of, rows), None)

    def items(self) -> Iterator[tuple[Any, dict[str, Any]]]:
        """All keys and rows."""
        return ((row.key, self._row_of(row)) for row in self.rows())

    def _own(self, key: Any) -> Any:
        """A key as the store has keys."""
        return key

    def _row_of(self, row: LiveRow) -> dict[str, Any]:
        named = zip(self.names, self.columns.aggregations, row.states, strict=True)
        results = {name: detached(one.result(state)) for name, one, state in named if name != LATEST}
        return {"key": key_in_row(row.key), **results}


class AggregateStore(WindowStore, AggregateRows):
    """The rows in memory."""

    def __init__(self, name: str, names: Sequence[str], columns: StateColumns, *, text_keys: bool) -> None:
        super().__init__(name, Rule("table"), columns, text_keys=text_keys)
        self.names = names

    def rows_of(self, key: Any) -> list[LiveWindow]:
        """As that of windows, without arrays of the one row that there can be: joins ask for each record."""
        code = self._known(key)
        if code == NONE:
            return []
        own = key if isinstance(key, str) == self._text_keys else self.key_of(self.index.key(code))
        return [LiveWindow(own, 0, 0, self._states(row)) for row in self.table.rows_of(code)]
