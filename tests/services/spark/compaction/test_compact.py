"""The offsets that a compaction reads and deletes, and the states that it rejects before it reads anything."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake
from hypothesis import given
from hypothesis import strategies as st

from penstock.services.aggregator.compaction_supervisor import COMMITTED
from penstock.services.spark.compaction import delta_writer
from penstock.services.spark.compaction.compact import (
    REWRITE_ROWS_MIN,
    AfterHookFailed,
    CompactionJob,
    CompactionPlan,
    bounded_ranges,
    call_after_hook,
    is_rewrite_due,
    offsets_to_delete,
    spread_over_tasks,
    widest_stores,
)
from penstock.services.spark.compaction.compaction_task import ChangelogRange, CompactionTaskResult, PartitionResult
from penstock.services.spark.compaction.delta_writer import FILE_ROWS
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.topic_offsets import TopicOffsets
from penstock.shared.common.errors import ChangelogHole, SchemaMismatch
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.aggregations.aggregation import Count, Max
from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

CLOSED, LATE = "closed/s", "late/s"


def job() -> CompactionJob:
    return CompactionJob(None, CompactSettings(application="app", lake="lake"), print)  # type: ignore[arg-type]


def offsets(earliest: int, latest: int) -> TopicOffsets:
    return TopicOffsets("log", "id-1", {0: earliest}, {0: latest})


def row(covered: int, **appended: int) -> dict[str, Any]:
    positions = {name.replace("_", "/"): at for name, at in appended.items()}
    return {"changelog_offset": covered, "epoch": covered, "progress": "{}", "appended": json.dumps(positions)}


def first(rows: list[dict[str, Any]], there: dict[str, int], held: TopicOffsets) -> Any:
    return job()._start_of_partition(0, rows, {name: {0: at} for name, at in there.items()}, held)


def test_a_commit_is_logged_as_the_supervisor_expects(tmp_path: Path) -> None:
    """The line follows the commit of `state`. The supervisor recognizes it by its prefix."""
    lines: list[str] = []
    settings = CompactSettings(application="app", lake=str(tmp_path))
    own = CompactionJob(None, settings, lines.append)  # type: ignore[arg-type]
    report = own._commit_tables(CompactionPlan(offsets(0, 9), {}, {}, []), {}, {})
    assert DeltaTable(own.path("state")).version() == report.state_version
    assert lines[-1].startswith(COMMITTED)


def test_a_partition_is_read_from_where_the_tables_end() -> None:
    """Without tables it is read from the beginning. A table with more rows than expected does not extend the range."""
    assert first([], {}, offsets(0, 9)) == (0, None)
    newest = row(5, closed_s=3)
    for held in (offsets(0, 9), offsets(5, 9), offsets(0, 5)):
        assert first([newest], {CLOSED: 3}, held) == (5, newest)
    assert first([newest], {CLOSED: 8}, offsets(5, 9)) == (5, newest)


def test_a_table_that_lags_is_read_from_the_newest_progress_row_whose_rows_it_has() -> None:
    """That progress row has the epoch in force there. Without one, reading starts at the changelog's beginning."""
    rows = [row(9, closed_s=8, late_s=2), row(5, closed_s=3), row(2)]
    assert first(rows, {CLOSED: 8, LATE: 2}, offsets(0, 9)) == (9, rows[0])
    assert first(rows, {CLOSED: 4, LATE: 2}, offsets(0, 9)) == (5, rows[1])
    assert first(rows, {CLOSED: 3, LATE: 2}, offsets(0, 9)) == (5, rows[1])
    assert first(rows, {CLOSED: 2, LATE: 2}, offsets(0, 9)) == (2, rows[2])
    # A table that is missing needs no record before its first row.
    assert first(rows, {CLOSED: 8}, offsets(0, 9)) == (5, rows[1])
    assert first(rows, {LATE: 2}, offsets(0, 9)) == (2, rows[2])
    assert first(rows, {}, offsets(0, 9)) == (2, rows[2])
    assert first(rows[:2], {LATE: 2}, offsets(0, 9)) == (0, None)
    assert first(rows[:1], {CLOSED: 8, LATE: 0}, offsets(0, 9)) == (0, None)


@pytest.mark.parametrize(
    ("rows", "there", "held", "message"),
    [
        ([row(5)], {}, offsets(6, 9), "log-0: offsets 5 to 5 .*offset 5"),
        ([row(5)], {}, offsets(0, 4), "log-0: .*ends at 4.* 5"),
        ([], {}, offsets(1, 4), "offsets 0 to 0"),
        ([row(9, closed_s=8)], {}, offsets(1, 9), "closed/s .*offset 0"),
        ([row(9, closed_s=8), row(5)], {CLOSED: 6}, offsets(6, 9), "closed/s .*offset 7"),
        ([row(9, closed_s=8), row(5, closed_s=3)], {CLOSED: 2}, offsets(5, 9), "closed/s .*offset 3"),
    ],
)
def test_a_hole_is_rejected_by_its_offsets(rows: Any, there: dict[str, int], held: TopicOffsets, message: str) -> None:
    """Deleted offsets, a log that ends too early, and a table that lags too far are each rejected by name."""
    with pytest.raises(ChangelogHole, match=message):
        first(rows, there, held)


def test_another_changelog_is_rejected() -> None:
    """A topic of the same name with another id is not the topic that the tables were made from."""
    for other in ("id-0", "id-2"):
        message = f"closed/s .*{other}.*id-1"
        with pytest.raises(ChangelogHole, match=message):
            job()._require_same_changelog(CLOSED, other, offsets(0, 9))


def test_positions_are_read_from_the_rows_if_no_commit_has_them(tmp_path: Path) -> None:
    """The last changelog offset of each partition. Rows of another topic are rejected."""
    uri = str(tmp_path / "closed")
    schema = pa.schema({"partition": pa.int32(), "topic_id": pa.string(), "changelog_offset": pa.int64()})
    rows = [{"partition": p, "topic_id": "id-1", "changelog_offset": at} for p, at in ((0, 4), (1, 9), (0, 7), (1, 0))]
    write_deltalake(uri, pa.Table.from_pylist(rows, schema))
    table = DeltaTable(uri)
    assert job()._table_positions(CLOSED, table, offsets(0, 9)) == {0: 7, 1: 9}
    delta_writer.commit(table, [], [], {"topic_id": "id-1", "positions": {"0": 12, "10": 3}})
    assert job()._table_positions(CLOSED, DeltaTable(uri), offsets(0, 9)) == {0: 12, 10: 3}
    for rejected in ({"topic_id": "id-0", "positions": {}}, {}):
        delta_writer.commit(DeltaTable(uri), [], [], rejected)
        write_deltalake(uri, pa.Table.from_pylist([{**rows[0], "topic_id": "id-0"}], schema), mode="append")
        with pytest.raises(ChangelogHole, match=r"closed/s.*id-0"):
            job()._table_positions(CLOSED, DeltaTable(uri), offsets(0, 9))


def test_a_range_begins_at_its_progress_row() -> None:
    """The newest row and the positions are those of the partition."""
    start = {"epoch": 3, "progress": "{3}"}
    newest = {0: {"epoch": 4, "progress": "{4}"}}
    held = TopicOffsets("log", "id", {0: 0, 1: 0}, {0: 20, 1: 6})
    found = bounded_ranges({1: (6, None), 0: (5, start)}, newest, {CLOSED: {0: 7}, LATE: {0: 8, 1: 2}}, held, 10)
    assert found == [
        ChangelogRange(0, 5, 15, 20, start, newest[0], {CLOSED: 7, LATE: 8}),
        ChangelogRange(1, 6, 6, 6, None, None, {LATE: 2}),
    ]


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 50)), min_size=1, max_size=6), st.integers(1, 100))
def test_a_run_is_bounded_and_leaves_nothing_it_has_room_for(ranges: list[tuple[int, int]], most: int) -> None:
    """A compaction reads at most its limit: all of short partitions, and equal shares of long ones."""
    begins: Any = {p: (begin, None) for p, (begin, _) in enumerate(ranges)}
    held = TopicOffsets("log", "id", dict.fromkeys(begins, 0), {p: a + n for p, (a, n) in enumerate(ranges)})
    found = bounded_ranges(begins, {}, {}, held, most)
    taken = [one.end - one.first for one in found]
    assert all(one.first <= one.end <= one.latest == held.latest[one.partition] for one in found)
    assert sum(taken) <= max(most, len(ranges))
    cut = [one.end - one.first for one in found if one.end < one.latest]
    if cut:
        assert min(cut) >= 1
        assert sum(taken) >= most
        assert max(cut) - min(cut) <= 1
        assert max(taken) <= max(cut) + 1


def test_remaining_records_are_those_before_the_end_of_each_partition() -> None:
    """A task may read beyond that end. This reduces the number of no other partition."""
    settings = CompactSettings(application="app", lake="lake")
    read_to = {0: 35, 1: 15}

    class Read(CompactionJob):
        def _run_tasks(self, items: Any, size: Any, step: Any) -> Any:
            found = [PartitionResult(one.partition, 0, 0, 0, 0, read_to[one.partition], [], ()) for one in items]
            return [msgspec.msgpack.encode(CompactionTaskResult(found, {}))]

    ranges = [ChangelogRange(partition, 0, 10, 20, None, None, {}) for partition in read_to]
    plan = CompactionPlan(
        TopicOffsets("log", "id", dict.fromkeys(read_to, 0), dict.fromkeys(read_to, 20)), {}, {}, ranges
    )
    job = Read(None, settings, lambda line: None)  # type: ignore[arg-type]  # it has no session, and needs none
    assert job._compact_and_commit(plan).remaining_records == 5


def planned(partition: int, newest: dict[str, Any] | None, first: int = 0, **positions: int) -> ChangelogRange:
    there = {name.replace("_", "/"): at for name, at in positions.items()}
    return ChangelogRange(partition, first, 20, 20, None, newest, there)


def test_covered_records_are_deleted() -> None:
    """They are deleted up to the covered offset of the newest progress row, whatever this compaction adds."""
    held = TopicOffsets("log", "id", {0: 0, 1: 4, 2: 0}, {0: 20, 1: 20, 2: 20})
    found = offsets_to_delete([planned(0, row(7), 7), planned(1, row(5), 5), planned(2, row(9), 9)], held)
    assert found == {TopicPartition("log", 0): 7, TopicPartition("log", 1): 5, TopicPartition("log", 2): 9}


def test_a_partition_without_coverage_keeps_its_records() -> None:
    """A partition is left out without a progress row, and if its covered records are deleted already."""
    held = TopicOffsets("log", "id", {0: 0, 1: 5, 2: 9, 3: 0}, {0: 20, 1: 20, 2: 20, 3: 20})
    assert offsets_to_delete([], held) == {}
    assert offsets_to_delete([planned(0, None, 3), planned(1, row(5), 5), planned(2, row(8), 8)], held) == {}
    assert offsets_to_delete([planned(1, row(5), 5), planned(3, row(1), 1)], held) == {TopicPartition("log", 3): 1}


@given(
    st.integers(0, 20),
    st.integers(0, 20),
    st.dictionaries(st.sampled_from([CLOSED, LATE]), st.integers(0, 19)),
    st.dictionaries(st.sampled_from([CLOSED, LATE]), st.integers(0, 19)),
)
def test_no_record_is_deleted_that_a_table_lacks(
    earliest: int, covered: int, appended: dict[str, int], there: dict[str, int]
) -> None:
    """Nothing is deleted while a table lacks rows that it once had: neither below its position nor above."""
    newest = row(covered) | {"appended": json.dumps(appended)}
    one = ChangelogRange(0, 0, 20, 20, None, newest, there)
    lacks = any(there.get(table, -1) < last for table, last in appended.items())
    expected = {TopicPartition("log", 0): covered} if covered > earliest and not lacks else {}
    assert offsets_to_delete([one], offsets(earliest, 20)) == expected


@pytest.mark.parametrize(
    ("added", "rewritten", "files", "files_max", "due"),
    [
        (REWRITE_ROWS_MIN, 0, 0, 0, False),
        (REWRITE_ROWS_MIN + 1, 0, 0, 0, True),
        (2 * REWRITE_ROWS_MIN, 4 * REWRITE_ROWS_MIN, 0, 0, False),
        (2 * REWRITE_ROWS_MIN + 1, 4 * REWRITE_ROWS_MIN, 0, 0, True),
        (0, 0, 4, 5, False),
        (0, 0, 5, 5, False),
        (0, 0, 6, 5, True),
        (0, 0, 2, 1, True),
        (0, 0, 9, 0, False),  # no limit
        (REWRITE_ROWS_MIN + 1, 0, 5, 5, True),
        (0, 2 * FILE_ROWS - 1, 6, 5, True),
        (0, 2 * FILE_ROWS, 10, 5, False),
        (0, 2 * FILE_ROWS, 11, 5, True),
        (0, 2 * FILE_ROWS, 99, 0, False),
    ],
)
def test_a_rewrite_is_due(added: int, rewritten: int, files: int, files_max: int, due: bool) -> None:
    """A rewrite is due if the added rows are more than half of the rewritten ones, or if too many files were added.

    A larger partition may have more added files.
    """
    newest = {"added_rows": added, "rewritten_rows": rewritten, "added_files": files}
    assert is_rewrite_due(newest, files_max) is due


@given(st.lists(st.integers(0, 50)), st.integers(1, 5))
def test_tasks_have_as_much_to_do_as_each_other(sizes: list[int], tasks: int) -> None:
    """Each item has a task, and no task exceeds another by more than its largest item."""
    parts = spread_over_tasks(sizes, lambda size: size, tasks)
    assert sorted(size for part in parts for size in part) == sorted(sizes)
    totals = [sum(part) for part in parts]
    assert max(totals) - min(totals) <= max(sizes, default=0)


STORE = StoreSchema(
    "s", "session", "string", 1, 1, "on_close", "in", None, None, None, (AggregationSchema.of("n", Count()),)
)
WIDER = msgspec.structs.replace(STORE, aggregations=(*STORE.aggregations, AggregationSchema.of("most", Max("delay"))))
OTHER = AggregationSchema.of("n", Max("delay"))


def known(*stores: StoreSchema) -> dict[str, Any]:
    progress = Progress("app", "exactly_once", {}, {}, {}, {}, stores, 0)
    return {"progress": msgspec.json.encode(progress).decode()}


def moved(partition: int, *stores: StoreSchema) -> PartitionResult:
    return PartitionResult(partition, 9, 1, 0, 0, 9, [], stores)


def test_the_tables_have_what_the_widest_partition_has() -> None:
    """The stores that a compaction read of a partition replace those of its progress row."""
    assert widest_stores({}, []) == ()
    assert widest_stores({0: known(STORE)}, []) == (STORE,)
    assert widest_stores({0: known(STORE), 1: known(WIDER)}, [moved(0, STORE)]) == (WIDER,)
    assert widest_stores({0: known(STORE), 1: known(STORE)}, [moved(1, WIDER)]) == (WIDER,)
    graces = msgspec.structs.replace(STORE, grace_ms=7)
    assert widest_stores({0: known(STORE)}, [moved(0, graces)]) == (graces,)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ((), "store"),
        ((STORE, STORE), "store"),
        ((msgspec.structs.replace(STORE, gap_ms=2),), "gap_ms was"),
        ((msgspec.structs.replace(STORE, aggregations=(OTHER,)),), "the aggregations changed: "),
    ],
)
def test_partitions_of_different_topologies_are_rejected(other: tuple[StoreSchema, ...], message: str) -> None:
    """They are rejected whichever of them this compaction reads."""
    for newest, written in (({0: known(WIDER)}, [moved(1, *other)]), ({1: known(*other)}, [moved(0, WIDER)])):
        with pytest.raises(SchemaMismatch, match=message):
            widest_stores(newest, written)


@pytest.mark.parametrize("text", ["import os\nos.environ['no_such_variable']\n", "def hook(:\n"])
def test_a_hook_whose_module_raises_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """The import of the hook's module is part of the hook, so its error is one of the hook."""
    (tmp_path / "raising_hook_of_test_compact.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    spark: Any = None
    with pytest.raises(AfterHookFailed, match=r"raising_hook_of_test_compact:hook: (KeyError|SyntaxError)"):
        call_after_hook(spark, "raising_hook_of_test_compact:hook", "lake")
