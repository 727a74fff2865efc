"""Decodes states of many windows into columns, from the bytes of their changelog entries."""

from __future__ import annotations

from typing import Any

import numpy as np

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.changelog import reader_kernels as k
from penstock.shared.streams.changelog.state_codec import StateCodec


def packed_columns(codec: StateCodec, states: PackedBytes) -> list[Any]:
    """Return the columns of states in declared order: arrays of numbers, and PackedBytes that share the states' buffer.

    Raises CorruptRecord for the first invalid state.
    """
    count = len(states)
    fixed = codec.fixed
    binary = codec.binary
    cells = np.empty((len(fixed), count), np.int64)
    begins, sizes = np.empty((2, len(binary), count), np.int64)
    bad = k.read_state_columns(*states.arrays, len(fixed), len(binary), cells, begins, sizes)
    # `unpack` raises the error with its reason.
    if bad < count:
        codec.unpack(states[bad] or b"")
    columns: list[Any] = [None] * len(codec.columns)
    for row, i in enumerate(fixed):
        columns[i] = cells[row] if codec.columns[i].type == "int64" else cells[row].view(np.float64)
    for row, i in enumerate(binary):
        columns[i] = PackedBytes(states.data, begins[row], sizes[row])
    return columns


def unpacked_columns(codec: StateCodec, states: PackedBytes) -> list[Any]:
    """Return the columns of states as `packed_columns` does, but with a list of bytes in place of each PackedBytes."""
    return [column.tolist() if isinstance(column, PackedBytes) else column for column in packed_columns(codec, states)]
