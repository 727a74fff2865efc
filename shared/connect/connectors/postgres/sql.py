"""SQL statements of the Postgres connectors, and quoted names.

>>> table = SqlTable("clicks", {"id": "bigint", "n": "integer"}, ("id",))
>>> upsert_from(table, "staged", ("id", "n"))  # doctest: +NORMALIZE_WHITESPACE
'INSERT INTO "clicks" ("id","n") SELECT DISTINCT ON ("id") "id","n" FROM "staged" ORDER BY "id","penstock_staged_row"
DESC ON CONFLICT ("id") DO UPDATE SET "n"=EXCLUDED."n"'
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from penstock.shared.common.errors import DataError
from penstock.shared.connect.errors import ConnectError

NAME_BYTES_MAX = 63
"""Postgres cuts longer names, so that two could become the same."""
STAGED_ROW = '"penstock_staged_row"'
"""The quoted column of a temporary table that numbers its rows in the order of COPY."""


@dataclass(frozen=True)
class SqlTable:
    """A table of the database: types by column, in order, and the columns of the key by which rows are written.

    `generated` are the generated columns, and the identity columns GENERATED ALWAYS.
    """

    name: str
    columns: Mapping[str, str] = field(hash=False)
    key: tuple[str, ...] = ()
    generated: frozenset[str] = frozenset()


def quoted(name: str) -> str:
    """Return the quoted name of a Postgres table. The parts of `schema.table` are quoted one by one.

    Raises ConnectError if a part is empty, has a NUL character, or is so long that Postgres would cut it.
    """
    parts = name.split(".")
    for part in parts:
        if not part or len(part.encode()) > NAME_BYTES_MAX or "\0" in part:
            raise ConnectError(f"{name!r} cannot be a name in Postgres: 1 to {NAME_BYTES_MAX} bytes a part")
    return ".".join('"' + part.replace('"', '""') + '"' for part in parts)


def quoted_column(name: str) -> str:
    """Return a quoted name of a Postgres column, which may contain dots.

    Raises DataError if it is empty, has a NUL character, or is too long for Postgres.
    """
    if not name or len(name.encode()) > NAME_BYTES_MAX or "\0" in name:
        raise DataError(f"{name!r} cannot be a column: 1 to {NAME_BYTES_MAX} bytes")
    return '"' + name.replace('"', '""') + '"'


def quoted_columns(names: Iterable[str]) -> str:
    """Return a comma-separated list of quoted names of Postgres columns."""
    return ",".join(quoted_column(name) for name in names)


def columns_of_table(oid: str) -> str:
    """Return the query for the columns of the table with this OID, in order: name, type, type_oid and generated.

    `generated` is true for a generated column, and for an identity column GENERATED ALWAYS. The type of a domain is its
    base type. `oid` is an SQL expression.
    """
    return (
        "WITH RECURSIVE c (name, number, type_oid, modifier, generated) AS ("
        "SELECT attname, attnum, atttypid, atttypmod, attgenerated <> '' OR attidentity = 'a' FROM pg_attribute "
        f"WHERE attrelid = {oid} AND attnum > 0 AND NOT attisdropped "
        "UNION ALL SELECT name, number, typbasetype, typtypmod, generated FROM c JOIN pg_type t ON t.oid = type_oid "
        "WHERE typtype = 'd') "
        "SELECT name, format_type(type_oid, modifier) AS type, type_oid, generated "
        "FROM c JOIN pg_type t ON t.oid = type_oid WHERE typtype <> 'd' ORDER BY number"
    )


def create_table(name: str, fields: Mapping[str, tuple[str, bool]], key: tuple[str, ...]) -> str:
    """Return the statement that creates a table. `fields` has each column's type, and whether it is NOT NULL."""
    lines = [
        f"{quoted_column(one)} {kind}{' NOT NULL' if required or one in key else ''}"
        for one, (kind, required) in fields.items()
    ]
    if key:
        lines.append(f"PRIMARY KEY ({quoted_columns(key)})")
    return f"CREATE TABLE IF NOT EXISTS {quoted(name)} ({', '.join(lines)})"


def add_columns(name: str, fields: Mapping[str, str]) -> str:
    """Return the statement that adds the missing columns to a table."""
    added = ", ".join(f"ADD COLUMN IF NOT EXISTS {quoted_column(one)} {kind}" for one, kind in fields.items())
    return f"ALTER TABLE {quoted(name)} {added}"


def upsert_from(table: SqlTable, source: str, names: tuple[str, ...]) -> str:
    """Return the statement that upserts the last row of each key in a temporary table."""
    rest = [name for name in names if name not in table.key]
    sets = ",".join(f"{quoted_column(name)}=EXCLUDED.{quoted_column(name)}" for name in rest)
    action = f"UPDATE SET {sets}" if rest else "NOTHING"
    into = quoted_columns(names)
    return (
        f"INSERT INTO {quoted(table.name)} ({into}) {_latest_rows(table, source, names)} "
        f"ON CONFLICT ({quoted_columns(table.key)}) DO {action}"
    )


def update_from(table: SqlTable, source: str, names: tuple[str, ...]) -> str:
    """Return the statement that updates the table's rows by the last row of each key in a temporary table.

    Raises DataError if the key has all columns, since there is then nothing to update.
    """
    rest = [name for name in names if name not in table.key]
    if not rest:
        raise DataError(f"insert.mode=update has nothing to update: the key has all columns ({', '.join(names)})")
    sets = ",".join(f"{quoted_column(name)}=s.{quoted_column(name)}" for name in rest)
    where = " AND ".join(f"t.{quoted_column(name)}=s.{quoted_column(name)}" for name in table.key)
    return f"UPDATE {quoted(table.name)} t SET {sets} FROM ({_latest_rows(table, source, names)}) s WHERE {where}"


def _latest_rows(table: SqlTable, source: str, names: tuple[str, ...]) -> str:
    """Return the query for the last row of each key, because one statement must not change a row twice.

    Postgres compares the keys, since different values of records can be the same in the type of the column.
    """
    key = quoted_columns(table.key)
    return f"SELECT DISTINCT ON ({key}) {quoted_columns(names)} FROM {quoted(source)} ORDER BY {key},{STAGED_ROW} DESC"


def delete_from(table: SqlTable, source: str) -> str:
    """Return the statement that deletes the rows whose keys are in a temporary table."""
    where = " AND ".join(f"t.{quoted_column(name)}=s.{quoted_column(name)}" for name in table.key)
    return f"DELETE FROM {quoted(table.name)} t USING {quoted(source)} s WHERE {where}"


def staging(name: str, table: SqlTable, names: tuple[str, ...]) -> str:
    """Return the statements for a temporary table with some of the columns, and STAGED_ROW. Every commit empties it."""
    # From a query, the columns have the collations of the table's columns. The casts replace domains.
    casts = ", ".join(f"CAST({quoted_column(one)} AS {table.columns[one]})" for one in names)
    return (
        f"CREATE TEMP TABLE {quoted(name)} ({quoted_columns(names)}) ON COMMIT DELETE ROWS AS "
        f"SELECT {casts} FROM {quoted(table.name)} WITH NO DATA; "
        f"ALTER TABLE {quoted(name)} ADD COLUMN {STAGED_ROW} bigint GENERATED ALWAYS AS IDENTITY"
    )
