"""`penstock backfill`: an application's first state from history, and the hand-over to its aggregator.

The tasks run in Spark (see `replay`); what they would have written to the changelog is folded into the tables as a
compaction folds a changelog. The progress that the tables hold then is what a restore begins with: the aggregator reads
its sources from where the backfill ended, and the changelog from its beginning. There the backfill first of all leaves
a record that names the tables (see `marks`), so that nobody begins without them, however far it came.

It makes an application's first state or none: where the lake or the changelog has some, it refuses. A backfill that
crashed before its MERGE left nothing that counts; the next one that is asked for the same goes on from the same starts
up to the same ends, and appends nothing twice. The aggregator and a compaction refuse meanwhile. One that crashed after
its MERGE has ended: asked for again, it finds nothing to do but its upkeep.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import tables
from penstock.services.spark.asked import SOURCE, asked, require_same, require_same_source
from penstock.services.spark.backfill_inputs import Ends, History, read_history
from penstock.services.spark.backfill_outputs import not_there, write_outputs
from penstock.services.spark.changelog import Newest
from penstock.services.spark.fold import Fold, Plan, Say, Summary
from penstock.services.spark.kafka import READ_SCHEMA, TopicOffsets, read_range, topic_offsets
from penstock.services.spark.marks import read_marks, write_marks
from penstock.services.spark.origins import Origin, origin_of
from penstock.services.spark.replay import COUNTED, OUT_SQL, ReplayJob, nothing, replay
from penstock.services.spark.runs import RUN, newest_note, standing
from penstock.services.spark.settings import BackfillSettings
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.errors import ConfigError
from penstock.shared.streams.changelog.format import decode_progress
from penstock.shared.streams.lake_names import require_lake_names
from penstock.shared.streams.settings import StreamsSettings, TaskSettings
from penstock.shared.streams.task_metrics import Totals
from penstock.shared.streams.topics import prepare_topics
from penstock.shared.streams.topology import Topology
from penstock.shared.streams.topology_loading import load_topology

FIRST_RUN = 1


class Backfill(Fold):
    """One backfill. Give it a Spark session, then `run()`."""

    settings: BackfillSettings

    def __init__(self, spark: SparkSession, settings: BackfillSettings, say: Say) -> None:
        super().__init__(spark, settings, say)
        self.now_ms = int(time.time() * 1000)
        self.topology = load_topology(settings.topology, settings.topology_options)
        require_whole_partitions(self.topology)
        require_lake_names(self.topology.schemas())
        self.history: History | None = None
        self.hand_over: Ends = {}
        self.written: dict[str, int] = {}
        """Records that the tasks had for each topic but the changelog, of those that are written."""
        self.left_out: dict[str, int] = {}
        """The same of those that are not, as `outputs` has it."""
        self.counted = Totals(0, 0, 0, 0, 0)
        self.late_ends: Ends = {}
        """The late topics' ends once the tasks' late records were written there."""
        self._outputs_from: Ends = {}
        self._out: DataFrame | None = None

    def plan(self) -> Plan:
        """Make the topics that are missing; ConfigError where the application has state already."""
        settings = self.settings
        streams = StreamsSettings(
            application_id=settings.application,
            topic_wait_ms=settings.kafka_timeout_ms,
            **settings.model_dump(include=set(TaskSettings.model_fields)),
        )
        if streams.changelog_topic != settings.changelog_topic:
            raise ConfigError(f"changelog: the aggregator's is {streams.changelog_topic}")
        asyncio.run(prepare_topics(settings.kafka, streams, self.topology, SYSTEM_CLOCK))
        offsets = self._offsets(settings.changelog_topic)
        covered, known, live_rows = tables.covered_rows(self.spark, self.state)
        if self._has_ended(covered, offsets):
            return self._nothing_left(covered, offsets)._replace(live_rows=live_rows, rules=known)
        pending = self._pending()
        adopted = None if pending is None else _ends(pending.get("to_sources"))
        starts = None if pending is None else _ends(pending.get("from_sources"))
        if pending is not None and adopted is None:
            raise ConfigError(f"{settings.tables} holds closed windows of a compaction that was not ended: finish it")
        if pending is not None and adopted is not None:
            require_same(pending.get("asked"), asked(settings, self.topology), settings.tables)
            self.now_ms = int(pending.get("now_ms", self.now_ms))  # what was too far ahead then still is
            self.say("a backfill was begun and not ended: this one goes on up to where that meant to go")
        topics = self.topology.source_topics()
        self.history = read_history(self.spark, settings, topics, self.now_ms, adopted, starts)
        began = None if pending is None else _ends(pending.get("outputs_from"))
        self._outputs_from = self._output_ends() if pending is None else began or {}
        if pending is not None:
            require_same_source(pending["asked"].get(SOURCE), self.history.source, settings.tables)
        self.hand_over = self.history.ends
        self.say(f"order: {self.history.order}")
        return Plan(
            FIRST_RUN,
            {},
            offsets,
            dict.fromkeys(offsets.latest, 0),
            offsets.latest,
            adopted is not None,
            offsets.latest,
        )

    def records(self, plan: Plan) -> DataFrame:
        """What the tasks would have written to the changelog; what was for other topics is written there."""
        assert self.history is not None
        settings = self.settings
        write_marks(settings.kafka, plan.offsets, settings.application, settings.tables, self.now_ms)
        job = self._job(self.history, plan.offsets.topic_id)
        out = self.history.records.mapInArrow(replay(job), OUT_SQL).persist()
        entries = out.filter(F.col("topic").isNull()).drop("topic", "headers", "source_key")
        begun = {row.partition for row in entries.select("partition").distinct().collect()}
        idle = [row for p in sorted(plan.offsets.latest.keys() - begun) for row in nothing(job, p)]
        by_topic = out.filter(F.col("topic") != COUNTED).groupBy("topic").count()
        had = {row.topic: row["count"] for row in by_topic.collect()}
        self.written = {topic: n for topic, n in had.items() if self._is_written(topic)}
        self.left_out = {topic: n for topic, n in had.items() if topic not in self.written}
        self._count(out.filter(F.col("topic") == COUNTED).select("value").collect())
        self._out = out
        if not idle:
            return entries
        more = self.spark.createDataFrame([row[:5] for row in idle], READ_SCHEMA)
        return entries.unionByName(more)

    def before_merge(self, plan: Plan) -> None:
        """What was for other topics than the changelog is written there, unless a run that crashed has done so."""
        assert self._out is not None
        settings, wanted = self.settings, self._wanted()
        if not wanted:
            return
        out = self._out.filter(F.col("topic").isin(wanted))
        if (there := self._outputs_there(plan)) is not None:
            out = not_there(out, there, self._refused())
        written = asyncio.run(write_outputs(settings.kafka, settings.max_request_size, out.toLocalIterator()))
        self.say("records written: " + ", ".join(f"{written[topic]} to {topic}" for topic in wanted))
        late = sorted({source.late for source in self.topology.sources() if source.late in wanted})
        self.late_ends = {topic: self._offsets(topic).latest for topic in late}

    def covered(self, newest: Mapping[int, Newest]) -> dict[int, Newest]:
        """The tables cover the sources, and nothing of the changelog."""
        return {partition: progress._replace(covered_offset=0) for partition, progress in newest.items()}

    def note(self, after: Mapping[int, int]) -> dict[str, Any]:
        """As a compaction's, with the source offsets, the moment it takes for now, and what it was asked for."""
        assert self.history is not None
        return {
            **super().note(after),
            "from_sources": self.history.starts,
            "to_sources": self.history.ends,
            "outputs_from": self._outputs_from,
            "now_ms": self.now_ms,
            "asked": asked(self.settings, self.topology) | {SOURCE: self.history.source},
        }

    def origin(self) -> str:
        """Where history began, for who audits it or corrects it."""
        assert self.history is not None
        words = asked(self.settings, self.topology)
        unwritten = {topic: n for topic, n in self.left_out.items() if topic in self._refused()}
        starts, ends = self.history.starts, self.history.ends
        origin = Origin(self.settings.files is not None, starts, self.late_ends, words, ends, unwritten)
        return msgspec.json.encode(origin).decode()

    def more(self) -> dict[str, Any]:
        """Where the aggregator goes on, the order that was taken, what was read and what the tasks had for each topic.

        Of the records that were `read`, `skipped` are those without a key or value that is needed, and those whose
        error a handler passed over.
        """
        told: dict[str, Any] = {"hand_over": self.hand_over}
        if self.history is None:
            return told
        counts = {"read": self.counted.records, **self.counted._asdict()}
        read = {name: counts[name] for name in ("read", "skipped", "late", "dead_letters")}
        outputs = {"outputs": self.written, "outputs_left_out": self.left_out}
        return {**told, "order": self.history.order, **read, **outputs}

    def after_merge(self, plan: Plan, summary: Summary) -> None:
        """Nothing of the history is needed any more."""
        self.spark.catalog.clearCache()

    def _offsets(self, topic: str) -> TopicOffsets:
        return topic_offsets(self.spark, self.settings.kafka, topic, self.settings.kafka_timeout_ms)

    def _pending(self) -> dict[str, Any] | None:
        """What the appends of a crashed run said of it, None where there was none."""
        logs = (tables.log(self.spark, self.closed(store)) for store in self._known_stores({}))
        notes = (newest_note(standing(log)) for log in logs)
        return next((dict(note) for note in notes if note.get(RUN) == FIRST_RUN), None)

    def _count(self, rows: Iterable[Row]) -> None:
        """Add up what the tasks counted, and say it."""
        totals = [msgspec.json.decode(bytes(row.value), type=Totals) for row in rows]
        self.counted = Totals(*map(sum, zip(*totals, strict=True))) if totals else self.counted
        read, _, late, dead, skipped = self.counted
        reasons = "without a key or value, or with an error that a handler passed over"
        self.say(f"{read} records read: {skipped} skipped ({reasons}), {dead} dead letters, {late} late")

    def _refused(self) -> list[str]:
        """The topics of late records and dead letters."""
        names = {name for source in self.topology.sources() for name in (source.late, source.dead_letters)}
        return sorted(name for name in names if name is not None)

    def _is_written(self, topic: str) -> bool:
        outputs = self.settings.outputs
        return outputs == "all" or (outputs == "refused" and topic in self._refused())

    def _wanted(self) -> list[str]:
        return [topic for topic in self.topology.output_topics() if self._is_written(topic)]

    def _output_ends(self) -> Ends:
        return {topic: self._offsets(topic).latest for topic in self._wanted()}

    def _outputs_there(self, plan: Plan) -> DataFrame | None:
        """What the topics have got since a backfill that crashed began to write; None where there was none.

        Where that one left no append, its late records and dead letters are still known by the changelog's id.
        """
        if not any(plan.offsets.latest.values()):
            return None
        found: DataFrame | None = None
        for topic in self._wanted():
            start = self._outputs_from.get(topic) if plan.adopted else None
            if start is None and topic not in self._refused():
                continue
            offsets = self._offsets(topic)
            first = {p: max(earliest, (start or {}).get(p, 0)) for p, earliest in offsets.earliest.items()}
            rows = read_range(self.spark, self.settings.kafka, topic, first, offsets.latest, headers=True)
            rows = rows.withColumn("topic", F.lit(topic))
            found = rows if found is None else found.unionByName(rows)
        return found

    def _job(self, history: History, changelog_id: str) -> ReplayJob:
        settings = self.settings
        return ReplayJob(
            settings.topology,
            settings.topology_options,
            str(Path.cwd()),
            settings.application,
            settings.processing_guarantee,
            settings.error_handlers,
            settings.max_future_ms,
            settings.max_request_size,
            settings.key_bytes_max,
            settings.commit_records,
            history.ends,
            history.source_ids,
            changelog_id,
            self.now_ms,
        )

    def _has_ended(self, covered: Mapping[int, Row], changelog: TopicOffsets) -> bool:
        """Whether this very backfill has ended, and nothing came after it.

        ConfigError where the application has another state, or a backfill into another lake was begun.
        """
        settings = self.settings
        marks = read_marks(self.spark, settings.kafka, changelog, changelog.latest)
        said = "A backfill makes an application's first state: give the application another id, or start it afresh"
        if covered:
            origin = None if marks.begun else origin_of(self.spark.table(tables.delta(self.state)))
            if origin is not None and origin.asked == asked(settings, self.topology):
                return True
            raise ConfigError(f"{settings.tables} has state already. {said}")
        if marks.begun:
            raise ConfigError(f"{changelog.topic} has records already (partitions {list(marks.begun)}). {said}")
        if marks.rests_on not in (None, settings.tables):
            raise ConfigError(
                f"lake: {changelog.topic} rests on {marks.rests_on}, into which a backfill was begun: run it again as "
                "it was, or begin anew (`penstock streams reset`, then `penstock backfill`)"
            )
        return False

    def _nothing_left(self, covered: dict[int, Row], changelog: TopicOffsets) -> Plan:
        """The plan of a backfill that has ended: it was killed in its upkeep, or nobody saw its end."""
        for partition, row in covered.items():
            for topic, offset in decode_progress(row.progress.encode()).sources.items():
                self.hand_over.setdefault(topic, {})[partition] = offset
        self.say("this backfill has ended already: its aggregator can be started")
        start = dict.fromkeys(changelog.latest, 0)
        return Plan(FIRST_RUN + 1, covered, changelog, start, start, False, start)

    def _fold(self, plan: Plan) -> tuple[Plan, Summary]:
        return super()._fold(plan) if self.history is not None else (plan, self._nothing_new(plan))


def require_whole_partitions(topology: Topology) -> None:
    """ConfigError where a task needs more than its partition of the source topics."""
    beyond = [*topology.internal_topics(), *(table.topic for table in topology.global_tables.values())]
    if beyond:
        raise ConfigError(
            f"topology: a backfill runs each partition by itself, and this topology needs {', '.join(beyond)} as well: "
            "a topic that it writes itself, or a global table"
        )


def _ends(said: Any) -> Ends | None:
    """Source ends as an append's note has them: JSON knows only text as keys."""
    if not isinstance(said, dict):
        return None
    return {topic: {int(p): int(offset) for p, offset in ends.items()} for topic, ends in said.items()}
