"""Reading the lake's tables, as deltalake writes them. Tables of Spark are in the tests of its jobs."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import ColumnProperties, CommitProperties, WriterProperties, write_deltalake

from penstock.services.spark.table_columns import CLOSED, LATE, rows_schema, state_schema
from penstock.shared.common.errors import ConfigError, LakeUnavailable, NotASnapshot
from penstock.shared.common.key_range import KeyRange
from penstock.shared.common.lake import compaction_history, state_snapshot
from penstock.shared.common.lake.column_names import CLOSED_COLUMNS, LATE_COLUMNS, STATE_COLUMNS
from penstock.shared.common.lake.compaction_history import Compaction, read_compactions
from penstock.shared.common.lake.state_snapshot import PartitionSnapshot, Snapshot, read_snapshot, read_window_changes
from penstock.shared.common.lake.window_queries import (
    ClosedWindow,
    count_windows,
    find_closed_windows,
    find_open_windows,
    window_position,
)
from penstock.shared.common.records import INT64_MIN
from penstock.shared.common.row_positions import WindowPosition
from penstock.shared.streams.aggregations.aggregation import Count, CountDistinct, Sum
from penstock.shared.streams.aggregations.collect import CollectList
from penstock.shared.streams.changelog.store_schema import AggregationSchema
from tests.lake_tables import live, progress, store_of, table_of, tombstone, write_closed, write_state

STORE = "ba\"n'ks"
AGGREGATIONS = {"n": Count(), "it's": CountDistinct("id")}
STORES = (store_of(STORE, AGGREGATIONS), store_of("other", {"x": Sum("x")}))
COUNTED = store_of("s", {"n": Count()})
Window = tuple[bytes, int]


def write(root: Path, offset: int, windows: list[tuple[int, bytes]]) -> None:
    """Write a run of two partitions that ends before `offset`."""
    rows = [
        live(partition, STORE, key, 5, 6, offset - 1 - i, {"n_n": partition, "it's_hll": key})
        for i, (partition, key) in enumerate(windows)
    ]
    write_state(root, "app", STORES, [*rows, *(progress(p, offset) for p in (0, 1))])


def replayed(root: Path, partition: int, version: int, store: str = STORE) -> dict[Window, tuple[int, int]]:
    """The live windows after all rows are replayed: end and `n` by key and start."""
    found: dict[Window, tuple[int, int]] = {}
    for batch in read_window_changes(str(root), "app", partition, store, version, ["n_n"]):
        for row in batch.to_pylist():
            window = row["key"], row["start_ms"]
            if row["live"]:
                found[window] = row["end_ms"], row["n_n"]
            else:
                found.pop(window, None)
    return found


def test_no_table_is_no_snapshot(tmp_path: Path) -> None:
    """An application that was never compacted has no snapshot and no windows."""
    assert read_snapshot(str(tmp_path), "app", [0]) is None
    assert count_windows(str(tmp_path), "app") == (0, {})
    assert read_compactions(str(tmp_path), "app", 5) == []
    assert find_closed_windows(str(tmp_path), "app", STORE, (None, None), (0, 9)) == []


def test_tables_have_the_reserved_columns() -> None:
    """The columns that compactions write are the reserved names."""
    assert {*state_schema([]).names} == {*STATE_COLUMNS}
    for kind, columns in ((CLOSED, CLOSED_COLUMNS), (LATE, LATE_COLUMNS)):
        of_keys = (rows_schema(kind, store_of("s", {}, "string")), rows_schema(kind, store_of("s", {}, "bytes")))
        assert {name for schema in of_keys for name in schema.names} == {*columns}


def test_a_snapshot_is_read_at_its_version(tmp_path: Path) -> None:
    """Windows are read at the snapshot's version, whatever was committed since."""
    write(tmp_path, 10, [(0, b"a"), (1, b"b")])
    snapshot = read_snapshot(str(tmp_path), "app", [0, 7])
    assert snapshot == Snapshot(0, {0: PartitionSnapshot(0, 10, 2, b"{}", "topic")})
    write(tmp_path, 20, [(0, b"later")])
    (batch,) = read_window_changes(str(tmp_path), "app", 0, STORE, snapshot.version, ["it's_hll", "n_n"])
    assert batch.to_pylist() == [{"key": b"a", "start_ms": 5, "end_ms": 6, "live": True, "it's_hll": b"a", "n_n": 0}]
    types = [pa.binary(), pa.int64(), pa.int64(), pa.bool_(), pa.binary(), pa.int64()]
    assert [field.type for field in batch.schema] == types


def test_the_progress_with_the_highest_offset_is_used(tmp_path: Path) -> None:
    """A partition's progress is the row with the highest offset, whatever run wrote last, and after an OPTIMIZE too."""
    rows = [progress(0, 30, '{"a": 3}', epoch=4), progress(1, 7)]
    write_state(tmp_path, "app", STORES, rows)
    write_state(tmp_path, "app", STORES, [progress(0, 20, '{"a": 2}'), progress(1, 8, topic_id=None)])
    expected = {
        0: PartitionSnapshot(0, 30, 4, b'{"a": 3}', "topic"),
        1: PartitionSnapshot(1, 8, 2, b"{}", None),
    }
    assert read_snapshot(str(tmp_path), "app", [0, 1]) == Snapshot(1, expected)
    write_state(tmp_path, "app", STORES, []).optimize.compact()
    found = read_snapshot(str(tmp_path), "app", [1, 0, 5])
    assert found is not None
    assert found.partitions == expected


@pytest.mark.parametrize("statistics", ["CHUNK", "NONE"])
@pytest.mark.parametrize("upkeep", [False, True])
def test_replayed_rows_are_the_live_windows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, statistics: Any, upkeep: bool
) -> None:
    """Replayed rows with tombstones and superseded rows are the live windows, for several stores and partitions, with
    and without an OPTIMIZE and statistics, in small and large slices.
    """
    random_ = random.Random(1)
    of_columns = ColumnProperties(statistics_enabled=statistics)
    properties = WriterProperties(max_row_group_size=4, default_column_properties=of_columns)
    indexed = {"delta.dataSkippingNumIndexedCols": "0" if statistics == "NONE" else "32"}
    expected: dict[int, dict[Window, tuple[int, int]]] = {0: {}, 1: {}}
    offset = 0
    for run in range(6):
        rows = []
        for _ in range(10):
            offset += random_.randint(1, 3)
            partition, key, start = random_.randint(0, 1), random_.choice([b"a", b"\xff", b""]), random_.randint(0, 2)
            windows = expected[partition]
            if random_.random() < 0.3 and (key, start) in windows:
                del windows[key, start]
                rows.append(tombstone(partition, STORE, key, start, offset))
            else:
                windows[key, start] = (start + offset, offset)
                rows.append(
                    live(partition, STORE, key, start, start + offset, offset, {"n_n": offset, "it's_hll": key})
                )
            offset += 1
            rows.append(live(partition, "other", key, start, start, offset, {"x_sum": 1.5}))
        random_.shuffle(rows)
        rows += [progress(p, offset + 1) for p in (0, 1)]
        table = write_state(tmp_path, "app", STORES, rows, configuration=indexed, writer_properties=properties)
        if upkeep and run % 2:
            table.optimize.compact(writer_properties=properties)
    for partition, windows in expected.items():
        for slice_rows in (3, 1_000):
            monkeypatch.setattr(state_snapshot, "SLICE_ROWS", slice_rows)
            assert replayed(tmp_path, partition, table.version()) == windows
        rows_read = find_open_windows(str(tmp_path), "app", STORE, table.version(), KeyRange.of(), (0, 10**6), {}, 99)
        own = [row for row in rows_read if row["partition"] == partition]
        assert {(r["key"], r["start_ms"]): (r["end_ms"], r["state"]["n_n"]) for r in own} == windows
    assert count_windows(str(tmp_path), "app").live >= sum(map(len, expected.values()))


def test_slices_are_limited_in_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are out of order in their files are sorted without an Arrow array of all states, which could have at
    most 2 GiB."""
    monkeypatch.setattr(state_snapshot, "SLICE_BYTES", 900_000)
    for first in (1, 0):
        offsets = range(first, 24_000, 2)
        write_state(tmp_path, "app", [COUNTED], [live(0, "s", b"k" * 20, 1, 2, at, {"n_n": at}) for at in offsets])
    slices = list(read_window_changes(str(tmp_path), "app", 0, "s", 1, ["n_n"]))
    assert [n for slice_ in slices for n in slice_.column("n_n").to_pylist()] == [*range(24_000)]
    assert max(slice_.nbytes for slice_ in slices) < 900_000 < sum(slice_.nbytes for slice_ in slices)
    assert max(len(batch) for slice_ in slices for batch in slice_.to_batches()) < 10_000


def test_a_rewrite_changes_nothing(tmp_path: Path) -> None:
    """After a rewrite of one partition its windows are the same, those of others stay, and an
    earlier version is unchanged.
    """
    write(tmp_path, 10, [(0, b"a"), (1, b"b")])
    more = [live(0, STORE, b"a", 5, 9, 12, {"n_n": 7, "it's_hll": b""}), tombstone(1, STORE, b"b", 5, 13)]
    write_state(tmp_path, "app", STORES, [*more, progress(0, 20), progress(1, 20)])
    rows = [more[0], progress(0, 20)]
    table = write_state(tmp_path, "app", STORES, rows, kind="rewrite", partition=0)
    assert replayed(tmp_path, 0, table.version()) == replayed(tmp_path, 0, 1) == {(b"a", 5): (9, 7)}
    assert replayed(tmp_path, 1, table.version()) == {}
    assert replayed(tmp_path, 1, 0) == {(b"b", 5): (6, 1)}


def test_columns_that_were_added_later_are_null(tmp_path: Path) -> None:
    """Rows that were written before an aggregation was added have null for it, and a store
    that was added later has no rows.
    """
    write_state(tmp_path, "app", [COUNTED], [live(0, "s", b"k", 1, 2, 3, {"n_n": 4})])
    wider = (store_of("s", {"n": Count(), "x": Sum("x")}), store_of("t", AGGREGATIONS))
    table = write_state(tmp_path, "app", wider, [live(0, "s", b"l", 1, 2, 5, {"n_n": 6, "x_sum": 1.5})])
    batches = read_window_changes(str(tmp_path), "app", 0, "s", table.version(), ["n_n", "x_sum"])
    assert [(row["n_n"], row["x_sum"]) for batch in batches for row in batch.to_pylist()] == [(4, None), (6, 1.5)]
    assert list(read_window_changes(str(tmp_path), "app", 0, "t", table.version(), ["n_n"])) == []


def test_state_columns_may_have_the_names_of_table_columns(tmp_path: Path) -> None:
    """An aggregation's column with the name of a table's column does not hide it."""
    named = [name.split("_") for name in ("start_ms", "end_ms", "changelog_offset")]
    own = tuple(AggregationSchema(of, "own", None, ((column, "int64"),), "int64") for of, column in named)
    store = msgspec.structs.replace(store_of("t", {}), aggregations=own)
    state = {"start_ms": 4, "end_ms": 5}
    table = write_state(tmp_path, "app", [store], [live(0, "t", b"k", 1, 2, 3, state)])
    (batch,) = read_window_changes(str(tmp_path), "app", 0, "t", table.version(), [*state])
    assert [column.to_pylist() for column in batch.columns] == [[b"k"], [1], [2], [True], [4], [5]]
    (row,) = find_open_windows(str(tmp_path), "app", "t", 0, KeyRange.of(), (0, 9), {}, 9)
    assert row["state"] == {**state, "changelog_offset": None}


def test_compactions_are_read_from_the_tables_history(tmp_path: Path) -> None:
    """The compactions of jobs are listed, newest first, without rewrites, upkeep and other appends."""
    assert read_compactions(str(tmp_path), "app", 1) == []
    statistics = {"started_at_ms": 5, "seconds": 1.5, "rows": 2, "entries": 3}
    write_state(tmp_path, "app", STORES, [progress(0, 1)], job="one", statistics=statistics)
    write_state(tmp_path, "app", STORES, [progress(0, 2)], job="two")
    table = write_state(tmp_path, "app", STORES, [progress(0, 2)], kind="rewrite", partition=0)
    write_deltalake(table, table_of([progress(1, 1)], state_schema(STORES)), mode="append")
    deep = CommitProperties(custom_metadata={"userMetadata": '{"x":' + "[" * 100_000})
    write_deltalake(table, table_of([progress(1, 2)], state_schema(STORES)), mode="append", commit_properties=deep)
    assert table.optimize.compact()["numFilesRemoved"] > 0
    second, first = read_compactions(str(tmp_path), "app", 5)
    assert first == Compaction(0, first.ended_at_ms, "one", 5, 1.5, 2, 3)
    assert second == Compaction(1, second.ended_at_ms, "two", None, None, None, None)
    assert read_compactions(str(tmp_path), "app", 1) == [second]
    assert second.ended_at_ms >= first.ended_at_ms


def test_a_compaction_before_many_rewrites_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A compaction is found before any number of other versions."""
    monkeypatch.setattr(compaction_history, "HISTORY_VERSIONS", (1, 2, 8))
    write_state(tmp_path, "app", STORES, [progress(p, 1) for p in range(4)], job="one")
    for partition in range(4):
        write_state(tmp_path, "app", STORES, [progress(partition, 1)], kind="rewrite", partition=partition)
    assert [one.job for one in read_compactions(str(tmp_path), "app", 1)] == ["one"]


def test_unknown_stores_and_columns(tmp_path: Path) -> None:
    """An unknown store has no windows, and an unknown column or a table of another kind is an error with its name."""
    write(tmp_path, 10, [(0, b"a")])
    assert list(read_window_changes(str(tmp_path), "app", 0, "new", 0, ["n_n"])) == []
    with pytest.raises(NotASnapshot, match="sum"):
        list(read_window_changes(str(tmp_path), "app", 0, STORE, 0, ["n_n", "sum"]))
    write_deltalake(str(tmp_path / "other" / "state"), pa.table({"x": [1]}))
    with pytest.raises(NotASnapshot, match="no column row"):
        read_snapshot(str(tmp_path), "other", [0])


def test_a_state_table_of_another_kind_is_no_temporary_failure(tmp_path: Path) -> None:
    """A query for windows names the columns that `state` lacks. A retry would not help."""
    column = pa.StructArray.from_arrays([pa.array([1])], ["n_n"])
    write_deltalake(str(tmp_path / "app" / "state"), pa.table({"s": column, "row": ["window"], "partition": [0]}))
    for read in (
        lambda: find_open_windows(str(tmp_path), "app", "s", 0, KeyRange.of(), (0, 9), {}, 9),
        lambda: list(read_window_changes(str(tmp_path), "app", 0, "s", 0, ["n_n"])),
        lambda: count_windows(str(tmp_path), "app"),
    ):
        with pytest.raises(NotASnapshot, match="store, key, start_ms, end_ms, live, changelog_offset"):
            read()


@pytest.mark.parametrize("odd", [{"progress": None}, {"progress": 5}, {"changelog_offset": None}, {"epoch": "two"}])
def test_an_invalid_progress_is_an_error(tmp_path: Path, odd: dict[str, Any]) -> None:
    """A progress that is missing or of another type is an error with its partition."""
    row = {"row": "progress", "partition": 3, "changelog_offset": 1, "epoch": 1, "progress": "{}"}
    table = pa.Table.from_pylist([row | {"topic_id": "id"} | odd])
    null = pa.schema([pa.field(f.name, pa.string() if pa.types.is_null(f.type) else f.type) for f in table.schema])
    write_deltalake(str(tmp_path / "app" / "state"), table.cast(null))
    with pytest.raises(NotASnapshot, match="partition 3"):
        read_snapshot(str(tmp_path), "app", [3])


def test_a_row_without_an_offset_is_an_error(tmp_path: Path) -> None:
    """A row without an offset is an error, since its order is unknown."""
    row: dict[str, Any] = {**live(0, STORE, b"a", 1, 2, 3, {"n_n": 1}), "changelog_offset": None}
    write_state(tmp_path, "app", STORES, [row])
    with pytest.raises(NotASnapshot, match="without a changelog offset"):
        list(read_window_changes(str(tmp_path), "app", 0, STORE, 0, ["n_n"]))


def test_a_column_that_is_not_a_store_is_an_error(tmp_path: Path) -> None:
    """A column of a store's name that contains no states is an error."""
    write_deltalake(str(tmp_path / "app" / "state"), pa.table({"n": [1]}))
    with pytest.raises(NotASnapshot, match="column 'n'"):
        list(read_window_changes(str(tmp_path), "app", 0, "n", 0, ["x"]))


@pytest.mark.parametrize(
    ("path", "message"), [("/lake\0", "null byte"), ("~nobody-of-that-name/lake", "home directory")]
)
def test_an_invalid_path_is_an_error(path: str, message: str) -> None:
    """A path that cannot be a folder is a ConfigError with its value."""
    with pytest.raises(ConfigError, match=f"^lake .*{message}"):
        read_snapshot(path, "app", [0])


def ended(root: str, application: str) -> list[Compaction]:
    return read_compactions(root, application, 1)


def test_a_damaged_log_is_unavailable(tmp_path: Path) -> None:
    """Every read of a table with a damaged log is LakeUnavailable."""
    write(tmp_path, 10, [(0, b"a")])
    (log,) = (tmp_path / "app" / "state" / "_delta_log").glob("*.json")
    for text in ("nonsense", "", log.read_text().replace('"minReaderVersion":1', '"minReaderVersion":99')):
        log.write_text(text)
        for read in (
            ended,
            count_windows,
            lambda root, app: read_snapshot(root, app, [0]),
        ):
            with pytest.raises(LakeUnavailable, match="cannot be read"):
                read(str(tmp_path), "app")


def test_a_removed_version_is_unavailable(tmp_path: Path) -> None:
    """A version or file that was removed is LakeUnavailable, so a restore can read the newer snapshot."""
    write(tmp_path, 10, [(0, b"a")])
    with pytest.raises(LakeUnavailable, match="at version 9"):
        list(read_window_changes(str(tmp_path), "app", 0, STORE, 9, ["n_n"]))
    for file in (tmp_path / "app" / "state").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(LakeUnavailable):
        list(read_window_changes(str(tmp_path), "app", 0, STORE, 0, ["n_n"]))


def test_open_windows_of_a_range_of_keys(tmp_path: Path) -> None:
    """A snapshot's windows of a range of keys are returned with their keys, up to the limit."""
    write(tmp_path, 10, [(0, b"a"), (1, b"b"), (1, b"c")])

    def found(keys: KeyRange, rows_max: int = 9, time_range: tuple[int, int] = (0, 9)) -> list[bytes]:
        rows = find_open_windows(str(tmp_path), "app", STORE, 0, keys, time_range, {}, rows_max)
        assert all((row["start_ms"], row["state"]["it's_hll"]) == (5, row["key"]) for row in rows)
        return sorted(row["key"] for row in rows)

    assert found(KeyRange.of("b")) == [b"b"]
    assert found(KeyRange.of(low=b"b")) == [b"b", b"c"]
    assert (found(KeyRange.of(high="b")), len(found(KeyRange.of(), 2))) == ([b"a", b"b"], 2)
    assert found(KeyRange.of(), time_range=(7, 9)) == []


def test_open_windows_have_their_newest_bounds(tmp_path: Path) -> None:
    """A window that grew into the queried time is found with its newest row, and a removed one is not."""
    rows = [live(0, STORE, key, 5, 6, at, {"n_n": 1, "it's_hll": b""}) for at, key in enumerate((b"a", b"b"))]
    write_state(tmp_path, "app", STORES, rows)
    rows = [live(0, STORE, b"a", 5, 50, 7, {"n_n": 2, "it's_hll": b""}), tombstone(0, STORE, b"b", 5, 8)]
    write_state(tmp_path, "app", STORES, rows)
    for time_range in ((0, 9), (20, 90)):
        (row,) = find_open_windows(str(tmp_path), "app", STORE, 1, KeyRange.of(), time_range, {}, 9)
        assert (row["key"], row["end_ms"], row["state"]["n_n"]) == (b"a", 50, 2)


def test_open_windows_after_a_position(tmp_path: Path) -> None:
    """Windows after a position are returned in order."""
    write(tmp_path, 10, [(0, b"a"), (0, b"\xff"), (1, b"b"), (1, b"c")])
    seen, after = [], None
    while rows := find_open_windows(str(tmp_path), "app", STORE, 0, KeyRange.of(), (0, 9), {}, 1, None, after):
        after = window_position(rows[0])
        seen.append(rows[0]["key"])
    assert seen == [b"a", b"\xff", b"b", b"c"]


def test_closed_windows_that_a_snapshot_still_has_are_not_open(tmp_path: Path) -> None:
    """In each partition, windows that end before its time are left out; the limit counts the others."""
    rows = [
        live(partition, "s", key, end - 5, end, end, {"n_n": 1})
        for partition, ends in ((0, (-7, 10, 11, 12)), (1, (10, 11)), (2, (9,)))
        for key, end in ((b"k", end) for end in ends)
    ]
    write_state(tmp_path, "app", [COUNTED], rows)

    def found(open_from_ms: dict[int, int], rows_max: int = 9) -> list[tuple[int, int]]:
        rows = find_open_windows(str(tmp_path), "app", "s", 0, KeyRange.of(), (-9, 99), open_from_ms, rows_max)
        return [(row["partition"], row["end_ms"]) for row in rows]

    assert found({0: 11, 1: INT64_MIN}) == [(2, 9), (1, 10), (0, 11), (1, 11), (0, 12)]
    assert found({0: -6, 1: 11, 2: 10}, 2) == [(0, 10), (0, 11)]
    assert len(found({0: INT64_MIN})) == 7


def close(root: Path, windows: list[tuple[Any, int]], key: Any = "string") -> None:
    """Write closed windows that last a second and are aggregated to their number."""
    rows = [
        {"key": own, "window_start": start, "window_end": start + 1_000, "n": number, "changelog_offset": number}
        for number, (own, start) in enumerate(windows)
    ]
    write_closed(root, "app", store_of("s", {"n": Count()}, key), rows)


def test_closed_windows_of_a_range_of_keys(tmp_path: Path) -> None:
    """Closed windows between two keys that touch a time are returned with their results, ordered by start."""
    close(tmp_path, [("a", 30), ("b", 20), ("c", 10), ("b", 5), ("b", 9_000)])

    def found(first: str | None, last: str | None, rows_max: int, time_range: tuple[int, int] = (0, 100)) -> list[int]:
        rows = find_closed_windows(str(tmp_path), "app", "s", (first, last), time_range, rows_max)
        return [row.start_ms for row in rows]

    assert found("b", "c", 9) == [5, 10, 20]
    assert found(None, "b", 9) == [5, 20, 30]
    assert found(None, None, 3) == [5, 10, 20]
    assert found("b", "b", 1) == [5]
    assert found("b", "b", 9, (1_006, 8_999)) == [20]
    assert found("b", "b", 9, (-(2**62), 2**62)) == [5, 20, 9_000]
    (row,) = find_closed_windows(str(tmp_path), "app", "s", ("c", "c"), (0, 100))
    assert row == ClosedWindow(0, 10, 1_010, "c", 2, "topic", {"n": 2})


@pytest.mark.parametrize("as_bytes", [False, True])
def test_closed_windows_after_a_position(tmp_path: Path, as_bytes: bool) -> None:
    """The pages contain each window once, also if many have the same start."""
    day = 86_400_000
    windows = [(key, start) for start in (5, day, 3 * day) for key in ("it's", "b", "c")]
    keyed = [(key.encode() if as_bytes else key, start) for key, start in windows]
    close(tmp_path, keyed, "bytes" if as_bytes else "string")
    for rows_max in (1, 2, 99):
        seen: list[tuple[Any, int]] = []
        after = None
        while rows := find_closed_windows(str(tmp_path), "app", "s", (None, None), (0, 9 * day), rows_max, None, after):
            seen += [(row.key, row.start_ms) for row in rows]
            after = window_position(rows[-1])
        assert seen == sorted(keyed, key=lambda one: (one[1], one[0]))


def test_windows_beyond_the_years_of_python_are_found(tmp_path: Path) -> None:
    """A window in a year of five digits is read like any other."""
    far_ms = 1_700_000_000_000_000
    row = {"key": "k", "window_start": far_ms, "window_end": far_ms, "n": 1, "closed_at": None}
    write_closed(tmp_path, "app", COUNTED, [row])
    (found,) = find_closed_windows(str(tmp_path), "app", "s", ("k", "k"), (0, far_ms))
    assert (found.end_ms, found.results) == (far_ms, {"n": 1})
    before = WindowPosition(far_ms - 1, far_ms - 1, 0, b"k")
    for after, count in ((before, 1), (window_position(found), 0)):
        rows = find_closed_windows(str(tmp_path), "app", "s", (None, None), (0, 2 * far_ms), 9, None, after)
        assert len(rows) == count


def test_results_may_have_the_names_of_other_tables_columns(tmp_path: Path) -> None:
    """A name of a column of `state` is free in `closed`."""
    row = {"key": "k", "window_start": 1, "window_end": 2, "start_ms": 3, "live": json.dumps([1])}
    write_closed(tmp_path, "app", store_of("s", {"start_ms": Count(), "live": CollectList("x")}), [row])
    (found,) = find_closed_windows(str(tmp_path), "app", "s", ("k", "k"), (0, 9))
    assert (found.start_ms, found.results) == (1, {"start_ms": 3, "live": "[1]"})


def test_windows_are_counted(tmp_path: Path) -> None:
    """A count is of live windows, not rows, and closed windows by store."""
    write(tmp_path, 10, [(0, b"a"), (1, b"b")])
    write_state(tmp_path, "app", STORES, [tombstone(1, STORE, b"b", 5, 12), live(0, STORE, b"a", 5, 7, 13, {"n_n": 1})])
    write_closed(tmp_path, "app", STORES[1], [{"key": "k", "window_start": 1, "window_end": 2}])
    assert count_windows(str(tmp_path), "app") == (1, {STORE: 0, "other": 1})
