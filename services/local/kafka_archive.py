"""Makes the class archive of the embedded Kafka (see shared/common/java/class_archive.py)."""

from __future__ import annotations

import signal
import tempfile
from pathlib import Path

from penstock.services.local.broker_config import (
    KAFKA_JARS,
    QUICK_START,
    EmbeddedKafkaSettings,
    broker_archive_path,
)
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import KafkaTimeout
from penstock.shared.common.java.class_archive import DUMP_TIMEOUT_MS, keep_archive, recording
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars

TOPIC = "archive"
READ_TIMEOUT_MS = 60_000


async def make_archive() -> Path | None:
    """Return the embedded Kafka's class archive, made if it is missing, for the Java that `find_java` finds. Returns
    None if the broker did not write it.

    The archive has the classes that a broker loads to create a topic and to serve a producer and a consumer group.
    """
    java = find_java()
    jars = await fetch_jars(KAFKA_JARS)
    archive = broker_archive_path(java, jars)
    if archive.is_file():
        return archive
    with recording(archive) as options, tempfile.TemporaryDirectory(prefix="penstock-archive-") as folder:
        settings = EmbeddedKafkaSettings(jvm_options=(*QUICK_START, *options), stop_timeout_ms=DUMP_TIMEOUT_MS)
        async with EmbeddedKafka(Path(folder) / "kafka", settings, java=java, jars=jars) as kafka:
            child = kafka.child
            await _use_classes(kafka.bootstrap_servers)
        return archive if keep_archive(archive, complete=child.returncode != -signal.SIGKILL) else None


async def _use_classes(address: str) -> None:
    """Create a topic, produce a record, read it and commit its offset in a group.

    So the broker loads the classes for the archive. Raises KafkaTimeout if the record does not arrive within
    READ_TIMEOUT_MS.
    """
    async with Admin(address) as admin:
        await admin.create_topics([NewTopic(TOPIC, 1)])
    async with Producer(address) as producer:
        await producer.send_and_wait(TOPIC, b"value")
    consumer_settings = ConsumerSettings(group_id="archive", auto_offset_reset="earliest")
    async with Consumer(address, consumer_settings) as consumer:
        consumer.subscribe([TOPIC])
        if not await consumer.poll(timeout_ms=READ_TIMEOUT_MS):
            raise KafkaTimeout(f"the record of topic {TOPIC} was not read within {READ_TIMEOUT_MS} ms")
        await consumer.commit()
