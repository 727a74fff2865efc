"""The rows of `state` that a rewrite keeps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from penstock.services.spark.compaction import rewrite as of_rewrite
from penstock.services.spark.compaction.delta_writer import DataFile
from penstock.services.spark.compaction.rewrite import RewriteInput, rewrite, rows_to_keep
from penstock.services.spark.table_columns import PROGRESS, state_schema
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder

STORES = {"s": "a", "t": "b"}


def schema() -> pa.Schema:
    builder = StreamsBuilder()
    for name in STORES:
        builder.stream(f"source-{name}").group_by_key().session_window(100).aggregate(name, n=Count()).on_close().to(
            "out"
        )
    return state_schema(builder.build().schemas())


SCHEMA = schema()


def window(store: str, key: str, start: int, offset: int, *, live: bool = True) -> dict[str, Any]:
    row = {"row": "window", "partition": 2, "store": store, "key": key.encode(), "start_ms": start, "live": live}
    return {**row, "end_ms": start + 1 if live else None, store: {"n_n": offset} if live else None} | {
        "changelog_offset": offset
    }


def offsets(rows: list[dict[str, Any]]) -> set[int]:
    return set(rows_to_keep(pa.Table.from_pylist(rows, SCHEMA)).column("changelog_offset").to_pylist())


def test_the_highest_offset_of_a_window_counts() -> None:
    """The order of rows does not matter, because files are read in no order."""
    rows = [window("s", "a", 0, 9), window("s", "a", 0, 12), window("s", "a", 0, 3), window("s", "b", 0, 5)]
    assert offsets(rows) == {12, 5}


def test_store_key_and_start_identify_a_window() -> None:
    """Two rows that differ in any of them belong to two windows."""
    rows = [window("s", "a", 0, 1), window("t", "a", 0, 2), window("s", "b", 0, 3), window("s", "a", 5, 4)]
    assert offsets(rows) == {1, 2, 3, 4}


def test_a_tombstone_takes_its_window_with_it() -> None:
    """The tombstone itself is not kept either. A tombstone before a live row has no effect."""
    rows = [window("s", "a", 0, 1), window("s", "a", 0, 2, live=False)]
    rows += [window("s", "b", 0, 3, live=False), window("s", "b", 0, 4)]
    assert offsets(rows) == {4}
    assert offsets([]) == set()


@pytest.mark.parametrize("pass_rows", [100, 2])
def test_a_rewritten_partition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pass_rows: int) -> None:
    """It has its live windows and a progress row.

    Memory decides the number of passes, and the counts of the progress row start again.
    """
    monkeypatch.setattr(of_rewrite, "PASS_ROWS", pass_rows)
    newest = {"row": "progress", "partition": 2, "changelog_offset": 20, "epoch": 4, "progress": "{}", "topic_id": "id"}
    newest |= {"appended": "{}", "rewritten_rows": 1, "added_rows": 6, "added_files": 2}
    newest["expired_ms"] = 5
    rows = [window("s", f"k{i % 3}", i % 12 // 2 * 10, i) for i in range(24)]  # each window twice
    rows += [window("s", "k0", 0, 30, live=False), newest]
    folder = tmp_path / "partition=2"
    folder.mkdir()
    for nth in (0, 1):
        own = pa.Table.from_pylist(rows[nth::2], SCHEMA).drop_columns(["partition"])
        pq.write_table(own, folder / f"{nth}.parquet")
    older = newest | {"changelog_offset": 9}
    crowded = RewriteInput(2, ["partition=2/0.parquet", "partition=2/1.parquet"], len(rows), 9, [newest, older])
    (done,) = rewrite(str(tmp_path), {})(msgspec.msgpack.encode([crowded]))
    files = msgspec.msgpack.decode(done, type=list[DataFile])
    assert all(file.path.startswith("partition=2/part-") and file.partition == 2 for file in files)
    found = [row for file in files for row in pq.ParquetFile(tmp_path / file.path).read().to_pylist()]
    assert sum(file.rows for file in files) == len(found)
    assert (len(files) > 2) == (pass_rows == 2)  # each pass writes its own, and is all that is in memory
    windows = {(row["key"], row["start_ms"], row["changelog_offset"]) for row in found if row["row"] == "window"}
    assert windows == {(f"k{i % 3}".encode(), i % 12 // 2 * 10, i) for i in range(13, 24)}
    progress, before = [row for row in found if row["row"] == "progress"]
    assert (before["changelog_offset"], before["added_rows"]) == (9, 6), "from where a table put back can go on"
    assert (progress["rewritten_rows"], progress["added_rows"], progress["added_files"]) == (11, 0, 0)
    kept = [name for name in PROGRESS.names if name not in ("partition", "rewritten_rows", "added_rows", "added_files")]
    assert {name: progress[name] for name in kept} == {name: newest[name] for name in kept}


def test_a_file_has_no_more_rows_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further rows are in further files with other names. The progress row is in the last file."""
    monkeypatch.setattr(of_rewrite, "FILE_ROWS", 2)
    newest = {"row": "progress", "partition": 2, "changelog_offset": 20, "appended": "{}"}
    folder = tmp_path / "partition=2"
    folder.mkdir()
    rows = pa.Table.from_pylist([window("s", f"k{i}", i, i) for i in range(5)], SCHEMA)
    pq.write_table(rows.drop_columns(["partition"]), folder / "0.parquet")
    crowded = RewriteInput(2, ["partition=2/0.parquet"], 5, 9, [newest])
    (done,) = rewrite(str(tmp_path), {})(msgspec.msgpack.encode([crowded]))
    files = msgspec.msgpack.decode(done, type=list[DataFile])
    assert [file.rows for file in files] == [2, 2, 1, 1]
    assert len({file.path for file in files}) == 4
