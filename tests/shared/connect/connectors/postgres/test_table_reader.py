"""How far a part of a Postgres source was read."""

from __future__ import annotations

import datetime as dt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.connect.connectors.postgres.table_reader import TableReader, aware, moment_of
from penstock.shared.connect.errors import ConnectError

NOON = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)


def reader(mode: str, offset: dict[str, Any] | None = None) -> TableReader:
    values = {
        "mode": mode,
        "incrementing.column.name": "id",
        "timestamp.column.name": ["at"],
        "batch.max.rows": 5,
        "timestamp.delay.interval.ms": 0,
        "timestamp.initial": None,
    }
    return TableReader(values, "t", "", offset)


@given(st.lists(st.integers(0, 3)).map(sorted), st.integers(0, 30))
def test_what_a_crash_leaves_unsent_is_read_again(seconds: list[int], sent: int) -> None:
    """Wherever sending ends, the stored offset lies before every row that was not sent."""
    rows = [{"at": NOON + dt.timedelta(seconds=n)} for n in seconds]
    offsets = reader("timestamp").read(rows)[:sent]
    stored = reader("timestamp", offsets[-1] if offsets else None).timestamp
    assert all(stored is None or row["at"] > stored for row in rows[sent:])
    if sent >= len(rows) > 0:
        assert stored == rows[-1]["at"]


def test_every_query_has_a_limit_that_cuts_no_moment_apart() -> None:
    """By number alone or with it a limit is exact; by time alone rows of the last moment come along; bulk has none."""
    assert reader("incrementing").statement()[0].endswith('ORDER BY "id" FETCH FIRST 5 ROWS ONLY')
    assert reader("timestamp+incrementing").statement()[0].endswith('ORDER BY "at", "id" FETCH FIRST 5 ROWS ONLY')
    assert reader("timestamp").statement()[0].endswith('ORDER BY "at" FETCH FIRST 5 ROWS WITH TIES')
    assert reader("bulk").statement() == ('SELECT * FROM "t"', [])


def test_reading_goes_on_where_it_was() -> None:
    """The next query asks for what lies beyond the stored offset, by time and then by number."""
    first = reader("timestamp+incrementing")
    offset = first.read([{"at": NOON, "id": 7}, {"at": NOON, "id": 8}])[-1]
    assert offset == {"incrementing": 8, "timestamp": 1704110400000, "timestamp_nanos": 0}
    again = reader("timestamp+incrementing", offset)
    assert again.statement() == first.statement()
    assert again.statement()[1] == [0, NOON, 8]
    assert '("at" > $2::timestamptz OR ("at" = $2::timestamptz AND "id" > $3::bigint))' in again.statement()[0]


def test_a_number_that_is_none_is_said() -> None:
    """What does not rise by whole numbers cannot be read by them."""
    with pytest.raises(ConnectError, match=r"t\.id: 'x' is no whole number"):
        reader("incrementing").read([{"id": "x"}])


def test_times_keep_their_microseconds_and_are_utc() -> None:
    """A stored time comes back whole; one without a zone is taken as UTC."""
    at = dt.datetime(2024, 1, 1, 12, 0, 0, 123456)
    offset = reader("timestamp").read([{"at": at}])[0]
    assert moment_of(offset["timestamp"], offset["timestamp_nanos"]) == aware(at) == at.replace(tzinfo=dt.UTC)
    assert moment_of(None, None) is None
