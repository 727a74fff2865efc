"""Splitting a stream of records into JSON objects."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.rest_proxy.v3_records import NotAnObject, RecordStreamSplitter

text = st.text(alphabet='a"{}\\,\n[]é', max_size=6)
objects = st.lists(
    st.dictionaries(text, st.recursive(text, lambda c: st.dictionaries(text, c, max_size=2))), max_size=4
)


@given(objects, st.sampled_from(["", "\n", ", ", " \r\n"]), st.data())
def test_the_objects_do_not_depend_on_the_chunks(values: list[Any], between: str, data: Any) -> None:
    """Braces and backslashes within strings are text. A chunk may end anywhere, also within a character."""
    body = between.join(json.dumps(value, ensure_ascii=False) for value in values).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=5)) | {0, len(body)})
    splitter = RecordStreamSplitter(10_000)
    split = [object_ for start, end in pairwise(cuts) for object_ in splitter.feed(body[start:end])]
    splitter.close()
    assert [json.loads(object_) for object_ in split] == values


TOO_LONG = b'{"a":' + b"1" * 100


@pytest.mark.parametrize("body", [b"[1]", b'{"a":1} 7', b"x", TOO_LONG, TOO_LONG + b"}", b"{}" + TOO_LONG + b"}{}"])
def test_other_data_ends_the_stream(body: bytes) -> None:
    """Data between objects that is not whitespace or a comma, and an object that is too long."""
    with pytest.raises(NotAnObject):
        RecordStreamSplitter(100).feed(body)


def test_an_incomplete_object_is_an_error() -> None:
    """It is detected at the end of the body."""
    splitter = RecordStreamSplitter(100)
    assert splitter.feed(b'{"a":1}{"b') == [b'{"a":1}']
    with pytest.raises(NotAnObject, match="within an object"):
        splitter.close()
