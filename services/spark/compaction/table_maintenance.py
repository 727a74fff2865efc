"""Table maintenance after a compaction: OPTIMIZE, VACUUM and retention.

A compaction adds one or a few files to each table that has new rows. OPTIMIZE merges the small files of `closed` and
`late` into larger ones, ordered by time; `state` is rewritten by the compaction itself. VACUUM removes the files that
the table has not needed for the retention time.

A failed step does not undo the compaction and does not stop the other steps. Its error is logged and listed in the
report. At the end the command raises the first such error, except `penstock batch` with `--every`. A step that loses a
conflict with another job has not failed: the next compaction does its work.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, TypeVar

import pyarrow as pa
from deltalake import CommitProperties, DeltaTable
from deltalake.transaction import RemoveAction
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException

from penstock.services.spark.compaction import delta_writer
from penstock.services.spark.compaction.delta_reader import commit_history, progress_rows, table_positions
from penstock.services.spark.compaction.delta_writer import (
    SORT_BYTES,
    TIMES,
    CompactionConflict,
    DataFile,
    DeltaFiles,
)
from penstock.services.spark.compaction.settings import MaintenanceSettings
from penstock.services.spark.errors import translated
from penstock.services.spark.table_columns import CLOSED, DAY_MS, INDEXED
from penstock.shared.common.errors import LakeUnavailable, PenstockError
from penstock.shared.common.lake import compaction_history, delta_tables
from penstock.shared.common.lake.delta_tables import DELTA_ERRORS, one_line
from penstock.shared.streams.changelog.format import decode_progress

T = TypeVar("T")
VACUUM_ENDED = "VACUUM END"
"""Ends a VACUUM in the history of `state`: Delta's operation, or the kind of our commit if no file was removed."""
OPTIMIZE = "OPTIMIZE"
"""Marks an OPTIMIZE in a table's history: the kind of our commit, or the operation of another engine."""
FILE_BYTES = 128 * 1024 * 1024
"""The most bytes, as compressed in the files, that OPTIMIZE merges into one. For those in memory see SORT_BYTES."""
TOMBSTONE_RETENTION_HOURS = 7 * 24
"""Delta's default `delta.deletedFileRetentionDuration`: how long checkpoints keep the entries of removed files."""
COMMITS_PER_APPEND = 4
"""A compaction's commits of a `closed` table: its rows, the deletion of old windows, the start and end of VACUUM."""
# This many versions are read beyond those of the compactions that a policy counts: others may lie between them.
EXTRA_HISTORY_VERSIONS = 50


class FailedSteps(list[tuple[str, PenstockError]]):
    """The names of the steps that failed after the commits of one or more compactions, each with its error."""

    def lines(self) -> tuple[str, ...]:
        """Return one line for each step."""
        return tuple(f"{step}: {type(error).__name__}: {error}" for step, error in self)

    def raise_first(self) -> None:
        """Raise the error of the first step, if there is one."""
        if self:
            raise self[0][1]


class TableMaintenance:
    """The maintenance steps after one compaction."""

    def __init__(self, settings: MaintenanceSettings, log: Callable[[str], object]) -> None:
        self.settings = settings
        self.log = log
        self.failed = FailedSteps()

    def __repr__(self) -> str:
        return f"TableMaintenance({self.failed.lines()})"

    def attempt(self, name: str, step: Callable[[], T], otherwise: T) -> T:
        """Return the result of a step, or `otherwise` if it raises an error of Penstock, Spark, Arrow or a connection.

        The error is added to `failed`, unless it is a CompactionConflict.
        """
        try:
            return step()
        except pa.ArrowException as e:
            error: PenstockError = LakeUnavailable(f"{type(e).__name__}: {one_line(e)}")
        except (PenstockError, Py4JError, PySparkException, ConnectionError) as e:
            error = e if isinstance(e, PenstockError) else translated(e)
        # Not a failure: no step is urgent, and the other job's compaction may do it.
        if isinstance(error, CompactionConflict):
            self.log(f"{name}: another job committed first; the next compaction does it")
        else:
            self.log(f"{name} failed: {error}")
            self.failed.append((name, error))
        return otherwise

    def maintain(self, state: str, others: Mapping[str, str]) -> dict[str, Any]:
        """Apply retention, then run OPTIMIZE and VACUUM if they are due. A step that fails does not stop the others.

        `others` are the paths of the `closed` and `late` tables, by name. Returns the fields `optimized_tables` and
        `vacuumed` of a CompactionReport.
        """
        settings = self.settings
        hours = settings.retention_hours
        appends_max = settings.optimize_files_max
        # Retention comes first: OPTIMIZE then merges only rows that stay.
        self.attempt("the deletion of old closed windows", lambda: self._delete_expired_windows(state, others), None)
        optimized = 0
        vacuumed = False
        if appends_max:
            optimized = sum(
                self.attempt(f"OPTIMIZE of {name}", partial(self._optimize_table, name, path, appends_max), False)
                for name, path in others.items()
            )
        if hours is not None and self.attempt("VACUUM", lambda: self._is_vacuum_due(state), False):
            # The history of `state` records the last VACUUM, so `state` comes last, after all other tables.
            vacuumed = True
            steps = [(path, self._vacuum_table) for path in others.values()] + [(state, self._vacuum_state)]
            for path, step in steps:
                vacuumed &= self.attempt(f"VACUUM of {path}", partial(step, path, hours), False)
        return {"optimized_tables": optimized, "vacuumed": vacuumed}

    def _open_table(self, path: str) -> DeltaTable | None:
        return delta_tables.open_table(path, self.settings.storage_options)

    def _is_vacuum_due(self, state: str) -> bool:
        table = self._open_table(state)
        every = self.settings.vacuum_every
        return table is not None and is_vacuum_due(commit_history(table, 2 * every + EXTRA_HISTORY_VERSIONS), every)

    def _optimize_table(self, name: str, path: str, appends_max: int) -> bool:
        table = self._open_table(path)
        versions = COMMITS_PER_APPEND * (appends_max + 1) + EXTRA_HISTORY_VERSIONS
        if table is None or not is_optimize_due(commit_history(table, versions), appends_max):
            return False
        if has_deletion_vectors(table):
            self.log(f"{name}: no OPTIMIZE, because deletion vectors are enabled for the table")
            return False
        merged = optimize(table, name.partition("/")[0], self.settings.storage_options)
        self.log(f"{name}: {merged} files merged")
        return merged > 0

    def _vacuum_table(self, path: str, hours: int) -> bool:
        if (table := self._open_table(path)) is not None:
            vacuum(table, hours)
        return True

    def _vacuum_state(self, path: str, hours: int) -> bool:
        if (table := self._open_table(path)) is not None:
            before = table.version()
            vacuum(table, hours)
            # deltalake commits a VACUUM only if it removes files. Without a commit, the next one would be due at once.
            if table.version() == before:
                delta_writer.commit(table, (), (), {"kind": VACUUM_ENDED})
        return True

    def _delete_expired_windows(self, state: str, others: Mapping[str, str]) -> None:
        """Delete closed windows that end before the limit in `state`, and late records before an earlier limit.

        The limit for late records is that in `state`, less the retention period, or less the window size if that is
        longer: a window that began before the limit may end after it. Both limits are rounded down to midnight UTC.
        """
        days = self.settings.closed_retention_days
        table = self._open_table(state)
        if days is None or table is None:
            return
        # The limit is the one in `state`, not one from the clock. `corrected` leaves out windows by the same limit,
        # which is not rounded down. So it never returns the late records of a deleted window alone.
        newest = [of[0] for of in progress_rows(table).values()]
        limit_ms = max((row["expired_ms"] for row in newest), default=-1)
        sizes_ms = {s.name: s.size_ms for row in newest for s in decode_progress(row["progress"].encode()).stores}
        for name, path in others.items():
            kind, _, store = name.partition("/")
            column = "window_end" if kind == CLOSED else "event_time"
            before_ms = limit_ms if kind == CLOSED else limit_ms - max(days * DAY_MS, sizes_ms.get(store, 0))
            # The limit moves with each compaction. A deletion rewrites the file in which the limit lies, which may have
            # FILE_BYTES. With whole days this happens once a day.
            before_ms -= before_ms % DAY_MS
            own = self._open_table(path) if before_ms > 0 else None
            if own is not None and (expired := delete_expired_rows(own, column, before_ms)):
                self.log(f"{name}: {expired} rows deleted: retention is {days} days")


# --- policies ---


def is_optimize_due(history: Iterable[dict[str, Any]], appends_max: int) -> bool:
    """Return True if a table has more than `appends_max` appends since its last OPTIMIZE.

    `history` has its commits, newest first.

    >>> write, optimize = {"operation": "WRITE"}, {"operation": "WRITE", "kind": "OPTIMIZE"}
    >>> is_optimize_due([write, optimize, write], 1), is_optimize_due([write, write], 1)
    (False, True)
    """
    appends = 0
    for commit in history:
        # Another engine's OPTIMIZE is an operation. Our own is a commit with a kind.
        if OPTIMIZE in (commit["operation"], commit.get("kind")):
            break
        appends += commit["operation"] == compaction_history.APPEND
    return appends > appends_max


def is_vacuum_due(history: Iterable[dict[str, Any]], every: int) -> bool:
    """Return True if there were `every` compactions or more since the last VACUUM.

    `history` has the commits of `state`, newest first.

    >>> compaction, vacuum = {"operation": "WRITE", "kind": "compaction"}, {"operation": "VACUUM END"}
    >>> is_vacuum_due([compaction, compaction], 2), is_vacuum_due([compaction, vacuum, compaction], 2)
    (True, False)
    """
    compactions = 0
    for commit in history:
        if VACUUM_ENDED in (commit["operation"], commit.get("kind")):
            break
        compactions += commit.get("kind") == compaction_history.COMPACTION
    return compactions >= every


# --- operations on a table ---


def has_deletion_vectors(table: DeltaTable) -> bool:
    """Return whether deletion vectors are enabled for a table. A vector marks the deleted rows of a file.

    Such a table is neither optimized nor rewritten: both would read the deleted rows from the files, and a RemoveAction
    without the vector would not remove a file.
    """
    return "deletionVectors" in (table.protocol().reader_features or ())


def optimize(table: DeltaTable, kind: str, options: Mapping[str, str]) -> int:
    """Merge the small files of a `closed` or `late` table. Returns how many files were merged into others.

    Files that are neighbours in time are merged, and the rows of each new file are sorted by time. So readers can still
    skip files and row groups by time.

    Raises CompactionConflict or LakeUnavailable.
    """
    time_column = TIMES[kind]
    schema = pa.schema(table.schema().to_arrow())
    files = DeltaFiles(table.table_uri, options, INDEXED[kind])
    now_ms = int(time.time() * 1000)
    added = list[DataFile]()
    removed = list[RemoveAction]()
    present = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    for group in _group_small_files(present, f"min.{time_column}", files.memory_bytes):
        rows = pa.concat_tables([_cast_to_schema(files.read(file["path"]), schema) for file in group])
        rows = rows.sort_by([(time_column, "ascending"), ("changelog_offset", "ascending")])
        added.append(files.write(rows.to_batches()))
        removed += [RemoveAction(file["path"], False, now_ms, file["size_bytes"], {}) for file in group]
    # The commit repeats the positions, so that it does not hide those of the compaction before.
    if added:
        delta_writer.commit(table, added, removed, {"kind": OPTIMIZE, **(table_positions(table) or {})})
    return len(removed)


def _group_small_files(
    files: list[dict[str, Any]], least: str, memory_bytes: Callable[[str], int]
) -> Iterator[list[dict[str, Any]]]:
    """Yield the groups of files to merge: neighbours in time, two or more.

    A group has at most FILE_BYTES, and its rows take at most SORT_BYTES in memory. `memory_bytes` returns the size of a
    file's rows by its path.
    """
    group = list[dict[str, Any]]()
    size = 0
    memory = 0
    # A file above half of a limit stays as it is: merging it would rewrite many rows to save one file. Two files of
    # at most half always fit, so a group that is full has two or more.
    small = [file for file in files if file["size_bytes"] <= FILE_BYTES / 2]
    for file in sorted(small, key=lambda file: (file.get(least) is not None, file.get(least), file["path"])):
        own = memory_bytes(file["path"])
        if own > SORT_BYTES / 2:
            continue
        if size + file["size_bytes"] > FILE_BYTES or memory + own > SORT_BYTES:
            yield group
            group = []
            size = 0
            memory = 0
        group.append(file)
        size += file["size_bytes"]
        memory += own
    if len(group) > 1:
        yield group


def _cast_to_schema(rows: pa.Table, schema: pa.Schema) -> pa.Table:
    """Return the rows of a file that OPTIMIZE merges, in the table's present columns and types.

    A file may lack columns that were added later.
    """
    columns = [
        rows.column(field.name).cast(field.type) if field.name in rows.column_names else pa.nulls(len(rows), field.type)
        for field in schema
    ]
    return pa.table(columns, schema=schema)


def delete_expired_rows(table: DeltaTable, column: str, before_ms: int) -> int:
    """Apply retention: delete the rows whose time in `column` is before `before_ms`. Returns their number."""
    text = datetime.fromtimestamp(before_ms / 1000, UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    before = f"arrow_cast('{text}Z', 'Timestamp(Microsecond, Some(\"UTC\"))')"
    metrics: dict[str, Any] = _translate_delta_errors(
        table, lambda: table.delete(f"{column} < {before}", commit_properties=_position_metadata(table))
    )
    return int(metrics.get("num_deleted_rows") or 0)


def vacuum(table: DeltaTable, retention_hours: int) -> None:
    """Remove the files that the table has not needed for `retention_hours`. Raises CompactionConflict or
    LakeUnavailable.

    Files of a failed compaction, which no commit names, are removed once they are older than that. If
    `retention_hours` is greater than TOMBSTONE_RETENTION_HOURS, or if deletion vectors are enabled, they stay. Other
    files are then removed only if their removal is still in the table's log or its last checkpoint.
    """
    # Without `enforce_retention_duration`, deltalake accepts less than the table's own retention, by default a week.
    # The settings have a minimum of their own.
    options: dict[str, Any] = {
        "dry_run": False,
        "enforce_retention_duration": False,
        # A full VACUUM removes every file that the log does not name and that was last modified before the retention.
        # Checkpoints forget the files that were removed a week ago, though a longer retention still needs them. VACUUM
        # then removes only files whose removal is in the table's log or its last checkpoint. The files of deletion
        # vectors are not among these, but deltalake's full VACUUM removes them though they are in use.
        "full": retention_hours <= TOMBSTONE_RETENTION_HOURS and not has_deletion_vectors(table),
        "commit_properties": _position_metadata(table),
    }
    _translate_delta_errors(table, lambda: table.vacuum(retention_hours, **options))


def _position_metadata(table: DeltaTable) -> CommitProperties:
    """Return the metadata of a maintenance commit.

    It repeats the table's positions, because the commit of the last compaction may no longer be found in the log.
    """
    return CommitProperties(custom_metadata=delta_writer.commit_metadata(table_positions(table)))


def _translate_delta_errors(table: DeltaTable, step: Any) -> Any:
    """Run a step and return its result. Raise CompactionConflict or LakeUnavailable for errors of deltalake."""
    try:
        return step()
    except DELTA_ERRORS as e:
        raise delta_writer.failed_write(e, table, table.table_uri) from e
