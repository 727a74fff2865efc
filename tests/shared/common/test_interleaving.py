"""Joining texts of rows with constant pieces between them."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.interleaving import interleaved
from penstock.shared.common.packed_bytes import PackedBytes

texts = st.binary(max_size=20)


@given(st.data(), st.integers(1, 4), st.integers(0, 6))
def test_rows_alternate_pieces_and_texts(data: st.DataObject, columns: int, rows: int) -> None:
    """A row consists of pieces and texts of any length in turns, also for slices of a buffer."""
    pieces = data.draw(st.lists(texts, min_size=columns + 1, max_size=columns + 1))
    of_rows = [data.draw(st.lists(texts, min_size=rows + 1, max_size=rows + 1)) for _ in range(columns)]
    found = interleaved(pieces, [PackedBytes.of(column)[1:] for column in of_rows])
    expected = [
        b"".join(piece + text for piece, text in zip(pieces, row, strict=False)) + pieces[-1]
        for row in zip(*(column[1:] for column in of_rows), strict=True)
    ]
    assert list(found) == expected
