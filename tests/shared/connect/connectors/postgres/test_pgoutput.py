"""The plugin's messages, on bytes that Postgres 15 wrote."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.connect.connectors.postgres.pgoutput import (
    UNCHANGED,
    Begin,
    Column,
    Commit,
    Delete,
    Insert,
    Other,
    Relation,
    Truncate,
    Update,
    decode,
    lsn_of,
    lsn_text,
)
from penstock.shared.connect.errors import DataError
from tests.shared.connect.connectors.postgres import recorded

WHOLE = ("2", r"\x00ff")


def test_a_transactions_ends() -> None:
    """Where its commit lies in the log, where the log goes on, and when it was."""
    begin = decode(recorded.BEGIN)
    assert begin == Begin(0x1530388, 848662155952317, 726)
    assert isinstance(begin, Begin)
    assert begin.committed_ms == 1795346955952
    assert decode(recorded.COMMIT) == Commit(0x1530388, 0x15303B8, 848662155952317)


def test_a_table() -> None:
    """Its name, what tells its rows apart, and its columns with their types."""
    assert decode(recorded.SRC) == Relation(
        16384, "public", "src", "d",
        (Column("id", True, 23), Column("name", False, 25), Column("price", False, 1700), Column("at", False, 1184),
         Column("big", False, 25)),
    )  # fmt: skip
    odd = decode(recorded.ODD)
    assert isinstance(odd, Relation)
    assert (odd.name, odd.identity, [column.is_key for column in odd.columns]) == ("Odd", "f", [True, True])


def test_rows_that_come_change_and_go() -> None:
    """A new row; one changed, without its large value, with its key as it was, with all that it was; gone, likewise."""
    at = "2024-01-01 12:00:00.25+00"
    assert decode(recorded.INSERT) == Insert(16384, ("1", "one", "1.5", at, None))
    assert decode(recorded.UPDATE) == Update(16384, None, False, ("2", "zwei", "NaN", None, UNCHANGED))
    assert decode(recorded.UPDATE_KEY) == Update(
        16384, ("1", None, None, None, None), False, ("3", "one", "1.5", at, None)
    )
    assert decode(recorded.UPDATE_WHOLE) == Update(16391, ("1", r"\x00ff"), True, WHOLE)
    assert decode(recorded.DELETE) == Delete(16384, ("3", None, None, None, None), False)
    assert decode(recorded.DELETE_WHOLE) == Delete(16391, WHOLE, True)
    assert decode(recorded.TRUNCATE) == Truncate((16384, 16391))


def test_what_is_of_no_concern_is_told_by_its_letter() -> None:
    """An origin, and whatever later versions add."""
    assert decode(b"O" + bytes(12)) == Other("O")


@given(st.sampled_from(recorded.ALL), st.data())
def test_half_a_message_is_refused(message: bytes, data: st.DataObject) -> None:
    """Wherever it ends."""
    end = data.draw(st.integers(0, len(message) - 1))
    with pytest.raises(DataError):
        decode(message[:end])


@given(st.integers(0, 2**64 - 1))
def test_a_place_in_the_log_is_written_as_postgres_does(lsn: int) -> None:
    """And read back."""
    assert lsn_of(lsn_text(lsn)) == lsn
    with pytest.raises(DataError):
        lsn_of("here")
