"""Consumers side by side: aiokafka's getmany, confluent-kafka's consume, Penstock as columns and as records.

It uses one real embedded broker and one topic of four partitions, with 100-byte JSON records in uncompressed batches of
64 KiB, all in the broker's page cache. Each contestant runs in its own process, in turns, and its best round counts.
The time runs from the assignment of the partitions to the last record. CPU is the process' own within it. Every
contestant takes as many records at a time as its API returns. All but `confluent-kafka consume, unread` read each
record's value: confluent-kafka creates a message's key and value when they are accessed, the others have them already.
The numbers of bytes and records are checked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
import time
from pathlib import Path

from bench._side_by_side import Figures, best_of, report
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings

TOPIC = "bench"
PARTITIONS = 4
KEYS = 20_000
BATCH_SIZE = 65_536
CONSUMED = 10_000
BULK = 50_000
POLL_MS = 1_000
CONTESTANTS = (
    "aiokafka getmany",
    "confluent-kafka consume",
    "confluent-kafka consume, unread",
    "penstock columns",
    "penstock records",
)
WANTED = (
    ("penstock columns", "aiokafka getmany", 5.0),
    ("penstock columns", "confluent-kafka consume", 1.0),
    ("penstock columns", "confluent-kafka consume, unread", 1.0),
)

Measured = tuple[int, int, float, float]
"""Records, bytes of values, seconds, seconds of CPU."""


def value_of(i: int) -> bytes:
    """A value of about 100 bytes."""
    return b'{"user":"u%d","path":"/item/%d","ms":%d,"status":200,"agent":"Mozilla","n":%07d,"session":"%08x"}' % (
        i % KEYS,
        i % 977,
        i % 1500,
        i,
        i * 2654435761 % 2**32,
    )


class Stopwatch:
    """Wall and CPU time since its creation."""

    def __init__(self) -> None:
        self._wall = time.perf_counter()
        self._cpu = time.process_time()

    def read(self) -> tuple[float, float]:
        return time.perf_counter() - self._wall, time.process_time() - self._cpu


async def penstock(servers: str, count: int, *, records: bool) -> Measured:
    """Penstock, as columns or as record objects."""
    settings = ConsumerSettings(auto_offset_reset="earliest", max_poll_records=None)
    async with Consumer(KafkaSettings(bootstrap_servers=servers), settings) as consumer:
        watch = Stopwatch()
        consumer.assign([TopicPartition(TOPIC, p) for p in range(PARTITIONS)])
        seen = size = 0
        while seen < count:
            for columns in (await consumer.poll(POLL_MS)).values():
                seen += len(columns)
                if records:
                    size += sum(len(record.value or b"") for record in columns.records())
                else:
                    size += sum(map(len, columns.values))  # type: ignore[arg-type]
        return seen, size, *watch.read()


async def aiokafka(servers: str, count: int) -> Measured:
    """aiokafka's AIOKafkaConsumer.getmany."""
    from aiokafka import AIOKafkaConsumer
    from aiokafka import TopicPartition as AioTopicPartition

    consumer = AIOKafkaConsumer(bootstrap_servers=servers, auto_offset_reset="earliest")
    async with consumer:
        watch = Stopwatch()
        consumer.assign([AioTopicPartition(TOPIC, p) for p in range(PARTITIONS)])
        seen = size = 0
        while seen < count:
            for records in (await consumer.getmany(timeout_ms=POLL_MS)).values():
                seen += len(records)
                size += sum(len(record.value) for record in records)
        return seen, size, *watch.read()


def confluent(servers: str, count: int, topic: str = TOPIC, *, unread: bool) -> Measured:
    """confluent-kafka's Consumer.consume(10000)."""
    from confluent_kafka import OFFSET_BEGINNING
    from confluent_kafka import Consumer as Confluent
    from confluent_kafka import TopicPartition as ConfluentTopicPartition

    # With its defaults it waits a second whenever 100,000 messages are ahead.
    ahead = {"queued.min.messages": 1_000_000, "fetch.queue.backoff.ms": 10}
    consumer = Confluent({"bootstrap.servers": servers, "group.id": "bench", "enable.auto.commit": False, **ahead})
    consumer.list_topics(topic)
    watch = Stopwatch()
    consumer.assign([ConfluentTopicPartition(topic, p, OFFSET_BEGINNING) for p in range(PARTITIONS)])
    seen = size = 0
    while seen < count:
        messages = consumer.consume(CONSUMED, POLL_MS / 1000)
        seen += len(messages)
        if not unread:
            size += sum(len(message.value()) for message in messages)
    measured = watch.read()
    consumer.close()
    return seen, size, *measured


def run_one(contestant: str, servers: str, count: int, size: int) -> Figures:
    """One round of one contestant, in this process."""
    unread = contestant.endswith("unread")
    if contestant.startswith("confluent"):
        seen, got, seconds, cpu = confluent(servers, count, unread=unread)
    elif contestant.startswith("aiokafka"):
        seen, got, seconds, cpu = asyncio.run(aiokafka(servers, count))
    else:
        seen, got, seconds, cpu = asyncio.run(penstock(servers, count, records=contestant.endswith("records")))
    if seen != count or (got != size and not unread):
        raise SystemExit(f"{contestant}: {seen} records and {got} bytes instead of {count} and {size}")
    return {"records_per_second": count / seconds, "cpu_us_per_record": cpu / count * 1e6}


async def fill(servers: str, count: int) -> int:
    """Write the topic; return the bytes of all values."""
    kafka = KafkaSettings(bootstrap_servers=servers)
    async with Admin(kafka) as admin:
        await admin.create_topics([NewTopic(TOPIC, PARTITIONS)])
    size = 0
    async with Producer(kafka, ProducerSettings(batch_size=BATCH_SIZE, linger_ms=20)) as producer:
        for start in range(0, count, BULK):
            values = [value_of(i) for i in range(start, min(start + BULK, count))]
            size += sum(map(len, values))
            bulk = [
                ProducerRecord(TOPIC, value, b"u%d" % (i % KEYS), partition=i % PARTITIONS)
                for i, value in enumerate(values, start)
            ]
            if (error := await (await producer.send_many(bulk)).first_error()) is not None:
                raise error
    return size


async def run(count: int, rounds: int) -> dict[str, Figures]:
    """Every contestant on one topic, `rounds` times in turns."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as kafka:
            size = await fill(kafka.bootstrap_servers, count)
            arguments = ["--servers", kafka.bootstrap_servers, "--records", str(count), "--bytes", str(size)]
            return await best_of("bench.consumer", CONTESTANTS, arguments, rounds)


def main() -> int:
    """Run, print and compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench consumer", description=__doc__)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--servers", help=argparse.SUPPRESS)
    parser.add_argument("--bytes", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(run_one(given.one, given.servers, given.records, given.bytes)))
        return 0
    figures = asyncio.run(run(given.records, given.rounds))
    return report(f"{given.records:,} records, best of {given.rounds}", figures, WANTED, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
