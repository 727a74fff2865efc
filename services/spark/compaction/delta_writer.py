"""Writes Delta tables as a compaction does: files first, then one commit that adds them to the table.

A commit creates the version after the one that the job planned with, or fails with `CompactionConflict`. If two jobs
plan with the same version, only one of them commits. Any other write since the plan also stops a job. Files that no
commit names belong to no table version; a full VACUUM removes them.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs as pafs
import pyarrow.parquet as pq
from deltalake import CommitProperties, DeltaTable, Schema, write_deltalake
from deltalake.exceptions import CommitFailedError
from deltalake.fs import DeltaStorageHandler
from deltalake.transaction import AddAction, RemoveAction

from penstock.services.spark.compaction.delta_reader import table_positions
from penstock.services.spark.table_columns import CLOSED, LATE
from penstock.shared.common.errors import LakeUnavailable, PenstockError
from penstock.shared.common.lake.delta_tables import DELTA_ERRORS, one_line

# A file has at most this many rows. Those of `closed` and `late` are sorted by time, so that readers can skip files.
FILE_ROWS = 1_000_000
ROW_GROUP_ROWS = 100_000
# About this many bytes in memory are sorted at a time: Arrow cannot sort a column of more than 2 GiB.
SORT_BYTES = 1024 * 1024 * 1024
COMPRESSION = "zstd"
MEMORY_BYTES = b"penstock.memory_bytes"
"""The key in a Parquet file's metadata under which the size of its rows in memory is recorded."""
TIMES = {CLOSED: "window_start", LATE: "event_time"}
"""The column by which the rows of a table are ordered within its files."""
Options = Mapping[str, str]


class CompactionConflict(PenstockError):
    """Another job of the same application, or another writer, committed to a table first.

    The failed commit changes nothing. This job's earlier commits stay.
    """


class DataFile(NamedTuple):
    """A file that was written below a table's folder, with the fields that a commit records."""

    path: str
    size: int
    partition: int | None
    rows: int
    stats: str


class DeltaFiles:
    """Writes and reads the Parquet files of one Delta table."""

    def __init__(self, uri: str, options: Options, indexed: Sequence[str]) -> None:
        if "://" not in uri:
            Path(uri).mkdir(parents=True, exist_ok=True)
        self._files = pafs.PyFileSystem(DeltaStorageHandler(uri, dict(options)))
        self._uri = uri
        self._indexed = indexed

    def write(self, batches: Sequence[pa.RecordBatch], partition: int | None = None) -> DataFile:
        """Write one file. `partition` is the value of the column `partition` if the table is partitioned by it.

        No two files have the same name, so two attempts of one Spark task do not write the same file. Raises
        LakeUnavailable if the file cannot be written.
        """
        table = pa.Table.from_batches(batches)
        name = f"part-{uuid.uuid4().hex}.parquet"
        # Delta keeps the values of partition columns in the table's log, not in the data files.
        if partition is not None:
            table = table.drop_columns(["partition"])
        # Parquet's own sizes are those of encoded columns: repeated values take almost no bytes in them.
        table = table.replace_schema_metadata({MEMORY_BYTES: str(table.nbytes)})
        path = name if partition is None else f"partition={partition}/{name}"
        try:
            with self._files.open_output_stream(path) as out:
                pq.write_table(table, out, row_group_size=ROW_GROUP_ROWS, compression=COMPRESSION)
                size = out.tell()
        except DELTA_ERRORS as e:
            raise LakeUnavailable(f"{self._uri}: {path} cannot be written: {one_line(e)}") from e
        return DataFile(path, size, partition, len(table), stats_of(table, self._indexed))

    def read(self, path: str) -> pa.Table:
        """Return the rows of a file of the table. Raises LakeUnavailable if the file is gone or cannot be read."""
        try:
            with self._files.open_input_file(path) as source:
                return pq.read_table(source)
        except DELTA_ERRORS as e:
            raise LakeUnavailable(f"{self._uri}: {path} cannot be read: {one_line(e)}") from e

    def memory_bytes(self, path: str) -> int:
        """Return the size in memory of a file's rows. A file of another writer is read to find it.

        Raises LakeUnavailable if the file is gone or cannot be read.
        """
        try:
            with self._files.open_input_file(path) as source:
                recorded = (pq.read_metadata(source).metadata or {}).get(MEMORY_BYTES)
        except DELTA_ERRORS as e:
            raise LakeUnavailable(f"{self._uri}: {path} cannot be read: {one_line(e)}") from e
        return int(self.read(path).nbytes if recorded is None else recorded)


def write_files(
    files: DeltaFiles, kind: str, batches: Sequence[pa.RecordBatch], partition: int | None = None
) -> Iterator[DataFile]:
    """Write rows of a `state`, `closed` or `late` table (`kind`), and yield each file that was written.

    A row is null in columns that its batch lacks. A file of `closed` or `late` is sorted by time. If the table is
    partitioned, all rows must belong to `partition`.
    """
    for own in sortable_chunks(batches):
        rows = pa.concat_tables([pa.Table.from_batches([batch]) for batch in own], promote_options="permissive")
        if kind in TIMES:
            rows = rows.sort_by(TIMES[kind])
        for at in range(0, len(rows), FILE_ROWS):
            yield files.write(rows.slice(at, FILE_ROWS).to_batches(), partition)


def sortable_chunks(batches: Sequence[pa.RecordBatch]) -> Iterator[list[pa.RecordBatch]]:
    """Yield lists of batches to write that are sorted together, of about SORT_BYTES each.

    Arrow cannot sort a column of more than 2 GiB.
    """
    part = list[pa.RecordBatch]()
    size = 0
    for batch in batches:
        if part and size + batch.nbytes > SORT_BYTES:
            yield part
            part = []
            size = 0
        part.append(batch)
        size += batch.nbytes
    if part:
        yield part


def stats_of(table: pa.Table, indexed: Iterable[str]) -> str:
    """Return Delta's statistics of a file as JSON: its number of rows, and bounds and nulls of the `indexed` columns.

    >>> stats_of(pa.table({"a": [2, 1], "b": ["x", "y"]}), ["a"])
    '{"numRecords": 2, "minValues": {"a": 1}, "maxValues": {"a": 2}, "nullCount": {"a": 0}}'
    """
    least = dict[str, Any]()
    most = dict[str, Any]()
    nulls = dict[str, int]()
    for name in indexed:
        if name not in table.column_names:
            continue
        column = table.column(name)
        nulls[name] = column.null_count
        bounds = pc.min_max(column).as_py()
        # A column without values has no bounds. Readers then do not skip the file.
        if bounds["min"] is not None:
            least[name] = _json_bound(bounds["min"])
            most[name] = _json_bound(bounds["max"])
    return json.dumps({"numRecords": len(table), "minValues": least, "maxValues": most, "nullCount": nulls})


def _json_bound(value: Any) -> Any:
    """Return a bound for the JSON of Delta's statistics.

    Delta's statistics round timestamps to ms. That loses nothing, since all timestamps here are whole ms.
    """
    return value.isoformat(timespec="milliseconds").replace("+00:00", "Z") if hasattr(value, "isoformat") else value


def ensure_table(
    table: DeltaTable | None,
    uri: str,
    options: Options,
    schema: pa.Schema,
    indexed: Sequence[str],
    *,
    is_partitioned: bool,
) -> DeltaTable:
    """Return the table with all columns of `schema`. Create it if it is None, and add the columns that it lacks.

    Raises CompactionConflict if another job changed the table first, or LakeUnavailable.
    """
    by = ["partition"] if is_partitioned else None
    try:
        if table is None:
            return DeltaTable.create(
                uri,
                Schema.from_arrow(schema),
                partition_by=by,
                configuration={"delta.dataSkippingStatsColumns": ",".join(indexed)},
                storage_options=dict(options),
            )
        # An empty append adds the columns. It repeats the positions: otherwise it would hide those of the commits
        # before, and the next compaction would have to compute them from the rows. For `max_commit_retries` see
        # `commit`.
        if _lacks_fields(pa.schema(table.schema().to_arrow()), schema):
            once = CommitProperties(custom_metadata=commit_metadata(table_positions(table)), max_commit_retries=0)
            wider = schema.empty_table()
            write_deltalake(table, wider, mode="append", schema_mode="merge", partition_by=by, commit_properties=once)
    except DELTA_ERRORS as e:
        # Both jobs found no table. The first one to create it goes on.
        if table is None and (isinstance(e, CommitFailedError) or "already exists" in str(e)):
            raise CompactionConflict(f"another job created {uri} at the same time") from e
        raise failed_write(e, table, f"{uri} cannot be created or extended") from e
    return table


def _lacks_fields(existing: pa.Schema, wanted: pa.Schema) -> bool:
    for field in wanted:
        if field.name not in existing.names:
            return True
        known = existing.field(field.name).type
        # Stores of `state` are struct columns: an appended aggregation is a new field in one of them.
        if pa.types.is_struct(field.type) and {f.name for f in field.type} - {f.name for f in known}:
            return True
    return False


def commit(
    table: DeltaTable, added: Iterable[DataFile], removed: Sequence[RemoveAction], metadata: Mapping[str, Any]
) -> int:
    """Add files to a table and remove others, in one new version. Returns that version.

    If files are removed, the added files must have no new rows: their `dataChange` is then false, so streaming readers
    skip them. `table` stays at its version, so it can commit once. Raises CompactionConflict if the next version exists
    already, or LakeUnavailable.
    """
    now_ms = int(time.time() * 1000)
    actions: list[AddAction | RemoveAction] = list(removed)
    for one in added:
        values = {} if one.partition is None else {"partition": str(one.partition)}
        # Files that replace others have the same rows, except for superseded ones of `state`. So `dataChange` is false.
        actions.append(AddAction(one.path, one.size, values, now_ms, not removed, one.stats))
    # deltalake repeats a commit whose version is taken, and appends do not conflict in Delta. So with retries both
    # jobs would append the same rows. Without them, the second job fails here.
    version = table.version()
    by = table.metadata().partition_columns
    properties = CommitProperties(custom_metadata=commit_metadata(metadata), max_commit_retries=0)
    try:
        table.create_write_transaction(actions, "append", table.schema(), partition_by=by, commit_properties=properties)
    except DELTA_ERRORS as e:
        raise failed_write(e, table, f"{table.table_uri} cannot be written") from e
    return int(version) + 1


def failed_write(error: Exception, table: DeltaTable | None, failure: str) -> PenstockError:
    """Return the error of a failed write to a table: CompactionConflict if another job has committed to it meanwhile.

    Else it is LakeUnavailable, whose text begins with `failure`. `table` is then at its newest version.
    """
    # deltalake raises CommitFailedError also for a table that it cannot write: another engine has given it a feature
    # that deltalake lacks, or has forbidden deletions.
    if table is not None and isinstance(error, CommitFailedError):
        version = table.version()
        try:
            table.update_incremental()
        except DELTA_ERRORS as e:
            error = e
        if table.version() > version:
            return CompactionConflict(
                f"another job has committed to {table.table_uri} as version {version + 1}; this job stops"
            )
    return LakeUnavailable(f"{failure}: {one_line(error)}")


def commit_metadata(metadata: Mapping[str, Any] | None) -> dict[str, str] | None:
    """Return a commit's metadata in the form in which it is written to Delta's log."""
    return None if metadata is None else {"userMetadata": json.dumps(metadata)}
