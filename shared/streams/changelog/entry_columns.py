"""Changelog entries before they are written: a column of keys and one of values, readable as pairs.

>>> entries = EntryColumns.of([(b"ann", b"1"), (None, b"2")])
>>> entries[1], list(entries[:1]), entries == [(b"ann", b"1"), (None, b"2")]
((None, b'2'), [(b'ann', b'1')], True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, overload

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.packed_bytes import PackedBytes

KeyAndValue = tuple[bytes | None, bytes]
"""A key and a value."""


def pack_values(head: bytes, fields: Sequence[NDArray[Any]]) -> PackedBytes:
    """Return values of one size, each with `head` and its row of every field, big-endian.

    >>> pack_values(b"L", [np.array([1, 2], np.uint16), np.array([[3, 4], [5, 6]], np.uint8)]).tolist()
    [b'L\\x00\\x01\\x03\\x04', b'L\\x00\\x02\\x05\\x06']
    """
    types = [(f"f{i}", field.dtype.newbyteorder(">"), field.shape[1:]) for i, field in enumerate(fields)]
    packed = np.zeros(len(fields[0]), np.dtype([("head", f"V{len(head)}"), *types]))
    packed["head"] = np.void(head)
    for (name, _, _), field in zip(types, fields, strict=True):
        packed[name] = field
    return PackedBytes.of_width(np.frombuffer(packed.tobytes(), np.uint8), packed.dtype.itemsize)


class EntryColumns(Sequence[KeyAndValue]):
    """Changelog records in order: `keys` and `values` of equal length; no value is null."""

    __slots__ = ("keys", "values")

    def __init__(self, keys: PackedBytes, values: PackedBytes) -> None:
        self.keys = keys
        self.values = values

    @classmethod
    def of(cls, entries: Sequence[KeyAndValue]) -> EntryColumns:
        """Return the same changelog entries in columns."""
        return cls(PackedBytes.of([key for key, _ in entries]), PackedBytes.of([value for _, value in entries]))

    @classmethod
    def joined(cls, parts: Sequence[EntryColumns]) -> EntryColumns:
        """Return all these changelog entries, in order."""
        parts = [part for part in parts if len(part)]
        return cls(*(PackedBytes.joined([getattr(part, name) for part in parts]) for name in ("keys", "values")))

    def __len__(self) -> int:
        return len(self.values)

    @overload
    def __getitem__(self, index: int) -> KeyAndValue: ...

    @overload
    def __getitem__(self, index: slice) -> EntryColumns: ...

    def __getitem__(self, index: int | slice) -> KeyAndValue | EntryColumns:
        if isinstance(index, slice):
            return EntryColumns(self.keys[index], self.values[index])
        value = self.values[index]
        assert value is not None
        return self.keys[index], value

    def __iter__(self) -> Iterator[KeyAndValue]:
        return zip(self.keys.tolist(), self.values.tolist(), strict=True)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"EntryColumns.of({list(self)})"
