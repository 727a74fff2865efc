"""JSON objects one after the other."""

from __future__ import annotations

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.ingest.json_values import NotAnObject, ObjectSplitter

text = st.text(alphabet='a"{}\\,\n[]é', max_size=6)
objects = st.lists(
    st.dictionaries(text, st.recursive(text, lambda c: st.dictionaries(text, c, max_size=2))), max_size=4
)


@given(objects, st.sampled_from(["", "\n", ", ", " \r\n"]), st.data())
def test_however_it_is_cut_the_objects_are_the_same(values: list[Any], between: str, data: Any) -> None:
    """Braces and backslashes within strings are text; a cut may be anywhere, within a character too."""
    body = between.join(json.dumps(value, ensure_ascii=False) for value in values).encode()
    cuts = sorted(data.draw(st.sets(st.integers(0, len(body)), max_size=5)) | {0, len(body)})
    splitter = ObjectSplitter(10_000)
    found = [one for start, end in pairwise(cuts) for one in splitter.feed(body[start:end])]
    splitter.close()
    assert [json.loads(one) for one in found] == values


@pytest.mark.parametrize("body", [b"[1]", b'{"a":1} 7', b"x", b'{"a":' + b"1" * 200])
def test_what_is_no_object_ends_it(body: bytes) -> None:
    """Between objects only blanks and commas stand; one that is too long is none."""
    with pytest.raises(NotAnObject):
        ObjectSplitter(100).feed(body)


def test_an_object_without_an_end_is_said() -> None:
    """Only at the end of the body it is known that nothing more comes."""
    splitter = ObjectSplitter(100)
    assert splitter.feed(b'{"a":1}{"b') == [b'{"a":1}']
    with pytest.raises(NotAnObject, match="within an object"):
        splitter.close()
