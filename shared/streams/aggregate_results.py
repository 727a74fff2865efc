"""Rows of an aggregation without windows on their way out: as records, or encoded at once for a sink.

What a commit hands on goes in order of time, as results of windows do (`window_results`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.json_rows import key_texts, objects, texts
from penstock.shared.streams.processor import Record
from penstock.shared.streams.state.detached import detached
from penstock.shared.streams.windows.aggregate_store import key_in_row
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_columns import Windows


@dataclass(slots=True)
class AggregateResults:
    """Rows of a store that have changed, in their order or `by_time`.

    `names` are those of the aggregations, LATEST the first of them: a row's time is that of its key's latest record.
    """

    store: str
    names: tuple[str, ...]
    columns: StateColumns
    keys_of: Callable[[PackedBytes], Sequence[Any]]
    changed: Windows
    by_time: bool = False
    _order: Int64Array = field(init=False)

    def __post_init__(self) -> None:
        latest = self.changed.columns[0]
        self._order = latest.argsort(kind="stable") if self.by_time else np.arange(len(self.changed))

    def __len__(self) -> int:
        return len(self.changed)

    def records(self) -> Iterator[tuple[Record, Exception | None]]:
        """The rows as records, one by one; with the error where one cannot be made."""
        keys, times = self.keys_of(self.changed.keys), self.changed.columns[0].tolist()
        for at in self._order.tolist():
            error, row = None, None
            try:
                row = detached(self._rows([at])[0])
            except Exception as e:
                error = e
            yield Record(keys[at], row, times[at]), error

    def encoded(self, *, whole_window_keys: bool) -> tuple[PackedBytes, PackedBytes]:
        """Keys and values, as `encode_json` makes them; there are no windows."""
        keys = self.source_keys()
        named, is_bare = key_texts(keys, self.keys_of)
        results = self.columns.result_columns([column[self._order] for column in self.changed.columns])[1:]
        return keys, objects(["key", *self.names[1:]], [named, *map(texts, results)], is_bare=is_bare)

    def source_keys(self) -> PackedBytes:
        """Each row's record key."""
        return self.changed.keys.at(self._order)

    def timestamps(self) -> Int64Array:
        """Each row's event time in ms."""
        return np.asarray(self.changed.columns[0][self._order])

    def _rows(self, places: Sequence[int]) -> list[dict[str, Any]]:
        results = self.columns.results([column[places] for column in self.changed.columns])
        keys = map(key_in_row, self.keys_of(self.changed.keys.at(np.array(places))))
        names = ("key", *self.names[1:])
        return [dict(zip(names, row, strict=True)) for row in zip(keys, *results[1:], strict=True)]
