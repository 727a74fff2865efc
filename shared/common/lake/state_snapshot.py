"""Reads the snapshots of an application's live rows from the lake: versions of its Delta table `state`.

Compactions write two kinds of rows to `<lake>/<application>/state`: changes of live rows, and the progress of each
changelog partition (its covered offset). Among the rows with the same (partition, store, key, start), the one with the
highest changelog offset is valid. If that row is a tombstone, there is no live row. To read a consistent snapshot, read
the covered offsets first, then the live rows at exactly the same version.

Everything here blocks: call it with `asyncio.to_thread`.
"""

# ruff: noqa: S608 - SQL is the only interface, and every name and text in it is quoted
from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.schema import StructType
from numpy.typing import NDArray

from penstock.shared.common.errors import LakeUnavailable, NotASnapshot
from penstock.shared.common.lake.delta_tables import (
    fields_of_table,
    open_table,
    query,
    quote_column_name,
    require_columns,
    rows,
    text_literal,
)
from penstock.shared.common.lake.location import table_uri

PROGRESS_COLUMNS = ("partition", "changelog_offset", "epoch", "progress", "topic_id")
WINDOW_COLUMNS = ("key", "start_ms", "end_ms", "live")
QUERIED_COLUMNS = ("row", "partition", "store", *WINDOW_COLUMNS, "changelog_offset")
"""The columns that a query for windows reads, beside the store's own."""
WINDOWS = "row = 'window'"
"""The condition for the rows of `state` that are changes of windows."""
SLICE_ROWS = 250_000
"""Rows of `state` that are read and sorted at once. A restore holds two slices: it reads one and applies the other."""
SLICE_BYTES = 256 << 20
"""A slice has fewer rows than SLICE_ROWS if they would be larger than this, at the size of the slice before it."""
FIRST_SLICE_ROWS = 1_000
"""The first slice is small, since the size of its rows is not known."""


class PartitionSnapshot(NamedTuple):
    """How far the snapshot covers one changelog partition. `covered_offset` is the NEXT offset to read."""

    partition: int
    covered_offset: int
    epoch: int
    progress: bytes
    topic_id: str | None


class Snapshot(NamedTuple):
    """One version of an application's `state`, and the progress of the requested partitions that it covers."""

    version: int
    partitions: dict[int, PartitionSnapshot]


def read_snapshot(
    lake: str, application: str, partitions: Collection[int], storage_options: Mapping[str, str] | None = None
) -> Snapshot | None:
    """Read the newest snapshot of `state`; None if there is no table yet. Raises LakeUnavailable or NotASnapshot."""
    table = open_table(table_uri(lake, application, "state"), storage_options)
    if table is None:
        return None
    require_columns(table, ("row", *PROGRESS_COLUMNS))
    covered: dict[int, PartitionSnapshot] = {}
    if chosen := [int(p) for p in partitions]:
        where = f"row = 'progress' AND partition IN ({', '.join(map(str, chosen))})"
        order = "PARTITION BY partition ORDER BY changelog_offset DESC NULLS FIRST"
        columns = ", ".join(map(quote_column_name, PROGRESS_COLUMNS))
        numbered = f"SELECT {columns}, row_number() OVER ({order}) AS nth FROM t WHERE {where}"
        newest = rows(table, f"SELECT {columns} FROM ({numbered}) WHERE nth = 1")
        covered = {row["partition"]: _parse_partition_snapshot(table, row) for row in newest}
    return Snapshot(int(table.version()), dict(sorted(covered.items())))


def _parse_partition_snapshot(table: DeltaTable, row: Mapping[str, Any]) -> PartitionSnapshot:
    offset = row["changelog_offset"]
    epoch = row["epoch"]
    progress = row["progress"]
    topic_id = row["topic_id"]
    numbers = isinstance(offset, int) and isinstance(epoch, int)
    if not numbers or not isinstance(progress, str) or not isinstance(topic_id, str | None):
        raise NotASnapshot(
            f"{table.table_uri} is not a snapshot: the progress of partition {row['partition']} is not readable"
        )
    return PartitionSnapshot(row["partition"], offset, epoch, progress.encode(), topic_id)


def read_window_changes(
    lake: str,
    application: str,
    partition: int,
    store: str,
    version: int,
    columns: Sequence[str],
    storage_options: Mapping[str, str] | None = None,
) -> Iterator[pa.Table]:
    """Read the changes of one store's windows in one partition, ordered by changelog offset.

    They come from one snapshot, which is the version `version` of the table `state`.

    They come in slices of at most about SLICE_ROWS rows and SLICE_BYTES bytes. Apply the slices in order. The last
    change of a window counts: if its `live` is false, the window is not live any more. A store that is not in the
    snapshot has no slices. Raises LakeUnavailable or NotASnapshot. The columns are:

    - key (binary), start_ms, end_ms (int64), live (bool).
    - The fields `columns` of the state, in this order (int64, float64 or binary). A field is null in a tombstone, and
      in a row that was written before the store had that aggregation.
    """
    table = open_table(table_uri(lake, application, "state"), storage_options, version)
    if table is None:
        raise LakeUnavailable(f"there is no table {table_uri(lake, application, 'state')} (any more)")
    fields = fields_of_table(table)
    if store not in fields:
        return
    if not isinstance(fields[store].type, StructType):
        raise NotASnapshot(f"{table.table_uri}: the column {store!r} holds no states")
    known = {f.name for f in fields[store].type.fields}
    if missing := [c for c in columns if c not in known]:
        raise NotASnapshot(f"{table.table_uri}: store {store!r} has no column {', '.join(missing)}")
    require_columns(table, QUERIED_COLUMNS)
    state = [f"{quote_column_name(store)}[{text_literal(c)}] AS {quote_column_name(f'state {c}')}" for c in columns]
    where = f"{WINDOWS} AND partition = {int(partition)} AND store = {text_literal(store)}"
    # Rows may be in any order in the files, because other programs may rewrite the files. So the offsets alone are read
    # first, and divided into ranges (slices) whose rows fit in memory. Files and row groups without rows of the slice
    # are skipped by their statistics, if they have any.
    offsets = _sorted_offsets(table, where)
    start = 0
    rows_max = min(FIRST_SLICE_ROWS, SLICE_ROWS)
    while start < len(offsets):
        low = offsets[start]
        high = offsets[min(start + rows_max, len(offsets)) - 1]
        within = f"{where} AND changelog_offset >= {low} AND changelog_offset <= {high}"
        sql = f"SELECT {', '.join((*WINDOW_COLUMNS, *state, 'changelog_offset'))} FROM t WHERE {within}"
        # The engine sorts: its batches are small. An Arrow array of all states would be limited to 2 GiB.
        found = query(table, f"{sql} ORDER BY changelog_offset")
        yield found.remove_column(found.num_columns - 1).rename_columns([*WINDOW_COLUMNS, *columns])
        start = int(np.searchsorted(offsets, high, "right"))
        rows_max = max(1, min(SLICE_ROWS, SLICE_BYTES * found.num_rows // found.nbytes))


def _sorted_offsets(table: DeltaTable, where: str) -> NDArray[np.int64]:
    """Return the changelog offsets of a snapshot's rows, in ascending order. Raises NotASnapshot if one is null."""
    column = query(table, f"SELECT changelog_offset FROM t WHERE {where}").column(0)
    if column.null_count:
        raise NotASnapshot(f"{table.table_uri} is not a snapshot: there are windows without a changelog offset")
    return np.sort(column.to_numpy())
