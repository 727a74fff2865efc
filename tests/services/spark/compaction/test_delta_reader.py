"""What a compaction reads from its tables: progress rows, positions, commits, stores."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.services.spark.compaction import delta_writer
from penstock.services.spark.compaction.delta_reader import (
    commit_history,
    progress_rows,
    table_positions,
    table_stores,
)
from penstock.services.spark.table_columns import STATE, state_schema
from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.common.lake import delta_tables

SCHEMA = pa.schema({"at": pa.int64()})


def newest(uri: str) -> DeltaTable:
    table = delta_tables.open_table(uri)
    assert table is not None
    return table


def made(uri: str) -> DeltaTable:
    return delta_writer.ensure_table(None, uri, {}, SCHEMA, ["at"], is_partitioned=False)


def test_progress_rows_by_partition_newest_first(tmp_path: Path) -> None:
    """All progress rows of a table are returned. A table without their columns is rejected."""
    uri = str(tmp_path / STATE)
    schema = state_schema(())
    rows = [{"row": "progress", "partition": p, "changelog_offset": at} for p, at in ((0, 4), (1, 5), (0, 9))]
    rows.append({"row": "window", "partition": 0, "changelog_offset": 99})
    write_deltalake(uri, pa.Table.from_pylist(rows, schema), partition_by="partition")
    found = progress_rows(newest(uri))
    assert {p: [row["changelog_offset"] for row in of] for p, of in found.items()} == {0: [9, 4], 1: [5]}
    write_deltalake(str(tmp_path / "x"), pa.table({"row": ["progress"]}))
    with pytest.raises(SchemaMismatch, match="has no column"):
        progress_rows(newest(str(tmp_path / "x")))


def write_version(uri: str, operation: str, metadata: str = "{}") -> None:
    """Commit nothing, as another writer."""
    path = Path(uri) / "_delta_log" / f"{newest(uri).version() + 1:020}.json"
    path.write_text(json.dumps({"commitInfo": {"timestamp": 1, "operation": operation, "userMetadata": metadata}}))


def test_positions_are_those_of_the_newest_compaction(tmp_path: Path) -> None:
    """Any number of commits of maintenance may follow it. After another writer's append there are none."""
    uri = str(tmp_path / "t")
    table = made(uri)
    assert table_positions(table) is None
    for at in (4, 9):
        metadata = {"kind": "compaction", "topic_id": "id", "positions": {"0": at}}
        delta_writer.commit(newest(uri), [], [], metadata)
    found = {"topic_id": "id", "positions": {"0": 9}}
    for operation in ("OPTIMIZE", "VACUUM START", "VACUUM END", "SET TBLPROPERTIES", "DELETE", "UPDATE"):
        assert table_positions(newest(uri)) == found
        write_version(uri, operation)
    assert table_positions(newest(uri)) == found
    write_version(uri, "WRITE")
    assert table_positions(newest(uri)) is None
    write_version(uri, "OPTIMIZE")
    assert table_positions(newest(uri)) is None


def test_what_a_commit_says(tmp_path: Path) -> None:
    """A commit of another writer has no metadata, or other metadata."""
    uri = str(tmp_path / "t")
    assert commit_history(made(uri), 1)[0].get("kind") is None
    for metadata in ('{"kind": "x"}', "[1]", "no JSON", "[" * 100_000):
        write_version(uri, "WRITE", metadata)
    kinds = [commit.get("kind") for commit in commit_history(newest(uri), 4)]
    assert kinds == [None, None, None, "x"]


def test_stores_are_the_folders(tmp_path: Path) -> None:
    """Each folder is a store's table. A missing folder is no error."""
    assert table_stores(str(tmp_path / "closed"), {}) == []
    for name in ("b", "a"):
        (tmp_path / "closed" / name).mkdir(parents=True)
    (tmp_path / "closed" / "file").touch()
    assert table_stores(str(tmp_path / "closed"), {}) == ["a", "b"]
