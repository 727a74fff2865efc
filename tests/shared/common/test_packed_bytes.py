"""PackedBytes, a compact sequence of byte strings; copies of its strings, and rows joined from them."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.arrow_arrays import binary_array
from penstock.shared.common.byte_copies import copied
from penstock.shared.common.interleaving import interleaved
from penstock.shared.common.packed_bytes import SPARSE, PackedBytes

STRINGS = st.lists(st.none() | st.binary(max_size=20), max_size=30)


@given(STRINGS, st.data())
def test_packed_strings_behave_like_a_list(strings: list[bytes | None], data: st.DataObject) -> None:
    """Items, slices, selections, iteration, length, `in` and equality are those of the list."""
    packed = PackedBytes.of(strings)
    assert packed == strings
    assert list(packed) == strings
    assert len(packed) == len(strings)
    assert [packed[i] for i in range(len(strings))] == strings
    cut = data.draw(st.slices(len(strings)))
    assert packed[cut] == strings[cut]
    assert all(string in packed for string in strings)
    assert b"not there, and longer than any" not in packed
    assert (None in packed) == (None in strings)
    if strings:
        indices = data.draw(st.lists(st.integers(0, len(strings) - 1), max_size=10))
        assert packed.at(np.array(indices, np.int64)) == [strings[i] for i in indices]
    assert packed.sizes().tolist() == [len(string or b"") for string in strings]


@given(st.lists(STRINGS, max_size=5))
def test_joined_parts_follow_each_other(parts: list[list[bytes | None]]) -> None:
    """Joined parts with different buffers are the strings in order."""
    packed = [PackedBytes.of([b"x", *part])[1:] for part in parts]
    assert PackedBytes.joined(packed) == [string for part in parts for string in part]


def test_strings_far_apart_are_copied_one_by_one() -> None:
    """Strings that are far apart in the buffer are copied without the bytes between them."""
    data = np.frombuffer(b"ab" + bytes(SPARSE * 100) + b"cd", np.uint8)
    packed = PackedBytes(data, np.array([len(data) - 2, 0, 5]), np.array([2, 2, -1]))
    assert packed.tolist() == [b"cd", b"ab", None]


@pytest.mark.parametrize("wrong", [["text"], [1], [b"a", "text"]])
def test_invalid_items_are_a_type_error(wrong: list[object]) -> None:
    """An item that is neither bytes nor None is a TypeError."""
    with pytest.raises(TypeError):
        PackedBytes.of(wrong)  # type: ignore[arg-type]


def test_kernels_are_given_one_kind_of_array() -> None:
    """The arrays for kernels are contiguous, read-only and of one type."""
    stepped = PackedBytes(np.zeros(9, np.uint8), np.arange(8)[::2], np.ones(4, np.int32))  # type: ignore[arg-type]
    for array, of in zip(stepped.arrays, (np.uint8, np.int64, np.int64), strict=True):
        assert array.flags.c_contiguous
        assert not array.flags.writeable
        assert array.dtype == of


@given(st.lists(st.one_of(st.none(), st.binary(max_size=9))), st.data())
def test_a_copy_has_the_strings_and_nothing_else(strings: list[bytes | None], data: st.DataObject) -> None:
    """A copy contains the selected strings, also nulls and duplicates, and its buffer nothing else."""
    indices = data.draw(st.lists(st.integers(0, len(strings) - 1))) if strings else []
    some = copied(PackedBytes.of(strings).at(np.array(indices, np.int64)))
    assert list(some) == [strings[index] for index in indices]
    assert some.data.tobytes() == b"".join(string for string in some if string is not None)


texts = st.binary(max_size=20)


@given(st.data(), st.integers(1, 4), st.integers(0, 6))
def test_rows_alternate_raw_bytes_and_texts(data: st.DataObject, columns: int, rows: int) -> None:
    """A row consists of pieces and texts of any length in turns, also for slices of a buffer. A null is empty."""
    pieces = data.draw(st.lists(texts, min_size=columns + 1, max_size=columns + 1))
    of_rows = [data.draw(st.lists(texts | st.none(), min_size=rows + 1, max_size=rows + 1)) for _ in range(columns)]
    found = interleaved(pieces, [PackedBytes.of(column)[1:] for column in of_rows])
    expected = [
        b"".join(piece + (text or b"") for piece, text in zip(pieces, row, strict=False)) + pieces[-1]
        for row in zip(*(column[1:] for column in of_rows), strict=True)
    ]
    assert list(found) == expected


def test_more_bytes_than_a_binary_array_can_hold_are_an_error() -> None:
    """Byte strings of 2 GiB in all are an error before their bytes are copied. They overlap here, in 1 MiB."""
    size = 1 << 20
    strings = PackedBytes(np.zeros(size, np.uint8), np.zeros(2048, np.int64), np.full(2048, size))
    with pytest.raises(pa.ArrowCapacityError):
        binary_array(strings)
