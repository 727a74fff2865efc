"""The steps after a compaction: a failed step hides neither the compaction nor the other steps."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from deltalake import DeltaTable, write_deltalake
from deltalake.transaction import RemoveAction

from penstock.services.spark.compaction import delta_writer, table_maintenance
from penstock.services.spark.compaction.compact import REWRITE_ROWS_MIN, CompactionJob, CompactionPlan, CompactionReport
from penstock.services.spark.compaction.delta_reader import commit_history, table_positions
from penstock.services.spark.compaction.delta_writer import CompactionConflict
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.compaction.table_maintenance import (
    TableMaintenance,
    delete_expired_rows,
    is_optimize_due,
    is_vacuum_due,
    optimize,
    vacuum,
)
from penstock.services.spark.table_columns import DAY_MS, PROGRESS
from penstock.services.spark.topic_offsets import TopicOffsets
from penstock.shared.common.errors import AuthorizationFailed
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.changelog.format import Progress
from penstock.shared.streams.changelog.store_schema import AggregationSchema, StoreSchema

RUN = {"operation": "WRITE", "kind": "compaction"}
REWRITE = {"operation": "WRITE", "kind": "rewrite"}
STARTED, ENDED, OPTIMIZED = ({"operation": name} for name in ("VACUUM START", "VACUUM END", "OPTIMIZE"))
DONE = CompactionReport(1, {0: 0}, {0: 9}, 7, entries=5, live_rows=4, deleted_rows=1, closed_rows=2)


class Steps(TableMaintenance):
    """Table maintenance that loses to another job."""

    def maintain(self, *paths: Any) -> dict[str, Any]:
        return {"optimized_tables": self.attempt("OPTIMIZE of x", lost, 0)}


class Job(CompactionJob):
    """A compaction that is committed and may not delete from the changelog."""

    def __init__(self, say: Any, error: Exception | None, **settings_: Any) -> None:
        settings = CompactSettings(application="a", lake="lake", **{"delete_covered": True} | settings_)
        super().__init__(None, settings, say)  # type: ignore[arg-type]  # it has no session, and needs none
        self.maintenance, self.error = Steps(settings, say), error

    def plan(self) -> CompactionPlan:
        return CompactionPlan(TopicOffsets("t", "id", {0: 0}, {0: 9}), {}, {}, [])

    def _compact_and_commit(self, plan: CompactionPlan) -> CompactionReport:
        return DONE

    def _rewrite_due_partitions(self, plan: CompactionPlan) -> int:
        return 1

    def _closed_and_late_paths(self) -> dict[str, str]:
        return {}

    def _delete_covered_records(self, plan: CompactionPlan) -> None:
        if self.error is not None:
            raise self.error


def lost() -> Any:
    raise CompactionConflict("x")


def test_a_compaction_counts_though_the_deletion_failed() -> None:
    """The report lists the failed step, and maintenance was still tried. `raise_first` raises the error."""
    messages = list[str]()
    job = Job(messages.append, AuthorizationFailed("no DELETE"))
    summary = job.run()
    assert (summary.live_rows, summary.rewritten_partitions) == (4, 1)
    assert summary.failed == ("the deletion from the changelog: AuthorizationFailed: no DELETE",)
    assert messages == [
        "the deletion from the changelog failed: no DELETE",
        "OPTIMIZE of x: another job committed first; the next compaction does it",
    ]
    with pytest.raises(AuthorizationFailed, match="no DELETE"):
        job.maintenance.failed.raise_first()


def test_nothing_is_deleted_without_delete_covered() -> None:
    """Without `delete_covered` a compaction does not try to delete from the changelog."""
    assert Job(lambda text: None, AuthorizationFailed("no DELETE"), delete_covered=False).run().failed == ()


def test_the_after_hook_is_not_called_before_the_first_commit() -> None:
    """There are no tables yet. Without new records it is called for those of the last commit."""

    class Idle(Job):
        def _compact_and_commit(self, plan: CompactionPlan) -> CompactionReport:
            return CompactionReport(1, {0: 0}, {0: 0}, version)

    version: int | None = None
    assert Idle(lambda text: None, None, after="no_such_module:hook").run().failed == ()
    version = 7
    (failed,) = Idle(lambda text: None, None, after="no_such_module:hook").run().failed
    assert failed.startswith("after=no_such_module:hook: ConfigError")


def test_an_error_of_arrow_does_not_end_the_job() -> None:
    """Arrow has limits of its own, such as 2 GiB of text in an array."""

    def overflow() -> int:
        raise pa.ArrowInvalid("offset overflow")

    maintenance = TableMaintenance(CompactSettings(application="a", lake="lake"), str)
    assert maintenance.attempt("OPTIMIZE of x", overflow, 0) == 0
    assert maintenance.failed.lines() == ("OPTIMIZE of x: LakeUnavailable: ArrowInvalid: offset overflow",)


def test_an_optimize_that_was_lost_is_no_failure() -> None:
    """The compaction stays committed, and the next one optimizes."""
    job = Job(lambda text: None, None)
    assert job.run().failed == ()
    job.maintenance.failed.raise_first()


@pytest.mark.parametrize(
    ("history", "due"),
    [
        ([RUN] * 19, False),
        ([RUN] * 20, True),
        ([RUN] * 21, True),  # one that was missed is not put off
        ([*[RUN] * 10, OPTIMIZED, REWRITE, *[RUN] * 9, ENDED, *[RUN] * 9], False),
        ([*[RUN] * 5, STARTED, *[RUN] * 15, ENDED], True),  # one that did not end
        ([ENDED, *[RUN] * 60], False),
        ([], False),
    ],
)
def test_a_vacuum_is_due_so_many_runs_after_the_last(history: list[dict[str, Any]], due: bool) -> None:
    """Rewrites, maintenance and a VACUUM that did not end do not count."""
    assert is_vacuum_due(history, 20) is due


@pytest.mark.parametrize(
    ("history", "due"),
    [([RUN] * 3, True), ([RUN] * 2, False), ([RUN, RUN, OPTIMIZED, RUN], False), ([], False), ([STARTED], False)],
)
def test_an_optimize_is_due_after_so_many_appends(history: list[dict[str, Any]], due: bool) -> None:
    """Appends before the last OPTIMIZE do not count."""
    assert is_optimize_due(history, 2) is due


# --- OPTIMIZE ---

HOUR_MICROS = 3_600_000_000
CLOSED_ROWS = pa.schema(
    {"key": pa.string(), "window_start": pa.timestamp("us", "UTC"), "n": pa.int64(), "changelog_offset": pa.int64()}
)
POSITIONS = {"topic_id": "id", "positions": {"0": 99}}


def append(uri: str, *hours: int, schema: pa.Schema = CLOSED_ROWS, positions: dict[str, Any] = POSITIONS) -> None:
    """Append a file with one row for each window that begins at that hour."""
    columns = {
        "key": pa.array([f"k{hour}" for hour in hours]),
        "window_start": pa.array([hour * HOUR_MICROS for hour in hours]).cast(pa.timestamp("us", "UTC")),
        "n": pa.array([*hours], pa.int64()),
        "changelog_offset": pa.array(range(len(hours))),
    }
    rows = pa.table([columns.get(f.name, pa.nulls(len(hours), f.type)) for f in schema], schema=schema)
    delta_writer.ensure_table(opened(uri), uri, {}, schema, ["window_start"], is_partitioned=False)
    file = delta_writer.DeltaFiles(uri, {}, ["window_start"]).write(rows.to_batches())
    delta_writer.commit(DeltaTable(uri), [file], [], {"kind": "compaction", **positions})


def opened(uri: str) -> DeltaTable | None:
    return DeltaTable(uri) if DeltaTable.is_deltatable(uri) else None


def hours_of(uri: str) -> dict[str, list[int]]:
    """The hours of the rows of each file, in the file's order."""
    return {path: pq.read_table(path).column("n").to_pylist() for path in DeltaTable(uri).file_uris()}


def test_optimize_merges_small_files_ordered_by_time(tmp_path: Path) -> None:
    """Rows stay the same, the table's positions are kept, and a reader that follows the table sees no new rows."""
    uri = str(tmp_path / "closed")
    for hours in ([5, 9], [1, 7], [3]):
        append(uri, *hours)
    assert optimize(DeltaTable(uri), "closed", {}) == 3
    assert list(hours_of(uri).values()) == [[1, 3, 5, 7, 9]]
    table = DeltaTable(uri)
    assert table_positions(table) == POSITIONS
    assert not is_optimize_due(commit_history(table, 10), 0)
    actions = [json.loads(line) for line in (tmp_path / f"closed/_delta_log/{table.version():020}.json").open()]
    changes = [action[kind]["dataChange"] for action in actions for kind in ("add", "remove") if kind in action]
    assert changes == [False] * 4
    (add,) = pa.table(table.get_add_actions(flatten=True)).to_pylist()
    assert (add["min.window_start"], add["max.window_start"]) == tuple(
        datetime.fromtimestamp(hour * 3_600, UTC) for hour in (1, 9)
    )


@pytest.mark.parametrize(
    ("sizes", "merged"),
    [([60, 60], [[0, 1]]), ([60, 60, 60], [[0, 1]]), ([65, 60], []), ([200, 10, 10], [[1, 2]]), ([5], []), ([], [])],
)
def test_files_to_merge(sizes: Sequence[int], merged: list[list[int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Only files below half the limit are merged, into files within the limit. A single file stays."""
    monkeypatch.setattr(table_maintenance, "FILE_BYTES", 128)
    files = [{"path": str(nth), "size_bytes": size, "min.at": nth} for nth, size in enumerate(sizes)]
    groups = [
        [int(file["path"]) for file in group]
        for group in table_maintenance._group_small_files(files[::-1], "min.at", lambda _: 0)
    ]
    assert groups == merged


def test_optimize_merges_neighbours_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two merged files of a table do not overlap, whatever the order of the appends was."""
    uri = str(tmp_path / "closed")
    for hour in (100, 1, 102, 3):
        append(uri, hour)
    size = max(Path(path).stat().st_size for path in DeltaTable(uri).file_uris())
    monkeypatch.setattr(table_maintenance, "FILE_BYTES", 2 * size)
    assert optimize(DeltaTable(uri), "closed", {}) == 4
    assert sorted(hours_of(uri).values()) == [[1, 3], [100, 102]]


@pytest.mark.parametrize("is_recorded", [True, False])
def test_optimize_sorts_no_more_than_arrow_can(
    is_recorded: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Files are merged up to SORT_BYTES in memory, also if another writer wrote them. The next OPTIMIZE has no work."""
    uri = str(tmp_path / "closed")
    for hours in ([9, 5], [7, 1], [3, 2], [8, 4]):
        append(uri, *hours)
    for path in () if is_recorded else DeltaTable(uri).file_uris():
        pq.write_table(pq.read_table(path).replace_schema_metadata(None), path)
    size = pq.read_table(DeltaTable(uri).file_uris()[0]).nbytes
    monkeypatch.setattr(table_maintenance, "SORT_BYTES", 2.5 * size)
    assert optimize(DeltaTable(uri), "closed", {}) == 4
    merged = hours_of(uri)
    assert sorted(merged.values()) == [[1, 2, 3, 7], [4, 5, 8, 9]]
    assert optimize(DeltaTable(uri), "closed", {}) == 0
    assert hours_of(uri) == merged


def test_optimize_fills_columns_that_older_files_lack(tmp_path: Path) -> None:
    """A store got a further aggregation between two appends."""
    uri = str(tmp_path / "closed")
    append(uri, 1)
    append(uri, 2, schema=CLOSED_ROWS.append(pa.field("total", pa.float64())))
    assert optimize(DeltaTable(uri), "closed", {}) == 2
    rows = DeltaTable(uri).to_pyarrow_table().to_pylist()
    assert [(row["n"], row["total"]) for row in rows] == [(1, None), (2, None)]


def test_optimize_becomes_due_though_each_run_also_deletes_and_vacuums(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Retention and VACUUM add three commits to each append. The history that is read still has enough appends."""
    monkeypatch.setattr(table_maintenance, "EXTRA_HISTORY_VERSIONS", 0)
    uri = str(tmp_path / "closed")
    maintenance = TableMaintenance(CompactSettings(application="a", lake="lake"), str)
    optimized = []
    for nth in range(3):
        append(uri, nth, 100 + nth)
        DeltaTable(uri).delete(f"n = {nth}")
        vacuum(DeltaTable(uri), 0)
        optimized.append(maintenance._optimize_table("closed/x", uri, 2))
    assert optimized == [False, False, True]
    assert list(hours_of(uri).values()) == [[100, 101, 102]]


def enable_deletion_vectors(uri: str, *actions: dict[str, Any]) -> None:
    """Commit the table feature, and further actions, to a Delta table."""
    of_table = ["deletionVectors"]
    protocol = {"minReaderVersion": 3, "minWriterVersion": 7, "readerFeatures": of_table, "writerFeatures": of_table}
    log = Path(uri, f"_delta_log/{DeltaTable(uri).version() + 1:020}.json")
    log.write_text("".join(f"{json.dumps(action)}\n" for action in ({"protocol": protocol}, *actions)))


def test_a_table_with_deletion_vectors_is_not_optimized(tmp_path: Path) -> None:
    """Its files have deleted rows, too. OPTIMIZE would append them, and double the others."""
    uri = str(tmp_path / "closed")
    for nth in range(3):
        append(uri, nth)
    enable_deletion_vectors(uri)
    messages = list[str]()
    maintenance = TableMaintenance(CompactSettings(application="a", lake="lake"), messages.append)
    assert maintenance._optimize_table("closed/x", uri, 2) is False
    assert len(DeltaTable(uri).file_uris()) == 3
    assert messages == ["closed/x: no OPTIMIZE, because deletion vectors are enabled for the table"]


def test_a_state_with_deletion_vectors_is_not_rewritten(tmp_path: Path) -> None:
    """A rewrite would bring deleted rows back, as OPTIMIZE would."""
    messages = list[str]()
    settings = CompactSettings(application="a", lake=str(tmp_path))
    job = CompactionJob(None, settings, messages.append)  # type: ignore[arg-type]  # it needs no session
    row = {"row": "progress", "partition": 0, "added_rows": REWRITE_ROWS_MIN + 1, "rewritten_rows": 0, "added_files": 1}
    write_deltalake(job.path("state"), pa.Table.from_pylist([row], PROGRESS), partition_by=["partition"])
    enable_deletion_vectors(job.path("state"))
    version = DeltaTable(job.path("state")).version()
    plan = CompactionPlan(TopicOffsets("t", "id", {0: 0}, {0: 9}), {}, {}, [])
    assert job._rewrite_due_partitions(plan) == 0
    assert DeltaTable(job.path("state")).version() == version
    assert messages == ["no rewrite of `state`, because deletion vectors are enabled for the table"]


def test_of_two_jobs_that_optimize_one_commits(tmp_path: Path) -> None:
    """The other raises CompactionConflict, and no row is lost or doubled."""
    uri = str(tmp_path / "closed")
    for nth in range(3):
        append(uri, nth)
    table = DeltaTable(uri)
    append(uri, 3)
    with pytest.raises(CompactionConflict):
        optimize(table, "closed", {})
    assert sorted(row["n"] for row in DeltaTable(uri).to_pyarrow_table().to_pylist()) == [0, 1, 2, 3]


# --- two jobs at once ---


class OvertakenTable(DeltaTable):
    """A table to which another job appends after this job has read its positions, and before it commits."""

    def vacuum(self, *args: Any, **options: Any) -> list[str]:
        append(self.table_uri, 9, positions=LATER)
        return super().vacuum(*args, **options)

    def delete(self, *args: Any, **options: Any) -> dict[str, Any]:
        append(self.table_uri, 9, positions=LATER)
        return super().delete(*args, **options)


LATER = {"topic_id": "id", "positions": {"0": 120}}


@pytest.mark.parametrize(
    "maintain",
    [
        lambda table: vacuum(table, 0),
        lambda table: delete_expired_rows(table, "window_start", 2 * HOUR_MICROS // 1_000),
    ],
    ids=["VACUUM", "DELETE"],
)
def test_positions_are_kept_if_maintenance_overlaps_an_append(
    tmp_path: Path, maintain: Callable[[DeltaTable], object]
) -> None:
    """Maintenance commits after the append, with the positions before it. The positions of the append count."""
    uri = str(tmp_path / "closed")
    append(uri, 1, 5)
    append(uri, 7)
    DeltaTable(uri).delete("n = 7")
    maintain(OvertakenTable(uri))
    assert json.loads(DeltaTable(uri).history(1)[0]["userMetadata"]) == POSITIONS
    assert table_positions(DeltaTable(uri)) == LATER


# --- VACUUM ---


def aged(path: Path, days: float) -> Path:
    at = time.time() - days * 86_400
    os.utime(path, (at, at))
    return path


@pytest.mark.parametrize("checkpoint", [False, True])
@pytest.mark.parametrize(
    ("removed_days", "hours", "is_left"),
    [(8, 168, False), (8, 24, False), (0.5, 24, True), (8, 1_000, True)],
)
def test_vacuum_removes_files_by_the_time_of_their_removal(
    tmp_path: Path, checkpoint: bool, removed_days: float, hours: int, is_left: bool
) -> None:
    """A file that a version within the retention needs stays, however old it is, and also after a checkpoint."""
    uri = str(tmp_path / "closed")
    append(uri, 1)
    (old,) = (aged(Path(path), 60) for path in DeltaTable(uri).file_uris())
    append(uri, 2)
    removed_ms = int((time.time() - removed_days * 86_400) * 1_000)
    remove = RemoveAction(old.name, False, removed_ms, old.stat().st_size, {})
    delta_writer.commit(DeltaTable(uri), [], [remove], {"kind": "compaction", **POSITIONS})
    if checkpoint:
        DeltaTable(uri).create_checkpoint()
    vacuum(DeltaTable(uri), hours)
    assert old.exists() is is_left
    assert table_positions(DeltaTable(uri)) == POSITIONS
    assert [*hours_of(uri).values()] == [[2]]


def test_vacuum_removes_old_files_that_no_commit_names(tmp_path: Path) -> None:
    """A failed compaction left them. Younger ones may belong to a compaction that still runs."""
    uri = str(tmp_path / "closed")
    append(uri, 1)
    (rows,) = (pq.read_table(path).to_batches() for path in DeltaTable(uri).file_uris())
    files = delta_writer.DeltaFiles(uri, {}, ["window_start"])
    failed, running = (Path(uri) / files.write(rows).path for _ in range(2))
    aged(failed, 2)
    aged(running, 0.5)
    vacuum(DeltaTable(uri), 24)
    assert (failed.exists(), running.exists()) == (False, True)
    assert len(hours_of(uri)) == 1


def test_vacuum_keeps_deletion_vectors(tmp_path: Path) -> None:
    """Without the file of its deletion vector, a data file cannot be read."""
    uri = str(tmp_path / "closed")
    append(uri, 1)
    (file,) = pa.table(DeltaTable(uri).get_add_actions(flatten=True)).to_pylist()
    path = {"path": file["path"], "dataChange": True}
    # The text has the UUID in the name of the vector's file, in Base85.
    vector = {"storageType": "u", "pathOrInlineDv": "vBn[lx{q8@P<9BNH/isA", "offset": 1, "sizeInBytes": 36}
    add = {"partitionValues": {}, "size": file["size_bytes"], "modificationTime": 1, "stats": '{"numRecords":1}'}
    add["deletionVector"] = vector | {"cardinality": 1}
    enable_deletion_vectors(uri, {"remove": path | {"deletionTimestamp": 1}}, {"add": path | add})
    of_vector = tmp_path / "closed/deletion_vector_61d16c75-6994-46b7-a15b-8b538852e50e.bin"
    of_vector.write_bytes(b"")
    (of_rows,) = (aged(Path(of), 60) for of in DeltaTable(uri).file_uris())
    aged(of_vector, 60)
    vacuum(DeltaTable(uri), 168)
    assert (of_vector.exists(), of_rows.exists()) == (True, True)


def test_a_vacuum_that_removes_nothing_counts(tmp_path: Path) -> None:
    """deltalake commits a VACUUM only if it removes files. The next one is due as late as after any other."""
    state = str(tmp_path / "state")
    delta_writer.ensure_table(None, state, {}, PROGRESS, [], is_partitioned=False)
    settings = CompactSettings(application="a", lake="lake", retention_hours=168, vacuum_every=3)
    maintenance = TableMaintenance(settings, str)
    vacuumed = []
    for _ in range(7):
        delta_writer.commit(DeltaTable(state), [], [], {"kind": "compaction"})
        vacuumed.append(maintenance.maintain(state, {})["vacuumed"])
    assert vacuumed == [False, False, True, False, False, True, False]
    assert maintenance.failed.lines() == ()


def apply_retention(
    state: Path, expired_ms: int, stores: tuple[StoreSchema, ...], tables: dict[str, str], **settings_: Any
) -> None:
    """Maintain the tables with a `state` that has the limit `expired_ms`."""
    body = msgspec.json.encode(Progress("app", "exactly_once", {}, {}, {}, {}, stores, 0)).decode()
    row = {"row": "progress", "partition": 0, "changelog_offset": 9, "progress": body, "expired_ms": expired_ms}
    write_deltalake(str(state), pa.Table.from_pylist([row], PROGRESS), mode="overwrite")
    maintenance = TableMaintenance(CompactSettings(application="a", lake="lake", **settings_), str)
    maintenance.maintain(str(state), tables)
    assert maintenance.failed.lines() == ()


def test_late_records_are_kept_as_long_as_their_windows(tmp_path: Path) -> None:
    """A window that is longer than the retention may begin long before the limit and end after it."""
    count = (AggregationSchema.of("n", Count()),)
    store = StoreSchema("months", "tumbling", "string", 0, 0, "on_close", "in", None, None, None, count)
    stores = (
        msgspec.structs.replace(store, size_ms=30 * DAY_MS),
        msgspec.structs.replace(store, name="days", size_ms=1),
    )
    days = (69, 71, 92, 94)
    late = {f"late/{store.name}": str(tmp_path / store.name) for store in stores}
    for path in late.values():
        times = pa.array([day * DAY_MS * 1000 for day in days]).cast(pa.timestamp("us", "UTC"))
        write_deltalake(path, pa.table({"event_time": times}))
        delta_writer.commit(DeltaTable(path), [], [], {"kind": "compaction", **POSITIONS})
    apply_retention(tmp_path / "state", 100 * DAY_MS, stores, late, closed_retention_days=7)
    kept = {name: DeltaTable(path).to_pyarrow_table()["event_time"].to_pylist() for name, path in late.items()}
    found = {name: sorted((at - datetime(1970, 1, 1, tzinfo=UTC)).days for at in times) for name, times in kept.items()}
    assert found == {"late/months": [71, 92, 94], "late/days": [94]}


def test_retention_rewrites_a_file_at_most_once_a_day(tmp_path: Path) -> None:
    """Retention deletes whole days. The limit moves with each compaction, but a file is not rewritten each time."""
    closed, late = (str(tmp_path / kind) for kind in ("closed", "late"))
    hours = pa.array([hour * HOUR_MICROS for hour in range(96)]).cast(pa.timestamp("us", "UTC"))
    for path, column in ((closed, "window_end"), (late, "event_time")):
        write_deltalake(path, pa.table({column: hours}))
        delta_writer.commit(DeltaTable(path), [], [], {"kind": "compaction", **POSITIONS})
    tables = {"closed/hours": closed, "late/hours": late}
    rows, files = [], set[str]()
    for hour in (48, 49, 71, 72, 73):
        apply_retention(tmp_path / "state", hour * 3_600_000, (), tables, closed_retention_days=1)
        rows.append([DeltaTable(path).to_pyarrow_table().num_rows for path in (closed, late)])
        files.update(uri for path in (closed, late) for uri in DeltaTable(path).file_uris())
    assert rows == [[48, 72], [48, 72], [48, 72], [24, 48], [24, 48]]
    assert len(files) == 4
