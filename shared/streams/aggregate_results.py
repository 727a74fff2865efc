"""Rows of an aggregation without windows on their way out: as records, or encoded at once for a sink.

What a commit hands on goes in order of time, as results of windows do (`window_results`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from penstock.shared.streams.processor import Record
from penstock.shared.streams.state.detached import detached
from penstock.shared.streams.windows.aggregate_store import key_in_row
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_columns import Windows

_encode_lines = msgspec.json.Encoder().encode_lines


@dataclass(slots=True)
class AggregateResults(Sequence[None]):
    """Rows of a store that have changed, in their order or `by_time`; as a sequence the windows that they are of: none.

    `names` are those of the aggregations, LATEST the first of them: a row's time is that of its key's latest record.
    """

    store: str
    names: tuple[str, ...]
    columns: StateColumns
    keys_of: Callable[[Sequence[bytes]], Sequence[str | bytes]]
    changed: Windows
    by_time: bool = False
    _order: list[int] = field(init=False)

    def __post_init__(self) -> None:
        latest = self.changed.columns[0]
        self._order = latest.argsort(kind="stable").tolist() if self.by_time else list(range(len(self.changed)))

    def __len__(self) -> int:
        return len(self.changed)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # of one place only
        return None

    def records(self) -> Iterator[tuple[Record, Exception | None]]:
        """The rows as records, one by one; with the error where one cannot be made."""
        keys, times = self.keys_of(self.changed.keys), self.changed.columns[0].tolist()
        for at in self._order:
            error, row = None, None
            try:
                row = detached(self._rows([at])[0])
            except Exception as e:
                error = e
            yield Record(keys[at], row, times[at]), error

    def encoded(self, *, whole_window_keys: bool) -> tuple[list[bytes | None], list[bytes | None]]:
        """Keys and values, as `encode_json` makes them; there are no windows."""
        # JSON has no line break inside, so the lines are the values.
        return self.source_keys(), list(_encode_lines(self._rows(self._order)).split(b"\n")[:-1])

    def source_keys(self) -> list[bytes | None]:
        """Each row's record key."""
        return [self.changed.keys[at] for at in self._order]

    def timestamps(self) -> list[int]:
        """Each row's event time in ms."""
        times: list[int] = self.changed.columns[0][self._order].tolist()
        return times

    def _rows(self, places: Sequence[int]) -> list[dict[str, Any]]:
        results = self.columns.results([column[places] for column in self.changed.columns])
        keys = map(key_in_row, self.keys_of([self.changed.keys[at] for at in places]))
        names = ("key", *self.names[1:])
        return [dict(zip(names, row, strict=True)) for row in zip(keys, *results[1:], strict=True)]
