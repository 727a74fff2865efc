"""Source partitions that Spark's Kafka source cannot read, by Penstock's own consumer in Spark's Python workers.

Spark makes microseconds of a record's time, in 64 bits, and stops at one that lies after the year 294246: nanoseconds
that were sent as milliseconds. To a task such a record is a dead letter like any other that lies too far ahead. So a
backfill reads a partition that has one in its range by this way, which is the slower one, and the others by Spark's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession

from penstock.services.spark.kafka import KAFKA_SOURCE_MS_MAX, READ_SCHEMA, TopicOffsets, offsets_at, read_range
from penstock.services.spark.replay import FAILED, HEADERS_SQL, OUT
from penstock.services.spark.settings import BackfillSettings
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.common.errors import KafkaTimeout, PenstockError
from penstock.shared.common.records import Columns, TopicPartition
from penstock.shared.common.settings import KafkaSettings

POLL_MS = 1_000
RECORDS_MAX = 50_000  # of a poll, and so of an Arrow batch
RECORDS_SQL = f"{READ_SCHEMA}, {HEADERS_SQL}"
RECORDS = pa.schema([OUT.field(n) for n in ("partition", "offset", "timestamp_ms", "key", "value", "headers")])


def read_source(
    spark: SparkSession,
    settings: BackfillSettings,
    held: TopicOffsets,
    start: Mapping[int, int],
    end: Mapping[int, int],
) -> DataFrame:
    """Committed records from `start` up to `end` (exclusive) of each partition, with headers; each partition in order.

    Errors as `topic_offsets`.
    """
    far = offsets_at(spark, settings.kafka, held, KAFKA_SOURCE_MS_MAX + 1, settings.kafka_timeout_ms)
    own = {p: (start[p], end[p]) for p, first in sorted(far.items()) if start[p] < end[p] and first < end[p]}
    rest = {p: first for p, first in start.items() if p not in own}
    frame = read_range(spark, settings.kafka, held.topic, rest, end, headers=True)
    if not own:
        return frame
    ranges = spark.createDataFrame(
        [(p, *places) for p, places in own.items()], "partition int, first bigint, last bigint"
    )
    read = _reading(settings.kafka, held.topic, settings.kafka_timeout_ms)
    return frame.unionByName(ranges.mapInArrow(read, RECORDS_SQL))


def batch_of(columns: Columns, last: int) -> pa.RecordBatch:
    """The records before offset `last` (RECORDS)."""
    columns = columns[: int(columns.offsets.searchsorted(last))]
    given = columns.headers or [()] * len(columns)
    return pa.record_batch(
        [
            pa.array([columns.partition] * len(columns), pa.int32()),
            pa.array(columns.offsets, pa.int64()),
            pa.array(columns.timestamps, pa.int64()),
            pa.array(columns.keys, pa.binary()),
            pa.array(columns.values, pa.binary()),
            pa.array([[{"key": k, "value": v} for k, v in of] for of in given], RECORDS.field("headers").type),
        ],
        schema=RECORDS,
    )


def _reading(kafka: KafkaSettings, topic: str, timeout_ms: int) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: partitions with their first and last (exclusive) offsets to RECORDS."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for row in (row for batch in batches for row in batch.to_pylist()):
            yield from _read(kafka, TopicPartition(topic, row["partition"]), row["first"], row["last"], timeout_ms)

    return run


def _read(kafka: KafkaSettings, at: TopicPartition, first: int, last: int, timeout_ms: int) -> Iterator[pa.RecordBatch]:
    settings = ConsumerSettings(isolation_level="read_committed", auto_offset_reset="none", commit_strategy="none")
    with asyncio.Runner() as loop:
        consumer = Consumer(kafka, settings)
        try:
            loop.run(_begin(consumer, at, first))
            position, silent_ms = first, 0
            while position < last:
                before = position
                found, position = loop.run(_poll(consumer, at))
                yield from (batch_of(columns, last) for columns in found)
                silent_ms = 0 if position > before else silent_ms + POLL_MS
                if silent_ms > timeout_ms:
                    raise KafkaTimeout(f"{at}: at offset {position} of {last} for {silent_ms} ms (kafka_timeout_ms)")
        except PenstockError as e:
            raise ValueError(f"{FAILED}: {type(e).__name__}: {e}") from None
        finally:
            loop.run(consumer.close())


async def _begin(consumer: Consumer, at: TopicPartition, first: int) -> None:
    await consumer.start()
    consumer.assign([at])
    consumer.seek(at, first)


async def _poll(consumer: Consumer, at: TopicPartition) -> tuple[list[Columns], int]:
    """What there is, and the position behind it."""
    found = await consumer.poll(POLL_MS, RECORDS_MAX)
    return list(found.values()), await consumer.position(at)
