"""Packs the column values of one state into the bytes of a changelog entry, and unpacks them.

`state_decoding` unpacks the states of many windows at once.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from penstock.shared.common.errors import CorruptRecord
from penstock.shared.streams.aggregations.aggregation import Column, ColumnValue
from penstock.shared.streams.changelog.format import LENGTH


class StateCodec:
    """Packs and unpacks the states of one store."""

    def __init__(self, columns: Sequence[Column]) -> None:
        self.columns = tuple(columns)
        fixed = [i for i, c in enumerate(columns) if c.type != "binary"]
        self.binary = [i for i, c in enumerate(columns) if c.type == "binary"]
        self.fixed = fixed
        self._struct = struct.Struct(">" + "".join("q" if columns[i].type == "int64" else "d" for i in fixed))
        self._all_fixed = not self.binary

    def pack(self, values: Sequence[ColumnValue]) -> bytes:
        """Return the state's bytes from its column values in declared order."""
        if self._all_fixed:
            return self._struct.pack(*values)
        parts = [self._struct.pack(*(values[i] for i in self.fixed))]
        for i in self.binary:
            blob = values[i]
            assert isinstance(blob, bytes)
            parts += (LENGTH.pack(len(blob)), blob)
        return b"".join(parts)

    def unpack(self, data: bytes) -> list[ColumnValue]:
        """Return the column values of a state. Raises CorruptRecord if it is invalid."""
        try:
            values: list[ColumnValue] = [0] * len(self.columns)
            for i, value in zip(self.fixed, self._struct.unpack_from(data), strict=True):
                values[i] = value
            at = self._struct.size
            for i in self.binary:
                (length,) = LENGTH.unpack_from(data, at)
                at += LENGTH.size
                values[i] = data[at : at + length]
                at += length
        except struct.error as e:
            raise CorruptRecord(f"a changelog state of {len(data)} bytes is too short: {e}") from None
        if at != len(data):
            raise CorruptRecord(f"a changelog state has {len(data)} bytes where {at} were expected")
        return values
