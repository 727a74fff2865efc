"""Reads topics as DataFrames with Spark's own Kafka source, which uses Kafka's Java client."""

from __future__ import annotations

import json
from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.spark.spark_sql import empty
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.settings import KafkaSettings

READ_SCHEMA = "partition int, offset bigint, timestamp_ms bigint, key binary, value binary"
_HEADERS = "headers array<struct<key: string, value: binary>>"
# fetch.max.wait.ms. A consumer that closes waits for its fetch in flight, once for every partition that is read. At a
# topic's end the broker holds that fetch for this long. Two cores read 60 partitions in 16.4 s with Kafka's default of
# 500 ms, and in 1.2 s with 10 ms.
FETCH_WAIT_MS = 10
# Records for each task beyond one task for each core. With fewer records, a further task costs more than it saves.
TASK_RECORDS = 50_000
# Spark's Kafka source converts every timestamp to microseconds, even if the column is not selected.
KAFKA_SOURCE_MS_MAX = (2**63 - 1) // 1_000


def java_client_properties(kafka: KafkaSettings) -> dict[str, str]:
    """Return the properties of Kafka's Java client, with which Spark's Kafka source reads.

    The CA file is passed by its path. A client certificate and its key are passed as PEM text. Raises ConfigError if
    the file of the certificate or of the key cannot be read, or if the key is not PKCS#8.
    """
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
        # JAAS has no \u escapes.
        user, password = (json.dumps(name, ensure_ascii=False) for name in names)
        properties["sasl.mechanism"] = kafka.sasl_mechanism
        properties["sasl.jaas.config"] = (
            f"org.apache.kafka.common.security.{kind}LoginModule required username={user} password={password};"
        )
    if kafka.ssl_cafile is not None:
        properties |= {"ssl.truststore.type": "PEM", "ssl.truststore.location": str(kafka.ssl_cafile)}
    if kafka.ssl_certfile is not None:
        # Kafka's parser picks the certificates, and the key, from all blocks of a PEM text.
        keyfile = kafka.ssl_keyfile or kafka.ssl_certfile
        properties["ssl.keystore.type"] = "PEM"
        try:
            properties["ssl.keystore.certificate.chain"] = kafka.ssl_certfile.read_text(encoding="utf-8")
            key = keyfile.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as e:
            raise ConfigError(f"kafka.ssl_certfile or kafka.ssl_keyfile cannot be read: {e}") from None
        properties["ssl.keystore.key"] = key
        is_encrypted = "BEGIN ENCRYPTED PRIVATE KEY" in key
        if not is_encrypted and "BEGIN PRIVATE KEY" not in key:
            raise ConfigError(
                f"kafka.ssl_keyfile: {keyfile} has no PKCS#8 key (BEGIN PRIVATE KEY or BEGIN ENCRYPTED PRIVATE KEY), "
                "and Kafka's Java client reads no other; convert the key with `openssl pkcs8 -topk8`"
            )
        # Java would decrypt a key that is not encrypted, and fail.
        if kafka.ssl_key_password is not None and is_encrypted:
            properties["ssl.key.password"] = kafka.ssl_key_password.get_secret_value()
    return properties


def read_topic(
    spark: SparkSession,
    kafka: KafkaSettings,
    topic: str,
    start: Mapping[int, int],
    end: Mapping[int, int],
    *,
    headers: bool = False,
) -> DataFrame:
    """Read a topic with Spark's Kafka source: the committed records from offset `start` up to `end` of each partition.

    `end` is exclusive. The columns are READ_SCHEMA, and `headers` if `headers` is true. One task reads a partition in
    order; a task may read several partitions that hold few records.
    """
    ranges = {p: (start[p], end[p]) for p in start if start[p] < end[p]}
    schema = f"{READ_SCHEMA}, {_HEADERS}" if headers else READ_SCHEMA
    if not ranges:
        return empty(spark, schema)
    reader = spark.read.format("kafka")
    for name, value in java_client_properties(kafka).items():
        reader = reader.option(f"kafka.{name}", value)
    frame = (
        reader.option("kafka.isolation.level", "read_committed")
        .option("kafka.fetch.max.wait.ms", FETCH_WAIT_MS)
        .option("assign", json.dumps({topic: sorted(ranges)}))
        .option("startingOffsets", json.dumps({topic: {str(p): first for p, (first, _) in ranges.items()}}))
        .option("endingOffsets", json.dumps({topic: {str(p): last for p, (_, last) in ranges.items()}}))
        .option("includeHeaders", str(headers).lower())
        .load()
    )
    cores = spark.sparkContext.defaultParallelism
    records = sum(last - first for first, last in ranges.values())
    frame = frame.coalesce(max(cores, records // TASK_RECORDS))
    columns = ["partition", "offset", F.unix_millis("timestamp").alias("timestamp_ms"), "key", "value"]
    return frame.select(*columns, "headers") if headers else frame.select(*columns)


def count_records(
    spark: SparkSession, kafka: KafkaSettings, topic: str, start: Mapping[int, int], end: Mapping[int, int]
) -> int:
    """Return the number of records that `read_topic` reads. Without offsets to read, no Spark job runs."""
    if all(start[p] >= end[p] for p in start):
        return 0
    return int(read_topic(spark, kafka, topic, start, end).count())
