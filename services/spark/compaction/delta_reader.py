"""Reads from the lake's Delta tables what a compaction continues with: stores, positions, progress rows, commits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow.fs as pafs
from deltalake import DeltaTable
from deltalake.exceptions import TableNotFoundError
from deltalake.fs import DeltaStorageHandler

from penstock.services.spark.table_columns import PROGRESS
from penstock.shared.common.errors import LakeUnavailable, SchemaMismatch
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.common.lake import delta_tables
from penstock.shared.common.lake.delta_tables import DELTA_ERRORS, one_line

# Versions of a table's log that are read first. Usually one of them has the table's positions.
VERSIONS_READ_FIRST = 5
# The search for a table's positions ends after this many versions of its log.
VERSIONS_MAX = 200
# The names are those of both writers, deltalake and Spark.
HARMLESS = frozenset(
    (
        *("OPTIMIZE", "REORG", "VACUUM START", "VACUUM END", "DELETE", "UPDATE"),
        *("ADD CONSTRAINT", "DROP CONSTRAINT", "SET TBLPROPERTIES", "UNSET TBLPROPERTIES", "UPDATE TABLE METADATA"),
        *("ADD COLUMN", "ADD COLUMNS", "CHANGE COLUMN", "CHANGE COLUMNS", "UPDATE FIELD METADATA"),
        *("ADD FEATURE", "UPGRADE PROTOCOL", "CLUSTER BY"),
        # Spark commits all three if it drops a feature.
        *("DROP FEATURE", "Empty Commit", "Deletion Vector Tombstones"),
    )
)
"""Operations that do not change a table's positions: table maintenance, deletions and updates by its owner, and changes
of metadata."""


def table_stores(uri: str, options: Mapping[str, str]) -> list[str]:
    """Find the Delta tables that earlier compactions wrote: return the sorted names of their stores.

    `uri` is the folder `closed` or `late`, in which each table is a folder. Returns no names if it does not exist.
    After a failed compaction, a name may have no table yet. Raises LakeUnavailable.
    """
    try:
        files = pafs.PyFileSystem(DeltaStorageHandler(uri, dict(options)))
        found = files.get_file_info(pafs.FileSelector("", allow_not_found=True))
    # deltalake raises it for a local folder that does not exist.
    except TableNotFoundError:
        return []
    except DELTA_ERRORS as e:
        raise LakeUnavailable(f"{uri} cannot be read: {one_line(e)}") from e
    return sorted(info.base_name for info in found if not info.is_file)


def commit_history(table: DeltaTable, limit: int) -> list[dict[str, Any]]:
    """Read at most `limit` commits of a table, newest first.

    Each has a version, a timestamp and an operation. A commit of a compaction has the compaction's metadata too.
    """
    try:
        found = table.history(limit)
    except DELTA_ERRORS as e:
        raise LakeUnavailable(f"{table.table_uri} cannot be read: {one_line(e)}") from e
    return [{**_decode_commit_metadata(commit.get("userMetadata")), **commit} for commit in found]


def _decode_commit_metadata(text: str | None) -> dict[str, Any]:
    try:
        found = decode_json(text or "{}")
    # `userMetadata` is free text: commits of other writers may contain anything.
    except InvalidJson:
        return {}
    return found if isinstance(found, dict) else {}


def table_positions(table: DeltaTable) -> dict[str, Any] | None:
    """Read a table's `topic_id` and `positions`, at which a compaction continues.

    They are those of the newest commit whose operation is not HARMLESS, or None if it has no positions. If the last
    VERSIONS_MAX commits are all HARMLESS, they are the newest positions among these. Commits that a RESTORE to a
    version has undone do not count, nor does the RESTORE.
    """
    for limit in (VERSIONS_READ_FIRST, VERSIONS_MAX):
        repeated = None
        version = table.version()
        for commit in commit_history(table, limit):
            if commit["version"] > version:
                continue
            # The table is again as it was at that version. A RESTORE to a time does not name the version.
            restored = commit.get("operationParameters", {}).get("version")
            if commit["operation"] == "RESTORE" and restored is not None:
                version = int(restored)
                continue
            found = {name: commit[name] for name in ("topic_id", "positions")} if "positions" in commit else None
            # It may have added or removed rows. So if it has no positions, those of older commits may be wrong.
            if commit["operation"] not in HARMLESS:
                return found
            # deltalake may commit maintenance after another job's append, with the positions from before the append.
            repeated = repeated or found
    return repeated


def progress_rows(state: DeltaTable) -> dict[int, list[dict[str, Any]]]:
    """Read the progress rows from which a compaction continues: those of the Delta table `state`, by partition.

    The newest row of a partition is first.

    Raises SchemaMismatch if the table is not Penstock's.
    """
    names = PROGRESS.names
    if missing := set(names) - {field.name for field in state.schema().fields}:
        raise SchemaMismatch(
            f"{state.table_uri} has no column {', '.join(sorted(missing))}: it is not Penstock's; lake and "
            "application must be the aggregator's"
        )
    found: dict[int, list[dict[str, Any]]] = {}
    columns = ", ".join(f'"{name}"' for name in names)
    rows = delta_tables.rows(state, f"SELECT {columns} FROM t WHERE row = 'progress'")  # noqa: S608 - names of our own
    for row in sorted(rows, key=lambda row: row["changelog_offset"], reverse=True):
        found.setdefault(row["partition"], []).append(row)
    return found
