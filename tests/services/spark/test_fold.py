"""What a task makes of a range of the changelog, without Spark and Kafka."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pytest

from penstock.services.spark.fold import CannotRead, Folded, Range, Where, write_files
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations import Count
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.dsl import StreamsBuilder

TOPIC_ID = "id"
Entry = tuple[bytes | None, bytes]


def schemas(**stores: Any) -> tuple[log.StoreSchema, ...]:
    builder = StreamsBuilder()
    grouped = builder.stream("source").group_by_key()
    for name, aggregations in (stores or {"s": {"n": Count()}}).items():
        grouped.session_window(100, 10).aggregate(name, **aggregations).on_close().to("out")
    return builder.build().schemas()


STORES = schemas()
CODEC = log.StateCodec(STORES[0].state_columns())


def state(n: int) -> bytes:
    return CODEC.pack([n])


def live(key: bytes, start: int, end: int, n: int, commit: int = 0, epoch: int = 1) -> Entry:
    return key, log.encode_live(0, epoch, commit, start, end, state(n))


def gone(key: bytes, start: int, commit: int = 0) -> Entry:
    return key, log.encode_deleted(0, 1, commit, start)


def final(key: bytes, start: int, end: int, n: int, commit: int = 0) -> Entry:
    return key, log.encode_final(0, 1, commit, start, end, end + 110, state(n))


def late(key: bytes, at: int, missed: Sequence[int], n: int | None, offset: int = 5) -> Entry:
    return key, log.encode_late(0, 1, 0, at, offset, missed, None if n is None else state(n))


def takeover(epoch: int = 1) -> Entry:
    return None, log.encode_takeover(epoch, log.Takeover("app", "i", 0))


def progress(commit: int = 0, read: int = 1, wall_ms: int = 0, epoch: int = 1) -> Entry:
    said = log.Progress("app", "exactly_once", {"source": read}, 0, {"s": 0}, {}, STORES, wall_ms)
    return None, log.encode_progress(epoch, commit, said)


def where(folder: str = "unused") -> Where:
    return Where(KafkaSettings(), "log", TOPIC_ID, 1_000, folder, {}, "job")


def range_of(count: int, first: int = 0, newest: dict[str, Any] | None = None, **positions: int) -> Range:
    said = None if newest is None else newest["progress"]
    at = {f"closed/{store}": offset for store, offset in positions.items()}
    return Range(3, first, count, count, 0 if newest is None else newest["epoch"], said, newest, at)


def row_sets(tables: Mapping[str, Sequence[pa.RecordBatch]]) -> dict[str, list[dict[str, Any]]]:
    """By table its rows."""
    return {table: [row for batch in of for row in batch.to_pylist()] for table, of in tables.items()}


def folded(entries: Sequence[Entry], of: Range | None = None) -> Folded:
    of = of or range_of(len(entries))
    found = Folded("log", of)
    keys, values = [key for key, _ in entries], [value for _, value in entries]
    found.feed(np.arange(of.first, of.first + len(entries)), keys, values)
    return found


def test_each_operation_has_its_table() -> None:
    """A live window and a tombstone go to `state`, a closed window to `closed`, a late record to `late`."""
    entries = [takeover(), live(b"a", 10, 20, 2), final(b"b", 1, 5, 3), gone(b"c", 7), late(b"d", 4, [4], 1)]
    found = folded([*entries, progress()])
    rows = row_sets(found.rows(where()))
    assert {table: len(of) for table, of in rows.items()} == {"state": 4, "closed/s": 1, "late/s": 1}
    by_key = {row["key"]: row for row in rows["state"] if row["row"] == "window"}
    told = {key: (row["start_ms"], row["end_ms"], row["live"], row["s"]) for key, row in by_key.items()}
    assert told == {
        b"a": (10, 20, True, {"n_n": 2}),
        b"b": (1, None, False, None),
        b"c": (7, None, False, None),
    }
    assert all(row["partition"] == 3 for of in rows.values() for row in of)
    (closed,), (missed,) = rows["closed/s"], rows["late/s"]
    assert (closed["key"], closed["n"], closed["changelog_offset"], closed["topic_id"]) == ("b", 3, 2, TOPIC_ID)
    assert [round(closed[at].timestamp() * 1000) for at in ("window_start", "window_end", "closed_at")] == [1, 5, 115]
    assert (missed["key"], missed["n"], missed["source_offset"]) == ("d", 1, 5)
    assert [round(at.timestamp() * 1000) for at in missed["missed"]] == [4]
    assert found.deleted == 2


def test_a_late_record_without_state_or_source_has_nulls() -> None:
    """One that an aggregation refused; and one of no source record. Those beside them keep their own."""
    entries = [takeover(), late(b"a", 4, [4, 5], None), late(b"b", 6, [], 9, offset=-1), progress()]
    rows = row_sets(folded(entries).rows(where()))["late/s"]
    assert [(row["key"], row["n"], row["state"], row["source_offset"]) for row in rows] == [
        ("a", None, None, 5),
        ("b", 9, {"n_n": 9}, None),
    ]
    assert [len(row["missed"]) for row in rows] == [2, 0]


def test_the_newest_change_of_a_window_counts() -> None:
    """By key and start, over several commits; the same key at another start is another window."""
    entries = [takeover(), live(b"a", 10, 20, 1), live(b"a", 50, 60, 7), progress()]
    entries += [live(b"a", 10, 30, 2, 1), progress(1)]
    entries += [gone(b"a", 10, 2), progress(2), live(b"a", 10, 25, 4, 3), progress(3)]
    found = folded(entries)
    windows = [row for row in row_sets(found.rows(where()))["state"] if row["row"] == "window"]
    assert {(row["start_ms"], row["end_ms"], row["s"]["n_n"], row["changelog_offset"]) for row in windows} == {
        (50, 60, 7, 2),
        (10, 25, 4, 8),
    }
    assert found.deleted == 0


def test_what_no_commit_confirmed_is_not_there() -> None:
    """Entries after the last progress record are the next run's, and those of an epoch that is over are nobody's."""
    entries = [takeover(), live(b"a", 1, 1, 1), progress(), live(b"b", 1, 1, 1, 1)]
    found = folded(entries)
    rows = row_sets(found.rows(where()))["state"]
    assert [row["key"] for row in rows if row["row"] == "window"] == [b"a"]
    assert (found.covered_offset, found.is_whole) == (3, True)
    old = folded([takeover(), live(b"a", 1, 1, 1), takeover(2), progress(0, epoch=1)])
    assert (old.rows(where()), old.covered_offset, old.is_whole) == ({}, 0, True)
    assert not folded(entries[:2]).is_whole


def test_a_progress_row_says_how_far_the_tables_are() -> None:
    """The next offset, by table the last row, and how much came since the last rewrite."""
    entries = [takeover(), final(b"a", 1, 2, 1), live(b"b", 1, 2, 1), final(b"c", 1, 2, 1), progress()]
    (row,) = [r for r in row_sets(folded(entries).rows(where()))["state"] if r["row"] == "progress"]
    assert (row["changelog_offset"], row["previous_offset"], row["epoch"], row["topic_id"]) == (5, 0, 1, TOPIC_ID)
    assert json.loads(row["appended"]) == {"closed/s": 3}
    assert (row["rewritten_rows"], row["added_rows"], row["added_files"]) == (3, 0, 0)  # a first run needs no rewrite
    more = [live(b"d", 1, 2, 1, 1), progress(1, 2)]
    second = folded(more, range_of(7, 5, row, s=3))
    (after,) = [r for r in row_sets(second.rows(where()))["state"] if r["row"] == "progress"]
    assert (after["changelog_offset"], after["previous_offset"]) == (7, 5)
    assert json.loads(after["appended"]) == {"closed/s": 3}
    assert (after["rewritten_rows"], after["added_rows"], after["added_files"]) == (3, 1, 1)


def test_a_table_gets_only_what_it_has_not() -> None:
    """A table that was put back is behind, one of a run that died is ahead: each goes on from its own position."""
    entries = [takeover(), final(b"a", 1, 2, 1), final(b"b", 1, 2, 1), live(b"c", 1, 2, 1), progress()]
    ahead = row_sets(folded(entries, range_of(5, s=1)).rows(where()))
    assert [row["key"] for row in ahead["closed/s"]] == ["b"]
    (newest,) = [r for r in row_sets(folded(entries).rows(where()))["state"] if r["row"] == "progress"]
    behind = Range(3, 0, 5, 5, 0, None, newest, {})
    rows = row_sets(folded([*entries], behind).rows(where()))
    assert len(rows["closed/s"]) == 2
    assert [row["row"] for row in rows["state"]] == ["progress"]  # `state` has these changes already


def test_commits_in_which_nothing_happened_write_nothing() -> None:
    """Wall-clock punctuation alone does not; a source offset that moved does."""
    entries = [takeover(), live(b"a", 1, 1, 1), progress()]
    (row,) = [r for r in row_sets(folded(entries).rows(where()))["state"] if r["row"] == "progress"]
    idle = folded([progress(1, 1, wall_ms=9)], range_of(4, 3, row))
    assert (idle.rows(where()), idle.summary([]).covered_offset) == ({}, 4)
    moved = folded([progress(1, 2, wall_ms=9)], range_of(4, 3, row))
    assert list(moved.rows(where())) == ["state"]


def test_an_entry_that_cannot_be_read_is_named() -> None:
    """With topic, partition and offset: one that is no entry, one whose state is none, a time that no table can say."""
    with pytest.raises(CannotRead, match="log-3 at offset 1"):
        folded([takeover(), (b"a", log.encode_live(0, 1, 0, 1, 1, b"")[:5])])
    bad = folded([takeover(), live(b"a", 1, 1, 1), (b"b", log.encode_live(0, 1, 0, 1, 1, b"\1")), progress()])
    with pytest.raises(CannotRead, match="log-3 at offset 2"):
        bad.rows(where())
    beyond = folded([takeover(), final(b"a", 0, 10**15, 1), progress()])
    with pytest.raises(CannotRead, match="log-3 at offset 1: a closed window from 0 to"):
        beyond.rows(where())


def test_files_are_ordered_by_time(tmp_path: Any) -> None:
    """So that readers skip files; a file of `state` lies in its partition's folder."""
    entries = [takeover(), *(final(b"k", start, start, 1) for start in (9, 3, 6)), live(b"a", 1, 1, 1), progress()]
    rows = folded(entries).rows(where())
    (closed,) = write_files(where(str(tmp_path)), "closed/s", rows["closed/s"], 3)
    (of_state,) = write_files(where(str(tmp_path)), "state", rows["state"], 3)
    assert (closed.path, closed.rows, closed.partition) == ("part-job-3-0.parquet", 3, None)
    assert (of_state.path, of_state.rows, of_state.partition) == ("partition=3/part-job-3-0.parquet", 5, 3)
    times = pa.parquet.read_table(tmp_path / "closed/s" / closed.path).column("window_start").to_pylist()
    assert [round(at.timestamp() * 1000) for at in times] == [3, 6, 9]
    assert list(write_files(where(str(tmp_path)), "late/s", [], 3)) == []
