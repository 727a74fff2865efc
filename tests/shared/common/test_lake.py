"""Snapshots read from Delta tables; those with deletion vectors, which Spark writes, are in the compactor's tests."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from penstock.shared.common import lake
from penstock.shared.common.continuation import WindowPlace
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange

STATE = pa.struct([("n", pa.int64()), ("it's", pa.binary())])
SCHEMA = pa.schema(
    [
        *(("row", pa.string()), ("partition", pa.int32()), ("store", pa.string())),
        *(("key", pa.binary()), ("start_ms", pa.int64()), ("end_ms", pa.int64()), ("ba\"n'ks", STATE)),
        *(("changelog_offset", pa.int64()), ("epoch", pa.int32()), ("commit", pa.int64())),
        *(("progress", pa.string()), ("topic_id", pa.string()), ("run", pa.int64())),
    ]
)
STORE = "ba\"n'ks"


def write(root: Path, offset: int, windows: list[tuple[int, bytes]]) -> None:
    empty: dict[str, Any] = dict.fromkeys(SCHEMA.names)
    progress = {"row": "progress", "store": "", "key": b"", "start_ms": 0, "changelog_offset": offset}
    progress |= {"epoch": 2, "commit": 3, "progress": "{}", "topic_id": "id", "run": 1}
    rows = [empty | progress | {"partition": p} for p in (0, 1)]
    for partition, key in windows:
        window = {"row": "window", "partition": partition, "store": STORE, "key": key, "start_ms": 5, "end_ms": 6}
        rows.append(empty | window | {STORE: {"n": partition, "it's": key}})
    table = pa.Table.from_pylist(rows, SCHEMA)
    write_deltalake(str(root / "app" / "state"), table, mode="overwrite", partition_by=["partition"])


def test_no_table_is_no_snapshot(tmp_path: Path) -> None:
    """An application that was never compacted has no snapshot and nothing to describe."""
    assert lake.read_snapshot(str(tmp_path), "app", [0]) is None
    assert lake.describe(str(tmp_path), "app")["state_version"] == -1


def test_a_snapshot_stays_what_it_was(tmp_path: Path) -> None:
    """Windows are read at the snapshot's version, whatever was committed since."""
    write(tmp_path, 10, [(0, b"a"), (1, b"b")])
    snapshot = lake.read_snapshot(str(tmp_path), "app", [0, 7])
    assert snapshot == lake.Snapshot(0, {0: lake.PartitionSnapshot(0, 10, 2, 3, b"{}", "id")})
    write(tmp_path, 20, [(0, b"later")])
    (batch,) = lake.read_windows(str(tmp_path), "app", 0, STORE, snapshot.version, ["it's", "n"])
    assert batch.to_pylist() == [{"key": b"a", "start_ms": 5, "end_ms": 6, "it's": b"a", "n": 0}]
    assert [field.type for field in batch.schema] == [pa.binary(), pa.int64(), pa.int64(), pa.binary(), pa.int64()]
    assert lake.describe(str(tmp_path), "app")["live_rows"] == 1


def test_upkeep_makes_no_snapshot(tmp_path: Path) -> None:
    """A snapshot is as old as its merge, whatever wrote versions since; without a merge there is none."""
    assert lake.compacted_at_ms(str(tmp_path), "app") is None
    write(tmp_path, 10, [(0, b"a")])
    assert lake.compacted_at_ms(str(tmp_path), "app") is None
    table = DeltaTable(str(tmp_path / "app" / "state"))
    table.merge(table.to_pyarrow_table(), "false", "s", "t").when_not_matched_insert_all().execute()
    at_ms = lake.compacted_at_ms(str(tmp_path), "app")
    assert at_ms is not None
    assert DeltaTable(str(tmp_path / "app" / "state")).optimize.compact()["numFilesRemoved"] > 0
    assert lake.compacted_at_ms(str(tmp_path), "app") == at_ms == lake.describe(str(tmp_path), "app")["compacted_at_ms"]


def test_what_the_snapshot_does_not_know(tmp_path: Path) -> None:
    """An unknown store has no windows; an unknown column or a table of another kind is refused by name."""
    write(tmp_path, 10, [(0, b"a")])
    assert list(lake.read_windows(str(tmp_path), "app", 0, "new", 0, ["n"])) == []
    with pytest.raises(lake.NotASnapshot, match="sum"):
        list(lake.read_windows(str(tmp_path), "app", 0, STORE, 0, ["n", "sum"]))
    write_deltalake(str(tmp_path / "other" / "state"), pa.table({"x": [1]}))
    with pytest.raises(lake.NotASnapshot, match="no column row"):
        lake.read_snapshot(str(tmp_path), "other", [0])


@pytest.mark.parametrize("odd", [{"progress": None}, {"progress": 5}, {"changelog_offset": None}, {"epoch": "two"}])
def test_progress_that_is_none_is_refused(tmp_path: Path, odd: dict[str, Any]) -> None:
    """A row whose progress is missing or of another type is named as it is, not stumbled over."""
    row = {"row": "progress", "partition": 3, "changelog_offset": 1, "epoch": 1, "commit": 1, "progress": "{}"}
    table = pa.Table.from_pylist([row | {"topic_id": "id"} | odd])
    null = pa.schema([pa.field(f.name, pa.string() if pa.types.is_null(f.type) else f.type) for f in table.schema])
    write_deltalake(str(tmp_path / "app" / "state"), table.cast(null))
    with pytest.raises(lake.NotASnapshot, match="the progress of partition 3 is not readable"):
        lake.read_snapshot(str(tmp_path), "app", [3])


def test_a_store_that_is_none_is_refused(tmp_path: Path) -> None:
    """A column of a store's name that holds something else is no store."""
    write_deltalake(str(tmp_path / "app" / "state"), pa.table({"n": [1]}))
    with pytest.raises(lake.NotASnapshot, match="the column 'n' holds no states"):
        list(lake.read_windows(str(tmp_path), "app", 0, "n", 0, ["x"]))


@pytest.mark.parametrize(("path", "said"), [("/lake\0", "null byte"), ("~nobody-of-that-name/lake", "home directory")])
def test_a_path_that_is_none_is_a_wrong_setting(path: str, said: str) -> None:
    """What cannot be a folder is refused as a setting, by its value."""
    with pytest.raises(ConfigError, match=f"^lake .*{said}"):
        lake.read_snapshot(path, "app", [0])


def test_a_log_that_is_none_is_unavailable(tmp_path: Path) -> None:
    """A table whose log was damaged cannot be read, by any of the ways in."""
    write(tmp_path, 10, [(0, b"a")])
    (log,) = (tmp_path / "app" / "state" / "_delta_log").glob("*.json")
    for text in ("nonsense", "", log.read_text().replace('"minReaderVersion":1', '"minReaderVersion":99')):
        log.write_text(text)
        for read in (lake.compacted_at_ms, lake.describe, lambda root, app: lake.read_snapshot(root, app, [0])):
            with pytest.raises(lake.LakeUnavailable, match="cannot be read"):
                read(str(tmp_path), "app")


def test_a_version_that_is_gone_can_be_tried_again(tmp_path: Path) -> None:
    """A restore that loses the ground under it gets an error that says to read the newer snapshot."""
    write(tmp_path, 10, [(0, b"a")])
    with pytest.raises(lake.LakeUnavailable, match="at version 9"):
        list(lake.read_windows(str(tmp_path), "app", 0, STORE, 9, ["n"]))
    for file in (tmp_path / "app" / "state").rglob("*.parquet"):
        file.unlink()
    with pytest.raises(lake.LakeUnavailable):
        list(lake.read_windows(str(tmp_path), "app", 0, STORE, 0, ["n"]))


def test_the_newest_revision_of_a_window_counts(tmp_path: Path) -> None:
    """Of the rows of one window the highest revision is found; one without a state says that the window is no more."""
    rows = [(0, 10, 0, 1), (0, 10, 2, 3), (0, 10, 1, 2), (20, 30, 0, 1), (20, 30, 1, None), (20, 40, 1, 4)]
    starts, ends, revisions, numbers = (list(column) for column in zip(*rows, strict=True))
    table: dict[str, Any] = {"start_ms": starts, "end_ms": ends, "revision": revisions, "key": ["k"] * 6}
    table |= {"partition": [0] * 6, "day": [datetime.date(1970, 1, 1)] * 6}
    states = pa.array([None if n is None else {"n": n} for n in numbers], pa.struct([("n", pa.int64())]))
    arrow = pa.table(table).append_column("state", states)
    write_deltalake(str(tmp_path / "app" / "closed" / "s"), arrow, partition_by=["day"])
    found = lake.find_closed(str(tmp_path), "app", "s", "k", (0, 100))
    assert sorted((r["start_ms"], r["end_ms"], r["state"]["n"]) for r in found) == [(0, 10, 3), (20, 40, 4)]


def test_live_windows_of_a_range_of_keys(tmp_path: Path) -> None:
    """A snapshot's windows of one key or of several, with their keys, no more than asked for."""
    write(tmp_path, 10, [(0, b"a"), (1, b"b"), (1, b"c")])

    def found(keys: KeyRange, rows_max: int = 9, reach: tuple[int, int] = (0, 9)) -> list[bytes]:
        rows = lake.find_windows(str(tmp_path), "app", STORE, 0, keys, reach, rows_max)
        assert all((row["start_ms"], row["state"]["it's"]) == (5, row["key"]) for row in rows)
        return sorted(row["key"] for row in rows)

    assert found(KeyRange.of("b")) == [b"b"]
    assert found(KeyRange.of(low=b"b")) == [b"b", b"c"]
    assert (found(KeyRange.of(high="b")), len(found(KeyRange.of(), 2))) == ([b"a", b"b"], 2)
    assert found(KeyRange.of(), reach=(7, 9)) == []


def write_closed(root: Path, keys: list[Any], starts: list[int], revisions: list[int] | None = None) -> None:
    table: dict[str, Any] = {
        "start_ms": starts,
        "end_ms": starts,
        "revision": revisions or [0] * len(keys),
        "key": keys,
    }
    days = [datetime.date(1970, 1, 1) + datetime.timedelta(milliseconds=start) for start in starts]
    table |= {"partition": [0] * len(keys), "day": days}
    states = pa.array([{"n": n} for n in range(len(keys))], pa.struct([("n", pa.int64())]))
    write_deltalake(str(root / "app" / "closed" / "s"), pa.table(table).append_column("state", states))


def test_windows_of_a_range_of_keys(tmp_path: Path) -> None:
    """Keys between two bounds, the windows that begin first, and up to which one these are all."""
    write_closed(tmp_path, ["a", "b", "c", "b"], [30, 20, 10, 5])

    def found(first: str | None, last: str | None, rows_max: int) -> tuple[list[int], int | None]:
        rows, all_to = lake.find_closed_of(str(tmp_path), "app", "s", (first, last), (0, 100), rows_max)
        return sorted(row["start_ms"] for row in rows), None if all_to is None else all_to.start_ms

    assert found("b", "c", 9) == ([5, 10, 20], None)
    assert found(None, "b", 9) == ([5, 20, 30], None)
    assert found(None, None, 3) == ([5, 10], 10)
    assert found("b", "b", 2) == ([5], 5)


@pytest.mark.parametrize("as_bytes", [False, True])
def test_windows_after_a_place(tmp_path: Path, as_bytes: bool) -> None:
    """Page after page has each window once, of many that begin at once too, however many revisions one has."""
    day = 86_400_000
    windows = [(key, start) for start in (5, day, 3 * day) for key in ("it's", "b", "c") for _ in range(2)]
    windows += [("b", day)] * 20
    keys = [key.encode() if as_bytes else key for key, _ in windows]
    write_closed(tmp_path, keys, [start for _, start in windows], list(range(len(windows))))
    for rows_max in (1, 3, 99):
        seen, after = [], None
        while True:
            rows, to = lake.find_closed_of(str(tmp_path), "app", "s", (None, None), (0, 9 * day), rows_max, None, after)
            rows.sort(key=lake.window_place)
            seen += [(row["key"], row["start_ms"], row["state"]["n"]) for row in rows]
            if (after := to) is None:
                break
        assert [start for _, start, _ in seen] == [5] * 3 + [day] * 3 + [3 * day] * 3
        assert len({(key, start) for key, start, _ in seen}) == 9
        assert max(number for _, _, number in seen) == len(windows) - 1


def test_live_windows_after_a_place(tmp_path: Path) -> None:
    """Those that begin, end and lie later, in their order."""
    write(tmp_path, 10, [(0, b"a"), (0, b"\xff"), (1, b"b"), (1, b"c")])
    seen, after = [], None
    while rows := lake.find_windows(str(tmp_path), "app", STORE, 0, KeyRange.of(), (0, 9), 1, None, after):
        after = lake.window_place(rows[0])
        seen.append(rows[0]["key"])
    assert seen == [b"a", b"\xff", b"b", b"c"]


def test_windows_beyond_the_years_of_python_are_found(tmp_path: Path) -> None:
    """A window in a year of five digits is read as any other."""
    far_ms = 1_700_000_000_000_000
    table: dict[str, Any] = {"start_ms": [far_ms], "end_ms": [far_ms], "revision": [0], "key": ["k"], "partition": [0]}
    table["day"] = pa.array([far_ms // 86_400_000], pa.int32()).cast(pa.date32())
    table["end"] = pa.array([far_ms * 1000], pa.timestamp("us", "UTC"))
    table["state"] = pa.array([{"n": 1}], pa.struct([("n", pa.int64())]))
    write_deltalake(str(tmp_path / "app" / "closed" / "s"), pa.table(table))
    (row,) = lake.find_closed(str(tmp_path), "app", "s", "k", (0, far_ms))
    assert (row["end_ms"], row["state"]) == (far_ms, {"n": 1})
    before = WindowPlace(far_ms - 1, far_ms - 1, 0, b"k")
    for after, count in ((before, 1), (lake.window_place(row), 0)):
        rows, _ = lake.find_closed_of(str(tmp_path), "app", "s", (None, None), (0, 2 * far_ms), 9, None, after)
        assert len(rows) == count
