"""One compaction appends the changelog records after the covered offsets to the Delta tables.

Steps of a compaction:

1. Plan: open the tables, each at a version, and find the first offset to read of each partition.
2. Compact: Spark's tasks read the ranges and write data files (see `compaction_task`).
3. Commit the files to `closed/<store>` and `late/<store>`, then to `state`. The last commit makes the compaction valid.
4. Rewrite the partitions of `state` that have many superseded rows, delete from the changelog what the previous
   compaction covers, maintain the tables (see `table_maintenance`), and call the user's after hook. A failure here
   undoes no commit.

Positions. A table's position in a partition is the last changelog offset up to which the table is complete. Each commit
of `closed` and `late` has the positions in its metadata. A RESTORE to a version restores its positions, too. After
another writer's append, they are read from the table's rows. A progress row of `state` records, for each of the other
tables, the changelog offset of its last row. The table and the newest progress row normally agree. There are two
exceptions:

1. The table is ahead of the progress row: a compaction crashed between two commits. The next compaction does not append
   the rows that the table has already.
2. The table is behind the progress row: the table was restored from a copy. The partition is read again from the newest
   progress row before which the table lacks no rows, or from the changelog's beginning. No changelog record of the
   partition is deleted until the table has caught up.

Two jobs at once. A commit creates the table version after the one that the job planned with, or fails (see
`delta_writer`). If two jobs plan with the same versions, one commits and the other ends with CompactionConflict before
it commits to the next table.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple, TypeVar

import msgspec
import pyarrow as pa
from deltalake import DeltaTable
from deltalake.transaction import RemoveAction
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession

from penstock.services.spark.compaction import delta_writer
from penstock.services.spark.compaction.compaction_task import (
    ChangelogRange,
    CompactionTaskOptions,
    CompactionTaskResult,
    PartitionResult,
    compact_changelog_ranges,
    lagging_tables,
)
from penstock.services.spark.compaction.delta_reader import progress_rows, table_positions, table_stores
from penstock.services.spark.compaction.delta_writer import FILE_ROWS, DataFile
from penstock.services.spark.compaction.rewrite import RewriteInput, rewrite
from penstock.services.spark.compaction.settings import MaintenanceSettings
from penstock.services.spark.compaction.table_maintenance import TableMaintenance, has_deletion_vectors
from penstock.services.spark.errors import translated
from penstock.services.spark.lake_tables import LakeTables
from penstock.services.spark.table_columns import CLOSED, INDEXED, LATE, STATE, rows_schema, state_schema
from penstock.services.spark.topic_offsets import TopicOffsets, changelog_offsets, run_with_timeout
from penstock.shared.clients.admin import Admin
from penstock.shared.common.errors import ChangelogHole, ConfigError, FatalError
from penstock.shared.common.lake import compaction_history, delta_tables
from penstock.shared.common.records import TopicPartition
from penstock.shared.streams.changelog.format import decode_progress
from penstock.shared.streams.changelog.store_schema import StoreSchema, check_schema
from penstock.shared.streams.lake_names import require_lake_names
from penstock.shared.streams.topology_loading import load_function

Log = Callable[[str], object]
T = TypeVar("T")
Row = dict[str, Any]

# Up to this many rows added to a partition of `state` are not worth the cost of a rewrite.
REWRITE_ROWS_MIN = 10_000
REWRITE = "rewrite"
"""The kind of a rewrite's commit of `state`."""
# A rewrite keeps this many of a partition's progress rows, because a restored table continues at one of them.
PROGRESS_ROWS_MAX = 100
REMEDY = (
    "Restore tables whose covered offsets the changelog still has, or start afresh (`penstock streams reset`, then "
    "`penstock batch` for the history)"
)


class AfterHookFailed(FatalError):
    """The after hook raised an error. The compaction before it stays committed."""


class CompactionReport(NamedTuple):
    """The result of a compaction. The compaction stays committed if steps after the commits have `failed`."""

    partitions: int
    from_offsets: dict[int, int]
    """By changelog partition, the covered offsets before the compaction."""
    to_offsets: dict[int, int]
    """By changelog partition, the covered offsets after the compaction."""
    state_version: int | None
    entries: int = 0
    live_rows: int = 0
    """The number of changed live rows: windows, and keys in stores without windows."""
    deleted_rows: int = 0
    """The number of tombstones added to `state`."""
    closed_rows: int = 0
    """The number of rows added to the tables of closed windows."""
    late_rows: int = 0
    """The number of rows added to the tables of late records."""
    seconds: float = 0.0
    remaining_records: int = 0
    """The number of changelog offsets that existed when the compaction began and that it did not read."""
    foreign_records: int = 0
    rewritten_partitions: int = 0
    optimized_tables: int = 0
    vacuumed: bool = False
    failed: tuple[str, ...] = ()
    """The steps after the commits that failed."""


class CompactionPlan(NamedTuple):
    """The start of a compaction: the tables, each at a version, and the newest progress rows by partition."""

    offsets: TopicOffsets
    newest: dict[int, Row]
    tables: dict[str, DeltaTable]
    ranges: list[ChangelogRange]

    @property
    def state_version(self) -> int | None:
        return self.tables[STATE].version() if STATE in self.tables else None


class CompactionJob:
    """One compaction of one application on a Spark session. Call `run()` once."""

    def __init__(self, spark: SparkSession, settings: MaintenanceSettings, log: Log) -> None:
        self.spark = spark
        self.settings = settings
        self.log = log
        self.options = settings.storage_options
        self.job = uuid.uuid4().hex
        self.maintenance = TableMaintenance(settings, log)
        self._started = time.monotonic()
        self._started_ms = int(time.time() * 1000)

    def path(self, table: str) -> str:
        """Return the path of a table, such as `state` or `closed/visits`."""
        return f"{self.settings.folder}/{table}"

    def run(self) -> CompactionReport:
        """Compact once.

        Raises CorruptRecord, ChangelogHole, SchemaMismatch or ConfigError before the first commit. Raises
        CompactionConflict, LakeUnavailable, or an error of Kafka or Spark: then `closed` and `late` may have rows that
        `state` does not cover.

        A step that fails after the commit of `state` is only listed in the report's `failed`.
        """
        try:
            plan = self.plan()
            report = self._compact_and_commit(plan)
        except (Py4JError, PySparkException, ConnectionError) as e:
            raise translated(e) from e
        report = self._maintain_tables(plan, report)
        seconds = round(time.monotonic() - self._started, 3)
        return report._replace(failed=self.maintenance.failed.lines(), seconds=seconds)

    # --- plan ---

    def plan(self) -> CompactionPlan:
        """Open the tables and return the plan with the ranges to read.

        Raises ChangelogHole if the changelog does not continue where the tables end.
        """
        settings = self.settings
        # `state` is opened first, because a compaction commits it last. If another job commits meanwhile, the other
        # tables are then as new or newer, and no rows seem to be missing in them.
        paths = {STATE: self.path(STATE), **self._closed_and_late_paths()}
        opened = {name: delta_tables.open_table(path, self.options) for name, path in paths.items()}
        tables = {name: table for name, table in opened.items() if table is not None}
        rows = {} if STATE not in tables else progress_rows(tables[STATE])
        newest = {partition: of[0] for partition, of in rows.items()}
        # Look up the offsets after the tables were opened. Otherwise another job could cover records beyond them, and
        # the log would seem to end before the tables do.
        offsets = changelog_offsets(settings)
        for row in newest.values():
            self._require_same_changelog(STATE, row["topic_id"], offsets)
        positions = {
            name: self._table_positions(name, table, offsets) for name, table in tables.items() if name != STATE
        }
        begins = {p: self._start_of_partition(p, rows.get(p, []), positions, offsets) for p in offsets.earliest}
        return CompactionPlan(
            offsets, newest, tables, bounded_ranges(begins, newest, positions, offsets, settings.changelog_records_max)
        )

    def _require_same_changelog(self, table: str, topic_id: str, offsets: TopicOffsets) -> None:
        # A topic that was created again begins at offset 0. Its records would count as covered, and rows of both
        # topics would have the same offsets.
        if topic_id != offsets.topic_id:
            raise ChangelogHole(
                f"{self.path(table)} was made from {offsets.topic} with id {topic_id}, but its id is "
                f"{offsets.topic_id}: it was deleted and created again. Move the tables to another folder to begin new "
                "ones"
            )

    def _table_positions(self, name: str, table: DeltaTable, offsets: TopicOffsets) -> dict[int, int]:
        """Return a table's positions: by partition the last changelog offset up to which it is complete."""
        if (found := table_positions(table)) is not None:
            self._require_same_changelog(name, found["topic_id"], offsets)
            return {int(p): int(at) for p, at in found["positions"].items()}
        # Another writer has committed since, for example a RESTORE to a time. Its version may lack rows that the last
        # recorded positions count.
        self.log(f"{name}: its positions are read from its rows")
        rows = delta_tables.rows(
            table, "SELECT partition, topic_id, max(changelog_offset) AS last FROM t GROUP BY 1, 2"
        )
        for row in rows:
            self._require_same_changelog(name, row["topic_id"], offsets)
        return {row["partition"]: row["last"] for row in rows}

    def _start_of_partition(
        self, partition: int, rows: list[Row], positions: Mapping[str, Mapping[int, int]], offsets: TopicOffsets
    ) -> tuple[int, Row | None]:
        """Return the first offset to read of a partition, and the progress row that has it; 0 and None if there is no
        such row.

        Raises ChangelogHole if that offset is deleted, or beyond the changelog's end.
        """
        newest = rows[0] if rows else None
        earliest = offsets.earliest[partition]
        table_positions = {table: of[partition] for table, of in positions.items() if partition in of}
        # Start at the newest progress row before which no table lacks rows: each table's position is at least the row's
        # last offset of the table. The position may be below the covered offset, because the changelog has other
        # records between them. If no table lags, this is the newest row.
        row = next((row for row in rows if not lagging_tables(row, table_positions)), None)
        start = 0 if row is None else int(row["changelog_offset"])
        lacks = ""
        if behind := lagging_tables(newest, table_positions):
            lowest = min(table_positions.get(table, -1) for table in behind)
            lacks = f" {', '.join(behind)} lacks rows from offset {lowest + 1} on."
            self.log(f"partition {partition}:{lacks} reading from offset {start}")
        if earliest > start:
            raise ChangelogHole(
                f"{offsets.topic}-{partition}: offsets {start} to {earliest - 1} were deleted, but the tables at "
                f"{self.settings.folder} continue at offset {start}.{lacks} Check that `lake` is the aggregator's. "
                f"{REMEDY}"
            )
        # The topic lost records, or was restored from a copy. Its next records would get offsets that the tables
        # count as covered, and would never be read.
        if offsets.latest[partition] < start:
            raise ChangelogHole(
                f"{offsets.topic}-{partition}: the log ends at {offsets.latest[partition]}, but the tables cover it up "
                f"to {start}. {REMEDY}"
            )
        return start, row

    # --- compact ---

    def _compact_and_commit(self, plan: CompactionPlan) -> CompactionReport:
        """Read the ranges, write the data files and commit them. Returns the report."""
        wanted = [one for one in plan.ranges if one.first < one.end]
        if not wanted:
            return self._report_nothing_new(plan)
        self.log(f"reading {sum(one.end - one.first for one in wanted)} changelog records")
        settings = self.settings
        offsets = plan.offsets
        options = CompactionTaskOptions(
            kafka=settings.kafka,
            topic=offsets.topic,
            topic_id=offsets.topic_id,
            idle_ms_max=settings.kafka_timeout_ms,
            folder=settings.folder,
            storage_options=self.options,
            retention_days=settings.closed_retention_days,
        )
        done = self._run_tasks(wanted, lambda one: one.end - one.first, compact_changelog_ranges(options))
        found = [msgspec.msgpack.decode(one, type=CompactionTaskResult) for one in done]
        # Commit nothing if any task failed. Data files that no commit names belong to no table version.
        for task in found:
            if task.failure is not None:
                raise task.failure.to_error()
        foreign = sum(one.foreign_records for task in found for one in task.partitions)
        reached = {one.partition: one.read_to for task in found for one in task.partitions}
        # Control records have offsets and are not polled, so a task may read beyond the end that it was given.
        left = sum(max(0, one.latest - reached[one.partition]) for one in wanted)
        # Each partition with something to write has at least a progress row, so a file of `state`.
        written = {one.partition: one for task in found for one in task.partitions if one.files}
        if not written:
            return self._report_nothing_new(plan)._replace(remaining_records=left, foreign_records=foreign)
        report = self._commit_tables(plan, written, _files_by_table(found))
        return report._replace(remaining_records=left, foreign_records=foreign)

    def _run_tasks(
        self, items: list[T], size: Callable[[T], int], step: Callable[[bytes], Iterable[bytes]]
    ) -> list[bytes]:
        """Run `step` over the items in Spark tasks, and return the tasks' results.

        The items are spread so that the tasks have similar total sizes.
        """
        tasks = max(1, min(len(items), self.spark.sparkContext.defaultParallelism))
        parts = [msgspec.msgpack.encode(part) for part in spread_over_tasks(items, size, tasks)]
        found: list[bytes] = self.spark.sparkContext.parallelize(parts, tasks).flatMap(step).collect()
        return found

    def _report_nothing_new(self, plan: CompactionPlan) -> CompactionReport:
        self.log("nothing new")
        before = {one.partition: one.covered for one in plan.ranges}
        return CompactionReport(len(before), before, before, plan.state_version)

    def _commit_tables(
        self,
        plan: CompactionPlan,
        written: Mapping[int, PartitionResult],
        appended: Mapping[str, list[DataFile]],
    ) -> CompactionReport:
        stores = widest_stores(plan.newest, written.values())
        require_lake_names(stores)
        # Tables that catch up are committed even without new rows: their positions must advance, or the next
        # compaction reads the range again.
        catching_up = {name for one in plan.ranges if one.partition in written for name in one.lagging}
        # 1. `closed` and `late`. If the job ends here, the next one reads the same ranges and leaves out the rows
        #    that these tables have.
        for kind in (CLOSED, LATE):
            for store in stores:
                name = f"{kind}/{store.name}"
                if name in appended or name in catching_up:
                    table = self._ensure_table(plan, name, rows_schema(kind, store))
                    # `table_positions` reads only one commit. So this commit repeats the positions of the
                    # partitions that it adds nothing to.
                    positions = {one.partition: one.positions[name] for one in plan.ranges if name in one.positions}
                    for p, one in written.items():
                        positions[p] = max(positions.get(p, -1), one.covered_offset - 1)
                    metadata = {
                        "job": self.job,
                        "kind": kind,
                        "topic_id": plan.offsets.topic_id,
                        "positions": positions,
                    }
                    delta_writer.commit(table, appended.get(name, ()), (), metadata)
                    self.log(f"{name}: {sum(file.rows for file in appended.get(name, ()))} rows")
        before = {one.partition: one.covered for one in plan.ranges}
        files = {**appended, STATE: [file for one in written.values() for file in one.files]}
        rows = {kind: _count_written_rows(kind, files) for kind in (STATE, CLOSED, LATE)}
        deleted = sum(one.deleted for one in written.values())
        live = rows[STATE] - deleted - len(written)
        entries = sum(one.entries for one in written.values())
        state_metadata = {
            "job": self.job,
            "kind": compaction_history.COMPACTION,
            "started_at_ms": self._started_ms,
            "seconds": round(time.monotonic() - self._started, 3),
            "rows": live + deleted + rows[CLOSED] + rows[LATE],
            "entries": entries,
        }
        # 2. `state`. This commit makes the compaction valid: readers take from the other tables only rows that its
        #    progress rows cover.
        state = self._ensure_table(plan, STATE, state_schema(stores))
        version = delta_writer.commit(state, files[STATE], (), state_metadata)
        # The supervisor recognizes the line: if a later step fails, fewer records would not help.
        self.log(f"committed version {version} of `state`")
        after = before | {p: max(before[p], one.covered_offset) for p, one in written.items()}
        return CompactionReport(
            partitions=len(before),
            from_offsets=before,
            to_offsets=after,
            state_version=version,
            entries=entries,
            live_rows=live,
            deleted_rows=deleted,
            closed_rows=rows[CLOSED],
            late_rows=rows[LATE],
        )

    def _ensure_table(self, plan: CompactionPlan, name: str, schema: pa.Schema) -> DeltaTable:
        """Return the table that was opened for the plan. Create it if it is missing, and add missing columns."""
        indexed = INDEXED[name.partition("/")[0]]
        return delta_writer.ensure_table(
            plan.tables.get(name), self.path(name), self.options, schema, indexed, is_partitioned=name == STATE
        )

    # --- after the commit ---

    def _maintain_tables(self, plan: CompactionPlan, report: CompactionReport) -> CompactionReport:
        attempt = self.maintenance.attempt
        settings = self.settings
        # Without a commit of `state` there is nothing new to maintain.
        if report.state_version != plan.state_version:
            rewritten = attempt("the rewrite of `state`", lambda: self._rewrite_due_partitions(plan), 0)
            report = report._replace(rewritten_partitions=rewritten)
            if settings.delete_covered:
                attempt("the deletion from the changelog", lambda: self._delete_covered_records(plan), None)
            others = attempt("table maintenance", self._closed_and_late_paths, dict[str, str]())
            report = report._replace(**self.maintenance.maintain(self.path(STATE), others))
        # Before the first commit there are no tables for the hook.
        if settings.after is not None and report.state_version is not None:
            hook = settings.after
            attempt(f"after={hook}", lambda: call_after_hook(self.spark, hook, settings.tables), None)
        return report

    def _closed_and_late_paths(self) -> dict[str, str]:
        """Return the paths of the `closed` and `late` tables by name."""
        stores = {kind: table_stores(self.path(kind), self.options) for kind in (CLOSED, LATE)}
        return {f"{kind}/{store}": self.path(f"{kind}/{store}") for kind, of in stores.items() for store in of}

    def _rewrite_due_partitions(self, plan: CompactionPlan) -> int:
        """Rewrite the partitions of `state` for which a rewrite is due. Returns their number."""
        state = delta_tables.open_table(self.path(STATE), self.options)
        assert state is not None
        files_max = self.settings.optimize_files_max
        due = {p: rows for p, rows in progress_rows(state).items() if is_rewrite_due(rows[0], files_max)}
        if not due:
            return 0
        if has_deletion_vectors(state):
            self.log("no rewrite of `state`, because deletion vectors are enabled for the table")
            return 0
        actions = pa.table(state.get_add_actions(flatten=True))
        files = [file for file in actions.to_pylist() if int(file["partition.partition"]) in due]
        wanted = []
        for p, rows in due.items():
            own = [file for file in files if int(file["partition.partition"]) == p]
            size, count = (sum(file[name] for file in own) for name in ("size_bytes", "num_records"))
            # Older progress rows let a restored table catch up. A row is useless once its changelog offset was
            # deleted.
            retained = [row for row in rows[1:] if row["changelog_offset"] >= plan.offsets.earliest[p]]
            paths = [file["path"] for file in own]
            wanted.append(RewriteInput(p, paths, count, size, rows[:1] + retained[: PROGRESS_ROWS_MAX - 1]))
        self.log(f"rewriting {len(wanted)} partitions of `state`, {sum(one.rows for one in wanted)} rows")
        step = rewrite(self.path(STATE), self.options)
        done = self._run_tasks(wanted, lambda one: one.rows, step)
        added = [file for one in done for file in msgspec.msgpack.decode(one, type=list[DataFile])]
        now_ms = int(time.time() * 1000)
        removed = [
            RemoveAction(
                file["path"], False, now_ms, file["size_bytes"], {"partition": str(file["partition.partition"])}
            )
            for file in files
        ]
        delta_writer.commit(state, added, removed, {"job": self.job, "kind": REWRITE})
        return len(wanted)

    def _delete_covered_records(self, plan: CompactionPlan) -> None:
        """Delete the changelog records that the previous compaction covers (see `offsets_to_delete`)."""
        before = offsets_to_delete(plan.ranges, plan.offsets)
        if before:
            self.log(f"deleting changelog records of {len(before)} partitions")

            async def delete_changelog_records() -> None:
                async with Admin(self.settings.kafka) as admin:
                    await admin.delete_records(before)

            settings = self.settings
            run_with_timeout(delete_changelog_records(), settings.kafka, settings.kafka_timeout_ms, plan.offsets.topic)


def _files_by_table(found: Iterable[CompactionTaskResult]) -> dict[str, list[DataFile]]:
    """Return by table the files of `closed` and `late` that all tasks wrote."""
    files: dict[str, list[DataFile]] = {}
    for task in found:
        for table, own in task.files.items():
            files.setdefault(table, []).extend(own)
    return files


def _count_written_rows(kind: str, files: Mapping[str, list[DataFile]]) -> int:
    """Return the number of rows that the compaction wrote to tables of a kind: `state`, `closed` or `late`."""
    return sum(one.rows for table, own in files.items() if table.partition("/")[0] == kind for one in own)


def is_rewrite_due(row: Row, files_max: int) -> bool:
    """Return whether a partition of `state` is to be rewritten, by its newest progress row.

    A rewrite is due if more rows were added since the last one than REWRITE_ROWS_MIN and than half of the rows that it
    left. It is also due if more than `files_max` compactions added files; 0 is no limit. If the last rewrite left
    several times FILE_ROWS, `files_max` is multiplied by that number.
    """
    # Both limits are relative to the partition's size, so that the cost of rewrites follows the changes and not the
    # number of live windows.
    is_heavy = row["added_rows"] > max(row["rewritten_rows"] / 2, REWRITE_ROWS_MIN)
    files_max *= max(1, row["rewritten_rows"] // FILE_ROWS)
    return bool(is_heavy or (files_max > 0 and row["added_files"] > files_max))


def offsets_to_delete(ranges: Iterable[ChangelogRange], offsets: TopicOffsets) -> dict[TopicPartition, int]:
    """Return, by changelog partition, the offset before which a compaction deletes records: the covered offset before
    this compaction.

    A partition is left out if it had no progress row, if it has no records before that offset, or if a `closed` or
    `late` table lagged behind.
    """
    # Use the progress rows from before this compaction: a restore may still read the previous version of `state`, and
    # needs the changelog from its covered offset on. A table that lagged may not have caught up yet, since this
    # compaction's range is limited. The next one then needs the records from the table's position on.
    return {
        TopicPartition(offsets.topic, one.partition): one.covered
        for one in ranges
        if one.newest is not None and one.covered > offsets.earliest[one.partition] and not one.lagging
    }


def widest_stores(newest: Mapping[int, Row], written: Iterable[PartitionResult]) -> tuple[StoreSchema, ...]:
    """Return the stores that define a compaction's tables: those of the partition with the most aggregations.

    Instances are upgraded one after the other, so partitions may differ in added aggregations. Raises SchemaMismatch
    for a difference that `check_schema` rejects.
    """
    stores = {p: decode_progress(row["progress"].encode()).stores for p, row in newest.items()}
    stores |= {one.partition: one.stores for one in written}
    widest = max(stores.values(), key=lambda own: sum(len(store.aggregations) for store in own), default=())
    for own in stores.values():
        check_schema(own, widest)
    return widest


def spread_over_tasks(items: Iterable[T], size: Callable[[T], int], tasks: int) -> list[list[T]]:
    """Distribute the items of a compaction, such as ranges, over Spark's tasks, which get similar total sizes.

    >>> spread_over_tasks([5, 1, 3, 4], lambda n: n, 2)
    [[5, 1], [4, 3]]
    """
    parts: list[list[T]] = [[] for _ in range(tasks)]
    sizes = [0] * tasks
    for one in sorted(items, key=size, reverse=True):
        least = sizes.index(min(sizes))
        parts[least].append(one)
        sizes[least] += size(one)
    return parts


def bounded_ranges(
    begins: Mapping[int, tuple[int, Row | None]],
    newest: Mapping[int, Row],
    positions: Mapping[str, Mapping[int, int]],
    offsets: TopicOffsets,
    records_max: int,
) -> list[ChangelogRange]:
    """Return the ranges of a compaction, together about `records_max` records.

    Each partition receives an equal share, and leaves what it does not need to larger partitions. With `records_max` 10
    and partitions of 1, 4 and 20 records, the ranges have 1, 4 and 5 records.
    """
    left = {p: offsets.latest[p] - start for p, (start, _) in begins.items()}
    share = dict[int, int]()
    remaining = records_max
    for nth, p in enumerate(sorted(left, key=lambda p: left[p])):
        # At least one record, even with more partitions than `records_max`: a partition with a share of 0 might never
        # be read.
        share[p] = min(left[p], max(remaining // (len(left) - nth), 1))
        remaining -= share[p]
    ranges = []
    for p, (start, row) in sorted(begins.items()):
        table_positions = {table: of[p] for table, of in positions.items() if p in of}
        ranges.append(
            ChangelogRange(
                partition=p,
                first=start,
                end=start + share[p],
                latest=offsets.latest[p],
                start=row,
                newest=newest.get(p),
                positions=table_positions,
            )
        )
    return ranges


def call_after_hook(spark: SparkSession, name: str, folder: str) -> None:
    """Call the user's after hook `name`, a `module:function`, as `function(spark, tables)`.

    `tables` has the DataFrames `closed/<store>`, `late/<store>` and `live/<store>` of each windowed store. Raises
    ConfigError if there is no such function or it raises ConfigError, and AfterHookFailed for any other error.
    """
    try:
        function: Any = load_function(name, "after")
        function(spark, LakeTables(spark, folder).frames())
    # It ends the job with the exit status of invalid settings.
    except ConfigError:
        raise
    except Exception as e:
        raise AfterHookFailed(f"{name}: {type(e).__name__}: {e}") from e
