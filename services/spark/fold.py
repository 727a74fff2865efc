"""Changelog records into the Delta tables, once: what a compaction and a backfill have in common.

Order of commits. First come facts that a rerun finds again and leaves as they are (`advances`), then each
store's finals are appended to `closed/<store>`, then one MERGE into `state` writes live windows, deletes, rules (see
`rules`) and the new covered offsets. A run has a number, one above that of the state it starts from. Every append and
the MERGE carry it as Delta's transaction version, so Delta makes each of them once a run. An append also carries where
the run ends: a run that crashed before its MERGE left that behind, and the next one, which has the same number, adopts
it, so that what it skips is exactly what was appended. Two jobs at once have the same number too: Delta lets one of
them through.

A partition in which nothing moved but wall-clock grids is left as it is: an idle application, whose punctuation still
commits, would otherwise rewrite its progress rows for ever. Its covered offset stays behind by a bounded tail.
"""

# ruff: noqa: S608 - SQL is the only way in, and every name and text in it is quoted
from __future__ import annotations

import json
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from itertools import islice
from typing import Any, NamedTuple

import msgspec
from py4j.protocol import Py4JError
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import advances, delta_log, rules, tables, upkeep
from penstock.services.spark.aftercare import Aftercare
from penstock.services.spark.bodies import final_rows, live_rows
from penstock.services.spark.changelog import Counts, Newest, Window, counted, known, latest_per_window, read_window
from penstock.services.spark.failures import CompactionConflict, translated
from penstock.services.spark.kafka import TopicOffsets
from penstock.services.spark.runs import CLOSED, CORRECTED, RUN, TOPIC_ID, note_of
from penstock.services.spark.settings import UpkeepSettings
from penstock.shared.streams.changelog.format import FINAL, Progress, decode_progress
from penstock.shared.streams.lake_names import IS_LIVE, STATE_HEAD, STATE_TAIL, require_lake_names

Say = Callable[[str], object]
IDLE_RECORDS_MAX = 1_000  # of an idle partition's tail: what a restore reads beyond the snapshot for nothing
BROADCAST_BYTES_MAX = 64 * 1024 * 1024  # of what is merged: beyond it, rows of `state` travel to it
MERGE_KEY = ("partition", "row", "store", "key", "start_ms")


class Summary(NamedTuple):
    """What a run did. Offsets are by changelog partition: `to_offsets` are the covered ones now.

    It wrote `merged_rows` live windows, took `deleted_rows` out and appended `finals`; `live_rows` are there now.
    `remaining_records` of the changelog were there when it began, and are the next run's. `failed` says
    what did not come about after the run, which counts all the same.
    """

    run: int
    partitions: int
    entries: int
    live_rows: int
    merged_rows: int
    deleted_rows: int
    finals: int
    from_offsets: dict[int, int]
    to_offsets: dict[int, int]
    state_version: int | None
    seconds: float
    remaining_records: int = 0
    adopted: bool = False
    foreign_records: int = 0
    optimized_partitions: int = 0
    vacuumed: bool = False
    expired_days: int = 0
    failed: tuple[str, ...] = ()


class Merged(NamedTuple):
    """Rows of windows that the MERGE wrote, `inserted` of them new, and took out; the version of `state` it made."""

    written: int
    inserted: int
    deleted: int
    version: int


class Plan(NamedTuple):
    """What a run starts from: the covered rows, and from where to where it reads, `cap` at most.

    `adopted` says that it goes on with the run that appended last. `ahead` are stores of whose closed windows
    more may be in the table than `state` covers; `appended` is by store the newest run that is in its table,
    `corrected` the newest run of corrections. A run that `accepts_loss` says so in `state`, whatever is new.
    `live_rows` are in `state` before it, and `rules`, by their places (see `rules`).
    """

    run: int
    covered: dict[int, Row]
    offsets: TopicOffsets
    start: dict[int, int]
    end: dict[int, int]
    adopted: bool
    cap: Mapping[int, int]
    ahead: frozenset[str] = frozenset()
    appended: Mapping[str, int] = {}
    corrected: Mapping[str, int] = {}
    accepts_loss: bool = False
    live_rows: int = 0
    rules: frozenset[rules.Place] = frozenset()

    def is_cut(self, partition: int) -> bool:
        """Whether the run ends before the partition does."""
        return self.end[partition] < self.offsets.latest[partition]


class Fold(ABC):
    """One run for one application. Give it a Spark session, then `run()`."""

    def __init__(self, spark: SparkSession, settings: UpkeepSettings, say: Say) -> None:
        self.spark, self.settings, self.say = spark, settings, say
        self.job = uuid.uuid4().hex
        self.after = Aftercare(spark, settings, say)
        self.state = f"{settings.tables}/state"

    def closed(self, store: str) -> str:
        """Where a store's closed windows are."""
        return f"{self.settings.tables}/closed/{store}"

    def run(self, told: Callable[[Summary], object] = lambda summary: None) -> Summary:
        """Compact once; `told` is called with what the run did as soon as it counts and all that comes after was tried.

        Raises CorruptRecord, ChangelogHole, SchemaMismatch (nothing was changed), CompactionConflict (another job did
        the same run), or an error of Kafka's or Spark's. After `told` was called: what failed behind the run.
        """
        started = time.monotonic()
        try:
            plan, summary = self._fold(self.plan())
        except (Py4JError, PySparkException, ConnectionError) as e:
            raise translated(e) from e
        self.after.attempt("what follows the run", lambda: self.after_merge(plan, summary), None)
        summary = self._look_after(summary)._replace(failed=self.after.told())
        summary = summary._replace(seconds=round(time.monotonic() - started, 3))
        told(summary)
        self.after.require_done()
        return summary

    @abstractmethod
    def plan(self) -> Plan:
        """Where to read, and what the tables hold before the run."""

    @abstractmethod
    def records(self, plan: Plan) -> DataFrame:
        """The changelog records of the run (READ_SCHEMA)."""

    def window(self, plan: Plan, records: DataFrame) -> Window:
        """What the records say by the reader's rule."""
        return read_window(self.spark, plan.offsets.topic, records, known(plan.covered))

    def wider(self, plan: Plan, newest: Mapping[int, Newest]) -> Plan | None:
        """A plan that reads further, where this one's ranges end before what they would have to cover."""
        return None

    def before_merge(self, plan: Plan) -> None:
        """What must be there before the run counts; a run that crashed behind its appends is gone on with from here."""
        return

    def after_merge(self, plan: Plan, summary: Summary) -> None:
        """What is done once the run counts."""
        return

    def more(self) -> dict[str, Any]:
        """What the job says of itself beside its summary."""
        return {}

    def origin(self) -> str | None:
        """What the tables are to remember of where history began, as JSON (see `origins`)."""
        return None

    def covered(self, newest: Mapping[int, Newest]) -> dict[int, Newest]:
        """The newest progress records, with the offsets that the tables cover then."""
        return dict(newest)

    def note(self, after: Mapping[int, int]) -> dict[str, Any]:
        """What an append says of its run, for the one that goes on after a crash."""
        return {"to_offsets": after}

    def appended_last(self, store: str) -> int:
        """The newest run that Delta knows to have appended to a store's table, whatever its log still says."""
        return delta_log.transaction(self.spark, self.closed(store), self._transaction(store))

    def _known_stores(self, covered: Mapping[int, Row]) -> list[str]:
        """Stores that may have a table: the folders, since a first run can crash before any progress row is there."""
        names = {s.name for row in covered.values() for s in decode_progress(row.progress.encode()).stores}
        return sorted(names.union(upkeep.tables_below(self.spark, f"{self.settings.tables}/closed")))

    def _fold(self, plan: Plan) -> tuple[Plan, Summary]:
        """Read, and write what was read; which plan that was in the end."""
        records = self.records(plan).persist()
        try:
            window = self.window(plan, records)
            wider = self.wider(plan, window.newest)
            if wider is None:
                return plan, self._fold_window(plan, window)
        finally:
            records.unpersist()
        return self._fold(wider)

    def _fold_window(self, plan: Plan, window: Window) -> Summary:
        entries = window.entries.persist()
        try:
            counts = counted(entries)
            newest = moved(self.covered(window.newest), plan, counts.by_partition)
            if not newest and plan.accepts_loss:
                newest = {partition: Newest.of(row) for partition, row in plan.covered.items()}
            window = window._replace(entries=entries, newest=newest)
            summary = self._write(plan, window, counts) if newest else self._nothing_new(plan)
        finally:
            entries.unpersist()
        left = sum(plan.offsets.latest[p] - to for p, to in summary.to_offsets.items() if plan.is_cut(p))
        return summary._replace(remaining_records=left, foreign_records=window.foreign_records)

    def _nothing_new(self, plan: Plan) -> Summary:
        self.say("nothing new")
        version, before = tables.version(self.spark, self.state), {p: int(plan.start[p]) for p in plan.start}
        return Summary(plan.run - 1, len(before), 0, plan.live_rows, 0, 0, 0, before, before, version, 0.0)

    def _write(self, plan: Plan, window: Window, counts: Counts) -> Summary:
        before = {p: int(plan.start[p]) for p in plan.start}
        require_lake_names(window.stores)
        tables.ensure_state(self.spark, self.state, window.layouts())
        after = before | {p: n.covered_offset for p, n in window.newest.items()}
        total = sum(counts.by_partition.values())
        self.say(f"run {plan.run}: {total} entries in {len(window.newest)} partitions")
        advances.keep(self.spark, self.settings.tables, window.advances)
        finals = self._append_finals(plan, window, counts, after)
        appended = {**plan.appended, **dict.fromkeys(finals, plan.run)}
        self.before_merge(plan)
        rows = self._merge(plan, window, window.entries, appended)
        live = plan.live_rows + rows.inserted - rows.deleted
        done = (plan.run, len(before), total, live, rows.written, rows.deleted, sum(finals.values()))
        return Summary(*done, before, after, rows.version, 0.0, adopted=plan.adopted)

    def _append_finals(self, plan: Plan, window: Window, counts: Counts, after: dict[int, int]) -> dict[str, int]:
        """Append each store's closed windows once; their number by store, of those that had any."""
        appended = {}
        topic = plan.offsets.topic
        said = json.dumps({RUN: plan.run, "job": self.job, TOPIC_ID: plan.offsets.topic_id, **self.note(after)})
        for store, layout in zip(window.stores, window.layouts(), strict=True):
            own = window.entries.filter((F.col("operation") == F.lit(FINAL)) & (F.col("store") == layout.number))
            count = counts.finals.get(layout.number, 0)
            if count and store.name in plan.ahead:  # all of the table is looked at: not for a run that closed nothing
                self.say(f"closed/{store.name}: its rows are compared: its log does not say that `state` covers them")
                there = tables.appended_before(self.spark, self.closed(store.name))
                own = own.filter(F.col("offset") >= tables.by_partition(there))
                count = own.count()
            if not count:
                continue
            decoded = own.mapInArrow(final_rows(topic, layout, window.generations), tables.final_schema(layout))
            once = (self._transaction(store.name), plan.run)
            tables.append_closed(tables.closed_frame(decoded, store), store, self.closed(store.name), once, said)
            self._require_ours(self.closed(store.name), plan)
            self.say(f"closed/{store.name}: {count} windows")
            appended[store.name] = count
        return appended

    def _transaction(self, table: str) -> str:
        return f"penstock-compact-{self.settings.application}-{table}"

    def _merge(self, plan: Plan, window: Window, entries: DataFrame, appended: Mapping[str, int]) -> Merged:
        """The one commit that makes the run count; the rows that it wrote and deleted.

        It says by store the newest run that has `appended`.
        """
        layouts = window.layouts()
        rows = latest_per_window(entries).mapInArrow(
            live_rows(plan.offsets.topic, layouts, window.generations), tables.live_schema(layouts)
        )
        rows = tables.in_table_order(self.spark, self.state, rows, layouts)
        rows = rows.withColumns({name: F.lit(None).cast("string") for name in ("progress", "topic_id")})
        new, gone = self._rules(plan, window)
        progress = self._progress(window.newest, plan, rules.rows_of(new, gone, plan.offsets.topic_id, plan.run))
        source = rows.withColumn("run", F.lit(plan.run)).unionByName(progress, allowMissingColumns=True).persist()
        self._broadcast_if_small(source).createOrReplaceTempView("penstock_changes")
        columns = [name for name, _ in STATE_HEAD] + [layout.name for layout in layouts]
        columns += [name for name, _ in STATE_TAIL]
        names = [tables.quoted(name) for name in columns]
        partitions = ", ".join(str(p) for p in window.newest)
        same = " AND ".join(f"t.{name} = s.{name}" for name in MERGE_KEY)
        there = {CLOSED: {s: run for s, run in appended.items() if run}, CORRECTED: dict(plan.corrected)}
        said = json.dumps({RUN: plan.run, "job": self.job, **there})
        conf = {
            "spark.databricks.delta.write.txnAppId": self._transaction("state"),
            "spark.databricks.delta.write.txnVersion": str(plan.run),
            "spark.databricks.delta.commitInfo.userMetadata": said,
        }
        for name, value in conf.items():
            self.spark.conf.set(name, value)
        try:
            self.spark.sql(
                f"MERGE INTO {tables.delta(self.state)} t USING penstock_changes s "
                f"ON t.partition IN ({partitions}) AND {same} "
                f"WHEN MATCHED AND NOT s.{IS_LIVE} THEN DELETE "
                f"WHEN MATCHED THEN UPDATE SET {', '.join(f't.{n} = s.{n}' for n in names)} "
                f"WHEN NOT MATCHED AND s.{IS_LIVE} THEN INSERT ({', '.join(names)}) "
                f"VALUES ({', '.join(f's.{n}' for n in names)})"
            )
        finally:
            for name in conf:
                self.spark.conf.unset(name)
            source.unpersist()
        done = self._require_ours(self.state, plan)
        metrics = done.operationMetrics or {}
        inserted, updated, deleted = (
            int(metrics.get(f"numTargetRows{what}", 0)) for what in ("Inserted", "Updated", "Deleted")
        )
        each = 1 if self.origin() is None else 2  # rows of a partition that are no window
        others = each * len(window.newest) + len(new)
        first = each * len(window.newest.keys() - plan.covered) + len(new)
        return Merged(inserted + updated - others, inserted - first, deleted - len(gone), done.version)

    def _rules(self, plan: Plan, window: Window) -> tuple[rules.Rules, frozenset[rules.Place]]:
        """The rules that `state` is to get, and those that it is to lose, by their places."""
        new = new_rules(plan, window)
        gone = rules.oldest({*plan.rules, *new}, rules.RULES_MAX) if new else frozenset()
        gone = frozenset(place for place in gone if place[0] in window.newest)
        if gone:
            self.say(
                f"partitions {sorted({p for p, _ in gone})} have had more than {rules.RULES_MAX} rules: "
                f"the {len(gone)} oldest are forgotten, and what they took goes by the oldest that is kept"
            )
        return {place: rule for place, rule in new.items() if place not in gone}, gone & plan.rules

    def _broadcast_if_small(self, source: DataFrame) -> DataFrame:
        """`source`, computed, which the joins of a MERGE take to where the rows of `state` are if it is small."""
        source.count()
        took = int(source._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())
        return F.broadcast(source) if took <= BROADCAST_BYTES_MAX else source

    def _progress(self, newest: Mapping[int, Newest], plan: Plan, more: Iterable[tuple[Any, ...]]) -> DataFrame:
        rows: list[tuple[Any, ...]] = [
            (row, p, "", b"", 0, n.covered_offset, n.epoch, n.commit, text, plan.offsets.topic_id, plan.run, True)
            for p, n in newest.items()
            for row, text in (("progress", n.body.decode()), ("origin", self.origin()))
            if text is not None
        ]
        schema = (
            "row string, partition int, store string, key binary, start_ms bigint, changelog_offset bigint, "
            f"epoch int, commit bigint, progress string, topic_id string, run bigint, {IS_LIVE} boolean"
        )
        return self.spark.createDataFrame([*rows, *more], schema)

    def _require_ours(self, path: str, plan: Plan) -> Row:
        """The version that this run's commit is. CompactionConflict where another job made it."""
        for row in islice(delta_log.commits(self.spark, path), tables.HISTORY_VERSIONS_MAX):
            if (said := note_of(row.userMetadata)).get(RUN) == plan.run:
                if said.get("job") != self.job and not (plan.adopted and path != self.state):
                    raise CompactionConflict(f"another job has done run {plan.run} of {path}; this one stops")
                return row
        raise CompactionConflict(f"{path} has moved on past run {plan.run}: another job is compacting; this one stops")

    def _look_after(self, summary: Summary) -> Summary:
        """OPTIMIZE and VACUUM, each where its policy says so."""
        stores = self.after.attempt("upkeep", lambda: self._known_stores({}), list[str]())
        others = (advances.path_of(self.settings.tables),)
        return summary._replace(**self.after.look_after(self.state, {s: self.closed(s) for s in stores}, others))


def new_rules(plan: Plan, window: Window) -> rules.Rules:
    """The rules that `state` lacks, of the partitions to write."""
    found = {**rules.of_earlier_releases(plan.covered, plan.rules), **window.rules}
    return {place: rule for place, rule in found.items() if place[0] in window.newest and place not in plan.rules}


def moved(newest: Mapping[int, Newest], plan: Plan, entries: Mapping[int, int]) -> dict[int, Newest]:
    """The partitions to write: those with entries, with progress beyond grids and the wall clock, or a long tail.

    One of which the run reads only the beginning has a long tail however far the run goes.
    """

    def has_moved(partition: int, new: Newest) -> bool:
        row = plan.covered.get(partition)
        if row is None or plan.is_cut(partition) or entries.get(partition) or new.epoch != row.epoch:
            return True
        tail = new.covered_offset - row.changelog_offset
        return tail > IDLE_RECORDS_MAX or _lasting(new.progress) != _lasting(decode_progress(row.progress.encode()))

    return {partition: new for partition, new in newest.items() if has_moved(partition, new)}


def _lasting(progress: Progress) -> Progress:
    return msgspec.structs.replace(progress, grids_ms={}, wall_ms=0)
