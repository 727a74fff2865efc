"""Upper bounds for the size of the states of each key's windows in a changelog entry.

A record is rejected if it would make a state too large for a changelog entry. To encode the state with every record
would be slow for large states. So each key has an upper bound, which grows by the size of each record. Only if the
bound exceeds the limit, the key's states are encoded, and the bound is set to their size. If the next records might
still exceed the limit, they are processed one by one, and each state is measured.

A record is added once to each of its windows. So after a batch no window of a key is larger than its largest window
before, plus all records of the batch. Sessions may also be merged with each other. So for sessions the bound is the sum
of all sessions of the key, plus the records.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from penstock.shared.common.records import Int64Array
from penstock.shared.streams.windows.key_index import Int32Array
from penstock.shared.streams.windows.size_limits import LENGTH_BYTES, NUMBER_BYTES
from penstock.shared.streams.windows.state_columns import StateColumns
from penstock.shared.streams.windows.window_table import WindowTable

UNKNOWN = 2**62
"""The bound of a key whose windows were restored; they are measured with its next record."""


class StateSizeBounds:
    """The bounds of one table's keys, in bytes without the key."""

    def __init__(self, table: WindowTable, columns: StateColumns) -> None:
        self._table = table
        self._growing = [states for states in columns.objects if states.bytes_max is None]
        self._rows_add_up = table.rule.kind == "session"
        kinds = [column.type for one in columns.aggregations for column in one.state_columns]
        self._fixed = sum(LENGTH_BYTES if kind == "binary" else NUMBER_BYTES for kind in kinds)
        self._fixed += sum(states.bytes_max or 0 for states in columns.objects)
        self._objects = columns.objects
        self._bounds: Int64Array = np.zeros(0, np.int64)

    def __repr__(self) -> str:
        return f"<StateSizeBounds of {len(self._bounds)} keys, {len(self._growing)} aggregations that grow>"

    def forget(self, codes: Int32Array) -> None:
        """Reset the bounds of keys whose windows were restored."""
        self._see_keys()
        self._bounds[codes] = UNKNOWN

    def in_doubt(self, codes: Int32Array, inputs: Sequence[Sequence[object]], bytes_max: int) -> list[int]:
        """Return the indexes of all records whose key may, with its state, take more than `bytes_max` after the batch.

        `inputs` has what the records add to each aggregation whose states are objects. A negative code means a skipped
        record. Raises the error of a value that cannot be encoded.
        """
        # All states have a limited size, and fit.
        if not self._growing and self._fixed + self._longest_key_states(codes) <= bytes_max:
            return []
        growth = np.zeros(len(codes), np.int64)
        for states, own in zip(self._objects, inputs, strict=True):
            if states.bytes_max is None:
                growth += states.growth(own[: len(codes)])
        self._see_keys()
        has_key = codes >= 0
        keys, key_indexes = np.unique(codes[has_key], return_inverse=True)
        grown = np.bincount(key_indexes, growth[has_key], len(keys)).astype(np.int64)
        free_bytes = bytes_max - self._fixed - self._table.keys.sizes[keys]
        bounds = self._bounds[keys] + grown
        # The bound may be far above the real size, for example after windows were closed. Measure before a batch is
        # cut.
        for at in np.flatnonzero(bounds > free_bytes).tolist():
            bounds[at] = self._measure_key_states(int(keys[at])) + grown[at]
        self._bounds[keys] = bounds
        doubtful = keys[bounds > free_bytes]
        return np.flatnonzero(np.isin(codes, doubtful)).tolist() if len(doubtful) else []

    def _measure_key_states(self, code: int) -> int:
        """Return the size of the key's growing states now: those of the largest window, or for sessions of all."""
        used_bytes = 0
        for row in self._table.rows_of(code):
            size = sum(states.encoded_bytes(row) for states in self._growing)
            used_bytes = used_bytes + size if self._rows_add_up else max(used_bytes, size)
        return used_bytes

    def _longest_key_states(self, codes: Int32Array) -> int:
        known = codes[codes >= 0]
        return int(self._table.keys.sizes[known].max()) if len(known) else 0

    def _see_keys(self) -> None:
        missing = self._table.keys.capacity - len(self._bounds)
        if missing > 0:
            self._bounds = np.concatenate((self._bounds, np.zeros(missing, np.int64)))
