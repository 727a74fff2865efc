"""Records that missed a window, as changelog entries. An entry has the starts of the windows that the record missed,
and the state that a window of this record alone would have, if that state is valid and fits.

The records are kept until the next commit: late ones, and those that missed only some of their hopping windows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.changelog.entry_columns import EntryColumns, pack_values
from penstock.shared.streams.changelog.format import ENVELOPE, FORMAT_VERSION, LATE, LENGTH, encode_late
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.windows.object_states import ChangelogColumn
from penstock.shared.streams.windows.size_limits import NUMBER_BYTES

NO_OFFSET = -1


@dataclass(frozen=True, slots=True)
class LateRows:
    """The records of one store that missed windows, in order, as columns."""

    store: str
    keys: PackedBytes
    """The record keys."""
    times: Int64Array
    """The timestamps in ms."""
    offsets: Int64Array
    """The source offsets; NO_OFFSET if a record has no source record."""
    first_missed: Int64Array
    """The start of the first window that each record missed; more missed windows follow every `advance_ms`."""
    missed: Int64Array
    """The number of windows that each record missed."""
    advance_ms: int
    states: Sequence[ChangelogColumn]
    """The state columns, with the state of each record alone."""
    has_state: NDArray[np.bool_]
    """Marks the records that have a valid state."""

    def __len__(self) -> int:
        return len(self.keys)

    def fitting(self, bytes_max: int) -> LateRows:
        """Return the same records, without the states that make an entry larger than this."""
        sizes = self.keys.sizes() + NUMBER_BYTES * (self.missed + 3)
        for column in self.states:
            own = NUMBER_BYTES if isinstance(column, np.ndarray) else LENGTH.size + np.array([*map(len, column)])
            sizes = sizes + own
        fits = sizes <= bytes_max
        if fits.all():
            return self
        return replace(self, has_state=self.has_state & fits)


def encode_late_rows(rows: LateRows, codec: StateCodec, number: int, epoch: int, commit: int) -> EntryColumns:
    """Return the changelog entries of records that missed windows, in order."""
    if all(isinstance(column, np.ndarray) for column in rows.states) and rows.has_state.all():
        head = ENVELOPE.pack(FORMAT_VERSION, LATE, number, epoch, commit)
        # Rows that missed the same number of windows have entries of one size, which are packed in one array. The last
        # line puts them back in order.
        order = np.argsort(rows.missed, kind="stable")
        counts, firsts = np.unique(rows.missed[order], return_index=True)
        groups = zip(counts.tolist(), np.split(order, firsts[1:]), strict=True)
        grouped = PackedBytes.joined([_pack_late_rows(rows, indexes, count, head) for count, indexes in groups])
        return EntryColumns(rows.keys, grouped.at(np.argsort(order)))
    columns = [column.tolist() if isinstance(column, np.ndarray) else column for column in rows.states]
    states = list(zip(*columns, strict=True)) or [()] * len(rows)
    values = []
    for i, state in enumerate(states):
        first = int(rows.first_missed[i])
        count = int(rows.missed[i])
        missed = range(first, first + count * rows.advance_ms, rows.advance_ms) if count > 1 else [first]
        packed = codec.pack(state) if rows.has_state[i] else None
        values.append(encode_late(number, epoch, commit, int(rows.times[i]), int(rows.offsets[i]), missed, packed))
    return EntryColumns(rows.keys, PackedBytes.of(values))


def _pack_late_rows(rows: LateRows, indexes: Int64Array, count: int, head: bytes) -> PackedBytes:
    """Return the values of rows that missed the same number of windows, which have equal lengths."""
    counts = np.full(len(indexes), count, np.uint32)
    missed = rows.first_missed[indexes, None] + np.arange(count) * rows.advance_ms
    has_state = np.ones(len(indexes), np.uint8)
    states = [np.asarray(column)[indexes] for column in rows.states]
    return pack_values(head, [rows.times[indexes], rows.offsets[indexes], counts, missed, has_state, *states])
