"""Changelog entries before they are written: a column of keys and one of values, readable as pairs.

>>> entries = EntryColumns.of([(b"ann", b"1"), (None, b"2")])
>>> entries[1], list(entries[:1]), entries == [(b"ann", b"1"), (None, b"2")]
((None, b'2'), [(b'ann', b'1')], True)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import overload

from penstock.shared.common.packed_bytes import PackedBytes

KeyAndValue = tuple[bytes | None, bytes]
"""A key and a value."""


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
