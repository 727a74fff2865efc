"""Byte strings as offsets and lengths in one buffer. A Python object is made only for a string that is accessed.

An iteration accesses all strings at once.

>>> packed = PackedBytes.of([b"ann", None, b"", b"bob"])
>>> packed.offsets.tolist(), packed.lengths.tolist()
([0, 3, 3, 3], [3, -1, 0, 3])
>>> packed[0], packed[1], list(packed[2:]), packed == [b"ann", None, b"", b"bob"]
(b'ann', None, [b'', b'bob'], True)
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

T = TypeVar("T", bound=np.generic)

NULL = -1
"""The length of a null; an empty string has length 0."""

SPARSE = 16
"""If the strings span more than about this many bytes of the buffer for each of their bytes, each is copied alone."""


class PackedBytes(Sequence[bytes | None]):
    """A sequence of bytes and nulls: string i is `data[offsets[i]:offsets[i] + lengths[i]]`, a null has length -1.

    `data` is a uint8 array; `offsets` and `lengths` are int64 arrays with one element for each string. All are
    contiguous and read-only. Strings may overlap and be in any order. Every slice keeps the whole buffer in memory.
    """

    __slots__ = ("data", "lengths", "offsets")

    def __init__(self, data: NDArray[np.uint8], offsets: NDArray[np.int64], lengths: NDArray[np.int64]) -> None:
        self.data = read_only(data, np.uint8)
        self.offsets = read_only(offsets, np.int64)
        self.lengths = read_only(lengths, np.int64)

    @classmethod
    def of(cls, strings: Sequence[bytes | None], lengths: NDArray[np.int64] | None = None) -> PackedBytes:
        """The strings in one buffer. Raises TypeError if one is neither bytes-like nor None.

        `lengths` is the result of `lengths_of`, if the caller has it.
        """
        if isinstance(strings, PackedBytes):
            return strings
        if not strings:
            return _NO_STRINGS
        if lengths is None:
            lengths = lengths_of(strings)
        sizes = np.maximum(lengths, 0)
        ends = np.cumsum(sizes)
        try:
            data = b"".join(strings)  # type: ignore[arg-type]  # nulls are rare, so the error finds them
        except TypeError:
            data = b"".join([string for string in strings if string is not None])
        if len(data) != ends[-1]:
            raise TypeError("a memoryview whose items are not single bytes is not a byte string")
        return cls(np.frombuffer(data, np.uint8), ends - sizes, lengths)

    @classmethod
    def of_width(cls, data: NDArray[np.uint8], width: int) -> PackedBytes:
        """Strings of one width that fill the buffer one after the other.

        >>> list(PackedBytes.of_width(np.frombuffer(b"aabbcc", np.uint8), 2))
        [b'aa', b'bb', b'cc']
        """
        offsets = np.arange(0, len(data), width, dtype=np.int64)
        return cls(data, offsets, np.full(len(offsets), width, np.int64))

    @classmethod
    def joined(cls, parts: Sequence[PackedBytes]) -> PackedBytes:
        """The strings of all parts, one after the other.

        >>> list(PackedBytes.joined([PackedBytes.of([b"a", None]), PackedBytes.of([b"bc"])]))
        [b'a', None, b'bc']
        """
        if len(parts) == 1:
            return parts[0]
        if not parts:
            return cls.of([])
        before = np.cumsum([0, *(len(part.data) for part in parts[:-1])])
        offsets = np.concatenate([part.offsets + at for part, at in zip(parts, before.tolist(), strict=True)])
        data = np.concatenate([part.data for part in parts])
        return cls(data, offsets, np.concatenate([part.lengths for part in parts]))

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> bytes | None: ...

    @overload
    def __getitem__(self, index: slice) -> PackedBytes: ...

    def __getitem__(self, index: int | slice) -> bytes | PackedBytes | None:
        if isinstance(index, slice):
            return PackedBytes(self.data, self.offsets[index], self.lengths[index])
        at = int(self.offsets[index])
        length = int(self.lengths[index])
        return None if length < 0 else self.data[at : at + length].tobytes()

    @property
    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
        """Buffer, offsets and lengths, as kernels take them."""
        return self.data, self.offsets, self.lengths

    def at(self, indexes: NDArray[Any]) -> PackedBytes:
        """The strings at these indexes, given as numbers or as a mask."""
        return PackedBytes(self.data, self.offsets[indexes], self.lengths[indexes])

    def tolist(self) -> list[Any]:
        """The strings as Python objects."""
        if not len(self.lengths):
            return []
        ends = self.offsets + np.maximum(self.lengths, 0)
        low = int(self.offsets.min())
        high = int(ends.max())
        starts = (self.offsets - low).tolist()
        stops = (ends - low).tolist()
        if high - low > SPARSE * (self.sizes().sum() + len(self)):
            view = self.data.data[low:high]
            strings = [bytes(view[a:b]) for a, b in zip(starts, stops, strict=True)]
        else:
            copied = self.data[low:high].tobytes()
            strings = [copied[a:b] for a, b in zip(starts, stops, strict=True)]
        if self.has_null:
            for index in np.flatnonzero(self.lengths < 0).tolist():
                strings[index] = None  # type: ignore[call-overload]
        return strings

    def __iter__(self) -> Iterator[bytes | None]:
        return iter(self.tolist())

    def __contains__(self, string: object) -> bool:
        return self.has_null if string is None else string in self.tolist()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence) or isinstance(other, str | bytes):
            return NotImplemented
        return self.tolist() == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"PackedBytes.of({self.tolist()})"

    @property
    def has_null(self) -> bool:
        """Whether one of the strings is a null."""
        return bool((self.lengths < 0).any())

    def sizes(self) -> NDArray[np.int64]:
        """The number of bytes of each string, 0 for a null."""
        return np.maximum(self.lengths, 0)


def lengths_of(strings: Sequence[bytes | None]) -> NDArray[np.int64]:
    """The length of each string, NULL for a null. Raises TypeError if one has no length.

    >>> lengths_of([b"ann", None]).tolist()
    [3, -1]
    """
    # Up to about 10,000 strings, this is faster than np.fromiter.
    packed = struct.Struct(f"{len(strings)}q").pack
    try:
        lengths = packed(*map(len, strings))  # type: ignore[arg-type]
    except TypeError:
        lengths = packed(*[NULL if string is None else len(string) for string in strings])
    return np.frombuffer(lengths, np.int64)


def read_only(array: NDArray[Any], of: type[T]) -> NDArray[T]:
    """The array in the form that kernels need: with elements of the type `of`, contiguous and read-only."""
    flags = array.flags
    if not flags.writeable and flags.c_contiguous and array.dtype.type is of and array.dtype.isnative:
        return array
    view: NDArray[T] = np.ascontiguousarray(array, of).view()
    view.flags.writeable = False
    return view


_NO_STRINGS = PackedBytes(np.empty(0, np.uint8), np.empty(0, np.int64), np.empty(0, np.int64))
