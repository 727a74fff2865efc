"""Results of many windows on their way out: as records for whatever node comes next, or encoded at once for a sink.

Encoded, they are byte for byte what `result_encoders` makes of each: one msgspec struct a window, all written by one
call as lines. JSON has no line break inside, so the lines are the values.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import msgspec

from shared.streams.columnar import StateColumns
from shared.streams.latest import LATEST
from shared.streams.processor import Record
from shared.streams.state.session_changes import Windows
from shared.streams.windowed_aggregate import WindowKey, WindowResult

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
    """Results of a store's windows, after those that are retracted; as a sequence, the keys of all of them.

    `names` are those of the aggregations, `retracted` keys, starts and ends.
    """

    store: str
    names: tuple[str, ...]
    columns: StateColumns
    keys_of: Callable[[Sequence[bytes]], Sequence[str | bytes]]
    windows: Windows
    retracted: tuple[list[bytes], list[int], list[int]] = field(default_factory=lambda: ([], [], []))

    def __len__(self) -> int:
        return len(self.retracted[0]) + len(self.windows)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]  # of one place only
        gone = len(self.retracted[0])
        if index < gone:
            keys, starts, ends = self.retracted
            key, start, end = keys[index], starts[index], ends[index]
        else:
            windows, at = self.windows, index - gone
            key, start, end = windows.keys[at], int(windows.starts[at]), int(windows.ends[at])
        return WindowKey(self.keys_of([key])[0], start, end)

    def records(self) -> Iterator[Record]:
        """The results as records, one by one."""
        gone = self.keys_of(self.retracted[0])
        for key, start, end in zip(gone, *self.retracted[1:], strict=True):
            yield Record(WindowKey(key, start, end), None, end)
        windows = self.windows
        bounds = zip(self.keys_of(windows.keys), windows.starts.tolist(), windows.ends.tolist(), strict=True)
        times = self.timestamps()[len(self.retracted[0]) :]
        for (key, start, end), time, results in zip(bounds, times, zip(*self._results(), strict=True), strict=True):
            named = dict(zip(self._shown, results, strict=True))
            yield Record(WindowKey(key, start, end), WindowResult(key, start, end, named), time)

    def encoded(self, *, whole_window_keys: bool) -> tuple[list[bytes | None], list[bytes | None]]:
        """Keys and values, as `encode_updates` makes them, or else `encode_json`."""
        windows = self.windows
        named = self.keys_of(windows.keys)
        starts, ends = windows.starts.tolist(), windows.ends.tolist()
        values: list[bytes | None] = [None] * len(self.retracted[0])
        values += _lines(map(_row_type(self._shown), named, starts, ends, *self._results()))
        if not whole_window_keys:
            return [*self.retracted[0], *windows.keys], values
        gone = map(_row_type(()), self.keys_of(self.retracted[0]), *self.retracted[1:])
        return [*_lines(gone), *_lines(map(_row_type(()), named, starts, ends))], values

    def timestamps(self) -> list[int]:
        """Each result's event time in ms: that of the window's latest record where it is kept, or else its end."""
        times = self.windows.columns[0] if self._has_latest else self.windows.ends
        return [*self.retracted[2], *times.tolist()]

    @property
    def _has_latest(self) -> bool:
        return self.names[0] == LATEST

    @property
    def _shown(self) -> tuple[str, ...]:
        return self.names[self._has_latest :]

    def _results(self) -> list[list[Any]]:
        return self.columns.results(self.windows.columns)[self._has_latest :]
