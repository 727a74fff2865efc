"""`penstock compact --with-late`: late records become corrections of closed windows, as rows of a higher revision.

A late record that stands in the late topic for the first time is put into the closed windows that it belongs to: with
sessions those within the gap of it, all made one; a session of its own where there is none; with tumbling and hopping
windows each that it lies in. Rows are only ever added to `closed`. Of the rows with the same partition, key, start_ms
and end_ms the one with the highest revision counts, and where that has no `state` (null, as its results) the window is
no more: it went into a wider one. A session that the stream closes within the gap of a corrected one goes into that one
too, in the next such run; what the stream itself cut in two stays in two unless a late record reaches both. The gap is
that of the commit which took the late record, whatever it is by now (see `gaps` and `session_joins`). A corrected
window's `changelog_offset` is the last one that the tables covered then: what has a higher one was closed since.

A late record is of the life of the application that its header names by the id of the changelog topic: those of an
earlier one (before `penstock streams reset`) are left out, and with them whatever stands before such a one and names
none.

A late record counts once the tables cover its source record, by the offset that its headers tell: until then the stream
may have closed its window in what no run has read yet. In each partition of the late topic a run ends before the first
that is not covered; it and what comes after it are the next run's.

What is covered are rows of `state` by store and late topic (see `late_coverage`). A late topic that the application had
before is read to its end, ahead of the one that it has now. A topic's corrections are one append, then the covered
offsets one MERGE. The append carries the number of the run, as Delta's transaction version, its topic, and where the
run ends, and so do its rows: what `state` lacks of appends, since a run crashed in between or an earlier `state` was
put back, the next run adopts first, of each topic the newest (see `late_runs`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import late_runs, late_states, rules, tables
from penstock.services.spark.bodies import StoreLayout
from penstock.services.spark.failures import CompactionConflict
from penstock.services.spark.gaps import gaps_of
from penstock.services.spark.generations import layouts_of, newest_stores
from penstock.services.spark.kafka import TopicOffsets, read_range, topic_offsets
from penstock.services.spark.late_coverage import Covered, LateCoverage
from penstock.services.spark.lives import IS_EARLIER, with_earlier
from penstock.services.spark.nearby import clustered, nearby, starts, with_nearby_sessions
from penstock.services.spark.origins import origin_of
from penstock.services.spark.runs import (
    CORRECTED,
    LATE_RUN,
    LATE_TOPIC,
    LATE_TOPIC_ID,
    Version,
    newest,
    newest_note,
    standing,
)
from penstock.services.spark.session import travelling
from penstock.services.spark.settings import CompactSettings
from penstock.shared.common.errors import FatalError, UnknownTopicOrPartition
from penstock.shared.streams import late_records as names
from penstock.shared.streams.changelog.format import StoreSchema, decode_progress

REFUSED_SAID_MAX = 10  # late records left out that are named one by one
_NOTE = "spark.databricks.delta.commitInfo.userMetadata"
_GROUP = ("partition", "key", "cluster")


class NotCorrectable(FatalError):
    """Late records of a store cannot be made corrections; the message says which store, and why."""


class Corrected(NamedTuple):
    """What a run did with late records: those taken, those left out, windows written anew, windows that went away.

    `late_waiting` are left for the next run, since the tables did not cover their source records when it began;
    `late_of_earlier_lives` were written before the application was reset, and are left out.
    """

    late_records: int = 0
    late_refused: int = 0
    corrected_windows: int = 0
    superseded_windows: int = 0
    late_waiting: int = 0
    late_of_earlier_lives: int = 0


class _Range(NamedTuple):
    """What is read of a late topic: the number of the run, and offsets by partition."""

    run: int
    topic: str
    topic_id: str
    start: dict[int, int]
    end: dict[int, int]


class Corrections:
    """The corrections of one application; `job` tells this process's commits from another's."""

    def __init__(self, spark: SparkSession, settings: CompactSettings, say: Any, job: str) -> None:
        self.spark, self.settings, self.say, self.job = spark, settings, say, job
        self.state = f"{settings.tables}/state"
        self.life: str | None = None
        """The id of the changelog that the tables were made from; None where they do not say."""
        self.covered: dict[int, int] = {}
        """By partition the next changelog offset, before which the tables cover everything."""
        self.rules: rules.Rules = {}

    def run(self) -> Corrected:
        """Correct each store that can be; then raise NotCorrectable where one could not."""
        rows = tables.progress_rows(self.spark, self.state)
        progress = {partition: decode_progress(row.progress.encode()) for partition, row in rows.items()}
        if not progress:
            return Corrected()
        if any(p.guarantee != "exactly_once" for p in progress.values()):
            raise NotCorrectable(
                "late records of an application with at_least_once may stand in their topic twice, or be of work that "
                "was done again: --with-late needs exactly_once"
            )
        self.covered = {partition: row.changelog_offset for partition, row in rows.items()}
        self.rules = rules.kept(self.spark.table(tables.delta(self.state)))
        self.rules = self.rules | rules.of_earlier_releases(rows, self.rules)
        stores, refused, done = newest_stores(progress.values()), [], Corrected()
        self.life = next((row.topic_id for row in rows.values() if row.topic_id), None)
        for store, layout in zip(stores, layouts_of(stores), strict=True):
            if store.late is None and not self._coverage(store).known():
                continue
            if reason := late_states.uncorrectable(store):
                refused.append(f"store {store.name!r}: {reason}")
                continue
            sources = {partition: p.sources.get(store.source, 0) for partition, p in progress.items()}
            try:
                done = added(done, self._correct(store, layout, sources))
            except late_runs.UnknownCorrections as e:
                refused.append(f"store {store.name!r}: {e}")
        if refused:
            raise NotCorrectable(f"late records cannot be made corrections. {'; '.join(refused)}")
        return done

    def _correct(self, store: StoreSchema, layout: StoreLayout, sources: Mapping[int, int]) -> Corrected:
        """Correct one store; `sources` are the offsets before which the tables cover its source, by partition."""
        coverage, settings, done = self._coverage(store), self.settings, Corrected()
        known = coverage.known()
        path, name = self._path(store), self._transaction(store)
        if lacks := late_runs.lacking(self.spark, path, name, known, store.late, self.say):
            for note in lacks:
                self._adopt(store, known, note)
            known = coverage.known()
        run = max((one.run for one in known), default=0)
        topics = coverage.to_read(known, store.late, settings.kafka, settings.kafka_timeout_ms)
        for topic, covered in topics:
            read = self._range(store, topic, covered, run)
            is_last = topic is topics[-1][0]  # whose turn also joins sessions that no new late record came near
            if read.end == covered and not is_last:
                continue
            taken, is_new = self._correct_topic(store, layout, sources, read, covered)
            run, done = read.run if is_new else run, added(done, taken)
        return done

    def _correct_topic(
        self,
        store: StoreSchema,
        layout: StoreLayout,
        sources: Mapping[int, int],
        read: _Range,
        covered: Mapping[int, int],
    ) -> tuple[Corrected, bool]:
        """Correct one store by one of its late topics; whether the tables say anything new of it then."""
        path = self._path(store)
        origin = origin_of(self.spark.table(tables.delta(self.state)))
        own = {} if origin is None else origin.late.get(read.topic, {})
        everything = self._late(store, layout, read, self._places(store, sources, own))
        everything = with_earlier(everything, self.life, "late_partition", "late_offset").persist()
        # What a backfill wrote there it has covered; the offsets of a file's rows are none of the topic.
        is_own = F.col("late_offset") < tables.by_partition(own, "late_partition")
        is_earlier = F.col(IS_EARLIER)
        streamed = everything.filter(~is_own & ~is_earlier)
        read = read._replace(end=read.end | first_waiting(streamed, sources))
        is_within = F.col("late_offset") < tables.by_partition(read.end, "late_partition")
        late, waiting = everything.filter(is_within), everything.filter(~is_within).count()
        if waiting:
            self.say(f"{store.name}: {waiting} late records wait for the run that covers their source records")
        earlier, late = late.filter(is_earlier).count(), late.filter(~is_earlier)
        if earlier:
            self.say(f"{store.name}: {earlier} late records are of an earlier life of the application, and left out")
        refused = late.filter("reason IS NOT NULL")
        for row in refused.orderBy("late_partition", "late_offset").limit(REFUSED_SAID_MAX).collect():
            self.say(f"left out: {read.topic}-{row.late_partition} at offset {row.late_offset}: {row.reason}")
        good = late.filter("reason IS NULL").withColumn("is_own", is_own)
        good = good.dropDuplicates(["partition", "source_offset", "is_own"])
        rows = self._rows(store, layout, good, read).persist()
        try:
            counts = rows.agg(F.count("state").alias("new"), F.count(F.lit(1)).alias("all")).first()
            assert counts is not None
            taken = Corrected(good.count(), refused.count(), counts.new, counts.all - counts.new, waiting, earlier)
            if taken.corrected_windows:
                self._append(store, rows, path, read)
            if is_new := bool(taken.corrected_windows) or read.end != covered:
                self._cover(store, read)
        finally:
            rows.unpersist()
            everything.unpersist()
        counted = f"{taken.late_records} late records, {taken.corrected_windows} windows corrected"
        self.say(f"{store.name}: {read.topic}: {counted}")
        return taken, is_new

    # --- where to read ---

    def _adopt(self, store: StoreSchema, known: list[Covered], note: Mapping[str, Any]) -> None:
        """Cover what an append has that `state` lacks: its run crashed, or an earlier `state` was put back."""
        run, topic, topic_id = int(note[LATE_RUN]), note.get(LATE_TOPIC), note.get(LATE_TOPIC_ID)
        if topic is None or topic_id is None:  # an earlier release's append: it knew the topic of now alone
            if store.late is None:
                topic, topic_id = known[-1].topic or "", known[-1].topic_id
            else:
                now = topic_offsets(self.spark, self.settings.kafka, store.late, self.settings.kafka_timeout_ms)
                topic, topic_id = now.topic, now.topic_id
        self.say(
            f"{store.name}: corrections {run}, of {topic}, are in its table and `state` lacks them: they count now"
        )
        ends = {int(partition): int(end) for partition, end in note[late_runs.TO_OFFSETS].items()}
        had = next((one.offsets for one in known if one.topic_id == topic_id), {})  # its rows may say less of some
        ends = {partition: max(end, had.get(partition, 0)) for partition, end in ends.items()} or had
        self._cover(store, _Range(run, topic, topic_id, ends, ends))

    def _range(self, store: StoreSchema, topic: TopicOffsets, covered: Mapping[int, int], run: int) -> _Range:
        """What to read of a topic; `run` is the newest run of the store's corrections that is covered."""
        start = dict(topic.earliest)
        for partition, offset in covered.items():
            if (first := topic.earliest.get(partition, 0)) > offset:
                gone = f"offsets {offset} to {first - 1}"
                self.say(f"{topic.topic}-{partition}: {gone} are gone, and what was in them is corrected by nobody")
            start[partition] = max(first, offset)
        path = self._path(store)
        taken = late_runs.last_taken(self.spark, path, self._transaction(store))
        next_run = late_runs.next_late_run(run, self._log(path), taken)
        end = {p: max(topic.latest[p], start[p]) for p in start}
        return _Range(next_run, topic.topic, topic.topic_id, start, end)

    def _coverage(self, store: StoreSchema) -> LateCoverage:
        return LateCoverage(self.spark, self.state, store.name, self.say)

    def _path(self, store: StoreSchema) -> str:
        return f"{self.settings.tables}/closed/{store.name}"

    def _transaction(self, store: StoreSchema) -> str:
        return f"penstock-late-{self.settings.application}-{store.name}"

    def _log(self, path: str) -> list[Version]:
        return tables.log(self.spark, path, LATE_RUN)

    def _places(self, store: StoreSchema, sources: Mapping[int, int], own: Mapping[int, int]) -> late_states.Places:
        """Where the source ends: it is asked after the late topic was, so that every late record's is there."""
        settings = self.settings
        try:
            held = topic_offsets(self.spark, settings.kafka, store.source, settings.kafka_timeout_ms)
        except UnknownTopicOrPartition:
            return late_states.Places(store.source, dict.fromkeys(sources), own)
        return late_states.Places(store.source, held.latest, own)

    # --- what to write ---

    def _late(self, store: StoreSchema, layout: StoreLayout, read: _Range, places: late_states.Places) -> DataFrame:
        """Late records with their state as a window of one, or the reason why they have none."""

        def header(name: str) -> SparkColumn:
            found = F.filter("headers", lambda h: h["key"] == name)
            return F.try_element_at(found, F.lit(-1))["value"].cast("string")

        records = read_range(self.spark, self.settings.kafka, read.topic, read.start, read.end, headers=True)
        own = [(names.TOPIC, store.source), (names.STORE, store.name)]
        own.append((names.APPLICATION, self.settings.application))
        for name, ours in own:
            records = records.filter(F.coalesce(header(name) == ours, F.lit(True)))
        told = {"partition": (names.PARTITION, "INT"), "source_offset": (names.OFFSET, "BIGINT")}
        told["closed_ms"] = (names.STREAM_TIME_MS, "BIGINT")
        columns = [header(name).try_cast(type_).alias(alias) for alias, (name, type_) in told.items()]
        columns.append(header(names.CHANGELOG_ID).alias("life"))
        at = (F.col("partition").alias("late_partition"), F.col("offset").alias("late_offset"))
        schema = (
            "late_partition INT, late_offset BIGINT, partition INT, source_offset BIGINT, closed_ms BIGINT, "
            f"life STRING, timestamp_ms BIGINT, key BINARY, state {tables.struct_type(layout)}, reason STRING"
        )
        with travelling(late_states, *late_states.TRAVELS):
            return records.select(*at, *columns, "timestamp_ms", "key", "value").mapInArrow(
                late_states.late_states(store.aggregations, layout, places), schema
            )

    def _rows(self, store: StoreSchema, layout: StoreLayout, late: DataFrame, read: _Range) -> DataFrame:
        """The rows to append: corrected windows, and those that went into a wider one, without a state."""
        members = self._members(store, layout, late, self._path(store))
        came = F.struct("is_late", "came", "start_ms", "state")
        end = F.when(F.col("is_late"), F.struct("late_partition", tables.by_partition(read.end, "late_partition")))
        grouped = members.groupBy(*_GROUP).agg(
            F.min("start_ms").alias("to_start_ms"),
            F.max("end_ms").alias("to_end_ms"),
            F.max("closed_ms").alias("closed_ms"),
            (F.greatest(F.max("revision"), F.lit(0)) + 1).alias("revision"),
            F.max("is_late").alias("has_late"),
            F.count(F.lit(1)).alias("members"),
            F.sort_array(F.collect_list(came)).alias("states"),
            F.collect_set(end).alias("ends"),
        )
        by = late_runs.corrected_by(read.run, read.topic, read.topic_id, F.map_from_entries("ends"))
        grouped = grouped.filter("has_late OR members > 1").withColumn("corrected_by", by)
        grouped = grouped.drop("has_late", "members", "ends")
        head = [name for name in grouped.columns if name != "states"]
        types = ", ".join(f"{name} {type_}" for name, type_ in grouped.dtypes if name in head)
        with travelling(late_states, *late_states.TRAVELS):
            merged = grouped.mapInArrow(
                late_states.merged_states(store.aggregations, layout, head),
                f"{types}, merged {tables.struct_type(layout)}",
            )
        last = tables.by_partition(self.covered) - 1
        more = (last.alias("changelog_offset"), F.unix_millis(F.now()).alias("written_ms"))
        common = ("partition", "key", "closed_ms", "revision", "corrected_by")
        bounds = (F.col("to_start_ms").alias("start_ms"), F.col("to_end_ms").alias("end_ms"))
        new = merged.select(*common, *bounds, F.col("merged").alias("state"), *more)
        wider = (F.col("start_ms") != F.col("to_start_ms")) | (F.col("end_ms") != F.col("to_end_ms"))
        gone = members.filter(~F.col("is_late")).select(*_GROUP, "start_ms", "end_ms").join(merged, list(_GROUP))
        none = F.lit(None).cast(tables.struct_type(layout)).alias("state")
        gone = gone.filter(wider).select(*common, "start_ms", "end_ms", none, *more)
        return tables.closed_frame(new.unionByName(gone), store, are_corrections=True)

    def _members(self, store: StoreSchema, layout: StoreLayout, late: DataFrame, path: str) -> DataFrame:
        """Late records as windows, closed windows of their keys, and which of them belong together (`cluster`)."""
        columns = ["partition", "key", "start_ms", "end_ms", "state", "closed_ms", "revision", "came"]
        columns += ["changelog_offset", "reach_ms", "late_partition"]
        closed_ms = F.coalesce("closed_ms", "timestamp_ms").alias("closed_ms")
        start = F.col("timestamp_ms") if store.kind == "session" else F.explode(starts(store))
        end = F.col("start_ms") + (0 if store.kind == "session" else store.size_ms)
        at = [F.lit(-1).alias("revision"), F.col("source_offset").alias("came")]
        at.append(F.lit(None).cast("bigint").alias("changelog_offset"))
        session = store.kind == "session"
        # A backfill's may name a row of a file: it took them by the first rule that there was.
        gaps, offset = gaps_of(self.rules, store), F.when(~F.col("is_own"), F.col("source_offset")).otherwise(-1)
        at.append((gaps.of_record(offset) if session else F.lit(0)).cast("bigint").alias("reach_ms"))
        ours = late.select("partition", "key", start.alias("start_ms"), "state", closed_ms, "late_partition", *at)
        ours = ours.withColumn("end_ms", end).select(*columns).withColumn("is_late", F.lit(True))
        if not tables.exists(self.spark, path):
            alone = ours.withColumn("is_new", F.lit(False))
            return clustered(alone) if session else ours.withColumn("cluster", F.col("start_ms"))

        def read(found: DataFrame) -> DataFrame:
            fields = [F.col("state")[name].alias(name) for name, _ in layout.columns]
            computed = {
                "key": F.col("key").cast("binary"),
                "closed_ms": F.unix_millis("closed_at"),
                "came": F.lit(-1).cast("bigint"),
                "state": F.struct(*fields).cast(tables.struct_type(layout)),
                "reach_ms": F.lit(None).cast("bigint"),
                "late_partition": F.lit(None).cast("int"),
            }
            return found.withColumns(computed).select(*columns).withColumn("is_late", F.lit(False))

        closed = self.spark.table(tables.delta(path))
        if session:
            return with_nearby_sessions(closed, ours, gaps, read)
        return ours.unionByName(read(nearby(closed, ours))).withColumn("cluster", F.col("start_ms"))

    # --- writing it ---

    def _append(self, store: StoreSchema, rows: DataFrame, path: str, read: _Range) -> None:
        said: dict[str, Any] = {LATE_RUN: read.run, "job": self.job, late_runs.TO_OFFSETS: read.end}
        said |= {LATE_TOPIC: read.topic, LATE_TOPIC_ID: read.topic_id}
        tables.append_closed(rows, store, path, (self._transaction(store), read.run), json.dumps(said))
        notes = [version.note for version in self._log(path) if version.note.get(LATE_RUN) == read.run]
        if not any(note["job"] == self.job for note in notes):
            raise CompactionConflict(f"another job has made corrections {read.run} of {path}; this one stops")

    def _cover(self, store: StoreSchema, read: _Range) -> None:
        """Say how far the late topic is covered, unless another job has covered more by now."""
        said = json.dumps({LATE_RUN: read.run, "job": self.job, CORRECTED: self._corrected(store)})
        self.spark.conf.set(_NOTE, said)
        try:
            self._coverage(store).cover(read.topic, read.topic_id, read.end, read.run)
        finally:
            self.spark.conf.unset(_NOTE)

    def _corrected(self, store: StoreSchema) -> dict[str, int]:
        """By store the newest run of corrections that is in its table, as this run knows it then."""
        known: dict[str, int] = newest_note(standing(self._log(self.state)), CORRECTED).get(CORRECTED, {})
        found = newest(standing(self._log(self._path(store))), LATE_RUN)
        return {**known, store.name: found} if found else known


def added(one: Corrected, other: Corrected) -> Corrected:
    """Both numbers of everything together."""
    return Corrected(*map(sum, zip(one, other, strict=True)))


def first_waiting(late: DataFrame, sources: Mapping[int, int]) -> dict[int, int]:
    """By partition of the late topic the first offset of which the source record is not covered (see `_correct`)."""
    waits = (F.col("source_offset") >= tables.by_partition(sources)) & F.col("reason").isNull()
    first = late.filter(waits).groupBy("late_partition").agg(F.min("late_offset").alias("offset"))
    return {row.late_partition: row.offset for row in first.collect()}
