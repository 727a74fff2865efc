"""The record by which a changelog says that it rests on a backfill's tables: the first one of each partition.

It is written before a backfill reads any history, and verified to be the first. So from the backfill's first step on
nobody begins the application without its tables: an aggregator that finds no `state` in them refuses, whether the
backfill is under way, was broken off anywhere, or has ended elsewhere. One that does find it goes on with its epoch,
and passes over the mark. The backfill's end is the MERGE into `state` alone.

A mark has the epoch that the backfill's own commits have. Where an aggregator came first, which began with that epoch
too, its entries go on to count.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable
from typing import NamedTuple

from pyspark.sql import SparkSession

from penstock.services.spark.kafka import TopicOffsets, read_range
from penstock.services.spark.replay import EPOCH, INSTANCE
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.errors import ConfigError, CorruptRecord
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.changelog.format import TAKEOVER, Takeover, decode, encode_takeover, history_before

MARKS_MAX = 10  # looked for in a partition: more than one are there only if a write's fate was unknown


class Marks(NamedTuple):
    """What a changelog's first records say: on which tables it rests, None where it does not; and which of its
    partitions have records beside that."""

    rests_on: str | None = None
    begun: tuple[int, ...] = ()


def read_marks(spark: SparkSession, kafka: KafkaSettings, offsets: TopicOffsets, partitions: Collection[int]) -> Marks:
    """The marks of these partitions."""
    start = {p: offsets.earliest[p] for p in partitions}
    end = {p: min(offsets.latest[p], first + MARKS_MAX) for p, first in start.items()}
    rows = read_range(spark, kafka, offsets.topic, start, end).select("partition", "value").collect()
    given = [(row.partition, None if row.value is None else bytes(row.value)) for row in rows]
    return marks_of(given, {p: offsets.latest[p] for p in partitions})


def marks_of(records: Iterable[tuple[int, bytes | None]], latest: dict[int, int]) -> Marks:
    """What the first records of partitions (partition, value) say that end at these offsets."""
    marked, tables = dict.fromkeys(latest, 0), dict[str, None]()
    for partition, value in records:
        if (found := rests_on(value)) is not None:
            marked[partition] += 1
            tables[found] = None
    return Marks(next(iter(tables), None), tuple(sorted(p for p, end in latest.items() if end > marked[p])))


def rests_on(value: bytes | None) -> str | None:
    """The tables that a changelog record names, None where it is no mark."""
    try:
        entry = decode(value)
    except CorruptRecord:
        return None
    return history_before(entry.body) if entry.operation == TAKEOVER else None


def write_marks(kafka: KafkaSettings, offsets: TopicOffsets, application: str, tables: str, now_ms: int) -> None:
    """Write one to each partition that is empty. ConfigError where another record came first."""
    empty = sorted(p for p, end in offsets.latest.items() if not end)
    value = encode_takeover(EPOCH, Takeover(application, INSTANCE, now_ms, rests_on=tables))
    places = asyncio.run(_written(kafka, [ProducerRecord(offsets.topic, value, None, (), p) for p in empty]))
    if overtaken := sorted(p for p, offset in places.items() if offset):
        raise ConfigError(
            f"{offsets.topic} has got records meanwhile (partitions {overtaken}): an aggregator was started. Stop it, "
            "and start the application afresh (`penstock streams reset`), or go on without this history"
        )


async def _written(kafka: KafkaSettings, records: list[ProducerRecord]) -> dict[int, int]:
    """Write the records; their offsets by partition. Raises what the first one failed with."""
    places = {}
    async with Producer(kafka, ProducerSettings()) as producer:
        for result in await (await producer.send_many(records)):
            if isinstance(result, BaseException):
                raise result
            places[result.partition] = result.offset
    return places
