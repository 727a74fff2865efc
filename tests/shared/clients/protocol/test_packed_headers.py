"""Headers packed in one buffer: access, and appending of further headers."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.protocol.packed_headers import PackedHeaders
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import HeaderColumn, Headers

strings = st.one_of(st.none(), st.binary(max_size=9), st.sampled_from([b"", b"x" * 64, b"y" * 9_000]))
headers = st.lists(st.tuples(st.text(max_size=9), strings), max_size=3).map(tuple)


@given(st.lists(headers, max_size=9), st.data())
def test_headers_can_be_appended(rows: list[Headers], data: st.DataObject) -> None:
    """Constants and nullable columns are appended to the headers of each record, however many it has."""
    packed = PackedHeaders.of(rows)
    assert packed == rows
    assert (packed.blocks.lengths > 0).tolist() == [len(row) > 0 for row in rows]
    names = data.draw(st.lists(st.text(max_size=70), min_size=64 if data.draw(st.booleans()) else 1, max_size=66))
    column = st.lists(strings, min_size=len(rows), max_size=len(rows)).map(PackedBytes.of)
    more = [(name, data.draw(column) if i % 2 else b"x" * i) for i, name in enumerate([*names, "last"])]
    if not any(isinstance(value, PackedBytes) for _, value in more):
        more.append(("column", data.draw(column)))
    found = packed.followed_by(more)
    for row, (own, given_) in enumerate(zip(found, rows, strict=True)):
        others = [(name, value[row] if isinstance(value, PackedBytes) else value) for name, value in more]
        assert own == (*given_, *others)


def test_slices_and_indexing() -> None:
    """Slices and indexing work, and the result equals any sequence of the same headers."""
    rows: list[Any] = [(("a", b"1"),), (), (("é", None), ("", b""))]
    packed = PackedHeaders.of(rows)
    assert PackedHeaders.of(packed) is packed
    assert (packed[1:], packed.at(np.array([2, 0]))) == (rows[1:], [rows[2], rows[0]])
    assert packed == HeaderColumn(rows)
    assert packed != rows[:2]
    assert repr(packed[:1]) == "PackedHeaders.of([(('a', b'1'),)])"
    assert PackedHeaders(PackedBytes.of([None, b""])) == [(), ()]
