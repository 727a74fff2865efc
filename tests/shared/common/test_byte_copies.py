"""Copies of packed strings into their own buffer."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.byte_copies import copied
from penstock.shared.common.packed_bytes import PackedBytes


@given(st.lists(st.one_of(st.none(), st.binary(max_size=9))), st.data())
def test_a_copy_has_the_strings_and_nothing_else(strings: list[bytes | None], data: st.DataObject) -> None:
    """A copy contains the selected strings, also nulls and duplicates, and its buffer nothing else."""
    indices = data.draw(st.lists(st.integers(0, len(strings) - 1))) if strings else []
    some = copied(PackedBytes.of(strings).at(np.array(indices, np.int64)))
    assert list(some) == [strings[index] for index in indices]
    assert some.data.tobytes() == b"".join(string for string in some if string is not None)
