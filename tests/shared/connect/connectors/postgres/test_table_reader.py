"""Queries and offsets of the Postgres source's table reader."""

from __future__ import annotations

import contextlib
import datetime as dt
import re
from decimal import Decimal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.connect.allowed_files import AllowedFiles
from penstock.shared.connect.connectors.postgres.columns import aware, decode_timestamp
from penstock.shared.connect.connectors.postgres.source import PostgresSourceConnector, PostgresSourceTask
from penstock.shared.connect.connectors.postgres.table_reader import TableReader, moment_of
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import Offset, Partition
from penstock.shared.connect.runtime.abstract_source_task import WorkerSourceTaskContext
from penstock.shared.connect.runtime.offset_backing_store import StoredOffsetReader
from tests.shared.connect.harness import Store

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
def test_unsent_rows_are_read_again_after_a_crash(seconds: list[int], sent: int) -> None:
    """Wherever sending stops, the stored offset is before every row that was not sent."""
    rows = [{"at": NOON + dt.timedelta(seconds=n)} for n in seconds]
    offsets = reader("timestamp").read(rows)[:sent]
    stored = reader("timestamp", offsets[-1] if offsets else None).timestamp
    assert all(stored is None or row["at"] > stored for row in rows[sent:])
    if sent >= len(rows) > 0:
        assert stored == rows[-1]["at"]


def test_every_query_has_a_limit_that_splits_no_timestamp() -> None:
    """Queries with an incrementing column have an exact limit, queries by timestamp include
    ties, and bulk has no limit.
    """
    assert reader("incrementing").statement()[0].endswith('ORDER BY "id" FETCH FIRST 5 ROWS ONLY')
    assert reader("timestamp+incrementing").statement()[0].endswith('ORDER BY "at", "id" FETCH FIRST 5 ROWS ONLY')
    assert reader("timestamp").statement()[0].endswith('ORDER BY "at" FETCH FIRST 5 ROWS WITH TIES')
    assert reader("bulk").statement() == ('SELECT * FROM "t"', [])


def test_reading_continues_from_the_stored_offset() -> None:
    """The query of a restarted reader continues after the stored timestamp and number."""
    first = reader("timestamp+incrementing")
    offset = first.read([{"at": NOON, "id": 7}, {"at": NOON, "id": 8}])[-1]
    assert offset == {"incrementing": 8, "timestamp": 1704110400000, "timestamp_nanos": 0}
    again = reader("timestamp+incrementing", offset)
    assert again.statement() == first.statement()
    assert again.statement()[1] == [0, NOON, 8]
    assert '("at" > $2::timestamptz OR ("at" = $2::timestamptz AND "id" > $3::bigint))' in again.statement()[0]


def test_an_incrementing_column_may_be_numeric() -> None:
    """The offset of a numeric column's whole number is an integer."""
    (offset,) = reader("incrementing").read([{"id": Decimal("7.00")}])
    assert (offset, type(offset["incrementing"])) == ({"incrementing": 7}, int)
    ends = [-(2**63), 2**63 - 1]
    assert [row["incrementing"] for row in reader("incrementing").read([{"id": Decimal(end)} for end in ends])] == ends


@pytest.mark.parametrize(
    "value",
    ["x", True, 1.0, Decimal("1.5"), Decimal("NaN"), Decimal("Infinity"), Decimal(2**63), Decimal(-(2**63) - 1)],
)
def test_an_incrementing_column_must_be_an_integer_of_64_bits(value: Any) -> None:
    """An incrementing column with a value that is no whole number, or does not fit in a bigint, is an error."""
    with pytest.raises(ConnectError, match=rf"t\.id.*{re.escape(repr(value))}"):
        reader("incrementing").read([{"id": value}])


@pytest.mark.parametrize("mode", ["timestamp", "timestamp+incrementing"])
def test_a_timestamp_column_must_be_a_timestamp(mode: str) -> None:
    """A timestamp column of another type, such as `date`, is an error that names the column."""
    with pytest.raises(ConnectError, match=r"t\.at.*2024"):
        reader(mode).read([{"at": NOON.date(), "id": 1}])


@pytest.mark.parametrize("mode", ["timestamp", "timestamp+incrementing"])
def test_a_time_before_the_year_1_cannot_be_a_position(mode: str) -> None:
    """-infinity and times before the year 1 have one value, which as a position would skip rows. 0001-01-01 is read."""
    first = round((dt.datetime(1, 1, 1) - dt.datetime(2000, 1, 1)) / dt.timedelta(microseconds=1))
    for form in (-(2**63), first - 1):
        with pytest.raises(ConnectError, match=r"t\.at"):
            reader(mode).read([{"at": decode_timestamp((form,)), "id": 1}])
    (offset,) = reader(mode).read([{"at": decode_timestamp((first,)), "id": 1}])
    assert offset["timestamp"] == -62_135_596_800_000


def test_times_keep_their_microseconds_and_are_utc() -> None:
    """A stored time keeps its microseconds; a time without a zone is UTC."""
    at = dt.datetime(2024, 1, 1, 12, 0, 0, 123456)
    offset = reader("timestamp").read([{"at": at}])[0]
    assert moment_of(offset["timestamp"], offset["timestamp_nanos"]) == aware(at) == at.replace(tzinfo=dt.UTC)
    assert moment_of(None, None) is None


@pytest.mark.parametrize(
    ("mode", "valid", "invalid"),
    [
        ("bulk", [], [{"incrementing": 100}]),
        ("logical", [], [{"incrementing": 100}]),
        ("incrementing", [{"incrementing": 7}], [{"id": 7}, {"incrementing": "7"}, {"incrementing": True},
                                                 {"incrementing": None}, {"incrementing": 1 << 63}, {"timestamp": 0}]),
        ("timestamp", [{"timestamp": 0}, {"timestamp": -1, "timestamp_nanos": 999_999_000}],
         [{"timestamp": "2024-01-01"}, {"timestamp": 10**18}, {"timestamp": 10**30}, {"timestamp_nanos": 0},
          {"timestamp": 0, "timestamp_nanos": -1}, {"timestamp": 0, "timestamp_nanos": 10**9},
          {"timestamp": 0, "incrementing": 7}]),
        ("timestamp+incrementing", [{"timestamp": 0}, {"timestamp": 0, "timestamp_nanos": 0, "incrementing": -7}],
         [{"incrementing": 7}, {"timestamp": None, "incrementing": 7}]),
    ],
)  # fmt: skip
async def test_an_altered_offset_is_a_position_of_the_mode(
    mode: str, valid: list[dict[str, Any]], invalid: list[dict[str, Any]]
) -> None:
    """An offset without the position of the mode would read the table from its first row, or fail the task."""
    connector, table = PostgresSourceConnector(), {"protocol": "1", "table": "t"}
    for offset in (None, {}, *valid):
        assert await connector.alter_offsets({"mode": mode}, [(table, offset)])
    for offset in invalid:
        with pytest.raises(ConnectError, match="is not an offset"):
            await connector.alter_offsets({"mode": mode}, [({"protocol": "1", "query": "query"}, offset)])


@pytest.mark.parametrize(
    ("mode", "fails"), [("timestamp", True), ("incrementing", True), ("timestamp+incrementing", False), ("bulk", False)]
)
async def test_a_task_continues_only_at_an_offset_of_its_mode(mode: str, fails: bool) -> None:
    """After a change of the mode, the stored offset could skip rows or read the table again. A bulk read ignores it."""

    class Offsets(StoredOffsetReader):
        async def offset(self, partition: Partition) -> Offset | None:
            return {"incrementing": 7, "timestamp": 1000, "timestamp_nanos": 0}

    task = PostgresSourceTask()
    task.context = WorkerSourceTaskContext({}, AllowedFiles(), Offsets(Store(), "c"))
    columns = {"incrementing.column.name": "id", "timestamp.column.name": "at"}
    props = {"connection.url": "postgresql://db/shop", "table.whitelist": "t", "topic.prefix": "", **columns}
    with pytest.raises(ConnectError, match=f"mode={mode}") if fails else contextlib.nullcontext():
        await task.start({**props, "mode": mode})
