"""The rows that Spark's tasks write, without Spark: from a range of the changelog, and by a rewrite of `state`.

A fake broker holds the changelog.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet
import pyarrow.parquet as pq
import pytest

from penstock.services.spark.compaction import compaction_task
from penstock.services.spark.compaction import rewrite as of_rewrite
from penstock.services.spark.compaction.compaction_task import (
    ChangelogRange,
    CompactionTaskOptions,
    CompactionTaskResult,
    PartitionCompaction,
    compact_changelog_ranges,
    compact_ranges,
    lagging_tables,
    read_range,
)
from penstock.services.spark.compaction.delta_writer import DataFile
from penstock.services.spark.compaction.rewrite import RewriteInput, rewrite, rows_to_keep
from penstock.services.spark.table_columns import DAY_MS, PROGRESS, TIMESTAMP_MS_MAX, state_schema
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common import arrow_arrays
from penstock.shared.common.errors import ChangelogHole, CorruptRecord, KafkaTimeout, SchemaMismatch
from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import RecordColumns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count, Max
from penstock.shared.streams.changelog import format as log
from penstock.shared.streams.changelog.state_codec import StateCodec
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.changelog_topic import changelog_consumer
from penstock.shared.testing.fake_broker import FakeCluster

TOPIC_ID = "id"
TIMEOUT_S = 20  # for reads from a broker in this process
Entry = tuple[bytes | None, bytes]


def schemas(**stores: Any) -> tuple[StoreSchema, ...]:
    builder = StreamsBuilder()
    grouped = builder.stream("source").group_by_key()
    for name, aggregations in (stores or {"s": {"n": Count()}}).items():
        grouped.session_window(100, 10).aggregate(name, **aggregations).on_close().to("out")
    return builder.build().schemas()


STORES = schemas()
TWO_STORES = schemas(s={"n": Count()}, t={"n": Count()})
STATE_SCHEMA = state_schema(TWO_STORES)
CODEC = StateCodec(STORES[0].state_columns())


def state(n: int) -> bytes:
    return CODEC.pack([n])


def live(key: bytes, start: int, end: int, n: int, commit: int = 0, epoch: int = 1, store: int = 0) -> Entry:
    return key, log.encode_live(store, epoch, commit, start, end, state(n))


def gone(key: bytes, start: int, commit: int = 0) -> Entry:
    return key, log.encode_deleted(0, 1, commit, start)


def final(key: bytes, start: int, end: int, n: int, commit: int = 0, store: int = 0) -> Entry:
    return key, log.encode_final(store, 1, commit, start, end, end + 110, state(n))


def late(key: bytes, at: int, missed: Sequence[int], n: int | None, offset: int = 5) -> Entry:
    return key, log.encode_late(0, 1, 0, at, offset, missed, None if n is None else state(n))


def takeover(epoch: int = 1) -> Entry:
    return None, log.encode_takeover(epoch, log.Takeover("app", "i", 0))


def progress(
    commit: int = 0,
    read: int = 1,
    wall_ms: int = 0,
    epoch: int = 1,
    stores: tuple[StoreSchema, ...] = STORES,
    grids_ms: Mapping[str, int] | None = None,
    stream_time_ms: int = 0,
) -> Entry:
    progress_record = log.Progress(
        "app",
        "exactly_once",
        {"source": read},
        {"s": 0},
        {"source": stream_time_ms},
        dict(grids_ms or {}),
        stores,
        wall_ms,
    )
    return None, log.encode_progress(epoch, commit, progress_record)


def options(
    folder: str = "unused", kafka: KafkaSettings | None = None, idle_ms_max: int = 1_000
) -> CompactionTaskOptions:
    return CompactionTaskOptions(kafka or KafkaSettings(), "log", TOPIC_ID, idle_ms_max, folder, {})


def range_of(count: int, first: int = 0, newest: dict[str, Any] | None = None, **positions: int) -> ChangelogRange:
    at = {f"closed/{store}": offset for store, offset in positions.items()}
    return ChangelogRange(3, first, count, count, newest, newest, at)


def row_sets(tables: Mapping[str, Sequence[pa.RecordBatch]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by table."""
    return {table: [row for batch in of for row in batch.to_pylist()] for table, of in tables.items()}


def compacted(entries: Sequence[Entry], of: ChangelogRange | None = None, at_once: int = 1_000) -> PartitionCompaction:
    """The result of compacting entries that arrive in batches of this size."""
    of = of or range_of(len(entries))
    found = PartitionCompaction("log", of)
    for first in range(0, len(entries), at_once):
        own = entries[first : first + at_once]
        offsets = np.arange(of.first + first, of.first + first + len(own))
        found.feed(offsets, [key for key, _ in own], [value for _, value in own])
    return found


def windows_of(found: PartitionCompaction) -> list[dict[str, Any]]:
    """The rows of windows in `state`."""
    return [row for row in row_sets(found.rows(options()))["state"] if row["row"] == "window"]


def progress_of(found: PartitionCompaction) -> dict[str, Any]:
    """The progress row."""
    (row,) = (row for row in row_sets(found.rows(options()))["state"] if row["row"] == "progress")
    return row


def test_each_operation_has_its_table() -> None:
    """A live window and a tombstone go to `state`, a closed window to `closed`, a late record to `late`."""
    entries = [takeover(), live(b"a", 10, 20, 2), final(b"b", 1, 5, 3), gone(b"c", 7), late(b"d", 4, [4], 1)]
    found = compacted([*entries, progress()])
    rows = row_sets(found.rows(options()))
    assert {table: len(of) for table, of in rows.items()} == {"state": 4, "closed/s": 1, "late/s": 1}
    by_key = {row["key"]: row for row in rows["state"] if row["row"] == "window"}
    found_rows = {key: (row["start_ms"], row["end_ms"], row["live"], row["s"]) for key, row in by_key.items()}
    assert found_rows == {
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
    """An aggregation rejected one record, and another has no source record.

    The records beside them keep their values.
    """
    entries = [takeover(), late(b"a", 4, [4, 5], None), late(b"b", 6, [], 9, offset=-1)]
    entries += [late(b"c", 7, [], 1, offset=0), late(b"d", 8, [7], 2), progress()]
    rows = row_sets(compacted(entries).rows(options()))["late/s"]
    assert [(row["key"], row["n"], row["state"], row["source_offset"]) for row in rows] == [
        ("a", None, None, 5),
        ("b", 9, {"n_n": 9}, None),
        ("c", 1, {"n_n": 1}, 0),
        ("d", 2, {"n_n": 2}, 5),
    ]
    assert [len(row["missed"]) for row in rows] == [2, 0, 0, 1]


@pytest.mark.parametrize("at_once", [1, 4, 100])
def test_the_newest_change_of_a_window_counts(at_once: int) -> None:
    """It counts by key and start, over several commits. The same key at another start is another window."""
    entries = [takeover(), live(b"a", 10, 20, 1), live(b"a", 50, 60, 7), progress()]
    entries += [live(b"a", 10, 30, 2, 1), progress(1)]
    entries += [gone(b"a", 10, 2), progress(2), live(b"a", 10, 25, 4, 3), progress(3)]
    found = compacted(entries, at_once=at_once)
    found_rows = [
        (row["start_ms"], row["end_ms"], row["s"]["n_n"], row["changelog_offset"]) for row in windows_of(found)
    ]
    assert sorted(found_rows) == [(10, 25, 4, 8), (50, 60, 7, 2)]
    assert found.deleted == 0
    assert (found.covered_offset, found.result([]).stores) == (len(entries), STORES)


def test_windows_of_several_batches_keep_their_offsets() -> None:
    """Each batch has a commit of its own."""
    entries = [takeover(), live(b"a", 1, 2, 1), progress(), live(b"b", 1, 2, 1, 1), live(b"c", 1, 2, 1, 1), progress(1)]
    entries += [live(b"d", 1, 2, 1, 2), live(b"e", 1, 2, 1, 2), progress(2)]
    rows = windows_of(compacted(entries, at_once=3))
    assert [(row["key"], row["changelog_offset"]) for row in rows] == [
        (b"a", 1),
        (b"b", 3),
        (b"c", 4),
        (b"d", 6),
        (b"e", 7),
    ]


def test_the_keys_of_a_range_may_be_larger_than_one_arrow_array(monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest change of each window is found if the keys of each batch fit into one array, and those of all do not.

    The array is limited to 4 bytes instead of 2 GiB.
    """
    monkeypatch.setattr(arrow_arrays, "BINARY_BYTES_MAX", 4)
    entries = [takeover(), live(b"aa", 1, 2, 1), live(b"bb", 1, 2, 2), progress()]
    entries += [live(b"cc", 1, 2, 3, 1), live(b"bb", 1, 2, 4, 1), progress(1)]
    entries += [live(b"aa", 1, 2, 5, 2), live(b"aa", 3, 4, 6, 2), progress(2)]
    rows = windows_of(compacted(entries, at_once=3))
    found = [(row["key"], row["start_ms"], row["s"]["n_n"], row["changelog_offset"]) for row in rows]
    assert found == [(b"cc", 1, 3, 4), (b"bb", 1, 4, 5), (b"aa", 1, 5, 7), (b"aa", 3, 6, 8)]


def test_windows_of_two_stores_are_different_rows() -> None:
    """Windows of one key and start are different windows in two stores, and each store has its own table."""
    entries = [takeover(), live(b"a", 1, 2, 5), live(b"a", 1, 2, 6, store=1), final(b"b", 1, 2, 7, store=1)]
    found = compacted([*entries, final(b"c", 1, 2, 8), progress(stores=TWO_STORES)])
    assert [(row["store"], row["key"], row["live"]) for row in windows_of(found)] == [
        ("s", b"a", True),
        ("s", b"c", False),
        ("t", b"a", True),
        ("t", b"b", False),
    ]
    rows = row_sets(found.rows(options()))
    assert {table: [row["key"] for row in rows[table]] for table in ("closed/s", "closed/t")} == {
        "closed/s": ["c"],
        "closed/t": ["b"],
    }
    second_alone = compacted([takeover(), final(b"b", 1, 2, 7, store=1), progress(stores=TWO_STORES)])
    assert list(second_alone.rows(options())) == ["state", "closed/t"]


@pytest.mark.parametrize(
    ("later", "message"),
    [
        (TWO_STORES, "stores"),
        ((msgspec.structs.replace(STORES[0], name="t"),), "stores 's', .*'t' is new"),
        ((msgspec.structs.replace(STORES[0], key="bytes"),), "key .*'string'.*'bytes'"),
        ((msgspec.structs.replace(STORES[0], aggregations=()),), "the aggregations changed: n"),
    ],
)
@pytest.mark.parametrize("is_known", [False, True])
def test_stores_stay_what_they_were(later: tuple[StoreSchema, ...], message: str, is_known: bool) -> None:
    """Stores must not change from one commit to the next, nor since the progress row at which a range begins."""
    before, changed = [takeover(), progress()], [live(b"a", 1, 2, 5, 1), progress(1, stores=later)]
    newest = {
        "epoch": 1,
        "progress": before[1][1][log.ENVELOPE.size :].decode(),
        "changelog_offset": 2,
        "appended": "{}",
    }
    with pytest.raises(SchemaMismatch, match=message):
        compacted(changed, range_of(4, 2, newest)) if is_known else compacted([*before, *changed])


def test_later_commits_may_have_further_aggregations() -> None:
    """Older windows lack the new aggregations. The tables have the columns of the last commit."""
    more = AggregationSchema.of("most", Max("delay"))
    wider = (msgspec.structs.replace(STORES[0], aggregations=(*STORES[0].aggregations, more)),)
    entries = [takeover(), live(b"a", 1, 2, 5), progress(), live(b"a", 1, 3, 6, 1), progress(1)]
    found = compacted([*entries, progress(2, stores=wider)])
    assert [(row["store"], row["end_ms"]) for row in windows_of(found)] == [("s", 3)]
    assert found.result([]).stores == wider


def test_a_store_without_windows_closes_none() -> None:
    """An entry that its changelog calls final is a deleted row, in `state` only."""
    joined = (msgspec.structs.replace(STORES[0], kind="join"),)
    found = compacted([takeover(), final(b"a", 1, 2, 5), progress(stores=joined)])
    assert list(found.rows(options())) == ["state"]
    assert [(row["key"], row["live"]) for row in windows_of(found)] == [(b"a", False)]


def test_keys_are_text_or_bytes() -> None:
    """Keys are as the store has them. Keys that are not text have a column with another name."""
    of_bytes = (msgspec.structs.replace(STORES[0], key="bytes"),)
    entries = [takeover(), final(b"\xff", 1, 2, 5), late(b"\xfe", 4, [4], 1), progress(stores=of_bytes)]
    rows = row_sets(compacted(entries).rows(options()))
    assert [rows[table][0]["key_bytes"] for table in ("closed/s", "late/s")] == [b"\xff", b"\xfe"]
    assert "key" not in rows["closed/s"][0]


def test_entries_without_a_commit_are_not_compacted() -> None:
    """Entries after the last progress record belong to the next compaction. Entries of an old epoch are ignored."""
    entries = [takeover(), live(b"a", 1, 1, 1), progress(), live(b"b", 1, 1, 1, 1)]
    found = compacted(entries)
    rows = row_sets(found.rows(options()))["state"]
    assert [row["key"] for row in rows if row["row"] == "window"] == [b"a"]
    assert (found.covered_offset, found.commit is None) == (3, False)
    old = compacted([takeover(), live(b"a", 1, 1, 1), takeover(2), progress(0, epoch=1)])
    assert (old.rows(options()), old.covered_offset, old.commit) == ({}, 0, None)
    assert compacted(entries[:2]).commit is None


def test_a_progress_row_has_the_positions_of_the_tables() -> None:
    """It has the next offset, by table the last row, and the rows and files added since the last rewrite."""
    entries = [takeover(), final(b"a", 1, 2, 1), live(b"b", 1, 2, 1), final(b"c", 1, 2, 1), progress()]
    (row,) = [r for r in row_sets(compacted(entries).rows(options()))["state"] if r["row"] == "progress"]
    assert (row["changelog_offset"], row["epoch"], row["topic_id"]) == (5, 1, TOPIC_ID)
    assert json.loads(row["appended"]) == {"closed/s": 3}
    assert (row["rewritten_rows"], row["added_rows"], row["added_files"]) == (3, 0, 0)  # the first needs no rewrite
    more = [live(b"d", 1, 2, 1, 1), progress(1, 2)]
    second = compacted(more, range_of(7, 5, row, s=3))
    (after,) = [r for r in row_sets(second.rows(options()))["state"] if r["row"] == "progress"]
    assert after["changelog_offset"] == 7
    assert json.loads(after["appended"]) == {"closed/s": 3}
    assert (after["rewritten_rows"], after["added_rows"], after["added_files"]) == (3, 1, 1)
    entries = [*(live(key, 1, 2, 1, 2) for key in (b"e", b"f", b"g")), progress(2, 3)]
    third = progress_of(compacted(entries, range_of(11, 7, after)))
    assert (third["rewritten_rows"], third["added_rows"], third["added_files"]) == (3, 4, 2)


def test_each_table_continues_from_its_own_position() -> None:
    """A restored table is behind, and a table of a failed compaction is ahead. Each continues from its own position."""
    entries = [takeover(), *(final(key, 1, 2, 1) for key in (b"a", b"b", b"c")), live(b"d", 1, 2, 1), progress()]
    ahead = row_sets(compacted(entries, range_of(6, s=2)).rows(options()))
    assert [row["key"] for row in ahead["closed/s"]] == ["c"]
    assert json.loads(progress_of(compacted(entries, range_of(6, s=2)))["appended"]) == {"closed/s": 3}
    two_late = [takeover(), late(b"a", 4, [4], 1), late(b"b", 4, [4], 1), progress()]
    of_late = range_of(4)._replace(positions={"late/s": 1})
    assert [row["key"] for row in row_sets(compacted(two_late, of_late).rows(options()))["late/s"]] == ["b"]
    (newest,) = [r for r in row_sets(compacted(entries).rows(options()))["state"] if r["row"] == "progress"]
    behind = ChangelogRange(3, 0, 6, 6, None, newest, {})
    rows = row_sets(compacted([*entries], behind).rows(options()))
    assert len(rows["closed/s"]) == 3
    assert [row["row"] for row in rows["state"]] == ["progress"]  # `state` has these changes already


def test_a_range_that_ends_before_the_newest_progress_row_has_its_own_positions() -> None:
    """Its progress row has the last rows of the tables at its end, so that a table that lags continues there."""
    entries = [takeover(), final(b"a", 1, 2, 1), progress(), final(b"b", 1, 2, 1, 1), progress(1), progress(2)]
    newest = progress_of(compacted(entries))
    start = progress_of(compacted(entries[:3]))
    assert json.loads(newest["appended"]) == {"closed/s": 3}
    for read, own in ((entries[:3], {"closed/s": 1}), (entries[:5], {"closed/s": 3})):
        again = progress_of(compacted(read, ChangelogRange(3, 0, len(read), 6, None, newest, {})))
        assert (again["changelog_offset"], json.loads(again["appended"])) == (len(read), own)
    idle = progress_of(compacted([progress(1)], ChangelogRange(3, 3, 4, 6, start, newest, {"closed/s": 1})))
    assert (idle["changelog_offset"], json.loads(idle["appended"])) == (4, {"closed/s": 1})


def test_a_table_lags_behind_the_last_offset_that_it_once_had() -> None:
    """A table at that offset or above does not lag, and no table lags if there is no progress row."""
    newest = {"appended": json.dumps({"late/s": 0, "closed/s": 5, "closed/t": 5, "closed/u": 5, "late/t": 5})}
    assert lagging_tables(newest, {"closed/s": 4, "closed/t": 5, "closed/u": 6}) == ["closed/s", "late/s", "late/t"]
    assert lagging_tables(None, {"closed/s": 4}) == []


@pytest.mark.parametrize(
    ("retention_days", "before_ms", "time_ms", "limit_ms"),
    [
        (None, None, 10 * DAY_MS, -1),
        (None, 5, 10 * DAY_MS, 5),
        (7, None, 6 * DAY_MS, -1),
        (7, None, 10 * DAY_MS + 3, 3 * DAY_MS + 3),
        (7, 4 * DAY_MS, 10 * DAY_MS, 4 * DAY_MS),
        (7, 5, TIMESTAMP_MS_MAX, TIMESTAMP_MS_MAX - 7 * DAY_MS),
        (7, 5, TIMESTAMP_MS_MAX + 1, 5),
    ],
)
def test_closed_windows_expire_by_stream_time(
    retention_days: int | None, before_ms: int | None, time_ms: int, limit_ms: int
) -> None:
    """The limit is the retention before the stream time. It never decreases, and ignores a time after the year 9999."""
    newest = None
    if before_ms is not None:
        newest = progress_of(compacted([takeover(), progress()])) | {"expired_ms": before_ms}
    entries = [takeover(), live(b"a", 1, 2, 1), progress(stream_time_ms=time_ms)]
    found = compacted(entries, ChangelogRange(3, 2, 5, 5, None, newest, {}))
    rows = row_sets(found.rows(options()._replace(retention_days=retention_days)))["state"]
    assert [row["expired_ms"] for row in rows if row["row"] == "progress"] == [limit_ms]


def test_commits_in_which_nothing_happened_write_nothing() -> None:
    """Wall-clock punctuation alone writes nothing. A changed source offset does."""
    epoch = 1_000
    entries = [takeover(epoch), live(b"a", 1, 1, 1, epoch=epoch), progress(epoch=epoch)]
    (row,) = [r for r in row_sets(compacted(entries).rows(options()))["state"] if r["row"] == "progress"]
    idle = compacted([progress(1, 1, wall_ms=9, epoch=epoch)], range_of(4, 3, row))
    assert (idle.rows(options()), idle.result([]).covered_offset) == ({}, 4)
    scheduled = compacted([progress(1, 1, wall_ms=9, epoch=epoch, grids_ms={"tick": 7})], range_of(4, 3, row))
    assert scheduled.rows(options()) == {}
    moved = compacted([progress(1, 2, wall_ms=9, epoch=epoch)], range_of(4, 3, row))
    assert list(moved.rows(options())) == ["state"]
    taken = compacted([takeover(epoch + 1), progress(1, 1, epoch=epoch + 1)], range_of(5, 3, row))
    assert progress_of(taken)["epoch"] == epoch + 1  # otherwise the next compaction would accept an old owner's entries


def test_an_idle_tail_is_covered_once_it_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a restore would read it without effect."""
    monkeypatch.setattr(compaction_task, "IDLE_RECORDS_MAX", 2)
    row = progress_of(compacted([takeover(), live(b"a", 1, 1, 1), progress()]))
    idle = [progress(1 + i) for i in range(3)]
    assert compacted(idle[:2], range_of(5, 3, row)).rows(options()) == {}
    assert progress_of(compacted(idle, range_of(6, 3, row)))["changelog_offset"] == 6


def test_an_entry_that_cannot_be_read_is_named() -> None:
    """The error has topic, partition and offset.

    Tested are an invalid entry, an invalid state, and a time that no table can represent.
    """
    with pytest.raises(CorruptRecord, match="log-3 at offset 1"):
        compacted([takeover(), (b"a", log.encode_live(0, 1, 0, 1, 1, b"")[:5])])
    bad = compacted([takeover(), live(b"a", 1, 1, 1), (b"b", log.encode_live(0, 1, 0, 1, 1, b"\1")), progress()])
    with pytest.raises(CorruptRecord, match="log-3 at offset 2"):
        bad.rows(options())
    no_state = compacted([takeover(), (b"a", log.encode_late(0, 1, 0, 4, 5, [4], b"")), progress()])
    with pytest.raises(CorruptRecord, match="log-3 at offset 1"):
        no_state.rows(options())
    for start, end in ((0, 10**15), (0, TIMESTAMP_MS_MAX + 1), (10**15, 0), (10**15, 10**15), (-1, 5)):
        beyond = compacted([takeover(), final(b"a", 0, 1, 1), final(b"b", start, end, 1), progress()])
        with pytest.raises(CorruptRecord, match=f"log-3.*offset 2.*{start}"):
            beyond.rows(options())
    for start in (0, TIMESTAMP_MS_MAX):
        last = compacted([takeover(), final(b"a", start, TIMESTAMP_MS_MAX, 1), progress()])
        (closed,) = row_sets(last.rows(options()))["closed/s"]
        assert (closed["window_end"].year, closed["closed_at"]) == (9999, None)


def test_files_are_ordered_by_time(tmp_path: Any) -> None:
    """Readers can skip files. A file of `state` is in its partition's folder."""
    entries = [takeover(), *(final(b"k", start, start, 1) for start in (9, 3, 6)), live(b"a", 1, 1, 1), progress()]
    rows = compacted(entries).rows(options())
    (closed,) = options(str(tmp_path)).write("closed/s", rows["closed/s"])
    (of_state,) = options(str(tmp_path)).write("state", rows["state"], 3)
    assert (closed.rows, closed.partition) == (3, None)
    assert (of_state.path.partition("/")[0], of_state.rows, of_state.partition) == ("partition=3", 5, 3)
    times = pa.parquet.read_table(tmp_path / "closed/s" / closed.path).column("window_start").to_pylist()
    assert [round(at.timestamp() * 1000) for at in times] == [3, 6, 9]
    entries = [takeover(), *(late(b"k", at, [at], 1) for at in (9, 3, 6)), progress()]
    assert options(str(tmp_path)).write("late/s", []) == []
    rows = compacted(entries).rows(options())
    (missed,) = options(str(tmp_path)).write("late/s", rows["late/s"])
    times = pa.parquet.read_table(tmp_path / "late/s" / missed.path).column("event_time").to_pylist()
    assert [round(at.timestamp() * 1000) for at in times] == [3, 6, 9]


# --- from a broker ---


@asynccontextmanager
async def broker(*partitions: Sequence[Entry]) -> AsyncIterator[KafkaSettings]:
    """A changelog with these entries by partition."""
    async with FakeCluster() as cluster:
        kafka = KafkaSettings(bootstrap_servers=cluster.bootstrap_servers)
        async with Admin(kafka) as admin:
            await admin.create_topics([NewTopic("log", len(partitions))])
        async with Producer(kafka) as producer:
            for partition, entries in enumerate(partitions):
                keys, values = [key for key, _ in entries], [value for _, value in entries]
                delivery = await producer.send_many(RecordColumns("log", keys, values, None, partition))
                assert await delivery.first_error() is None
        yield kafka


async def read(
    kafka: KafkaSettings, end: int, latest: int, idle_ms_max: int = 10_000, first: int = 0
) -> PartitionCompaction:
    """Partition 0 from this offset."""
    async with changelog_consumer(kafka) as consumer, asyncio.timeout(TIMEOUT_S):
        of = ChangelogRange(0, first, end, latest, None, None, {})
        return await read_range(consumer, options(kafka=kafka, idle_ms_max=idle_ms_max), of)


async def test_a_range_is_read_on_until_a_commit_has_ended() -> None:
    """A range that ends within the first commit is read to that commit's end, not to the partition's end."""
    first = [takeover(), live(b"a", 1, 1, 1), live(b"b", 1, 1, 1), progress()]
    async with broker([*first, live(b"c", 1, 1, 1, 1), progress(1), live(b"d", 1, 1, 1, 2), progress(2)]) as kafka:
        within = await read(kafka, 2, 8)
        assert (within.covered_offset, within.read_to) == (4, 4)
        assert {row["key"] for row in windows_of(within)} == {b"a", b"b"}
        whole = await read(kafka, 4, 8)
        assert whole.covered_offset == 4
        cut = await read(kafka, 2, 2)  # nothing more was there when the compaction began
        assert (cut.covered_offset, cut.commit) == (0, None)


async def test_a_range_whose_entries_are_large_is_cut_after_a_commit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task holds the entries of its range in memory. The next compaction continues after the last commit."""
    monkeypatch.setattr(compaction_task, "RANGE_BYTES_MAX", 1)
    monkeypatch.setattr(compaction_task, "POLL_RECORDS", 2)
    entries = [takeover(), live(b"a", 1, 1, 1), live(b"b", 1, 1, 1), progress(), live(b"c", 1, 1, 1, 1), progress(1)]
    async with broker([*entries, live(b"d", 1, 1, 1, 2), progress(2)]) as kafka:
        cut = await read(kafka, 8, 8)
        assert (cut.covered_offset, cut.read_to, cut.result([]).read_to) == (4, 4, 4)
        assert {row["key"] for row in windows_of(cut)} == {b"a", b"b"}


@pytest.mark.parametrize(("missing", "is_full"), [(0, False), (1, True)])
def test_entries_in_one_buffer_are_counted_once(missing: int, is_full: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keys and values of a fetch share a buffer, which several polls return, and which held entries keep."""
    entries = [takeover(), live(b"a", 1, 1, 1), progress(), live(b"b", 1, 1, 1, 1), progress(1)]
    fetched = PackedBytes.of([key for key, _ in entries] + [value for _, value in entries])
    monkeypatch.setattr(compaction_task, "RANGE_BYTES_MAX", fetched.data.nbytes - missing)
    found = PartitionCompaction("log", range_of(5))
    for at in range(0, 5, 2):
        found.feed(np.arange(at, min(at + 2, 5)), fetched[:5][at : at + 2], fetched[5:][at : at + 2])
    assert (len(found.parts), found.is_full) == (2, is_full)


async def test_a_range_is_read_on_in_steps_of_its_length() -> None:
    """A range of three records from offset 5 is read to 8, then to 11: there a commit has ended."""
    foreign: list[Entry] = [(None, b"{}")] * 8
    async with broker([*foreign, takeover(), progress(), *foreign, (None, b"{}")]) as kafka:
        assert (await read(kafka, 8, 19, first=5)).read_to == 11
        assert (await read(kafka, 8, 9, first=5)).read_to == 9


async def test_a_transaction_marker_may_follow_the_latest_offset() -> None:
    """The position is then after the marker, beyond the end that was planned."""
    async with broker([(None, b"{}")]) as kafka:
        async with Producer(kafka, ProducerSettings(transactional_id="x")) as producer:
            await producer.init_transactions()
            async with producer.transaction():
                await producer.send("log", b"{}", partition=0)
        found = await read(kafka, 2, 2)
        assert (found.commit, found.read_to) == (None, 3)


async def test_foreign_records_are_skipped() -> None:
    """A range of foreign records is read on to the next commit, or to the planned end of the partition."""
    foreign = [(None, b"{}")] * 20
    async with broker([*foreign, takeover(), live(b"a", 1, 1, 1), progress(), *foreign]) as kafka:
        found = await read(kafka, 5, 43)
        assert (found.covered_offset, found.reader.foreign_records >= 20) == (23, True)
        none = await read(kafka, 5, 20)
        assert (none.commit, none.read_to, none.result([]).read_to) == (None, 20, 20)


def test_a_range_moves_where_another_follows() -> None:
    """Wall-clock punctuation alone writes nothing, except in a range that is followed by another or read again."""
    newest = progress_of(compacted([takeover(), live(b"a", 1, 1, 1), progress()]))
    idle = [progress(n, grids_ms={"w": n}) for n in range(1, 6)]
    first = 1_000
    for latest, covered, moves in ((5, 0, False), (6, 0, True), (5, 5, False), (5, 6, True)):
        of = range_of(first + 5, first, newest | {"changelog_offset": first + covered})
        assert bool(compacted(idle, of._replace(latest=first + latest)).rows(options())) is moves


async def test_missing_records_of_a_range_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range beyond the records that the broker returns ends with an error that names the position."""
    monkeypatch.setattr(compaction_task, "POLL_MS", 1)
    async with broker([takeover(), live(b"a", 1, 1, 1), progress()]) as kafka:
        with pytest.raises(KafkaTimeout, match=r"log-0.*3 of 9"):
            await read(kafka, 9, 9, 300)


async def test_a_poll_without_records_is_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll returns before the first response if it may not wait. The range ends with an error only after a while."""
    monkeypatch.setattr(compaction_task, "POLL_MS", 0)
    async with broker([takeover(), live(b"a", 1, 1, 1), progress()]) as kafka:
        assert (await read(kafka, 3, 3)).read_to == 3


async def test_a_range_whose_records_arrive_is_never_idle(monkeypatch: pytest.MonkeyPatch) -> None:
    """A range may take longer than the idle time, as long as its records arrive."""
    monkeypatch.setattr(compaction_task, "POLL_MS", 10_000)
    monkeypatch.setattr(compaction_task, "POLL_RECORDS", 1)
    async with broker([takeover(), live(b"a", 1, 1, 1), progress()]) as kafka:
        assert (await read(kafka, 3, 3, idle_ms_max=0)).read_to == 3


async def test_changelog_records_that_were_deleted(tmp_path: Any) -> None:
    """A task whose range was deleted meanwhile fails with ChangelogHole."""
    async with broker([takeover(), live(b"a", 1, 1, 1), progress()]) as kafka:
        async with Admin(kafka) as admin:
            await admin.delete_records({TopicPartition("log", 0): 2})
        with pytest.raises(ChangelogHole, match="log-0"):
            await compact_ranges(options(str(tmp_path), kafka, 10_000), [ChangelogRange(0, 0, 4, 4, None, None, {})])


async def test_spark_attempts_a_task_again_after_a_temporary_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout is raised. An error that each attempt would have is the task's result."""
    monkeypatch.setattr(compaction_task, "POLL_MS", 1)

    async def run(kafka: KafkaSettings) -> CompactionTaskResult:
        ranges = msgspec.msgpack.encode([ChangelogRange(0, 0, 9, 9, None, None, {})])
        task = compact_changelog_ranges(options(kafka=kafka, idle_ms_max=300))
        (done,) = await asyncio.to_thread(lambda: list(task(ranges)))
        return msgspec.msgpack.decode(done, type=CompactionTaskResult)

    async with broker([takeover(), live(b"a", 1, 1, 1), progress()]) as kafka:
        with pytest.raises(KafkaTimeout):
            await run(kafka)
        async with Admin(kafka) as admin:
            await admin.delete_records({TopicPartition("log", 0): 2})
        found = await run(kafka)
        assert (found.partitions, found.files) == ([], {})
        assert found.failure is not None
        assert isinstance(found.failure.to_error(), ChangelogHole)


@pytest.mark.parametrize(("missing", "partitions"), [(-1, [[0, 2]]), (0, [[0, 2]]), (1, [[2], [0]])])
async def test_a_tasks_partitions_share_the_files_of_closed(
    missing: int, partitions: list[list[int]], tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files of `state` are for one partition. Files of `closed` have the rows of several partitions, within a limit."""
    entries = [takeover(), live(b"a", 1, 1, 1), final(b"b", 1, 2, 1), progress()]
    rows = compacted(entries).rows(options())["closed/s"]
    monkeypatch.setattr(compaction_task, "RANGE_BYTES_MAX", sum(batch.nbytes for batch in rows) - missing)
    async with broker(entries, [], [*entries, takeover(2)]) as kafka:
        ranges = [ChangelogRange(p, 0, n, n, None, None, {}) for p, n in ((2, 5), (0, 4))]
        found = await compact_ranges(options(str(tmp_path), kafka, 10_000), ranges)
    assert [(one.partition, one.covered_offset, one.deleted) for one in found.partitions] == [(2, 4, 1), (0, 4, 1)]
    folders = [[file.path.partition("/")[0] for file in one.files] for one in found.partitions]
    assert folders == [["partition=2"], ["partition=0"]]
    closed = [pq.read_table(tmp_path / "closed/s" / file.path) for file in found.files["closed/s"]]
    assert [sorted(rows.column("partition").to_pylist()) for rows in closed] == partitions


def window(store: str, key: str, start: int, offset: int, *, live: bool = True) -> dict[str, Any]:
    row = {"row": "window", "partition": 2, "store": store, "key": key.encode(), "start_ms": start, "live": live}
    return {**row, "end_ms": start + 1 if live else None, store: {"n_n": offset} if live else None} | {
        "changelog_offset": offset
    }


def kept_offsets(rows: list[dict[str, Any]]) -> set[int]:
    return set(rows_to_keep(pa.Table.from_pylist(rows, STATE_SCHEMA)).column("changelog_offset").to_pylist())


def test_a_rewrite_keeps_the_highest_offset_of_a_window() -> None:
    """The order of rows does not matter, because files are read in no order."""
    rows = [window("s", "a", 0, 9), window("s", "a", 0, 12), window("s", "a", 0, 3), window("s", "b", 0, 5)]
    assert kept_offsets(rows) == {12, 5}


def test_store_key_and_start_identify_a_window() -> None:
    """Two rows that differ in any of them belong to two windows."""
    rows = [window("s", "a", 0, 1), window("t", "a", 0, 2), window("s", "b", 0, 3), window("s", "a", 5, 4)]
    assert kept_offsets(rows) == {1, 2, 3, 4}


def test_a_tombstone_takes_its_window_with_it() -> None:
    """The tombstone itself is not kept either. A tombstone before a live row has no effect."""
    rows = [window("s", "a", 0, 1), window("s", "a", 0, 2, live=False)]
    rows += [window("s", "b", 0, 3, live=False), window("s", "b", 0, 4)]
    assert kept_offsets(rows) == {4}
    assert kept_offsets([]) == set()


def test_a_rewrite_copies_no_rows_into_one_array() -> None:
    """The rows stay in the arrays of their files, since an array has at most 2 GiB of keys or states."""
    tables = [pa.Table.from_pylist([window("s", "a", 0, n), window("s", "b", n, n)], STATE_SCHEMA) for n in (2, 1)]
    kept = rows_to_keep(pa.concat_tables(tables))
    assert kept.column("changelog_offset").to_pylist() == [2, 2, 1]
    assert [len(chunk) for chunk in kept.column("key").chunks] == [2, 1]


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
        own = pa.Table.from_pylist(rows[nth::2], STATE_SCHEMA).drop_columns(["partition"])
        pq.write_table(own, folder / f"{nth}.parquet")
    older = newest | {"changelog_offset": 9}
    # The rewrite before this one has left a file with progress rows alone.
    progress_alone = pa.Table.from_pylist([older], PROGRESS).drop_columns(["partition"])
    pq.write_table(progress_alone, folder / "2.parquet")
    paths = [f"partition=2/{nth}.parquet" for nth in range(3)]
    crowded = RewriteInput(2, paths, len(rows), 9, [newest, older])
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


@pytest.mark.parametrize(("keys", "starts"), [(400, 1), (200, 2), (1, 400)])
def test_a_rewrite_holds_no_more_rows_than_about_a_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keys: int, starts: int
) -> None:
    """The passes get about equally many rows, also for a store without windows and for one key."""
    monkeypatch.setattr(of_rewrite, "PASS_ROWS", 100)
    newest = {"row": "progress", "partition": 2, "changelog_offset": 20, "appended": "{}"}
    folder = tmp_path / "partition=2"
    folder.mkdir()
    rows = [window("s", f"k{i % keys}", i // keys * 60_000, i) for i in range(keys * starts)]
    pq.write_table(pa.Table.from_pylist(rows, STATE_SCHEMA).drop_columns(["partition"]), folder / "0.parquet")
    crowded = RewriteInput(2, ["partition=2/0.parquet"], len(rows), 9, [newest])
    (done,) = rewrite(str(tmp_path), {})(msgspec.msgpack.encode([crowded]))
    *passes, progress = [file.rows for file in msgspec.msgpack.decode(done, type=list[DataFile])]
    assert (len(passes), sum(passes), progress) == (5, 400, 1)
    assert max(passes) <= 100


def test_a_rewritten_file_has_no_more_rows_than_it_may(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Further rows are in further files with other names. The progress row is in the last file."""
    monkeypatch.setattr(of_rewrite, "FILE_ROWS", 2)
    newest = {"row": "progress", "partition": 2, "changelog_offset": 20, "appended": "{}"}
    folder = tmp_path / "partition=2"
    folder.mkdir()
    rows = pa.Table.from_pylist([window("s", f"k{i}", i, i) for i in range(5)], STATE_SCHEMA)
    pq.write_table(rows.drop_columns(["partition"]), folder / "0.parquet")
    crowded = RewriteInput(2, ["partition=2/0.parquet"], 5, 9, [newest])
    (done,) = rewrite(str(tmp_path), {})(msgspec.msgpack.encode([crowded]))
    files = msgspec.msgpack.decode(done, type=list[DataFile])
    assert [file.rows for file in files] == [2, 2, 1, 1]
    assert len({file.path for file in files}) == 4
