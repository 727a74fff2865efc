"""Delta tables on disk: the commits that compactions write, and what the next compaction reads from them.

Each commit is one version, and only one of two concurrent commits succeeds.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, Field, TableFeatures, write_deltalake
from deltalake.schema import PrimitiveType
from deltalake.transaction import RemoveAction

from penstock.services.spark.compaction import delta_writer
from penstock.services.spark.compaction.delta_reader import (
    commit_history,
    progress_rows,
    table_positions,
    table_stores,
)
from penstock.services.spark.compaction.delta_writer import CompactionConflict, DataFile, DeltaFiles, write_files
from penstock.services.spark.compaction.table_maintenance import delete_expired_rows
from penstock.services.spark.table_columns import CLOSED, LATE, STATE, state_schema
from penstock.shared.common.errors import LakeUnavailable, SchemaMismatch
from penstock.shared.common.lake import delta_tables

SCHEMA = pa.schema({"partition": pa.int32(), "at": pa.int64(), "s": pa.struct({"n": pa.int64()})})


def made(uri: str, schema: pa.Schema = SCHEMA, table: DeltaTable | None = None) -> DeltaTable:
    return delta_writer.ensure_table(table, uri, {}, schema, ["at"], is_partitioned=True)


def file_of(uri: str, *at: int, partition: int = 1) -> DataFile:
    rows = [{"partition": partition, "at": one, "s": {"n": one}} for one in at]
    return DeltaFiles(uri, {}, ["at"]).write([pa.RecordBatch.from_pylist(rows, SCHEMA)], partition)


def newest(uri: str) -> DeltaTable:
    table = delta_tables.open_table(uri)
    assert table is not None
    return table


def changes_data(uri: str, version: int) -> list[bool]:
    """Whether each file that a version adds or removes changes the table's rows."""
    lines = (Path(uri) / "_delta_log" / f"{version:020}.json").read_text().splitlines()
    actions = [action for line in lines for action in json.loads(line).values()]
    return [action["dataChange"] for action in actions if "dataChange" in action]


def test_a_commit_is_the_version_after(tmp_path: Path) -> None:
    """From the commit on, the table has the files with their bounds and the job's metadata."""
    uri = str(tmp_path / "t")
    table = made(uri)
    one = file_of(uri, 7, 3)
    assert delta_tables.rows(newest(uri), "SELECT * FROM t") == []
    before_ms = time.time() * 1_000 - 1
    assert delta_writer.commit(table, [one], [], {"kind": "compaction"}) == 1
    assert {(row["at"], row["partition"]) for row in delta_tables.rows(newest(uri), "SELECT * FROM t")} == {
        (3, 1),
        (7, 1),
    }
    (action,) = pa.table(newest(uri).get_add_actions(flatten=True)).to_pylist()
    bounds = (action["num_records"], action["min.at"], action["max.at"], action["partition.partition"])
    assert bounds == (2, 3, 7, 1)
    assert pq.ParquetFile(Path(uri) / one.path).schema_arrow.names == ["at", "s"]  # the folder says the partition
    assert table.metadata().configuration["delta.dataSkippingStatsColumns"] == "at"
    assert before_ms <= action["modification_time"] <= time.time() * 1_000
    (last, *_) = commit_history(newest(uri), 5)
    assert (last["version"], last["operation"], last["kind"]) == (1, "WRITE", "compaction")
    assert json.loads(last["operationParameters"]["partitionBy"]) == ["partition"]
    assert changes_data(uri, 1) == [True]


def test_files_are_taken_out_in_the_same_commit(tmp_path: Path) -> None:
    """A reader sees a rewrite completely or not at all."""
    uri = str(tmp_path / "t")
    old = file_of(uri, 1, 2)
    delta_writer.commit(made(uri), [old], [], {})
    removed = RemoveAction(old.path, False, 0, old.size, {"partition": "1"})
    assert delta_writer.commit(newest(uri), [file_of(uri, 2)], [removed], {}) == 2
    assert changes_data(uri, 2) == [False, False]
    assert [row["at"] for row in delta_tables.rows(newest(uri), "SELECT * FROM t")] == [2]


def test_the_second_commit_is_rejected(tmp_path: Path) -> None:
    """The second commit is rejected, also after another writer's append, which Delta itself would accept."""
    uri = str(tmp_path / "t")
    table, other = made(uri), newest(uri)
    delta_writer.commit(table, [file_of(uri, 1)], [], {})
    with pytest.raises(CompactionConflict, match="as version 1"):
        delta_writer.commit(other, [file_of(uri, 2)], [], {})
    late = newest(uri)
    write_deltalake(uri, pa.Table.from_pylist([{"partition": 1, "at": 9}], SCHEMA), mode="append")
    with pytest.raises(CompactionConflict, match="as version 2"):
        delta_writer.commit(late, [file_of(uri, 3)], [], {})
    assert {row["at"] for row in delta_tables.rows(newest(uri), "SELECT * FROM t")} == {1, 9}


def test_a_table_is_made_once_and_widened(tmp_path: Path) -> None:
    """Only one of two jobs creates it. New columns and new fields of a struct are added, and existing rows stay."""
    uri = str(tmp_path / "t")
    table = made(uri)
    with pytest.raises(CompactionConflict, match="made"):
        made(uri)
    same = made(uri, table=table)
    assert same.version() == 0
    wider = pa.schema([*SCHEMA.remove(2), ("s", pa.struct({"n": pa.int64(), "m": pa.int64()})), ("t", pa.int64())])
    delta_writer.commit(table, [file_of(uri, 4)], [], {})
    wide = made(uri, wider, newest(uri))
    assert (wide.version(), {field.name for field in wide.schema().fields}) == (2, {"partition", "at", "s", "t"})
    (row,) = delta_tables.rows(newest(uri), "SELECT * FROM t")
    assert (row["at"], row["s"], row["t"]) == (4, {"n": 4, "m": None}, None)
    assert made(uri, SCHEMA, wide).version() == 2  # it has more than these
    with pytest.raises(CompactionConflict, match="as version 2"):
        made(uri, pa.schema([*wider, ("u", pa.int64())]), _at(uri, 1))
    more = pa.schema([*wider, ("u", pa.int64())])
    assert {field.name for field in made(uri, more, wide).schema().fields} == {"partition", "at", "s", "t", "u"}


def test_a_table_is_not_widened_beside_an_append(tmp_path: Path) -> None:
    """Delta itself would accept both, but the compaction was planned without the appended rows."""
    uri = str(tmp_path / "t")
    table = made(uri)
    write_deltalake(uri, pa.Table.from_pylist([{"partition": 1, "at": 9}], SCHEMA), mode="append")
    with pytest.raises(CompactionConflict, match="as version 1"):
        made(uri, pa.schema([*SCHEMA, ("t", pa.int64())]), table)


@pytest.mark.parametrize(
    "write",
    [
        lambda table: delta_writer.commit(table, [], [], {}),
        lambda table: made(table.table_uri, pa.schema([*SCHEMA, ("t", pa.int64())]), table),
        lambda table: delete_expired_rows(table, "time", 1),
    ],
    ids=["commit", "widen", "DELETE"],
)
def test_a_table_with_a_feature_that_deltalake_lacks(tmp_path: Path, write: Callable[[DeltaTable], object]) -> None:
    """The error names the feature, for example after CLUSTER BY with Spark. No other job was first."""
    uri = str(tmp_path / "t")
    made(uri, pa.schema([*SCHEMA, ("time", pa.timestamp("us", "UTC"))]))
    features = {"minReaderVersion": 1, "minWriterVersion": 7, "writerFeatures": ["clustering", "domainMetadata"]}
    write_version(uri, "CLUSTER BY", protocol=features)
    with pytest.raises(LakeUnavailable, match="ClusteredTable"):
        write(newest(uri))


def _at(uri: str, version: int) -> DeltaTable:
    table = delta_tables.open_table(uri, version=version)
    assert table is not None
    return table


def test_widening_keeps_the_positions(tmp_path: Path) -> None:
    """Adding columns is a separate commit, which repeats the positions of the compaction before it."""
    uri = str(tmp_path / "t")
    metadata = {"topic_id": "id", "positions": {"0": 9}}
    delta_writer.commit(made(uri), [file_of(uri, 4)], [], metadata)
    wide = made(uri, pa.schema([*SCHEMA, ("t", pa.int64())]), newest(uri))
    assert (wide.version(), table_positions(newest(uri))) == (2, metadata)


def test_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    """A missing file and a folder that cannot be written are LakeUnavailable."""
    files = DeltaFiles(str(tmp_path), {}, [])
    for use in (files.read, files.memory_bytes):
        with pytest.raises(LakeUnavailable, match=r"gone\.parquet cannot be read"):
            use("gone.parquet")
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "partition=1").touch()
    rows: Any = pa.RecordBatch.from_pylist([{"a": 1, "partition": 1}])
    with pytest.raises(LakeUnavailable, match="cannot be written"):
        DeltaFiles(str(broken), {}, []).write([rows], 1)


def test_a_lake_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    """An unusable lake raises LakeUnavailable and not a conflict."""
    (tmp_path / "file").touch()
    with pytest.raises(LakeUnavailable, match="file/t cannot be created"):
        made(str(tmp_path / "file" / "t"))
    uri = str(tmp_path / "a" / "b")
    one = file_of(uri, 1)
    table = made(uri)
    shutil.rmtree(tmp_path / "a" / "b" / "_delta_log")
    (tmp_path / "a" / "b" / "_delta_log").touch()
    with pytest.raises(LakeUnavailable, match="cannot be written"):
        delta_writer.commit(table, [one], [], {})


def test_a_files_rows_are_ordered_by_time(tmp_path: Path) -> None:
    """Readers can skip files of `closed` and `late`. The rows of `state` keep their order."""
    for kind, column in ((CLOSED, "window_start"), (LATE, "event_time"), (STATE, "start_ms")):
        batch = pa.RecordBatch.from_pylist([{column: at} for at in (9, 3, 6)])
        (one,) = write_files(DeltaFiles(str(tmp_path / kind), {}, []), kind, [batch])
        times = pq.read_table(tmp_path / kind / one.path).column(column).to_pylist()
        assert times == ([9, 3, 6] if kind == STATE else [3, 6, 9])
    assert list(write_files(DeltaFiles(str(tmp_path / "none"), {}, []), LATE, [])) == []


def test_a_file_has_no_more_rows_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further rows are in further files with other names, in the same partition."""
    monkeypatch.setattr(delta_writer, "FILE_ROWS", 2)
    batch = pa.RecordBatch.from_pylist([{"start_ms": at, "partition": 3} for at in range(5)])
    files = list(write_files(DeltaFiles(str(tmp_path), {}, []), STATE, [batch], 3))
    assert [(file.rows, file.partition) for file in files] == [(2, 3), (2, 3), (1, 3)]
    assert len({file.path for file in files}) == 3


def test_rows_beyond_one_sort_are_written_to_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each file is ordered by time. No row is left out, whatever the size of a batch."""
    batches = [
        pa.RecordBatch.from_pylist([{"window_start": start, "n": n} for start in (n + 5, n)]) for n in range(0, 50, 10)
    ]
    size = batches[0].nbytes
    for most, rows in ((1, [2] * 5), (2 * size, [4, 4, 2]), (100 * size, [10])):
        monkeypatch.setattr(delta_writer, "SORT_BYTES", most)
        files = list(write_files(DeltaFiles(str(tmp_path), {}, []), CLOSED, batches))
        assert [file.rows for file in files] == rows
        starts = [pq.read_table(tmp_path / file.path)["window_start"] for file in files]
        assert all(own.to_pylist() == sorted(own.to_pylist()) for own in starts)
        assert sorted(start for own in starts for start in own.to_pylist()) == list(range(0, 50, 5))


def test_the_size_of_a_file_in_memory(tmp_path: Path) -> None:
    """It is the one that was recorded. A file of another writer is read to find it."""
    files = DeltaFiles(str(tmp_path), {}, [])
    rows = pa.table({"at": [1, 2]}, metadata={delta_writer.MEMORY_BYTES: "7"})
    pq.write_table(rows, tmp_path / "own.parquet")
    pq.write_table(rows, tmp_path / "other.parquet", store_schema=False)  # without any metadata
    assert files.memory_bytes("own.parquet") == 7
    assert files.memory_bytes("other.parquet") == files.read("other.parquet").nbytes > 7


def test_a_log_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    """A commit that is damaged after the table was opened raises LakeUnavailable with the table's path."""
    uri = str(tmp_path / "t")
    delta_writer.commit(made(uri), [file_of(uri, 1)], [], {})
    table = newest(uri)
    (Path(uri) / "_delta_log" / f"{1:020}.json").write_text("{")
    with pytest.raises(LakeUnavailable, match="t/ cannot be read"):
        commit_history(table, 5)


def test_bounds_of_a_file() -> None:
    """Bounds are exact to the millisecond, so that no row is outside them. A column of nulls has none.

    A column that the file lacks is left out.
    """
    times = pa.array([1_234_000, None, 7_000], pa.timestamp("us", "UTC"))
    table = pa.table({"at": times, "none": pa.array([None] * 3, pa.int64()), "other": [1, 2, 3]})
    assert json.loads(delta_writer.stats_of(table, ["absent", "at", "none"])) == {
        "numRecords": 3,
        "minValues": {"at": "1970-01-01T00:00:00.007Z"},
        "maxValues": {"at": "1970-01-01T00:00:01.234Z"},
        "nullCount": {"at": 1, "none": 3},
    }


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


def write_version(
    uri: str, operation: str, metadata: str = "{}", protocol: dict[str, Any] | None = None, **parameters: Any
) -> None:
    """Commit nothing but perhaps a `protocol`, as another writer."""
    path = Path(uri) / "_delta_log" / f"{newest(uri).version() + 1:020}.json"
    commit = {"timestamp": 1, "operation": operation, "userMetadata": metadata, "operationParameters": parameters}
    actions = [{"commitInfo": commit}, *([{"protocol": protocol}] if protocol else [])]
    path.write_text("".join(f"{json.dumps(action)}\n" for action in actions))


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


def test_metadata_changes_keep_the_positions(tmp_path: Path) -> None:
    """Another writer's changes of constraints, columns, properties or the protocol add and remove no rows."""
    uri = str(tmp_path / "t")
    found = {"topic_id": "id", "positions": {"0": 9}}
    delta_writer.commit(made(uri), [file_of(uri, 4)], [], found)
    column = Field("own", PrimitiveType("string"))
    newest(uri).alter.add_constraint({"positive": "at > 0"})
    newest(uri).alter.drop_constraint("positive")
    newest(uri).alter.add_columns([column])
    newest(uri).alter.set_column_metadata("own", {"comment": "ours"})
    newest(uri).alter.set_table_description("ours")
    newest(uri).alter.add_feature(TableFeatures.ChangeDataFeed, allow_protocol_versions_increase=True)
    for operation in ("ADD COLUMNS", "CHANGE COLUMN", "CHANGE COLUMNS", "UNSET TBLPROPERTIES", "UPGRADE PROTOCOL"):
        write_version(uri, operation)
    for operation in ("CLUSTER BY", "DROP FEATURE", "Empty Commit", "Deletion Vector Tombstones"):
        write_version(uri, operation)
    assert newest(uri).version() == 16
    assert table_positions(newest(uri)) == found


def test_positions_after_a_restore_are_those_of_the_restored_version(tmp_path: Path) -> None:
    """The versions that it undoes do not count, also if the restored version is itself a restored one."""
    uri = str(tmp_path / "t")
    table = made(uri)
    positions = {at: {"topic_id": "id", "positions": {"0": at}} for at in (4, 7, 9)}
    delta_writer.commit(table, [file_of(uri, 4)], [], positions[4])
    newest(uri).delete("at = 4")
    write_version(uri, "WRITE")
    delta_writer.commit(newest(uri), [file_of(uri, 9)], [], positions[9])
    newest(uri).restore(2)
    assert table_positions(newest(uri)) == positions[4]
    for _ in range(5):
        write_version(uri, "OPTIMIZE", json.dumps(positions[4]))
    newest(uri).restore(4)
    assert table_positions(newest(uri)) == positions[9]
    write_version(uri, "RESTORE", version=6, timestamp=None)
    assert table_positions(newest(uri)) == positions[4]
    delta_writer.commit(newest(uri), [], [], positions[7])
    assert table_positions(newest(uri)) == positions[7]
    newest(uri).restore(3)
    assert table_positions(newest(uri)) is None


def test_a_restore_by_time_has_no_positions(tmp_path: Path) -> None:
    """Its commit does not name the restored version. Nor does a version that is named by another operation."""
    uri = str(tmp_path / "t")
    for operation, parameters in (
        ("RESTORE", {"version": None, "timestamp": "2026-01-01"}),
        ("RESTORE", {"datetime": "1767225600000"}),
        ("MERGE", {"version": "1"}),
        ("WRITE", {"version": "1"}),
    ):
        delta_writer.commit(made(uri, table=delta_tables.open_table(uri)), [], [], {"topic_id": "id", "positions": {}})
        write_version(uri, operation, **parameters)
        assert table_positions(newest(uri)) is None


def test_positions_of_maintenance_count_only_without_those_of_a_compaction(tmp_path: Path) -> None:
    """Maintenance repeats the positions that it read. A compaction that commits meanwhile has newer ones.

    Once the log no longer has the compaction, the newest repeated positions count.
    """
    uri = str(tmp_path / "t")
    made(uri)
    for at in (4, 9):
        delta_writer.commit(newest(uri), [], [], {"topic_id": "id", "positions": {"0": at}})
    repeated = {at: {"topic_id": "id", "positions": {"0": at}} for at in (4, 9)}
    for operation in ("VACUUM START", "VACUUM END", "UPDATE", "SET TBLPROPERTIES", "OPTIMIZE"):
        write_version(uri, operation, json.dumps(repeated[4]))
        assert table_positions(newest(uri)) == repeated[9]
    write_version(uri, "DELETE", json.dumps(repeated[9]))
    write_version(uri, "DELETE")
    newest(uri).create_checkpoint()
    for version in range(3):
        (Path(uri) / "_delta_log" / f"{version:020}.json").unlink()
    assert table_positions(newest(uri)) == repeated[9]


def test_commit_kinds_of_other_writers(tmp_path: Path) -> None:
    """A commit of another writer has no metadata, or other metadata. Metadata never replaces Delta's own fields."""
    uri = str(tmp_path / "t")
    assert commit_history(made(uri), 1)[0].get("kind") is None
    for metadata in ('{"kind": "x", "version": "1.2", "operation": "y"}', "[1]", "no JSON", "[" * 100_000):
        write_version(uri, "WRITE", metadata)
    kinds = [commit.get("kind") for commit in commit_history(newest(uri), 4)]
    assert kinds == [None, None, None, "x"]
    assert [(commit["version"], commit["operation"]) for commit in commit_history(newest(uri), 4)] == [
        (version, "WRITE") for version in (4, 3, 2, 1)
    ]


def test_stores_are_the_folders(tmp_path: Path) -> None:
    """Each folder is a store's table. A missing folder is no error."""
    assert table_stores(str(tmp_path / "closed"), {}) == []
    for name in ("b", "a"):
        (tmp_path / "closed" / name).mkdir(parents=True)
    (tmp_path / "closed" / "file").touch()
    assert table_stores(str(tmp_path / "closed"), {}) == ["a", "b"]
