"""History as the tasks take it: source records by partition, each partition in its order.

A topic's order is its offsets'. Of several source topics each keeps its own order, and they are taken together by the
highest timestamp that each has reached: what a stream that is never behind would have seen. Files have a column that
orders them, or their own order: by path, then by place in the file. Rows that the column does not tell apart keep the
latter. A file's row goes to the partition that a producer would have chosen for its key.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import NamedTuple

from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import Window as SparkWindow
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)
from pyspark.sql.types import (
    DataType,
    DateType,
    IntegralType,
    NumericType,
    StringType,
    TimestampNTZType,
    TimestampType,
)

from penstock.services.spark.backfill_files import METADATA, FileRows, file_rows, state_of
from penstock.services.spark.far_times import read_source
from penstock.services.spark.kafka import TopicOffsets, offsets_at, topic_offsets
from penstock.services.spark.replay import HEADERS_SQL, partitioned
from penstock.services.spark.settings import NO_TIME, BackfillSettings, JobSettings
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.points_in_time import TimeUnit, time_ms

COLUMNS = ("partition", "topic", "offset", "timestamp_ms", "key", "value", "headers")
RECORDS_SQL = (
    f"partition int, topic string, offset bigint, timestamp_ms bigint, key binary, value binary, {HEADERS_SQL}"
)
MS_OF = {"s": Decimal(1000), "ms": Decimal(1), "us": Decimal("0.001"), "ns": Decimal("0.000001")}
NUMBER = r"^[-+]?([0-9]+[.]?[0-9]*|[.][0-9]+)([eE][-+]?[0-9]+)?$"
Ends = dict[str, dict[int, int]]


class Order(NamedTuple):
    """A column that sorts rows, and in words what it takes the files' column for."""

    column: SparkColumn
    taken_as: str


class History(NamedTuple):
    """Records (COLUMNS) in order, and by source topic and partition the offset at which the aggregator goes on.

    `starts` are the offsets of the first records; files have none. `source` says in words what is read: the files as
    they are now, or the topics by their ids.
    """

    records: DataFrame
    ends: Ends
    source_ids: dict[str, str]
    order: str
    starts: Ends
    source: str


def read_history(
    spark: SparkSession,
    settings: BackfillSettings,
    topics: Sequence[str],
    now_ms: int,
    adopted: Ends | None = None,
    adopted_starts: Ends | None = None,
) -> History:
    """What is to be replayed; `adopted` are the ends of a run that crashed, and where it began.

    Raises ConfigError, or an error of Kafka's.

    Of several topics, what lies too far ahead of `now_ms` is refused by the task and so moves no topic's time on. For
    UnknownTopicOrPartition, BrokerNotAvailable and the others see `topic_offsets`.
    """
    held = {topic: topic_offsets(spark, settings.kafka, topic, settings.kafka_timeout_ms) for topic in topics}
    ids = {topic: offsets.topic_id for topic, offsets in held.items()}
    stop = settings.end if settings.files is None else settings.hand_over
    ends = adopted or {topic: place(spark, settings, offsets, stop) for topic, offsets in held.items()}
    if settings.files is not None:
        records, order = file_records(spark, settings, topics, held)
        return History(records, ends, ids, order, {}, state_of(spark, settings))
    starts = adopted_starts or {t: place(spark, settings, offsets, settings.start) for t, offsets in held.items()}
    for topic, offsets in held.items():
        require_held(offsets, starts[topic])
        require_in_order(topic, starts[topic], ends[topic])
    frames = [
        read_source(spark, settings, held[topic], starts[topic], ends[topic])
        .withColumn("topic", F.lit(topic))
        .select(*COLUMNS)
        for topic in topics
    ]
    source = ", ".join(f"{topic} {topic_id}" for topic, topic_id in sorted(ids.items()))
    if len(frames) == 1:  # one task of Spark's a partition, in the order of offsets
        return History(frames[0], ends, ids, "offset", starts, source)
    together = frames[0]
    for frame in frames[1:]:
        together = together.unionByName(frame)
    so_far = SparkWindow.partitionBy("partition", "topic").orderBy("offset")
    limit_ms = None if settings.max_future_ms is None else now_ms + settings.max_future_ms
    at_ms = F.col("timestamp_ms")
    taken = at_ms if limit_ms is None else F.when(at_ms <= limit_ms, at_ms)
    reached = F.max(taken).over(so_far.rowsBetween(SparkWindow.unboundedPreceding, 0))
    partitions = len(held[topics[0]].latest)
    ordered = _in_order(together.withColumn("_reached", reached), partitions, "_reached", "topic", "offset")
    return History(ordered, ends, ids, "highest timestamp so far of each topic, then offset", starts, source)


def place(spark: SparkSession, settings: JobSettings, offsets: TopicOffsets, text: str) -> dict[int, int]:
    """A place of the settings as an offset of each partition, within what the topic holds.

    Raises ConfigError for partitions or offsets that the topic does not have.
    """
    if text == "earliest":
        return dict(offsets.earliest)
    if text == "latest":
        return dict(offsets.latest)
    if not NO_TIME.fullmatch(text):
        at = offsets_at(spark, settings.kafka, offsets, time_ms(text), settings.kafka_timeout_ms)
        return {p: at.get(p, end) for p, end in offsets.latest.items()}
    given = {int(p): int(at) for p, at in (one.split(":") for one in text.split(","))}
    if wrong := sorted(given.keys() ^ offsets.latest.keys()):
        said = "an offset for each partition is needed, and no other"
        raise ConfigError(f"{offsets.topic}: {text}: {said} (partitions {wrong})")
    require_held(offsets, given)
    return given


def require_in_order(topic: str, starts: Mapping[int, int], ends: Mapping[int, int]) -> None:
    """Raise ConfigError for partitions that would end before they begin.

    >>> require_in_order("visits", {0: 150, 1: 9}, {0: 20, 1: 9})
    Traceback (most recent call last):
        ...
    penstock.errors.ConfigError: start is after end: visits-0 from offset 150 to 20
    """
    if wrong := [f"{topic}-{p} from offset {starts[p]} to {end}" for p, end in sorted(ends.items()) if starts[p] > end]:
        raise ConfigError(f"start is after end: {', '.join(wrong)}")


def require_held(offsets: TopicOffsets, given: Mapping[int, int]) -> None:
    """Raise ConfigError for offsets that the topic does not have, or does not have any more."""
    for partition, offset in sorted(given.items()):
        if not offsets.earliest[partition] <= offset <= offsets.latest[partition]:
            held = f"the topic holds {offsets.earliest[partition]} to {offsets.latest[partition]}"
            raise ConfigError(f"{offsets.topic}-{partition}: offset {offset}; {held}")


def file_records(
    spark: SparkSession, settings: BackfillSettings, topics: Sequence[str], held: Mapping[str, TopicOffsets]
) -> tuple[DataFrame, str]:
    """Rows of files as records of the topic that they stand for, and the order they are taken in."""
    topic = settings.topic or (topics[0] if len(topics) == 1 else "")
    if topic not in topics:
        raise ConfigError(f"topic: {topic or 'unset'}: the files stand for one of the topology's: {', '.join(topics)}")
    if settings.format == "delta" and settings.order_column is None:
        raise ConfigError("order_column: a Delta table's files have no order; name the column that orders its rows")
    found = file_rows(spark, settings)
    metadata = F.col(METADATA)
    own = ("_path", "_block", "_row")
    ordered = None if settings.order_column is None else _order_of(found, settings, settings.order_column)
    kind, at = found.typed(settings.timestamp_column)
    at_ms = times(kind, at, settings.time_unit)
    if at_ms is None:
        said = f"{settings.timestamp_column!r} of {settings.files} is of type {kind.simpleString()}"
        raise ConfigError(f"timestamp_column: {said}, which is neither a time nor a number nor text")
    records = found.rows.select(
        F.lit(0).alias("partition"),
        F.lit(topic).alias("topic"),
        F.lit(None).cast("bigint").alias("offset"),
        at_ms.alias("timestamp_ms"),
        found.as_bytes(settings.key_column).alias("key"),
        (found.whole if settings.value_column is None else found.as_bytes(settings.value_column)).alias("value"),
        F.expr(f"CAST(NULL AS {HEADERS_SQL.partition(' ')[2]})").alias("headers"),
        metadata["file_path"].alias("_path"),
        metadata["file_block_start"].alias("_block"),
        F.monotonically_increasing_id().alias("_row"),
        *([] if ordered is None else [ordered.column.alias("_order")]),
    )
    extra = ", _path string, _block bigint, _row bigint"
    if ordered is not None:
        extra += f", _order {records.schema['_order'].dataType.simpleString()}"
    partitions = len(held[topic].latest)
    chosen = records.mapInArrow(partitioned(partitions), RECORDS_SQL + extra)
    if ordered is None:
        return _in_order(chosen, partitions, *own), "file order (path, then place in the file)"
    return _in_order(chosen, partitions, "_order", *own), f"{settings.order_column}, as {ordered.taken_as}"


def _order_of(found: FileRows, settings: BackfillSettings, name: str) -> Order:
    kind, column = found.typed(name)
    if isinstance(kind, StringType):
        return order_of_text(found.rows, column, settings.time_unit, is_time=name == settings.timestamp_column)
    return Order(column, kind.simpleString())


def order_of_text(rows: DataFrame, column: SparkColumn, unit: TimeUnit, *, is_time: bool = False) -> Order:
    """What orders rows by a column of text: the numbers or the times that all of it is, else the text.

    As in `times`: numbers among times count `unit`s. Text that `is_time` is always ordered by these, and begins with
    what is none. Nothing, also as a blank text, comes first.
    """
    text = F.trim(column)
    is_number = text.rlike(NUMBER)
    at = F.try_to_timestamp(column)
    kinds = (
        F.when(F.coalesce(text, F.lit("")) == "", None)
        .when(is_number, "numbers")
        .when(at.isNotNull(), "times")
        .otherwise("text")
    )
    there = {row.kind for row in rows.select(kinds.alias("kind")).distinct().collect()} - {None}
    if there <= {"numbers"}:
        # Doubles have every magnitude, decimals tell whole numbers apart that are one double.
        number = F.struct(text.try_cast("double").alias("n"), text.try_cast("decimal(38,9)").alias("exact"))
        return Order(number, "numbers")
    if there == {"times"}:
        return Order(at, "times")
    if "text" in there and not is_time:
        return Order(column, "text")
    ms = times(StringType(), column, unit)
    assert ms is not None
    return Order(ms, f"times, numbers in {unit}")


def _in_order(records: DataFrame, partitions: int, *order: str) -> DataFrame:
    together = records.repartitionByRange(partitions, "partition").sortWithinPartitions("partition", *order)
    return together.select(*COLUMNS)


def times(kind: DataType, column: SparkColumn, unit: TimeUnit) -> SparkColumn | None:
    """A column of that type as ms since the epoch, -1 where a value is no time; None where the type is none of time.

    Numbers, whole or not and also as text, count `unit`s since the epoch; a part of a ms is cut off. Any other text is
    a time as ISO 8601, in UTC where it does not say otherwise.
    """
    if isinstance(kind, IntegralType) and unit == "ms":
        ms = column.cast("bigint")
    elif isinstance(kind, NumericType):
        ms = _from_number(column, unit)
    elif isinstance(kind, StringType):
        ms = F.coalesce(_from_number(F.trim(column), unit), F.unix_millis(F.try_to_timestamp(column)))
    elif isinstance(kind, DateType | TimestampType | TimestampNTZType):
        ms = F.unix_millis(column.cast("timestamp"))
    else:
        return None
    # A row without a time is a record without one, which becomes a dead letter.
    return F.coalesce(ms, F.lit(-1))


def _from_number(column: SparkColumn, unit: TimeUnit) -> SparkColumn:
    return F.floor(column.try_cast("decimal(29,9)") * F.lit(MS_OF[unit])).try_cast("bigint")
