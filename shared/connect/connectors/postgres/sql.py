"""The SQL of the Postgres sink, and the conversion of records' values to column values.

>>> table = SqlTable("clicks", {"id": "bigint", "n": "integer"}, ("id",))
>>> upsert_from(table, "staged", ("id", "n"))
'INSERT INTO "clicks" ("id","n") SELECT "id","n" FROM "staged" ON CONFLICT ("id") DO UPDATE SET "n"=EXCLUDED."n"'
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from decimal import Decimal
from typing import Any

import msgspec

from penstock.shared.connect.errors import ConnectError, DataError
from penstock.shared.connect.schema import DATE, DECIMAL, TIME, TIMESTAMP, Schema, SchemaType, timestamp_from_ms

NAME_BYTES_MAX = 63
"""Postgres cuts longer names, so that two could become the same."""

_TYPES = {
    SchemaType.INT8: "smallint",
    SchemaType.INT16: "smallint",
    SchemaType.INT32: "integer",
    SchemaType.INT64: "bigint",
    SchemaType.FLOAT32: "real",
    SchemaType.FLOAT64: "double precision",
    SchemaType.BOOLEAN: "boolean",
    SchemaType.STRING: "text",
    SchemaType.BYTES: "bytea",
    SchemaType.ARRAY: "jsonb",
    SchemaType.MAP: "jsonb",
    SchemaType.STRUCT: "jsonb",
}
_LOGICAL = {DATE: "date", TIME: "time", TIMESTAMP: "timestamptz", DECIMAL: "numeric"}
_PLAIN: tuple[tuple[type, str], ...] = (
    (bool, "boolean"),
    (int, "bigint"),
    (float, "double precision"),
    (str, "text"),
    (bytes, "bytea"),
    (Decimal, "numeric"),
    (dt.datetime, "timestamptz"),
    (dt.date, "date"),
    (dt.time, "time"),
)


@dataclass(frozen=True)
class SqlTable:
    """A table of the database: types by column, in order, and the primary key's columns."""

    name: str
    columns: Mapping[str, str] = field(hash=False)
    key: tuple[str, ...] = ()


def quoted(name: str) -> str:
    """A quoted identifier; the parts of `schema.table` are quoted one by one. ConnectError if Postgres would cut it."""
    parts = name.split(".")
    for part in parts:
        if not part or len(part.encode()) > NAME_BYTES_MAX or "\0" in part:
            raise ConnectError(f"{name!r} cannot be a name in Postgres: 1 to {NAME_BYTES_MAX} bytes a part")
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def column(name: str) -> str:
    """A quoted column name, which may contain dots."""
    if not name or len(name.encode()) > NAME_BYTES_MAX or "\0" in name:
        raise DataError(f"{name!r} cannot be a column: 1 to {NAME_BYTES_MAX} bytes")
    return '"' + name.replace('"', '""') + '"'


def columns(names: Iterable[str]) -> str:
    """Return a comma-separated list of quoted column names."""
    return ",".join(column(name) for name in names)


def type_of(schema: Schema | None, value: Any) -> str | None:
    """A field's column type. Without a schema it depends on the value, and is None for a null."""
    if schema is not None:
        return _LOGICAL.get(schema.name or "", _TYPES[schema.type])
    for kind, name in _PLAIN:
        if isinstance(value, kind):
            return name
    return None if value is None else "jsonb"


def create_table(name: str, fields: Mapping[str, tuple[str, bool]], key: tuple[str, ...]) -> str:
    """The statement that creates a table. `fields` has each column's type, and whether it is NOT NULL."""
    lines = [
        f"{column(one)} {kind}{' NOT NULL' if required or one in key else ''}"
        for one, (kind, required) in fields.items()
    ]
    if key:
        lines.append(f"PRIMARY KEY ({columns(key)})")
    return f"CREATE TABLE IF NOT EXISTS {quoted(name)} ({', '.join(lines)})"


def add_columns(name: str, fields: Mapping[str, str]) -> str:
    """Return the ALTER TABLE statement that adds the missing columns."""
    added = ", ".join(f"ADD COLUMN IF NOT EXISTS {column(one)} {kind}" for one, kind in fields.items())
    return f"ALTER TABLE {quoted(name)} {added}"


def upsert_from(table: SqlTable, source: str, names: tuple[str, ...]) -> str:
    """The statement that inserts the rows of another table, and updates rows with the same key."""
    rest = [name for name in names if name not in table.key]
    sets = ",".join(f"{column(name)}=EXCLUDED.{column(name)}" for name in rest)
    action = f"UPDATE SET {sets}" if rest else "NOTHING"
    return (
        f"INSERT INTO {quoted(table.name)} ({columns(names)}) SELECT {columns(names)} FROM {quoted(source)} "
        f"ON CONFLICT ({columns(table.key)}) DO {action}"
    )


def update_from(table: SqlTable, source: str, names: tuple[str, ...]) -> str:
    """The statement that updates the rows which another table has too."""
    sets = ",".join(f"{column(name)}=s.{column(name)}" for name in names if name not in table.key)
    where = " AND ".join(f"t.{column(name)}=s.{column(name)}" for name in table.key)
    return f"UPDATE {quoted(table.name)} t SET {sets} FROM {quoted(source)} s WHERE {where}"


def delete_from(table: SqlTable, source: str) -> str:
    """The statement that deletes the rows whose keys are in another table."""
    where = " AND ".join(f"t.{column(name)}=s.{column(name)}" for name in table.key)
    return f"DELETE FROM {quoted(table.name)} t USING {quoted(source)} s WHERE {where}"


def staging(name: str, table: SqlTable, names: tuple[str, ...]) -> str:
    """The statement for a temporary table with some of the columns, which every commit empties."""
    types = ", ".join(f"{column(one)} {table.columns[one]}" for one in names)
    return f"CREATE TEMP TABLE {quoted(name)} ({types}) ON COMMIT DELETE ROWS"


def adapter(kind: str) -> Callable[[Any], Any] | None:
    """The function that converts a record's value to a column's; None if no conversion is needed."""
    base = kind.partition("(")[0]
    return _ADAPTERS.get(base)


def _adapt_json(value: Any) -> Any:
    return None if value is None else msgspec.json.encode(value, enc_hook=str).decode()


def _adapt_text(value: Any) -> Any:
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return _adapt_json(value) if isinstance(value, dict | list) else str(value)


def _adapt_timestamptz(value: Any) -> Any:
    if isinstance(value, bool):
        raise DataError(f"{value!r} is not a time")
    if isinstance(value, int):
        return timestamp_from_ms(value)
    if isinstance(value, str):
        try:
            value = dt.datetime.fromisoformat(value)
        except ValueError:
            raise DataError(f"{value!r:.100} is not an ISO 8601 time") from None
    if isinstance(value, dt.datetime) and value.tzinfo is None:
        return value.replace(tzinfo=dt.UTC)
    return value


def _adapt_timestamp(value: Any) -> Any:
    moment = _adapt_timestamptz(value)
    return moment.astimezone(dt.UTC).replace(tzinfo=None) if isinstance(moment, dt.datetime) else moment


def _adapt_date(value: Any) -> Any:
    if isinstance(value, str):
        try:
            return dt.date.fromisoformat(value)
        except ValueError:
            raise DataError(f"{value!r:.100} is not an ISO 8601 date") from None
    return value


def _adapt_numeric(value: Any) -> Any:
    if isinstance(value, float | int) and not isinstance(value, bool):
        return Decimal(str(value))
    return value


def _adapt_bytea(value: Any) -> Any:
    return value.encode() if isinstance(value, str) else value


_ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "json": _adapt_json,
    "jsonb": _adapt_json,
    "text": _adapt_text,
    "character varying": _adapt_text,
    "character": _adapt_text,
    "timestamp with time zone": _adapt_timestamptz,
    "timestamptz": _adapt_timestamptz,
    "timestamp without time zone": _adapt_timestamp,
    "date": _adapt_date,
    "numeric": _adapt_numeric,
    "bytea": _adapt_bytea,
}
