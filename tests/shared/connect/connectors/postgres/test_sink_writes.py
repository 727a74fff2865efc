"""What the Postgres sink writes: rows from records, the statements for them, and the errors that are retried."""

from __future__ import annotations

import datetime as dt
import math
import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import pytest

from penstock.shared.common.errors import DataError, RetriableError
from penstock.shared.connect.connectors.postgres.columns import (
    column_adapter,
    decode_timestamp,
    encode_as_date,
    encode_as_timestamp,
    encode_integer,
)
from penstock.shared.connect.connectors.postgres.database import driver, is_data_error, translated
from penstock.shared.connect.connectors.postgres.sink import _copy_rows_to_table, sink_settings
from penstock.shared.connect.connectors.postgres.sink_rows import RowBuilder, RowSettings, RowsToWrite, columns_of
from penstock.shared.connect.connectors.postgres.sql import SqlTable, update_from
from penstock.shared.connect.errors import ConnectError
from penstock.shared.connect.record import SinkRecord
from penstock.shared.connect.schema import INT32, OPTIONAL_STRING, STRING, Field, Schema

UPSERT = RowSettings(mode="upsert", pk_mode="record_key", pk_fields=("id",), deletes=True)
STRUCT = Schema.struct("Row", Field("id", INT32), Field("n", OPTIONAL_STRING))

NOON = dt.datetime(2024, 1, 1, 12, tzinfo=dt.UTC)

TABLE = SqlTable("t", {"id": "bigint", "n": "integer"}, ("id",))


def record(key: int, value: Any) -> SinkRecord:
    return SinkRecord("t", 0, None, {"id": key}, None, value, kafka_offset=key)


def build(*values: Any) -> list[RowsToWrite]:
    return RowBuilder(UPSERT).build([record(at, value) for at, value in enumerate(values)])


def test_rows_are_grouped_by_columns() -> None:
    """Consecutive rows with the same columns are one group; other columns or a delete start
    another, and order is kept.
    """
    groups = build({"a": 1}, {"a": 2}, {"b": 1}, None, {"a": 3})
    assert [(group.names, group.rows, group.deletes) for group in groups] == [
        (("id", "a"), [(0, 1), (1, 2)], False),
        (("id", "b"), [(2, 1)], False),
        (("id",), [(3,)], True),
        (("id", "a"), [(4, 3)], False),
    ]


def test_rows_are_grouped_by_primary_key() -> None:
    """Rows with the same columns but different primary key columns form separate groups. So each row is written by its
    own key.
    """
    by_key = RowBuilder(RowSettings(mode="upsert", pk_mode="record_key"))
    pairs = [({"a": 1}, {"b": 2, "c": 5}), ({"a": 1, "b": 3}, {"c": 6})]
    groups = by_key.build([SinkRecord("t", 0, None, key, None, value, kafka_offset=0) for key, value in pairs])
    assert [(group.key, group.names, group.rows) for group in groups] == [
        (("a",), ("a", "b", "c"), [(1, 2, 5)]),
        (("a", "b"), ("a", "b", "c"), [(1, 3, 6)]),
    ]


def test_fields_whitelist_selects_the_fields_to_write() -> None:
    """Only the fields in `fields.whitelist` are written, and those of the primary key."""
    settings = {"fields.whitelist": "b", "insert.mode": "upsert", "pk.mode": "record_value", "pk.fields": "id"}
    values = sink_settings().parse({"connection.url": "postgresql://db/shop", **settings})
    (group,) = RowBuilder(RowSettings.of(values)).build([record(1, {"id": 1, "a": 2, "b": 3})])
    assert (group.names, group.rows) == (("id", "b"), [(1, 3)])


def test_a_column_has_the_type_of_its_first_value_that_is_not_null() -> None:
    """A column's type is that of its first value that is not null; a column of nulls has no type."""
    (group,) = build({"a": None, "b": None}, {"a": None, "b": 1.5}, {"a": None, "b": 2})
    assert group.types == {"id": ("bigint", False), "a": (None, False), "b": ("double precision", False)}
    assert columns_of([group]) == {"id": ("bigint", False), "b": ("double precision", False)}
    assert group.with_columns({"id", "b"}).rows == [(0, None), (1, 1.5), (2, 2)]
    assert group.with_columns({"id", "a", "b"}) is group


def test_nulls_of_generated_columns_are_left_out() -> None:
    """A generated column is left out of the rows in which it is null, which Postgres rejects. The order is kept."""
    (group,) = build({"g": None, "n": 1}, {"g": None, "n": None}, {"g": 5, "n": 3}, {"g": None, "n": 4})
    assert [(part.names, part.rows) for part in group.without_nulls_of({"g"})] == [
        (("id", "n"), [(0, 1), (1, None)]),
        (("id", "g", "n"), [(2, 5, 3)]),
        (("id", "n"), [(3, 4)]),
    ]
    assert group.without_nulls_of({"other"}) == [group]


def test_columns_of_the_value_ignore_the_keys_types() -> None:
    """With `pk.mode=record_value` columns take their types from the value and not from the key."""
    by_value = RowBuilder(RowSettings(mode="upsert", pk_mode="record_value", pk_fields=("id",)))
    (group,) = by_value.build([SinkRecord("t", 0, STRING, "a", None, {"id": 1, "n": None}, kafka_offset=0)])
    assert group.types == {"id": ("bigint", False), "n": (None, False)}
    (group,) = by_value.build([SinkRecord("t", 0, None, b"a", STRUCT, {"id": 1, "n": None}, kafka_offset=0)])
    assert group.types == {"id": ("integer", True), "n": ("text", False)}


@pytest.mark.parametrize("value", [{"n": 1, 2: 3}, {2: None}, None])
def test_a_map_with_names_that_are_not_text_is_no_row(value: Any) -> None:
    """A map's keys may have any type, but a column's name is text."""
    deleting = RowBuilder(RowSettings(pk_mode="record_key", deletes=True))
    with pytest.raises(DataError, match="t-0@0: the field name 2 is not text"):
        deleting.build([SinkRecord("t", 0, None, {2 if value is None else "id": 1}, None, value, kafka_offset=0)])


def test_a_primary_key_of_the_key_has_the_keys_type() -> None:
    """With `pk.mode=record_key` the primary key has the key's type, whether the key is a primitive or a struct."""
    by_key = RowBuilder(RowSettings(mode="upsert", pk_mode="record_key", pk_fields=("id",), deletes=True))
    (group,) = by_key.build([SinkRecord("t", 0, STRING, "a", STRUCT, {"id": 1, "n": None}, kafka_offset=0)])
    assert (group.types, group.rows) == ({"id": ("text", True), "n": ("text", False)}, [("a", None)])
    (group,) = by_key.build([SinkRecord("t", 0, STRUCT, {"id": 7}, None, None, kafka_offset=0)])
    assert (group.types, group.deletes) == ({"id": ("integer", True)}, True)


@pytest.mark.parametrize(
    ("kind", "value", "adapted"),
    [
        ("numeric(10,2)", 1.5, Decimal("1.5")),
        ("numeric(10,-2)", 1.5, Decimal("1.5")),
        ("numeric[]", [0.1, [1, None]], [Decimal("0.1"), [Decimal(1), None]]),
        ("numeric(10,2)[]", [1.5], [Decimal("1.5")]),
        ("character varying(10)", 5, "5"),
        ("bpchar", 5, "5"),
        ("time(3) without time zone", "12:00:00.5", dt.time(12, 0, 0, 500_000)),
        ("time without time zone", NOON, NOON),
        ("time with time zone", NOON, NOON),
        ("bit varying(5)", "101", driver().BitString("101")),
        ('"char"', "a", b"a"),
        ('"char"', "", b"\0"),
    ],
)
def test_values_are_adapted_to_columns_with_a_precision(kind: str, value: Any, adapted: Any) -> None:
    """A column's precision or length does not change how its values are converted. Items of an array of numbers are
    converted as the values of a column.
    """
    adapt = column_adapter(kind)
    assert adapt is not None
    assert adapt(value) == adapted


@pytest.mark.parametrize(
    ("value", "moment"),
    [
        (NOON, NOON),
        (1704110400000, NOON),
        ("2024-01-01T13:00+01:00", NOON),
        (NOON.replace(tzinfo=None), NOON),
        (NOON.date(), NOON.replace(hour=0)),
    ],
)
def test_a_time_without_a_zone_is_utc(value: Any, moment: dt.datetime) -> None:
    """A time without a zone is UTC, and a date is midnight in UTC, whatever the time zone of the worker is."""
    assert decode_timestamp(encode_as_timestamp(value)) == moment


@pytest.mark.parametrize(("encode", "value"), [(encode_as_date, 19000), (encode_as_date, "noon"),
                                               (encode_as_timestamp, 1.5), (encode_as_timestamp, "noon"),
                                               (column_adapter("time without time zone"), 19000)])  # fmt: skip
def test_a_value_that_is_not_a_time_is_an_error(encode: Callable[[Any], Any], value: Any) -> None:
    """A value that is not a date or time is an error that shows the value."""
    with pytest.raises(DataError, match=f"{value!r} is not an ISO 8601"):
        encode(value)


@pytest.mark.parametrize(
    ("value", "adapted"),
    [
        ('{"a": [1]}', '{"a": [1]}'),
        ('"text"', '"text"'),
        ({"a": ["b", None]}, '{"a":["b",null]}'),
        ([1], "[1]"),
        (1.5, "1.5"),
        (True, "true"),
        (None, None),
    ],
)
@pytest.mark.parametrize("kind", ["json", "jsonb"])
def test_a_text_in_a_json_column_is_json(kind: str, value: Any, adapted: str | None) -> None:
    """A text for a JSON column is already JSON, as the source reads it. Any other value becomes JSON."""
    adapt = column_adapter(kind)
    assert adapt is not None
    assert adapt(value) == adapted


@pytest.mark.parametrize("kind", ["text", "character varying(10)", "character(3)"])
def test_a_text_column_takes_no_bytes(kind: str) -> None:
    """Bytes for a column of text are an error: they are neither decoded nor written as Python shows them."""
    adapt = column_adapter(kind)
    assert adapt is not None
    with pytest.raises(DataError, match="b'ann'"):
        adapt(b"ann")


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("interval", "1 day"),
        ("interval day to second(3)", "1 day"),
        ("daterange", "empty"),
        ("numeric(5,2)", True),
        ("real", True),
        ("double precision", False),
        *((f"{kind}[]", [[True]]) for kind in ("numeric", "real", "double precision")),
    ],
)
def test_a_value_that_a_column_never_takes_is_an_error(kind: str, value: Any) -> None:
    """No text is an interval or a range, and no boolean is a number. A null is written."""
    adapt = column_adapter(kind)
    assert adapt is not None
    assert adapt(None) is None
    with pytest.raises(DataError):
        adapt(value)


@pytest.mark.parametrize("value", [10.5, Decimal("1.9"), True, "10", math.nan, math.inf, Decimal("-Infinity"), 2**31])
def test_an_integer_column_takes_only_whole_numbers_in_its_range(value: Any) -> None:
    """An integer column takes whole numbers of any type. Any other value is an error: it is never truncated."""
    assert [encode_integer(4, whole) for whole in (-2, -2.0, Decimal("-2.00"))] == [b"\xff\xff\xff\xfe"] * 3
    with pytest.raises(DataError, match=re.escape(repr(value))):
        encode_integer(4, value)
    with pytest.raises(DataError, match="sNaN"):
        encode_integer(4, Decimal("sNaN"))
    with pytest.raises(DataError, match="an integer of 16610 bits"):
        encode_integer(4, 10**5000)


def test_values_of_array_columns_are_not_adapted() -> None:
    """The driver converts lists for array columns of other types, also if their items have a length."""
    kinds = ("text[]", "character varying(10)[]", "interval day to second(3)[]")
    assert [column_adapter(kind) for kind in kinds] == [None] * 3


@pytest.mark.parametrize(
    ("table", "target"), [("t", (None, "t")), ("sales.t", ("sales", "t")), ("shop.sales.t", ("sales", "t"))]
)
async def test_a_tables_name_may_have_a_schema_and_a_database(table: str, target: tuple[str | None, str]) -> None:
    """Rows are copied to the table `t`, `schema.t` or `database.schema.t`."""
    targets = []

    class Connection:
        async def copy_records_to_table(self, name: str, *, schema_name: str | None, **options: Any) -> None:
            targets.append((schema_name, name))

    await _copy_rows_to_table(Connection(), table, SqlTable(table, TABLE.columns), ("id", "n"), [(1, 2)])
    assert targets == [target]


def test_an_update_needs_a_column_to_change() -> None:
    """Rows that have only columns of the key are an error, since they change nothing."""
    rows = '(SELECT DISTINCT ON ("id") "id","n" FROM "s" ORDER BY "id","penstock_staged_row" DESC)'
    assert update_from(TABLE, "s", ("id", "n")) == f'UPDATE "t" t SET "n"=s."n" FROM {rows} s WHERE t."id"=s."id"'
    with pytest.raises(DataError, match=r"update.*id"):
        update_from(TABLE, "s", ("id",))


@pytest.mark.parametrize(
    ("name", "is_temporary"),
    [
        ("AdminShutdownError", True),
        ("DeadlockDetectedError", True),
        ("IdleInTransactionSessionTimeoutError", True),
        ("TransactionTimeoutError", True),
        ("InsufficientPrivilegeError", False),
        ("UndefinedTableError", False),
    ],
)
def test_a_temporary_error_of_the_database_is_retriable(name: str, is_temporary: bool) -> None:
    """An error that another attempt may not meet is retriable."""
    ours = translated(getattr(driver(), name)("of the server"))
    assert type(ours) is (RetriableError if is_temporary else ConnectError)


def test_a_read_only_transaction_is_temporary_in_the_sink() -> None:
    """A failover makes the old server read-only, and a new connection of the sink may reach the new primary. The source
    itself reads in read-only transactions, in which a query that writes always fails."""
    error = driver().ReadOnlySQLTransactionError("of the server")
    assert type(translated(error, writes=True)) is RetriableError
    assert type(translated(error)) is ConnectError


@pytest.mark.parametrize(
    ("file", "is_data"),
    [("nbtutils.c", True), ("hio.c", True), ("varsup.c", False), ("multixact.c", False), ("xact.c", False)],
)
def test_a_limit_of_the_database_is_not_an_error_of_a_record(file: str, is_data: bool) -> None:
    """A row that is too large is an error of its record. Near a wraparound of transaction ids, Postgres rejects every
    write with the same code, and no record is skipped."""
    error = driver().PostgresError.new({"C": "54000", "F": file, "M": "too large"})
    assert is_data_error(error) == is_data
