"""Opens Delta tables and queries them as Arrow, without Spark.

Everything here blocks: call it with `asyncio.to_thread`. `storage_options` are deltalake's, such as AWS_REGION.
"""

# ruff: noqa: S608 - SQL is the only interface, and every name and text in it is quoted
from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from deltalake import DeltaTable, QueryBuilder
from deltalake.exceptions import DeltaError, TableNotFoundError

from penstock.shared.common.errors import LakeUnavailable, NotASnapshot

DELTA_ERRORS = (DeltaError, OSError, ValueError, RuntimeError, pa.ArrowException)
"""The errors that deltalake raises: its own class, or Python's class for an error of Arrow, JSON or the storage."""
# A Rust stack trace begins with this line.
_FRAME = re.compile(r"0: \S+$")
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def one_line(error: BaseException) -> str:
    """The message of an error of deltalake, without colours, line breaks, arrows before each cause and the stack trace.

    >>> one_line(OSError("Generic S3 error\\n  \\x1b[31m↳\\x1b[0m client error\\n   0: <unknown>\\n   1: main"))
    'Generic S3 error: client error'
    """
    lines = (line.strip() for line in _COLOUR.sub("", str(error)).splitlines())
    text = " ".join(itertools.takewhile(lambda line: not _FRAME.match(line), filter(None, lines)))
    return text.replace(" ↳ ", ": ")


def open_table(
    uri: str, storage_options: Mapping[str, str] | None = None, version: int | None = None
) -> DeltaTable | None:
    """A Delta table, at its newest version or at `version`; None if there is no table.

    Raises LakeUnavailable, also if the table lacks that version.
    """
    try:
        return DeltaTable(uri, version=version, storage_options=dict(storage_options) if storage_options else None)
    except TableNotFoundError:
        return None
    except DELTA_ERRORS as e:
        at = "" if version is None else f" at version {version}"
        raise LakeUnavailable(f"{uri}{at} cannot be read: {one_line(e)}") from e


def query(table: DeltaTable, sql: str) -> pa.Table:
    """The result of a query, as an Arrow table. `sql` calls the Delta table `t`. Raises LakeUnavailable."""
    try:
        response = pa.RecordBatchReader.from_stream(QueryBuilder().register("t", table).execute(sql)).read_all()
        # The engine returns views of strings and bytes, which the other code (and older pyarrow) cannot compute with.
        return response.cast(pa.schema([pa.field(f.name, _plain_arrow_type(f.type)) for f in response.schema]))
    except DELTA_ERRORS as e:
        raise LakeUnavailable(f"{table.table_uri} at version {table.version()} cannot be read: {one_line(e)}") from e


def rows(table: DeltaTable, sql: str) -> list[dict[str, Any]]:
    """The result of a query as `query` takes it, with each row as a dict. Raises LakeUnavailable."""
    return list(query(table, sql).to_pylist())


def _plain_arrow_type(type_: pa.DataType) -> pa.DataType:
    if type_ == pa.binary_view() or pa.types.is_large_binary(type_):
        return pa.binary()
    if type_ == pa.string_view() or pa.types.is_large_string(type_):
        return pa.string()
    return type_


def count_rows(table: DeltaTable, of: str) -> int:
    """The number of rows of a query's source, such as the table `t` itself. Raises LakeUnavailable."""
    return int(rows(table, f"SELECT count(*) AS n FROM {of}")[0]["n"])


def fields_of_table(table: DeltaTable) -> dict[str, Any]:
    """The fields of a table's schema by name."""
    return {field.name: field for field in table.schema().fields}


def require_columns(table: DeltaTable, wanted: Sequence[str]) -> None:
    """Raise NotASnapshot unless the table has these columns."""
    fields = fields_of_table(table)
    if missing := [name for name in wanted if name not in fields]:
        raise NotASnapshot(f"{table.table_uri} is not a snapshot: it has no column {', '.join(missing)}")


def quote_column_name(name: str) -> str:
    """The name of a column as SQL."""
    return '"' + name.replace('"', '""') + '"'


def text_literal(value: str) -> str:
    """A text as SQL."""
    return "'" + value.replace("'", "''") + "'"
