"""Results of many windows: as records for the next node, or encoded at once for a sink.

Results that `json_rows` encodes at once are byte for byte the same as those of `result_encoders`. Rows of an
aggregation without windows are results without bounds.

A commit forwards the results of updates in order of timestamps, so that none of them makes another one late for a
window downstream. A retraction is forwarded before the result that replaces it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.packed_bytes import NULL, PackedBytes
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.aggregations.latest import LATEST
from penstock.shared.streams.record import Record
from penstock.shared.streams.user_code import user_copy
from penstock.shared.streams.window_result import WindowKey, WindowResult
from penstock.shared.streams.windows.aggregate_store import key_in_aggregate_row
from penstock.shared.streams.windows.json_rows import json_key_texts, json_objects, json_texts
from penstock.shared.streams.windows.state_columns import Column, StateColumns
from penstock.shared.streams.windows.window_columns import WindowColumns

BOUNDS = ("key", "start", "end")


@dataclass(slots=True)
class ResultBatch:
    """Results of a store's windows, or of its rows if it has no windows."""

    store: str
    names: tuple[str, ...]
    """The names of the aggregations."""
    columns: StateColumns
    keys_of: Callable[[PackedBytes], Sequence[Any]]
    windows: WindowColumns
    """The windows, whose order is that of the results unless `by_time` is set."""
    is_retracted: NDArray[np.bool_] | None = None
    """Marks the results that retract a window; None if there is no such result."""
    by_time: bool = False
    """Whether results are sorted by timestamp, then retractions before other results, then by start."""
    has_bounds: bool = True
    """False if the results are rows of an aggregation without windows. None of these is a retraction."""
    _order: Int64Array = field(init=False)
    """The indexes of all windows in output order."""

    def __post_init__(self) -> None:
        self._order = np.arange(len(self.windows))
        if self.by_time:
            kind = np.ones(len(self)) if self.is_retracted is None else ~self.is_retracted
            # np.lexsort sorts by the last key first: time, then retractions before results, then start.
            self._order = np.lexsort((self.windows.starts, kind, self._result_timestamps()))

    def __len__(self) -> int:
        return len(self.windows)

    def records(self) -> Iterator[tuple[Record, Exception | None]]:
        """Yield each result as a record, with the error if it cannot be made. Records share nothing with the states."""
        windows = self.windows
        retracted = [False] * len(self) if self.is_retracted is None else self.is_retracted.tolist()
        keys = self.keys_of(windows.keys)
        times = self._result_timestamps().tolist()
        starts = windows.starts.tolist()
        ends = windows.ends.tolist()
        results = self._results_or_none()
        for at in self._order.tolist():
            error = None
            result = cast(Any, None)
            if not retracted[at]:
                try:
                    own = self._results_of_window(at) if results is None else [column[at] for column in results]
                    named = dict(zip(self.names[self._has_latest_record :], own, strict=True))
                    if self.has_bounds:
                        result = WindowResult(keys[at], starts[at], ends[at], named)
                    else:
                        result = {"key": key_in_aggregate_row(keys[at]), **named}
                except Exception as e:
                    error = e
            key = WindowKey(keys[at], starts[at], ends[at]) if self.has_bounds else keys[at]
            yield Record(key, result, times[at]), error

    def _results_or_none(self) -> list[list[Any]] | None:
        """Return each aggregation's results; None if one of them cannot be made, or if a window is retracted."""
        if self.is_retracted is not None and self.is_retracted.any():
            return None
        try:
            return self._copy_results(self.windows.columns)
        except Exception:
            return None

    def _results_of_window(self, at: int) -> list[Any]:
        return [own[0] for own in self._copy_results([column[at : at + 1] for column in self.windows.columns])]

    def _copy_results(self, columns: Sequence[Column]) -> list[list[Any]]:
        """Return the results of all aggregations but Latest, as copies that share nothing with the states."""
        results = zip(self.columns.aggregations, self.columns.results(columns), strict=True)
        copied = [list(map(user_copy, own)) if one.result_type == "json" else own for one, own in results]
        return copied[self._has_latest_record :]

    def encoded(self, *, whole_window_keys: bool) -> tuple[PackedBytes, PackedBytes]:
        """Return keys and values encoded as by `encode_updates` with `whole_window_keys`, else as by `encode_json`.

        Raises encoding errors.
        """
        order = self._order
        present = order if self.is_retracted is None else order[~self.is_retracted[order]]
        keys, is_bare = json_key_texts(self.windows.keys, self.keys_of)
        bounds = [json_texts(column) for column in (self.windows.starts, self.windows.ends)] if self.has_bounds else []
        results = self.columns.result_columns([column[present] for column in self.windows.columns])[
            self._has_latest_record :
        ]
        columns = [keys.at(present), *(column.at(present) for column in bounds), *map(json_texts, results)]
        values = json_objects(
            [*BOUNDS[: 1 + len(bounds)], *self.names[self._has_latest_record :]], columns, is_bare=is_bare
        )
        if len(present) < len(order):
            offsets = np.zeros(len(order), np.int64)
            lengths = np.full(len(order), NULL, np.int64)
            is_present = ~self.is_retracted[order]  # type: ignore[index]  # not None, or all would be present
            offsets[is_present] = values.offsets
            lengths[is_present] = values.lengths
            values = PackedBytes(values.data, offsets, lengths)
        if not (whole_window_keys and self.has_bounds):
            return self.source_keys(), values
        return json_objects(BOUNDS, [keys.at(order), *(column.at(order) for column in bounds)], is_bare=is_bare), values

    def source_keys(self) -> PackedBytes:
        """Return each window's record key."""
        return self.windows.keys.at(self._order)

    def timestamps(self) -> Int64Array:
        """Return each result's timestamp in ms: a session's end, otherwise the highest timestamp of its records."""
        return np.asarray(self._result_timestamps()[self._order])

    def _result_timestamps(self) -> Int64Array:
        if not self._has_latest_record:
            return self.windows.ends
        latest = self.windows.columns[0]
        # A retracted window has no states any more, so it has no latest record.
        return latest if self.is_retracted is None else np.where(self.is_retracted, self.windows.ends, latest)

    @property
    def _has_latest_record(self) -> bool:
        return self.names[0] == LATEST
