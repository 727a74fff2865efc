"""Compiled kernels that assemble many JSON objects from the encoded values of their columns.

msgspec encodes all values of a column in one call, one value on each line; its JSON contains no line breaks. For an
int64 array a kernel encodes them instead. Another kernel writes the values of each row between the names of the columns
(`interleaving`). Each object is byte for byte the same as if msgspec had encoded the row.

>>> keys, ns = json_texts(["ann", 'b"b']), json_texts([1, None])
>>> list(json_objects(["key", "n"], [keys, ns]))
[b'{"key":"ann","n":1}', b'{"key":"b\\\\"b","n":null}']
>>> list(json_objects(["key", "n"], [PackedBytes.of([b"ann", b"bob"]), ns], is_bare=True))
[b'{"key":"ann","n":1}', b'{"key":"bob","n":null}']
"""

# mypy: disallow-untyped-defs=False, disallow-untyped-calls=False

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.compiled import compiled
from penstock.shared.common.interleaving import interleaved
from penstock.shared.common.packed_bytes import PackedBytes

TEN = np.uint64(10)
DIGITS_MAX = 20
"""The characters of an int64, with its sign."""

_encode_lines = msgspec.json.Encoder().encode_lines


@compiled
def _cut_lines(data, starts, lengths):
    at = 0
    for i in range(len(starts)):
        end = at
        while data[end] != 10:
            end += 1
        starts[i] = at
        lengths[i] = end - at
        at = end + 1
    return at


@compiled
def _write_integers(numbers, out, starts, lengths):
    """Write each number right-aligned into its own DIGITS_MAX bytes of `out`; `starts` and `lengths` tell where it is.

    A number that equals the previous one is not written: it gets the start and length of the previous one.
    """
    for i in range(len(numbers)):
        if i and numbers[i] == numbers[i - 1]:
            starts[i] = starts[i - 1]
            lengths[i] = lengths[i - 1]
            continue
        end = DIGITS_MAX * (i + 1)
        at = end - 1
        rest = np.uint64(numbers[i]) if numbers[i] >= 0 else np.uint64(0) - np.uint64(numbers[i])
        while rest >= TEN:
            out[at] = np.uint64(48) + rest % TEN
            rest //= TEN
            at -= 1
        out[at] = np.uint64(48) + rest
        if numbers[i] < 0:
            at -= 1
            out[at] = 45
        starts[i] = at
        lengths[i] = end - at


@compiled
def _are_bare(data, starts, lengths):
    for i in range(len(starts)):
        for j in range(starts[i], starts[i] + lengths[i]):
            byte = data[j]
            if byte < 32 or byte > 126 or byte == 34 or byte == 92:
                return False
    return True


def are_bare(strings: PackedBytes) -> bool:
    """Return whether all strings are printable ASCII without a quote or a backslash. JSON never escapes these.

    >>> are_bare(PackedBytes.of([b"ann", b""])), are_bare(PackedBytes.of([b'"'])), are_bare(PackedBytes.of([b"\\xc3"]))
    (True, False, False)
    """
    return bool(_are_bare(strings.data, strings.offsets, strings.lengths))


def json_texts(values: Sequence[Any] | NDArray[Any]) -> PackedBytes:
    """Encode each value as JSON. Raises msgspec's error if a value cannot be encoded.

    >>> json_texts(np.array([0, -7, 1_700_000_000_000])).tolist()
    [b'0', b'-7', b'1700000000000']
    """
    starts = np.empty(len(values), np.int64)
    lengths = np.empty(len(values), np.int64)
    if isinstance(values, np.ndarray) and values.dtype == np.int64:
        written = np.empty(DIGITS_MAX * len(values), np.uint8)
        _write_integers(values, written, starts, lengths)
        return PackedBytes(written, starts, lengths)
    data = np.frombuffer(_encode_lines(values.tolist() if isinstance(values, np.ndarray) else values), np.uint8)
    if _cut_lines(data, starts, lengths) < len(data):
        # A user's own JSON (msgspec.Raw) contains line breaks.
        return PackedBytes.of(list(map(msgspec.json.encode, values)))
    return PackedBytes(data, starts, lengths)


def json_key_texts(keys: PackedBytes, keys_of: Callable[[PackedBytes], Sequence[Any]]) -> tuple[PackedBytes, bool]:
    """Return record keys as JSON, and whether all of them lack their quotes. `keys_of` decodes raw keys.

    If the keys are text and `are_bare` is true of them, they are returned as they are, without quotes. Otherwise each
    key is complete JSON.
    """
    named = keys_of(keys[:1])
    if named and isinstance(named[0], str) and are_bare(keys):
        return keys, True
    return json_texts(keys_of(keys)), False


def json_objects(names: Sequence[str], columns: Sequence[PackedBytes], *, is_bare: bool = False) -> PackedBytes:
    """Return one JSON object for each row. If `is_bare`, the first column has strings whose quotes must be added."""
    opening = [b"%s%s:" % (b"," if i else b"{", msgspec.json.encode(name)) for i, name in enumerate(names)]
    parts = [*opening, b"}"]
    if is_bare:
        parts[0] += b'"'
        parts[1] = b'"' + parts[1]
    return interleaved(parts, columns)


def compile_json_rows() -> None:
    """Compile the kernels that assemble rows of JSON, or load them from numba's cache."""
    json_objects(["key", "start"], [json_texts([1]), json_texts(np.array([1]))])
    are_bare(PackedBytes.of([b"a"]))
