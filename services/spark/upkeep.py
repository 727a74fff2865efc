"""OPTIMIZE, VACUUM and retention of the tables.

Every run adds a file or a few to each table. OPTIMIZE merges the small files of `closed` and `late`; `state` is
rewritten by the compaction itself. VACUUM removes the files that no version younger than the retention needs.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

from deltalake import CommitProperties, DeltaTable
from deltalake.exceptions import CommitFailedError

from penstock.services.spark import delta
from penstock.services.spark.delta import CompactionConflict
from penstock.shared.common.errors import LakeUnavailable
from penstock.shared.common.lake import DELTA_ERRORS, one_line

OPTIMIZE, VACUUM_ENDED, WRITE = "OPTIMIZE", "VACUUM END", "WRITE"  # as Delta's history calls them
FILE_BYTES = 256 * 1024 * 1024  # files of this size and more stay as they are


def is_optimize_due(history: Iterable[dict[str, Any]], appends_max: int) -> bool:
    """Whether more than so many appends came since the last OPTIMIZE, by a table's commits, newest first.

    >>> write, optimize = {"operation": "WRITE"}, {"operation": "OPTIMIZE"}
    >>> is_optimize_due([write, optimize, write], 1), is_optimize_due([write, write], 1)
    (False, True)
    """
    appends = 0
    for commit in history:
        if commit["operation"] == OPTIMIZE:
            break
        appends += commit["operation"] == WRITE
    return appends > appends_max


def is_vacuum_due(history: Iterable[dict[str, Any]], every: int) -> bool:
    """Whether `every` compactions or more came since the last VACUUM, by the commits of `state`, newest first.

    >>> run, vacuum = {"operation": "WRITE", "kind": "compaction"}, {"operation": "VACUUM END"}
    >>> is_vacuum_due([run, run], 2), is_vacuum_due([run, vacuum, run], 2)
    (True, False)
    """
    runs = 0
    for commit in history:
        if commit["operation"] == VACUUM_ENDED:
            break
        runs += commit.get("kind") == "compaction"
    return runs >= every


def optimize(table: DeltaTable) -> None:
    """Make few files of many. CompactionConflict, LakeUnavailable."""
    _do(table, lambda: table.optimize.compact(target_size=FILE_BYTES, commit_properties=_again(table)))


def expire(table: DeltaTable, column: str, before_ms: int) -> int:
    """Delete the rows whose time in a column is before `before_ms`; how many those were."""
    text = datetime.fromtimestamp(before_ms / 1000, UTC).replace(tzinfo=None).isoformat(timespec="milliseconds")
    before = f"arrow_cast('{text}Z', 'Timestamp(Microsecond, Some(\"UTC\"))')"
    done: dict[str, Any] = _do(table, lambda: table.delete(f"{column} < {before}", commit_properties=_again(table)))
    return int(done.get("num_deleted_rows") or 0)


def vacuum(table: DeltaTable, retention_hours: int) -> None:
    """Remove the files that no version younger than the retention needs. CompactionConflict, LakeUnavailable."""
    how: dict[str, Any] = {"dry_run": False, "enforce_retention_duration": False, "commit_properties": _again(table)}
    _do(table, lambda: table.vacuum(retention_hours, **how))


def _again(table: DeltaTable) -> CommitProperties:
    """A commit that says the table's positions again."""
    return CommitProperties(custom_metadata=delta.metadata_of(delta.positions(table)))


def _do(table: DeltaTable, step: Any) -> Any:
    try:
        return step()
    except CommitFailedError as e:
        raise CompactionConflict(f"another job has written to {table.table_uri} meanwhile: {one_line(e)}") from e
    except DELTA_ERRORS as e:
        raise LakeUnavailable(f"{table.table_uri}: {one_line(e)}") from e
