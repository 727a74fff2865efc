"""Kafka as the jobs use it: Java client properties, topics' ids and offsets, ranges as DataFrames, deleting records.

Offsets are asked with the Java client that Spark's own Kafka source uses, in Spark's own driver, so that a setting that
works for the one works for the other, and so that "the end" is the last stable offset where the job reads committed
records only.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

from py4j.protocol import Py4JJavaError
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.session import causes, jvm, last_cause
from penstock.services.spark.settings import JobSettings
from penstock.shared.clients.connection import UNREACHED_SAY_MS
from penstock.shared.common.errors import (
    AuthenticationFailed,
    AuthorizationFailed,
    BrokerNotAvailable,
    ConfigError,
    PenstockError,
    RetriableError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.log import get_logger
from penstock.shared.common.settings import KafkaSettings

log = get_logger(__name__)

READ_SCHEMA = "partition int, offset bigint, timestamp_ms bigint, key binary, value binary"
_HEADERS = "headers array<struct<key: string, value: binary>>"
_ERRORS: tuple[tuple[str, type[PenstockError]], ...] = (
    ("AuthenticationException", AuthenticationFailed),
    ("AuthorizationException", AuthorizationFailed),
)


SETTLE_POLL_SECONDS = 0.05
# A consumer that is closed waits for the fetch it has under way, which at a topic's end the broker holds for this long:
# once for every partition that is read. With Kafka's 500 ms, 60 partitions took two cores 16.4 s, with 10 ms 1.2 s.
FETCH_WAIT_MS = 10
TASK_RECORDS = 50_000  # for each further task, beyond one for each core: with fewer, it costs more than it saves
KAFKA_SOURCE_MS_MAX = (2**63 - 1) // 1_000  # Spark's makes microseconds of a record's timestamp, whatever is selected


class Undecided(RetriableError):
    """A transaction stays open for longer than was waited for, and hides what was committed after it began."""


class TopicOffsets(NamedTuple):
    """One topic: its id, and by partition the first offset it holds and the one after the last that may be read."""

    topic: str
    topic_id: str
    earliest: dict[int, int]
    latest: dict[int, int]


def client_properties(kafka: KafkaSettings) -> dict[str, str]:
    """The Java client's properties for these settings; PEM files are handed over as the client wants them."""
    properties = {
        "bootstrap.servers": kafka.bootstrap_servers,
        "security.protocol": kafka.security_protocol,
        "request.timeout.ms": str(kafka.request_timeout_ms),
        "metadata.max.age.ms": str(kafka.metadata_max_age_ms),
    }
    if kafka.client_id is not None:
        properties["client.id"] = kafka.client_id
    if kafka.sasl_mechanism is not None and kafka.sasl_password is not None:
        kind = "plain.Plain" if kafka.sasl_mechanism == "PLAIN" else "scram.Scram"
        names = (kafka.sasl_username, kafka.sasl_password.get_secret_value())
        user, password = (json.dumps(name, ensure_ascii=False) for name in names)  # JAAS knows no \u
        properties["sasl.mechanism"] = kafka.sasl_mechanism
        properties["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{kind}LoginModule required username={user} password={password};"
        )
    if kafka.ssl_cafile is not None:
        properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(kafka.ssl_cafile)}
    if kafka.ssl_certfile is not None and kafka.ssl_keyfile is not None:
        properties["ssl.keystore.type"] = "PEM"
        try:
            properties["ssl.keystore.certificate.chain"] = kafka.ssl_certfile.read_text(encoding="utf-8")
            properties["ssl.keystore.key"] = kafka.ssl_keyfile.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"kafka.ssl_certfile or kafka.ssl_keyfile cannot be read: {e}") from None
        if kafka.ssl_key_password is not None:
            properties["ssl.key.password"] = kafka.ssl_key_password.get_secret_value()
    return properties


def topic_offsets(spark: SparkSession, kafka: KafkaSettings, topic: str, timeout_ms: int) -> TopicOffsets:
    """What a topic holds, up to the last stable offsets.

    Raises UnknownTopicOrPartition, BrokerNotAvailable, AuthenticationFailed or AuthorizationFailed.
    """
    java = jvm(spark)
    try:
        names = java.java.util.ArrayList()
        names.add(topic)
        with _admin(java, kafka) as admin:
            description = _answer(java, kafka, admin.describeTopics(names).allTopicNames(), timeout_ms).get(topic)
        with _consumer(java, kafka) as consumer:
            partitions = java.java.util.ArrayList()
            for info in description.partitions():
                partitions.add(java.org.apache.kafka.common.TopicPartition(topic, info.partition()))
            limit = java.java.time.Duration.ofMillis(timeout_ms)
            earliest = _by_partition(consumer.beginningOffsets(partitions, limit))
            latest = _by_partition(consumer.endOffsets(partitions, limit))
    except Py4JJavaError as e:
        raise _translated(e, kafka, topic, timeout_ms) from None
    return TopicOffsets(topic, str(description.topicId().toString()), earliest, latest)


def topic_name(spark: SparkSession, kafka: KafkaSettings, topic_id: str, timeout_ms: int) -> str | None:
    """What the topic with this id is called; None where there is none such. Errors as `topic_offsets`."""
    java = jvm(spark)
    try:
        ids = java.java.util.ArrayList()
        ids.add(java.org.apache.kafka.common.Uuid.fromString(topic_id))
        asked = java.org.apache.kafka.common.TopicCollection.ofTopicIds(ids)
        with _admin(java, kafka) as admin:
            found = _answer(java, kafka, admin.describeTopics(asked).allTopicIds(), timeout_ms)
            return next(str(description.name()) for description in found.values())
    except Py4JJavaError as e:
        chain = " ".join(causes(e))
        if "UnknownTopicIdException" in chain or "InvalidTopicException" in chain:
            return None
        raise _translated(e, kafka, f"the topic with id {topic_id}", timeout_ms) from None


def changelog_offsets(
    spark: SparkSession, settings: JobSettings, ask: Callable[..., TopicOffsets] = topic_offsets
) -> TopicOffsets:
    """What an application's changelog holds; `ask` is `topic_offsets`, or another way to ask. Errors as that."""
    try:
        return ask(spark, settings.kafka, settings.changelog_topic, settings.kafka_timeout_ms)
    except UnknownTopicOrPartition as e:
        raise UnknownTopicOrPartition(
            f"{e}: application (or changelog) must be the aggregator's, which makes the topic when it first starts"
        ) from None


def settled_offsets(spark: SparkSession, kafka: KafkaSettings, topic: str, timeout_ms: int) -> TopicOffsets:
    """What a topic holds, once each transaction is decided that has written to it by now.

    A transaction that another one's open one hides would else be seen in one topic and not in the other. Raises
    Undecided after `timeout_ms`, or an error as `topic_offsets`.
    """
    java = jvm(spark)
    places = java.java.util.ArrayList()
    found = topic_offsets(spark, kafka, topic, timeout_ms)
    for partition in found.latest:
        places.add(java.org.apache.kafka.common.TopicPartition(topic, partition))
    limit, deadline = java.java.time.Duration.ofMillis(timeout_ms), time.monotonic() + timeout_ms / 1000
    try:
        with _consumer(java, kafka, "read_uncommitted") as consumer:
            written = _by_partition(consumer.endOffsets(places, limit))
        with _consumer(java, kafka) as consumer:
            latest = _by_partition(consumer.endOffsets(places, limit))
            while open_ := undecided(written, latest):
                if time.monotonic() > deadline:
                    which = ", ".join(f"{topic}-{p} at offset {offset}" for p, offset in open_.items())
                    raise Undecided(f"{which}: a transaction has been open for more than {timeout_ms} ms")
                time.sleep(SETTLE_POLL_SECONDS)
                latest = _by_partition(consumer.endOffsets(places, limit))
    except Py4JJavaError as e:
        raise _translated(e, kafka, topic, timeout_ms) from None
    return found._replace(latest=latest)


def undecided(written: Mapping[int, int], stable: Mapping[int, int]) -> dict[int, int]:
    """By partition the last stable offset, where it lies before what was written.

    >>> undecided({0: 9, 1: 4}, {0: 7, 1: 6})
    {0: 7}
    """
    return {p: stable[p] for p, end in sorted(written.items()) if stable[p] < end}


def offsets_at(
    spark: SparkSession, kafka: KafkaSettings, held: TopicOffsets, time_ms: int, timeout_ms: int
) -> dict[int, int]:
    """Each partition's first offset whose timestamp is `time_ms` or later; partitions without one are left out.

    Errors as `topic_offsets`.
    """
    java = jvm(spark)
    wanted = java.java.util.HashMap()
    for partition in held.latest:
        place = java.org.apache.kafka.common.TopicPartition(held.topic, partition)
        _put_long(spark, wanted, place, time_ms)
    try:
        with _consumer(java, kafka) as consumer:
            found = consumer.offsetsForTimes(wanted, java.java.time.Duration.ofMillis(timeout_ms))
            return {int(p.partition()): int(found[p].offset()) for p in found if found[p] is not None}
    except Py4JJavaError as e:
        raise _translated(e, kafka, held.topic, timeout_ms) from None


@contextmanager
def _admin(java: Any, kafka: KafkaSettings) -> Iterator[Any]:
    admin = java.org.apache.kafka.clients.admin.AdminClient.create(_properties(java, client_properties(kafka)))
    try:
        yield admin
    finally:
        admin.close(java.java.time.Duration.ZERO)


def _answer(java: Any, kafka: KafkaSettings, future: Any, timeout_ms: int) -> Any:
    """Wait for an answer of Kafka's; after a moment without it the log says what is waited for."""
    said = {"bootstrap_servers": kafka.bootstrap_servers, "timeout_ms": timeout_ms}
    saying = threading.Timer(UNREACHED_SAY_MS / 1000, log.warning, ["no answer from Kafka yet, waiting on"], said)
    saying.daemon = True
    saying.start()
    try:
        return future.get(timeout_ms, java.java.util.concurrent.TimeUnit.MILLISECONDS)
    finally:
        saying.cancel()


@contextmanager
def _consumer(java: Any, kafka: KafkaSettings, isolation: str = "read_committed") -> Iterator[Any]:
    bytes_class = "org.apache.kafka.common.serialization.ByteArrayDeserializer"
    more = {"isolation.level": isolation, "key.deserializer": bytes_class, "value.deserializer": bytes_class}
    consumer = java.org.apache.kafka.clients.consumer.KafkaConsumer(_properties(java, _reading(kafka) | more))
    try:
        yield consumer
    finally:
        consumer.close(java.java.time.Duration.ZERO)


def delete_records(
    spark: SparkSession, kafka: KafkaSettings, topic: str, before: Mapping[int, int], timeout_ms: int
) -> None:
    """Delete the records of each partition that come before an offset; errors as `topic_offsets`."""
    java = jvm(spark)
    wanted = java.java.util.HashMap()
    for partition, offset in before.items():
        place = java.org.apache.kafka.common.TopicPartition(topic, partition)
        wanted.put(place, _records_before(spark, offset))
    try:
        with _admin(java, kafka) as admin:
            _answer(java, kafka, admin.deleteRecords(wanted).all(), timeout_ms)
    except Py4JJavaError as e:
        raise _translated(e, kafka, topic, timeout_ms) from None


def read_range(
    spark: SparkSession,
    kafka: KafkaSettings,
    topic: str,
    start: Mapping[int, int],
    end: Mapping[int, int],
    *,
    headers: bool = False,
    split: bool = False,
) -> DataFrame:
    """Committed records from `start` up to `end` (exclusive) of each partition: READ_SCHEMA, and headers if asked.

    Each partition is read by one task, in order, and a task reads several where they hold little. With `split`, some
    share a partition where Spark has more cores than there are partitions, in no order.
    """
    ranges = {p: (start[p], end[p]) for p in start if start[p] < end[p]}
    schema = f"{READ_SCHEMA}, {_HEADERS}" if headers else READ_SCHEMA
    if not ranges:
        return spark.createDataFrame([], schema)
    reader = spark.read.format("kafka")
    for name, value in _reading(kafka).items():
        reader = reader.option(f"kafka.{name}", value)
    cores, records = spark.sparkContext.defaultParallelism, sum(last - first for first, last in ranges.values())
    if split:
        reader = reader.option("minPartitions", max(len(ranges), min(cores, records // TASK_RECORDS)))
    frame = (
        reader.option("kafka.isolation.level", "read_committed")
        .option("assign", json.dumps({topic: sorted(ranges)}))
        .option("startingOffsets", json.dumps({topic: {str(p): first for p, (first, _) in ranges.items()}}))
        .option("endingOffsets", json.dumps({topic: {str(p): last for p, (_, last) in ranges.items()}}))
        .option("includeHeaders", str(headers).lower())
        .load()
    )
    frame = frame.coalesce(max(cores, records // TASK_RECORDS))
    columns = ["partition", "offset", F.unix_millis("timestamp").alias("timestamp_ms"), "key", "value"]
    return frame.select(*columns, "headers") if headers else frame.select(*columns)


def _reading(kafka: KafkaSettings) -> dict[str, str]:
    return client_properties(kafka) | {"fetch.max.wait.ms": str(FETCH_WAIT_MS)}


def _properties(java: Any, values: Mapping[str, str]) -> Any:
    properties = java.java.util.Properties()
    for name, value in values.items():
        properties.put(name, value)
    return properties


def _records_before(spark: SparkSession, offset: int) -> Any:
    """`RecordsToDelete.beforeOffset(offset)`: by reflection, since Py4J cannot tell it from its getter's namesake."""
    java: Any = jvm(spark)
    loader = java.java.lang.Thread.currentThread().getContextClassLoader()
    kind = loader.loadClass("org.apache.kafka.clients.admin.RecordsToDelete")
    maker = next(m for m in kind.getMethods() if m.getName() == "beforeOffset" and m.getParameterCount() == 1)
    arguments = spark.sparkContext._gateway.new_array(java.java.lang.Object, 1)
    arguments[0] = java.java.lang.Long.valueOf(offset)
    return maker.invoke(None, arguments)


def _put_long(spark: SparkSession, map_: Any, key: Any, number: int) -> None:
    """`map_.put(key, number)` with a Long: what Py4J is given as a Python integer of 32 bits, it makes an Integer."""
    java: Any = jvm(spark)
    put = next(m for m in map_.getClass().getMethods() if m.getName() == "put")
    arguments = spark.sparkContext._gateway.new_array(java.java.lang.Object, 2)
    arguments[0] = key
    boxed = java.java.util.stream.LongStream.rangeClosed(number, number).boxed().toArray()
    java.java.lang.System.arraycopy(boxed, 0, arguments, 1, 1)
    put.invoke(map_, arguments)


def _by_partition(offsets: Any) -> dict[int, int]:
    return {int(place.partition()): int(offsets[place]) for place in offsets}


def _translated(error: Py4JJavaError, kafka: KafkaSettings, topic: str, timeout_ms: int) -> PenstockError:
    chain, where = " ".join(causes(error)), f"kafka.bootstrap_servers={kafka.bootstrap_servers}"
    if "UnknownTopicOrPartitionException" in chain:
        return UnknownTopicOrPartition(f"{where}: there is no topic {topic}")
    for name, kind in _ERRORS:
        if name in chain:
            return kind(f"{where}, topic {topic}: {last_cause(error)}")
    if "TimeoutException" in chain:
        return BrokerNotAvailable(f"{where}: no answer about {topic} within {timeout_ms} ms (kafka_timeout_ms)")
    return BrokerNotAvailable(f"{where}: {topic} cannot be asked about: {last_cause(error)}")
