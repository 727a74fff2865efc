"""JSON of many rows equals msgspec's."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.streams.windows.json_rows import json_objects, json_texts

int64s = st.integers(-(2**63), 2**63 - 1)


@given(st.lists(st.one_of(int64s, st.integers(-11, 11))))
def test_integers(numbers: list[int]) -> None:
    """Each integer is its decimal text, including the smallest and repeated ones."""
    assert list(json_texts(np.array(numbers, np.int64))) == [b"%d" % number for number in numbers]


@given(st.lists(st.one_of(st.none(), st.booleans(), st.text(), st.floats(allow_nan=False), st.lists(int64s))))
def test_values(values: list[Any]) -> None:
    """Each value's JSON equals msgspec's, in order."""
    assert list(json_texts(values)) == [msgspec.json.encode(value) for value in values]


def test_an_array_of_floats() -> None:
    """The JSON of a float array equals that of a list of the same floats."""
    assert list(json_texts(np.array([0.5, -0.0, 1e300]))) == [b"0.5", b"-0.0", b"1e300"]


@pytest.mark.parametrize("raw", [b'{\n"a":1\n}', b"\n\n7", b"1\n"])
def test_json_of_the_users_own_may_have_line_breaks(raw: bytes) -> None:
    """Raw JSON with line breaks is kept unchanged and does not shift the values beside it."""
    values = [1, msgspec.Raw(raw), "b"]
    assert list(json_texts(values)) == [b"1", raw, b'"b"']
    assert list(json_objects(["v"], [json_texts(values)])) == [b'{"v":1}', b'{"v":' + raw + b"}", b'{"v":"b"}']
