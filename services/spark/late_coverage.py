"""How far a store's late topics are covered: rows of `state` (row 'late'), by store, topic and partition.

A topic is its id: one that was deleted and made again is another, and one that the application goes back to is the one
that it was. What it is called is in `progress`, as JSON; earlier releases left that empty, and kept the newest topic
alone. What is gone stays in the table, with the word that this was said: so it is said once.
"""

# ruff: noqa: S608 - SQL is the only way in, and every name and text in it is quoted
from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
from pyspark.sql import Row, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark import tables
from penstock.services.spark.kafka import TopicOffsets, topic_name, topic_offsets
from penstock.shared.common.errors import UnknownTopicOrPartition
from penstock.shared.common.settings import KafkaSettings

_LATE_ROW = (
    "row string, partition int, store string, key binary, start_ms bigint, changelog_offset bigint, "
    "progress string, topic_id string, run bigint"
)


class Said(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the rows of a topic say of it beside offsets."""

    topic: str
    is_gone: bool = False


class Covered(NamedTuple):
    """A late topic that a store's corrections know: next offsets by partition, and its newest run (0: none yet).

    `topic` is None where an earlier release did not say.
    """

    topic_id: str
    topic: str | None
    is_gone: bool
    offsets: dict[int, int]
    run: int


class LateCoverage:
    """The rows of one store in the table `state` at the path `state`."""

    def __init__(self, spark: SparkSession, state: str, store: str, say: Any) -> None:
        self.spark, self.state, self.store, self.say = spark, state, store, say

    def known(self) -> list[Covered]:
        """The late topics that there are rows of, those first whose corrections are the oldest."""
        own = (F.col("row") == "late") & (F.col("store") == self.store)
        return covered_topics(self.spark.table(tables.delta(self.state)).filter(own).collect())

    def to_read(
        self, known: Iterable[Covered], late: str | None, kafka: KafkaSettings, timeout_ms: int
    ) -> list[tuple[TopicOffsets, Mapping[int, int]]]:
        """The topics to read, with what is covered of each: the earlier ones that are still there, last that of now.

        `late` is its name, None where there is none (any more): UnknownTopicOrPartition where Kafka has none such. An
        earlier one that is gone is said, once.
        """
        now = None if late is None else topic_offsets(self.spark, kafka, late, timeout_ms)
        found: list[tuple[TopicOffsets, Mapping[int, int]]] = []
        of_now: Mapping[int, int] = {}
        for one in known:
            if now is not None and one.topic_id == now.topic_id:
                of_now = one.offsets
                continue
            name = one.topic or topic_name(self.spark, kafka, one.topic_id, timeout_ms)
            held = None if name is None else self._held(name, one.topic_id, kafka, timeout_ms)
            if held is not None:
                found.append((held, one.offsets))
            elif not one.is_gone:
                self._say_gone(one, now)
        return found if now is None else [*found, (now, of_now)]

    def cover(self, topic: str, topic_id: str, offsets: Mapping[int, int], run: int) -> None:
        """Say how far a topic is covered, unless another job has covered more by now."""
        said = msgspec.json.encode(Said(topic)).decode()
        rows = [("late", p, self.store, b"", 0, end, said, topic_id, run) for p, end in offsets.items()]
        self.spark.createDataFrame(rows, _LATE_ROW).createOrReplaceTempView("penstock_late")
        columns = _LATE_ROW.replace(",", "").split()[::2]
        same = " AND ".join(f"t.{name} = s.{name}" for name in ("row", "partition", "store", "topic_id"))
        self.spark.sql(
            f"MERGE INTO {tables.delta(self.state)} t USING penstock_late s ON t.row = 'late' AND {same} "
            f"WHEN MATCHED AND t.run < s.run THEN UPDATE SET {', '.join(f't.{n} = s.{n}' for n in columns)} "
            f"WHEN NOT MATCHED THEN INSERT ({', '.join(columns)}) VALUES ({', '.join(f's.{n}' for n in columns)})"
        )

    def remember(self, topic: str, kafka: KafkaSettings, timeout_ms: int) -> None:
        """Keep a topic that the application wrote to for the next run of corrections; one that is gone is said."""
        try:
            held = topic_offsets(self.spark, kafka, topic, timeout_ms)
        except UnknownTopicOrPartition:
            if all(one.topic != topic for one in self.known()):  # else the next run of corrections says it
                self.say(
                    f"{self.store}: its earlier late topic {topic} is gone: what stood in it is corrected by nobody"
                )
            return
        self.cover(topic, held.topic_id, held.earliest, 0)

    def _held(self, topic: str, topic_id: str, kafka: KafkaSettings, timeout_ms: int) -> TopicOffsets | None:
        try:
            held = topic_offsets(self.spark, kafka, topic, timeout_ms)
        except UnknownTopicOrPartition:
            return None
        return held if held.topic_id == topic_id else None

    def _say_gone(self, one: Covered, now: TopicOffsets | None) -> None:
        name = one.topic or f"with id {one.topic_id}"
        from_ = ", ".join(f"{p}:{offset}" for p, offset in sorted(one.offsets.items()))
        left = f"what stood in it from {from_} on (partition:offset) is corrected by nobody"
        if now is not None and one.topic == now.topic:
            self.say(f"{name} was deleted and made again: it is read from its beginning; {left} of the old one")
        else:
            self.say(f"{self.store}: its earlier late topic {name} is gone: {left}")
        said = msgspec.json.encode(Said(one.topic or "", is_gone=True)).decode()
        self.spark.sql(
            f"UPDATE {tables.delta(self.state)} SET progress = :said "
            "WHERE row = 'late' AND store = :store AND topic_id = :topic_id",
            args={"said": said, "store": self.store, "topic_id": one.topic_id},
        )


def settled_run(known: Iterable[Covered], late: str | None) -> int:
    """The run down to which what appends say of a store is in `state`, for all topics that it will read.

    Runs are covered one after the other, so that a `state` of any time covers all up to its newest. Where the
    application went back to an earlier topic, `late`, it is that one's: its row may be from before others.
    """
    return max((one.run for one in known if late is None or one.topic in (late, None)), default=0)


def covered_topics(rows: Iterable[Row]) -> list[Covered]:
    """A store's rows by topic, those first whose newest run is the oldest.

    Of topics without a name, an earlier release's, the newest alone: those rows of the others are what it had not yet
    overwritten, and do not say how far their topics were read.
    """
    by_topic: dict[str, list[Row]] = {}
    for row in rows:
        by_topic.setdefault(row.topic_id, []).append(row)
    found = []
    for topic_id, own in by_topic.items():
        newest = max(own, key=lambda row: int(row.run))
        said = msgspec.json.decode(newest.progress, type=Said) if newest.progress else None
        offsets = {int(row.partition): int(row.changelog_offset) for row in own}
        is_gone = said is not None and said.is_gone
        found.append(Covered(topic_id, (said and said.topic) or None, is_gone, offsets, int(newest.run)))
    last = max((one.run for one in found if one.topic is None and not one.is_gone), default=0)
    kept = [one for one in found if one.topic is not None or one.is_gone or one.run == last]
    return sorted(kept, key=lambda one: (one.run, one.topic_id))
