"""What a backfill's tasks had for other topics than the changelog: written there, once, whatever crashed before.

It is written behind the appends to `closed`, which say where each topic ended then, and before the MERGE by which the
backfill counts. So a backfill that goes on after a crash knows where to look for what the one before it wrote, and
writes what is not there yet. Of late records and dead letters it is told by the coordinates and the changelog's id in
their headers, of anything else by its time and content.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, Row
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.shared.clients.consumer.dead_letters import MESSAGE
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.settings import REFUSAL_BYTES_MAX
from penstock.shared.streams.task_outputs import partition_of

OUTPUTS_AT_ONCE = 10_000  # records written to topics at a time, held in the driver
DIGEST_BITS = 256


def not_there(rows: DataFrame, there: DataFrame, refused: Collection[str]) -> DataFrame:
    """The rows (`replay.OUT`) of which their topics do not have as many yet as there are, in their order.

    `there` is what the topics have: topic, partition, timestamp_ms, key, value, headers. `refused` are the topics of
    late records and dead letters, whose own times and messages are another at each attempt.
    """
    own = rows.withColumn("_order", F.monotonically_increasing_id())
    counted = there.withColumn("_is", _identity(refused)).groupBy("_is").agg(F.count(F.lit(1)).alias("_there"))
    nth = F.row_number().over(SparkWindow.partitionBy("_is").orderBy("_order"))
    numbered = own.withColumn("_is", _identity(refused)).withColumn("_nth", nth)
    missing = numbered.join(counted, "_is", "left").filter(F.col("_nth") > F.coalesce("_there", F.lit(0)))
    return missing.orderBy("_order").select(*rows.columns)


def _identity(refused: Collection[str]) -> SparkColumn:
    time = F.when(~F.col("topic").isin(*refused), F.col("timestamp_ms")) if refused else F.col("timestamp_ms")
    headers = F.filter("headers", lambda h: h["key"] != MESSAGE)
    # Not the partition, which the producer chooses by the key.
    is_ = F.struct("topic", "key", "value", time.alias("time"), F.coalesce(headers, F.array()).alias("h"))
    return F.sha2(F.to_json(is_), DIGEST_BITS)


async def write_outputs(kafka: KafkaSettings, max_request_size: int, rows: Iterable[Row]) -> Counter[str]:
    """Write rows (OUT) to their topics, in their order; how many to each. Raises what the first one failed with."""
    settings = ProducerSettings(max_request_size=max_request_size + REFUSAL_BYTES_MAX)
    written: Counter[str] = Counter()
    async with Producer(kafka, settings) as producer:
        for some in _batches(rows):
            topics = {row.topic for row in some if row.source_key is not None}
            partitions = {topic: await producer.partitions_for(topic) for topic in topics}
            sent = await producer.send_many([_record(row, partitions) for row in some])
            if (error := await sent.first_error()) is not None:
                raise error
            written.update(row.topic for row in some)
    return written


def _batches(rows: Iterable[Row]) -> Iterator[list[Row]]:
    rest = iter(rows)
    while some := list(itertools.islice(rest, OUTPUTS_AT_ONCE)):
        yield some


def _record(row: Row, partitions: Mapping[str, Sequence[int]]) -> ProducerRecord:
    """The record; `partitions` are those of the topics whose rows have source keys."""
    headers = tuple((h.key, None if h.value is None else bytes(h.value)) for h in row.headers)
    key, value = (None if part is None else bytes(part) for part in (row.key, row.value))
    source_key = row.source_key
    partition = row.partition if source_key is None else partition_of(bytes(source_key), partitions[row.topic])
    return ProducerRecord(row.topic, value, key, headers, partition, row.timestamp_ms)
