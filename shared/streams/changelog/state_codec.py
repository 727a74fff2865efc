"""Packs the column values of states into the bytes of changelog entries, and unpacks them."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.streams.aggregations.aggregation import Column, ColumnValue
from penstock.shared.streams.changelog import reader_kernels as k
from penstock.shared.streams.changelog.format import LENGTH


class StateCodec:
    """Packs and unpacks the states of one store."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        self._fixed = [i for i, c in enumerate(columns) if c.type != "binary"]
        self._binary = [i for i, c in enumerate(columns) if c.type == "binary"]
        self._struct = struct.Struct(">" + "".join("q" if columns[i].type == "int64" else "d" for i in self._fixed))

    def pack(self, values: Sequence[ColumnValue]) -> bytes:
        """Return the state's bytes from its column values in declared order."""
        if not self._binary:
            return self._struct.pack(*values)
        parts = [self._struct.pack(*(values[i] for i in self._fixed))]
        for i in self._binary:
            blob = values[i]
            assert isinstance(blob, bytes)
            parts += (LENGTH.pack(len(blob)), blob)
        return b"".join(parts)

    def unpack(self, data: bytes) -> list[ColumnValue]:
        """Return the column values of a state. Raises CorruptRecord if it is invalid."""
        try:
            values: list[ColumnValue] = [0] * len(self.columns)
            for i, value in zip(self._fixed, self._struct.unpack_from(data), strict=True):
                values[i] = value
            at = self._struct.size
            for i in self._binary:
                (length,) = LENGTH.unpack_from(data, at)
                at += LENGTH.size
                values[i] = data[at : at + length]
                at += length
        except struct.error as e:
            raise CorruptRecord(f"a changelog state of {len(data)} bytes is too short: {e}") from None
        if at != len(data):
            raise CorruptRecord(f"a changelog state has {len(data)} bytes where {at} were expected")
        return values

    def packed_columns(self, states: PackedBytes) -> list[Any]:
        """Return the columns of many states in declared order: arrays of numbers, and PackedBytes that share the
        states' buffer.

        Raises CorruptRecord for the first invalid state.
        """
        count = len(states)
        cells = np.empty((len(self._fixed), count), np.int64)
        begins, sizes = np.empty((2, len(self._binary), count), np.int64)
        bad = k.read_state_columns(*states.arrays, len(self._fixed), len(self._binary), cells, begins, sizes)
        # `unpack` raises the error with its reason.
        if bad < count:
            self.unpack(states[bad] or b"")
        columns: list[Any] = [None] * len(self.columns)
        for row, i in enumerate(self._fixed):
            columns[i] = cells[row] if self.columns[i].type == "int64" else cells[row].view(np.float64)
        for row, i in enumerate(self._binary):
            columns[i] = PackedBytes(states.data, begins[row], sizes[row])
        return columns

    def unpacked_columns(self, states: PackedBytes) -> list[Any]:
        """Return the columns as `packed_columns` does, but with a list of bytes in place of each PackedBytes."""
        columns = self.packed_columns(states)
        return [column.tolist() if isinstance(column, PackedBytes) else column for column in columns]
