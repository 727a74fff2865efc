"""Decoding of pgoutput's messages, on bytes that Postgres 15 wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError
from penstock.shared.connect.connectors.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Delete,
    Insert,
    Other,
    PgCommit,
    Relation,
    RelationColumn,
    Truncate,
    Update,
    decode_pgoutput,
)
from tests.shared.connect.connectors.postgres import recorded

WHOLE = ("2", r"\x00ff")


def test_begin_and_commit() -> None:
    """Begin and Commit have the commit's position, the next position, and the commit time."""
    begin = decode_pgoutput(recorded.BEGIN)
    assert begin == Begin(0x1530388, 848662155952317, 726)
    assert isinstance(begin, Begin)
    assert begin.committed_ms == 1795346955952
    assert decode_pgoutput(recorded.COMMIT) == PgCommit(0x1530388, 0x15303B8, 848662155952317)


def test_a_table() -> None:
    """Relation has the table's name, its replica identity, and its columns with types."""
    assert decode_pgoutput(recorded.SRC) == Relation(
        16384, "public", "src", "d",
        (RelationColumn("id", True, 23), RelationColumn("name", False, 25), RelationColumn("price", False, 1700),
         RelationColumn("at", False, 1184), RelationColumn("big", False, 25)),
    )  # fmt: skip
    odd = decode_pgoutput(recorded.ODD)
    assert isinstance(odd, Relation)
    assert (odd.name, odd.identity, [column.is_key for column in odd.columns]) == ("Odd", "f", [True, True])


def test_inserts_updates_deletes_and_truncates() -> None:
    """Insert, Update, Delete and Truncate have the new row, and the old row or its key if it is sent."""
    at = "2024-01-01 12:00:00.25+00"
    assert decode_pgoutput(recorded.INSERT) == Insert(16384, ("1", "one", "1.5", at, None))
    assert decode_pgoutput(recorded.UPDATE) == Update(16384, None, False, ("2", "zwei", "NaN", None, UNCHANGED))
    assert decode_pgoutput(recorded.UPDATE_KEY) == Update(
        16384, ("1", None, None, None, None), False, ("3", "one", "1.5", at, None)
    )
    assert decode_pgoutput(recorded.UPDATE_WHOLE) == Update(16391, ("1", r"\x00ff"), True, WHOLE)
    assert decode_pgoutput(recorded.DELETE) == Delete(16384, ("3", None, None, None, None), False)
    assert decode_pgoutput(recorded.DELETE_WHOLE) == Delete(16391, WHOLE, True)
    assert decode_pgoutput(recorded.TRUNCATE) == Truncate((16384, 16391))


def test_other_messages_are_named_by_their_letter() -> None:
    """Messages of other kinds are decoded as `Other` with their letter."""
    assert decode_pgoutput(b"O" + bytes(12)) == Other("O")


def test_a_delete_without_an_old_row_is_an_error() -> None:
    """A Delete has the old row or its key, never a new row."""
    with pytest.raises(DataError, match="old row"):
        decode_pgoutput(recorded.DELETE.replace(b"K", b"N", 1))


@given(st.sampled_from(recorded.ALL), st.data())
def test_a_truncated_message_is_an_error(message: bytes, data: st.DataObject) -> None:
    """A message that is cut off anywhere is a DataError."""
    end = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(DataError):
        decode_pgoutput(message[:end])
