"""Which runs of corrections are in a store's closed windows, whatever became of the tables since (see `corrections`).

A run says who it was in three places of its one append: its note in the table's log, with its late topic and where it
ended; Delta's transaction version, its number alone; and the column `corrected_by` of its rows, with the late topic,
and where it ended in those partitions that the late records of the window came from. Delta's log retention takes the
notes, a copy of rows alone has neither notes nor versions, and rows that go by retention take with them what they said,
and what they had taken. So the log is asked as far as it goes, Delta's version whether there is anything more, and the
rows what that is. What an earlier release's rows took nobody knows: where nothing else says it, nothing is corrected.
"""

# ruff: noqa: S608 - SQL is told to people, and no table's name is made of more than settings
from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import delta_log, tables
from penstock.services.spark.late_coverage import Covered, settled_run
from penstock.services.spark.runs import (
    LATE_RUN,
    LATE_TOPIC,
    LATE_TOPIC_ID,
    RUN,
    Version,
    is_down_to,
    newest,
    standing,
)
from penstock.shared.common.errors import FatalError

TO_OFFSETS = "to_offsets"
_SAID = "run BIGINT, topic STRING, topic_id STRING, to_offsets MAP<STRING, BIGINT>"
Note = Mapping[str, Any]


class UnknownCorrections(FatalError):
    """Closed windows have corrections that nobody knows what they took; the message says why, and the way out."""


def last_taken(spark: SparkSession, path: str, name: str) -> int:
    """The newest run that Delta knows by the transaction `name`, -1 where it knows none.

    Ask it before the log: what another job appends in between the log then says.
    """
    return delta_log.transaction(spark, path, name) if tables.exists(spark, path) else -1


def lacking(
    spark: SparkSession, path: str, name: str, known: Sequence[Covered], late: str | None, say: Callable[[str], object]
) -> list[Note]:
    """What the runs said of themselves that the table at `path` has and `state` lacks, of each late topic the newest.

    `name` is their transaction, `known` what `state` has of late topics, `late` that of now. Raises UnknownCorrections.
    """
    settled, taken = settled_run(known, late), last_taken(spark, path, name)
    log = tables.log(spark, path, LATE_RUN, settled)
    covered = {one.topic_id: one.run for one in known}
    if is_told(log, settled, taken):
        return pending(covered, notes(log))
    rows = said_by_rows(spark.table(tables.delta(path)))
    if rows:
        say(
            f"the log of {path} does not go back to corrections {settled}, which `state` covers (Delta's log "
            "retention, or a copy of rows alone): the rows are asked which there are since"
        )
    own = notes(log)
    found = [*own, *notes_of_rows(rows)]
    if not is_known(rows, found, max(covered.values(), default=0)):
        newest_run = max(taken, *covered.values(), *(note[LATE_RUN] for note in found)) if known else None
        raise UnknownCorrections(refusal(path, newest_run, can_be_made_anew=bool(known) or not own))
    return pending(covered, found)


def is_told(log: Sequence[Version], settled: int, taken: int) -> bool:
    """Whether the log says all runs behind `settled` that there are: `taken` is the newest that Delta knows.

    It does if it goes back to one that is covered, or to a beginning that is a run's, or if there are none behind.
    """
    if not log or is_down_to(log, LATE_RUN, settled) or 0 <= taken <= settled:
        return True
    first = min(log)
    return first.number == 0 and bool(first.note.keys() & {RUN, LATE_RUN})


def notes(log: Iterable[Version]) -> list[Note]:
    """What the runs of corrections said that stand in a log, newest first."""
    return [version.note for version in standing(log) if LATE_RUN in version.note]


def said_by_rows(closed: DataFrame) -> list[Row]:
    """What corrections say who made them, by late topic and partition: least and greatest run, and the greatest end.

    One row without a run stands for those that do not say it, of an earlier release.
    """
    texts = F.col("corrected_by") if "corrected_by" in closed.columns else F.lit(None).cast("string")
    by = closed.filter("revision > 0").select(texts.alias("text")).distinct()
    each = by.select(F.from_json("text", _SAID).alias("by"))
    each = each.select("by.run", "by.topic", "by.topic_id", F.explode_outer("by.to_offsets").alias("partition", "end"))
    bounds = (F.min("run").alias("first_run"), F.max("run").alias("run"), F.max("end").alias("end"))
    return list(each.groupBy("topic", "topic_id", "partition").agg(*bounds).collect())


def notes_of_rows(rows: Iterable[Row]) -> list[Note]:
    """What `said_by_rows` gave, as notes: of each late topic its newest run, and the ends of what was taken."""
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        if row.run is None:
            continue
        own = {LATE_RUN: 0, LATE_TOPIC: row.topic, LATE_TOPIC_ID: row.topic_id, TO_OFFSETS: {}}
        note = found.setdefault(row.topic_id, own)
        note[LATE_RUN] = max(note[LATE_RUN], row.run)
        if row.partition is not None:
            note[TO_OFFSETS][row.partition] = row.end
    return list(found.values())


def is_known(rows: Iterable[Row], found: Iterable[Note], covered_run: int) -> bool:
    """Whether it is known what all corrections behind the run that is covered took.

    Those that do not say it are an earlier release's, and so before all that are `found` to say it.
    """
    if all(row.run is not None for row in rows):
        return True
    runs = [int(note[LATE_RUN]) for note in found] + [int(row.first_run) for row in rows if row.run is not None]
    return min(runs, default=covered_run + 2) <= covered_run + 1


def refusal(path: str, newest_run: int | None, *, can_be_made_anew: bool) -> str:
    """Says what is not known, and the ways out; `newest_run` is None where `state` has no rows of late topics."""
    folder, _, store = path.rpartition("/closed/")
    anew = f"DELETE FROM {tables.delta(path)} WHERE revision > 0"
    if newest_run is not None:
        anew += f", then UPDATE {tables.delta(f'{folder}/state')} SET changelog_offset = 0, run = {newest_run}"
        anew += f" WHERE row = 'late' AND store = '{store}'"
    return (
        f"{path} has corrections that `state` may not cover: an earlier `state` was put back, or rows alone. Neither "
        "its log (Delta's log retention, or a copy of rows) nor those rows, an earlier release's, say which late "
        "records they took, and these could count twice. Put back a `state` and a `closed` of one time, with their logs"
    ) + (f"; or have all corrections made anew from the late topic: {anew}" if can_be_made_anew else "")


def pending(covered: Mapping[str, int], found: Iterable[Note]) -> list[Note]:
    """What is not covered: of each late topic its newest note, in their order.

    `covered` is by the id of a late topic its newest run. An earlier release's note does not name its topic: it is
    not covered where no topic has a run that is as new.
    """
    of_all = max(covered.values(), default=0)
    kept: dict[str | None, Note] = {}
    for note in found:
        topic_id = note.get(LATE_TOPIC_ID)
        run = of_all if topic_id is None else covered.get(topic_id, 0)
        if note[LATE_RUN] > max(run, kept.get(topic_id, {}).get(LATE_RUN, 0)):
            kept[topic_id] = note
    return sorted(kept.values(), key=lambda note: int(note[LATE_RUN]))


def next_late_run(covered_run: int, log: Sequence[Version], taken: int) -> int:
    """The number of a store's next corrections; that of another job's append, if it is not covered: one of two wins.

    Delta takes no number again up to the newest that was `taken`, whatever the log still says.
    """
    there = newest(standing(log), LATE_RUN)
    return there if there > covered_run else max(covered_run, newest(log, LATE_RUN), taken) + 1


def corrected_by(run: int, topic: str, topic_id: str, ends: SparkColumn) -> SparkColumn:
    """What a correction says who made it, as JSON; `ends` are by partition of the late topic where the run ended."""
    said = {"run": F.lit(run), "topic": F.lit(topic), "topic_id": F.lit(topic_id), TO_OFFSETS: ends}
    return F.to_json(F.struct(*(value.alias(name) for name, value in said.items())))
