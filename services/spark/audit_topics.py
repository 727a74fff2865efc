"""Topics as an audit reads them: whole, once they are settled, and refused records by what their headers say."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.kafka import (
    KAFKA_SOURCE_MS_MAX,
    TopicOffsets,
    offsets_at,
    read_range,
    settled_offsets,
    topic_offsets,
)
from penstock.services.spark.lives import IS_EARLIER, LIFE, with_earlier
from penstock.services.spark.origins import NotAuditable
from penstock.services.spark.settings import AuditSettings
from penstock.shared.clients.consumer.dead_letters import NODE
from penstock.shared.common.errors import UnknownTopicOrPartition


def coordinates(records: DataFrame, prefix: str, source: str, ours: dict[str, str], life: str) -> DataFrame:
    """Source partition and offset that records carry in their headers; null where they carry none that can be read.

    Records from another topic than `source`, or of which a header in `ours` names somebody else, are left out: several
    stores and applications share a late topic, several groups a dead-letter topic. So are those of a life of the
    application before `life` (see `lives`).
    """

    def header(name: str) -> Any:
        found = F.filter("headers", lambda h: h["key"] == f"{prefix}.{name}")
        return F.try_element_at(found, F.lit(-1))["value"].cast("string")

    said = {"topic": source, **ours}
    read = [header(name).alias(f"_{name}") for name in ("partition", "offset", "changelog_id", *said)]
    named = records.select(F.col("partition").alias("at_partition"), F.col("offset").alias("at_offset"), *read)
    for name, own in said.items():
        named = named.filter(F.col(f"_{name}").isNull() | (F.col(f"_{name}") == own))
    named = with_earlier(named.withColumnRenamed("_changelog_id", LIFE), life, "at_partition", "at_offset")
    return named.filter(~F.col(IS_EARLIER)).select(
        F.col("_partition").try_cast("INT").alias("partition"), F.col("_offset").try_cast("BIGINT").alias("offset")
    )


def dead_letters(spark: SparkSession, settings: AuditSettings, topic: str | None, source: str, life: str) -> DataFrame:
    """`coordinates` of the source records that a dead-letter topic has; none where there is none."""
    # What a node refused behind a store is no source record: that one was counted.
    is_of_output = F.coalesce(F.exists("headers", lambda h: h["key"] == NODE), F.lit(False))
    refused = whole_topic(spark, settings, topic).filter(~is_of_output)
    return coordinates(refused, "penstock.dlq", source, {"group": settings.application}, life)


def dead_letters_of(
    spark: SparkSession, settings: AuditSettings, topics: Iterable[str | None], source: str, life: str
) -> DataFrame:
    """`dead_letters` of several topics, those that are there, each record once."""
    found = dead_letters(spark, settings, None, source, life)
    for topic in sorted(topic for topic in topics if topic is not None):
        try:
            found = found.unionByName(dead_letters(spark, settings, topic, source, life))
        except UnknownTopicOrPartition:
            continue
    return found.dropna().distinct()


def whole_topic(spark: SparkSession, settings: AuditSettings, topic: str | None) -> DataFrame:
    """All records of a topic (READ_SCHEMA and headers), none where there is none. Raises as `held_by`."""
    if topic is None:
        return read_range(spark, settings.kafka, "", {}, {}, headers=True)
    offsets = held_by(spark, settings, topic, settled_offsets)
    return read_range(spark, settings.kafka, topic, offsets.earliest, offsets.latest, headers=True)


def held_by(
    spark: SparkSession, settings: AuditSettings, topic: str, ask: Callable[..., TopicOffsets] = topic_offsets
) -> TopicOffsets:
    """What a topic holds. NotAuditable where a record's time is beyond what Spark's Kafka source can read."""
    held = ask(spark, settings.kafka, topic, settings.kafka_timeout_ms)
    beyond = offsets_at(spark, settings.kafka, held, KAFKA_SOURCE_MS_MAX + 1, settings.kafka_timeout_ms)
    if places := ", ".join(f"{topic}-{partition} at offset {offset}" for partition, offset in sorted(beyond.items())):
        raise NotAuditable(
            f"{places}: the first record whose timestamp Spark's Kafka source cannot read, since it lies after the "
            "year 294246: were nanoseconds sent as milliseconds? Nothing was compared"
        )
    return held
