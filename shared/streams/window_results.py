"""Results of many windows on their way out: as records for whatever node comes next, or encoded at once for a sink.

Encoded, they are byte for byte what `result_encoders` makes of each: one msgspec struct a window, all written by one
call as lines. JSON has no line break inside, so the lines are the values.

What a commit hands on is many windows at once and goes in order of time: whatever window is downstream, of no order
less comes too late there. A retraction comes before what replaces it, which is never older.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec
import numpy as np

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.columnar import StateColumns
from penstock.shared.streams.latest import LATEST
from penstock.shared.streams.processor import Record
from penstock.shared.streams.state.column_merge import sorted_order
from penstock.shared.streams.state.session_changes import Windows
from penstock.shared.streams.windowed_aggregate import WindowKey, WindowResult

_encode_lines = msgspec.json.Encoder().encode_lines


@lru_cache(maxsize=64)
def _row_type(names: tuple[str, ...]) -> Callable[..., Any]:
    if not all(name.isidentifier() and not name.startswith("__") for name in names):
        return lambda *values: dict(zip(("key", "start", "end", *names), values, strict=True))
    return msgspec.defstruct("Row", ["key", "start", "end", *names], gc=False)


def _lines(rows: Iterator[Any]) -> list[bytes]:
    return _encode_lines(list(rows)).split(b"\n")[:-1]


@dataclass(slots=True)
class WindowResults(Sequence[WindowKey]):
    """Results of a store's windows, and those that are retracted; as a sequence, the keys of all of them.

    `names` are those of the aggregations, `retracted` keys, starts and ends. They go in order of the windows, or
    `by_time`, then by start.
    """

    store: str
    names: tuple[str, ...]
    columns: StateColumns
    keys_of: Callable[[Sequence[bytes]], Sequence[str | bytes]]
    windows: Windows
    retracted: tuple[list[bytes], list[int], list[int]] = field(default_factory=lambda: ([], [], []))
    by_time: bool = False
    _order: Int64Array = field(init=False)
    """The places of all in their order; those that are retracted are counted first."""

    def __post_init__(self) -> None:
        gone, count = len(self.retracted[0]), len(self)
        assert self.by_time or not gone
        self._order = np.arange(count)
        if self.by_time and count:
            starts = np.concatenate((np.array(self.retracted[1], np.int64), self.windows.starts))
            self._order = sorted_order(self._times(), (self._order >= gone).astype(np.int64), starts)

    def __len__(self) -> int:
        return len(self.retracted[0]) + len(self.windows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # of one place only
        at, gone = int(self._order[index]), len(self.retracted[0])
        if at < gone:
            keys, starts, ends = self.retracted
            key, start, end = keys[at], starts[at], ends[at]
        else:
            windows, at = self.windows, at - gone
            key, start, end = windows.keys[at], int(windows.starts[at]), int(windows.ends[at])
        return WindowKey(self.keys_of([key])[0], start, end)

    def records(self) -> Iterator[Record]:
        """The results as records, one by one."""
        (gone, gone_starts, gone_ends), windows = self.retracted, self.windows
        keys = [*self.keys_of(gone), *self.keys_of(windows.keys)]
        starts, ends = [*gone_starts, *windows.starts.tolist()], [*gone_ends, *windows.ends.tolist()]
        results, times = list(zip(*self._results(), strict=True)), self._times().tolist()
        for at in self._order.tolist():
            key, start, end = keys[at], starts[at], ends[at]
            result = None
            if at >= len(gone):
                named = dict(zip(self._shown, results[at - len(gone)], strict=True))
                result = WindowResult(key, start, end, named)
            yield Record(WindowKey(key, start, end), result, times[at])

    def encoded(self, *, whole_window_keys: bool) -> tuple[list[bytes | None], list[bytes | None]]:
        """Keys and values, as `encode_updates` makes them, or else `encode_json`."""
        windows = self.windows
        named = self.keys_of(windows.keys)
        starts, ends = windows.starts.tolist(), windows.ends.tolist()
        values: list[bytes | None] = [None] * len(self.retracted[0])
        values += _lines(map(_row_type(self._shown), named, starts, ends, *self._results()))
        if not whole_window_keys:
            return self.source_keys(), self._in_order(values)
        gone = map(_row_type(()), self.keys_of(self.retracted[0]), *self.retracted[1:])
        keys = [*_lines(gone), *_lines(map(_row_type(()), named, starts, ends))]
        return self._in_order(keys), self._in_order(values)

    def source_keys(self) -> list[bytes | None]:
        """Each window's record key."""
        return self._in_order([*self.retracted[0], *self.windows.keys])

    def timestamps(self) -> list[int]:
        """Each result's event time in ms: that of the window's latest record where it is kept, or else its end."""
        times: list[int] = self._times()[self._order].tolist()
        return times

    def _times(self) -> Int64Array:
        times = self.windows.columns[0] if self._has_latest else self.windows.ends
        return np.concatenate((np.array(self.retracted[2], np.int64), times))

    def _in_order(self, all_: Sequence[bytes | None]) -> list[bytes | None]:
        return list(map(all_.__getitem__, self._order.tolist())) if self.by_time else list(all_)

    @property
    def _has_latest(self) -> bool:
        return self.names[0] == LATEST

    @property
    def _shown(self) -> tuple[str, ...]:
        return self.names[self._has_latest :]

    def _results(self) -> list[list[Any]]:
        return self.columns.results(self.windows.columns)[self._has_latest :]
