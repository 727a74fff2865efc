"""One compaction: the changelog since the covered offsets, folded into the Delta tables (see `fold`).

Afterwards, where it is told to, it makes late records corrections (see `corrections`), and deletes changelog records:
those that the snapshot before its own covers, never more.

A run reads `run_records_max` records at most, so that a backlog of any size is made up for in runs that each count.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pyspark.sql import DataFrame, Row, SparkSession

from penstock.services.spark import advances, runs, tables
from penstock.services.spark.asked import require_no_backfill
from penstock.services.spark.changelog import Newest, Window, known, read_window
from penstock.services.spark.corrections import Corrected, Corrections
from penstock.services.spark.fold import Fold, Plan, Say, Summary
from penstock.services.spark.generations import newest_stores
from penstock.services.spark.kafka import TopicOffsets, changelog_offsets, delete_records, read_range, topic_offsets
from penstock.services.spark.late_coverage import LateCoverage
from penstock.services.spark.marks import Marks, read_marks
from penstock.services.spark.settings import CompactSettings
from penstock.shared.common.errors import ChangelogHole, PenstockError
from penstock.shared.streams.changelog.format import decode_progress

WAY_OUT = (
    "put back one whose covered offsets the changelog still has (that before the newest it has, by RESTORE for "
    "instance), or begin anew (`penstock streams reset`, then `penstock backfill`)"
)
NO_TABLES = (
    "there are no tables at {}, and the changelog was compacted before: into another lake (is it --lake, or "
    "streams.lake, as the aggregator has it?), or its tables are lost (put a copy back)"
)


class Compaction(Fold):
    """One run for one application. Give it a Spark session, then `run()`."""

    settings: CompactSettings

    def __init__(self, spark: SparkSession, settings: CompactSettings, say: Say) -> None:
        super().__init__(spark, settings, say)
        self.corrected: Corrected | None = None
        self.late_left: frozenset[tuple[str, str]] = frozenset()

    def plan(self) -> Plan:
        """Where to read; raises ChangelogHole where the changelog does not go on where the tables end.

        Raises UnfinishedBackfill where the tables hold what a backfill left that crashed, StateGone where what one
        left is lost, and TablesDisagree where `closed` lacks what `state` covers.
        """
        settings = self.settings
        covered, known_rules, live_rows = tables.covered_rows(self.spark, self.state)
        offsets = changelog_offsets(self.spark, settings)
        start = {p: covered[p].changelog_offset if p in covered else 0 for p in offsets.earliest}
        covered_run = max((row.run for row in covered.values()), default=0)
        closed = self._closed_logs(covered)
        next_ = self._next(covered, covered_run, closed)
        put_back = runs.put_back(covered_run, next_)
        try:
            require_no_hole(offsets, covered, start)
        except ChangelogHole as e:
            if not covered and put_back is None:
                raise ChangelogHole(f"{NO_TABLES.format(settings.tables)}: {e}") from None
            raise e if put_back is None else ChangelogHole(f"{e}. {put_back}: {WAY_OUT}") from None
        cap, adopted = offsets.latest, next_.adopted
        require_no_backfill(adopted, offsets.latest, settings.tables, self._marks(offsets, covered))
        runs.require_same_changelog(closed, offsets.topic_id, is_covered=bool(covered), folder=settings.tables)
        if put_back is not None:
            self.say(f"{put_back}; what the changelog has since then is folded into `state` once more")
        elif adopted is not None:
            self.say(f"run {next_.run} was begun and not ended: it goes on up to where it meant to go")
        if settings.accept_lost_windows:
            nothing = "--accept-lost-windows accepts nothing: no windows are missing but what was accepted before"
            self.say(nothing if next_.lost is None else f"accepted: {next_.lost}")
        if adopted is not None:
            ends = {p: int(adopted["to_offsets"].get(str(p), first)) for p, first in start.items()}
            cap = {p: min(ends[p], latest) for p, latest in offsets.latest.items()}
        end = bounded(start, cap, settings.run_records_max)
        had = (next_.ahead, next_.appended, next_.corrected, next_.lost is not None, live_rows, known_rules)
        return Plan(next_.run, covered, offsets, start, end, adopted is not None, cap, *had)

    def _marks(self, offsets: TopicOffsets, covered: Mapping[int, Row]) -> Marks:
        """What the changelog says to rest on, where partitions of it are in no table."""
        begun = {p for p, first in offsets.earliest.items() if p not in covered and first < offsets.latest[p]}
        return read_marks(self.spark, self.settings.kafka, offsets, begun) if begun else Marks()

    def _closed_logs(self, covered: Mapping[int, Row]) -> dict[str, list[runs.Version]]:
        """The versions of each store's table, of those that are there."""
        logs = {store: tables.log(self.spark, self.closed(store)) for store in self._known_stores(covered)}
        return {store: log for store, log in logs.items() if log}

    def _next(
        self, covered: Mapping[int, Row], covered_run: int, closed: Mapping[str, list[runs.Version]]
    ) -> runs.Next:
        """The next run, by the tables' logs."""
        forgotten = [store for store, log in closed.items() if not runs.newest(log)]
        return runs.next_run(
            {p: row.changelog_offset for p, row in covered.items()},
            covered_run,
            tables.log(self.spark, self.state),
            closed,
            accept_lost=self.settings.accept_lost_windows,
            taken=max((self.appended_last(store) for store in forgotten), default=0),
        )

    def records(self, plan: Plan) -> DataFrame:
        """The changelog records of the run (READ_SCHEMA)."""
        topic, kafka = plan.offsets.topic, self.settings.kafka
        self.say(f"reading {sum(plan.end[p] - first for p, first in plan.start.items())} changelog records")
        return read_range(self.spark, kafka, topic, plan.start, plan.end, split=True)

    def window(self, plan: Plan, records: DataFrame) -> Window:
        """What the records say."""
        window = read_window(self.spark, plan.offsets.topic, records, known(plan.covered))
        self.late_left = window.late_left
        return window

    def before_merge(self, plan: Plan) -> None:
        """Keep what late topics the stores had before the run: `--with-late` reads those to their ends."""
        settings = self.settings
        for store, topic in sorted(self.late_left):
            coverage = LateCoverage(self.spark, self.state, store, self.say)
            try:
                coverage.remember(topic, settings.kafka, settings.kafka_timeout_ms)
            except PenstockError as e:
                self.say(f"{store}: its earlier late topic {topic} cannot be kept for --with-late: {e}")

    def wider(self, plan: Plan, newest: Mapping[int, Newest]) -> Plan | None:
        """Twice as much of each partition whose range ends before the commit does that is next; None where none does.

        Without it a commit larger than the range would stop the partition for ever.
        """
        stuck = [p for p, end in plan.end.items() if plan.start[p] < end < plan.cap[p] and p not in newest]
        if not stuck:
            return None
        self.say(f"no commit ends within the run's range of partitions {stuck}: they are read on")
        further = {p: min(plan.cap[p], 2 * plan.end[p] - plan.start[p]) for p in stuck}
        return plan._replace(end=plan.end | further)

    def more(self) -> dict[str, Any]:
        """What was done with late records, where that was asked for."""
        return {} if self.corrected is None else self.corrected._asdict()

    def after_merge(self, plan: Plan, summary: Summary) -> None:
        """What is done once the run counts: none of it waits for another, nor the upkeep for any of it."""
        attempt = self.after.attempt
        if self.settings.with_late and not summary.remaining_records:
            corrections = Corrections(self.spark, self.settings, self.say, self.job)
            self.corrected = attempt("the correction by late records", corrections.run, None)
        if summary.to_offsets != summary.from_offsets:
            if self.settings.delete_covered:
                attempt("the deletion from the changelog", lambda: self._delete_covered(plan), None)
            attempt("upkeep of advances", lambda: self._forget_advances(plan), None, is_upkeep=True)

    def _forget_advances(self, plan: Plan) -> None:
        """Keep no more advances than the source topics have records; a topic that cannot be asked keeps them all."""
        progress = {p: decode_progress(row.progress.encode()) for p, row in plan.covered.items()}
        if not advances.moved_on_ms(progress):
            return
        settings = self.settings
        for store in filter(advances.has_time_of_its_own, newest_stores(progress.values())):
            try:
                held = topic_offsets(self.spark, settings.kafka, store.source, settings.kafka_timeout_ms)
            except PenstockError as e:
                self.say(f"{store.source}: all advances of its time are kept: {e}")
                continue
            advances.forget(self.spark, settings.tables, store.name, held.earliest)

    def _delete_covered(self, plan: Plan) -> None:
        """Delete what the snapshot before this one covers: who restores from that one still finds the rest."""
        before = {
            p: row.changelog_offset
            for p, row in plan.covered.items()
            if row.changelog_offset > plan.offsets.earliest[p]
        }
        if before:
            settings = self.settings
            delete_records(self.spark, settings.kafka, plan.offsets.topic, before, settings.kafka_timeout_ms)
            self.say(f"deleted changelog records of {len(before)} partitions, up to the snapshot before")


def bounded(start: Mapping[int, int], latest: Mapping[int, int], records_max: int) -> dict[int, int]:
    """Where to end, so that no more than `records_max` records (and one a partition) are read, shared out evenly.

    >>> bounded({0: 0, 1: 5, 2: 0}, {0: 10, 1: 105, 2: 90}, 50)
    {0: 10, 1: 25, 2: 20}
    """
    ends, room = {}, records_max
    waiting = sorted(latest, key=lambda p: latest[p] - start[p])
    for place, partition in enumerate(waiting):
        share = max(1, room // (len(waiting) - place))
        taken = min(share, max(0, latest[partition] - start[partition]))
        ends[partition] = start[partition] + taken
        room -= taken
    return dict(sorted(ends.items()))


def require_no_hole(offsets: TopicOffsets, covered: Mapping[int, Row], start: Mapping[int, int]) -> None:
    """Raise ChangelogHole unless the topic is the one that was covered, and goes on where that ended."""
    topic = offsets.topic
    for partition, row in covered.items():
        if row.topic_id != offsets.topic_id:
            raise ChangelogHole(
                f"{topic} was deleted and made again: its id is {offsets.topic_id}, "
                f"that of the snapshot is {row.topic_id}"
            )
        if partition not in start:
            raise ChangelogHole(f"{topic} has no partition {partition} (any more), which the snapshot covers")
    for partition, first in start.items():
        earliest, latest = offsets.earliest[partition], offsets.latest[partition]
        if earliest > first:
            raise ChangelogHole(
                f"{topic}-{partition}: offsets {first} to {earliest - 1} are gone and were not compacted"
            )
        if latest < first:
            raise ChangelogHole(
                f"{topic}-{partition} ends at {latest}, before the covered offset {first}: "
                f"offsets {latest} to {first - 1} are missing"
            )
