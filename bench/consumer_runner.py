"""The handler runner compared with one record at a time: a handler of 5 ms, 10,000 records and 1,000 keys.

It uses one real embedded broker. Both read the same topic through the same Consumer with the same handler. The time
runs from the first call of the handler to the end of the last, so joining the group is not included. Order per key is
checked in both: the values seen for each key must be the sent ones, in order, each once.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path

from prometheus_client import CollectorRegistry

from penstock.services.consumer.executor import Executor
from penstock.services.consumer.handler_loop import HandlerLoop
from penstock.services.consumer.handler_runner import RecordProducer
from penstock.services.consumer.handlers import Handler
from penstock.services.consumer.runner_metrics import RunnerMetrics
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.broker_config import EmbeddedKafkaSettings
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.producer import Producer
from penstock.shared.common.clock import SYSTEM_CLOCK
from penstock.shared.common.gc_tuning import spare_the_collector
from penstock.shared.common.records import ConsumerRecord, ProducerRecord
from penstock.shared.common.settings import KafkaSettings

TOPIC = "bench"
PARTITIONS = 4
RATIO_WANTED = 50
RUNS = 3
"""The rounds of the runner, of which the best counts. In a round of under a second other load has much influence."""


class SlowHandler:
    """Waits like a call to another service, and keeps the records that it has seen."""

    def __init__(self, handler_ms: float) -> None:
        self.handler_ms = handler_ms
        self.seen: dict[bytes | None, list[bytes | None]] = defaultdict(list)
        self.running: set[bytes | None] = set()
        self.calls = self.overlaps = self.most = 0
        self.first = self.last = 0.0

    async def __call__(self, record: ConsumerRecord) -> None:
        if not self.calls:
            self.first = time.perf_counter()
        self.calls += 1
        self.overlaps += record.key in self.running
        self.running.add(record.key)
        self.most = max(self.most, len(self.running))
        await asyncio.sleep(self.handler_ms / 1000)
        self.running.discard(record.key)
        self.seen[record.key].append(record.value)
        self.last = time.perf_counter()

    def result(self, records: Iterable[ProducerRecord]) -> dict[str, object]:
        sent: dict[bytes | None, list[bytes | None]] = defaultdict(list)
        for record in records:
            sent[record.key].append(record.value)
        seconds = self.last - self.first
        return {
            "seconds": round(seconds, 3),
            "records_per_s": round(self.calls / seconds),
            "in_flight_most": self.most,
            "order_per_key_ok": self.seen == sent and self.overlaps == 0,
        }


def settings_for(kafka: KafkaSettings, group: str, concurrency: int) -> ConsumerServiceSettings:
    return ConsumerServiceSettings(
        kafka=kafka,
        topics=(TOPIC,),
        group_id=group,
        handler="bench:handle",
        max_concurrency=concurrency,
        consumer={"auto_offset_reset": "earliest"},
    )


async def one_at_a_time(kafka: KafkaSettings, records: list[ProducerRecord], handler_ms: float) -> dict[str, object]:
    handler = SlowHandler(handler_ms)
    async with Consumer(kafka, settings_for(kafka, "one-at-a-time", 1).consumer_settings()) as consumer:
        consumer.subscribe([TOPIC])
        while handler.calls < len(records):
            for columns in (await consumer.poll(1_000)).values():
                for record in columns.records():
                    await handler(record)
            await consumer.commit()
    return handler.result(records)


async def runner(
    kafka: KafkaSettings, records: list[ProducerRecord], handler_ms: float, concurrency: int, run: int
) -> dict[str, object]:
    spare_the_collector()
    handler = SlowHandler(handler_ms)
    settings = settings_for(kafka, f"runner-{concurrency}-{run}", concurrency)
    metrics = RunnerMetrics(CollectorRegistry(), settings.group_id)
    async with Producer(kafka) as producer, Consumer(kafka, settings.consumer_settings()) as consumer:
        executor = Executor(
            Handler("bench:handle", handler),
            settings.retry_policy(),
            RecordProducer(producer),
            metrics,
            group="bench",
        )
        handling = HandlerLoop(
            consumer, settings.scheduler(batch=False), executor, metrics, SYSTEM_CLOCK, settings.handler_loop_options()
        )
        handling.subscribe([TOPIC])
        cpu = time.process_time()
        while handling.finished < len(records):
            await handling.run_once()
        cpu = time.process_time() - cpu
        await handling.stop(5_000)
    return {
        **handler.result(records),
        "concurrency": concurrency,
        "cpu_us_per_record": round(cpu / len(records) * 1e6, 1),
    }


async def measure(records: int, keys: int, handler_ms: float, concurrency: int) -> dict[str, object]:
    rng = random.Random(0)
    sent = [ProducerRecord(TOPIC, b"%d" % i, b"key-%d" % rng.randrange(keys)) for i in range(records)]
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder), EmbeddedKafkaSettings()) as broker:
            kafka = KafkaSettings(bootstrap_servers=broker.bootstrap_servers)
            async with Admin(kafka) as admin:
                await admin.create_topics([NewTopic(TOPIC, PARTITIONS)])
            async with Producer(kafka) as producer:
                await (await producer.send_many(sent))
            runs = [await runner(kafka, sent, handler_ms, concurrency, run) for run in range(RUNS)]
            ours = min(runs, key=lambda result: float(str(result["seconds"])))
            usual = await runner(kafka, sent, handler_ms, 64, 0)
            plain = await one_at_a_time(kafka, sent, handler_ms)
    ratio = float(str(plain["seconds"])) / float(str(ours["seconds"]))
    return {
        "records": records,
        "keys": keys,
        "handler_ms": handler_ms,
        "one_at_a_time": plain,
        "runner": ours,
        "runner_default_concurrency": usual,
        "ratio": round(ratio, 1),
        "ratio_wanted": RATIO_WANTED,
        "ok": ratio >= RATIO_WANTED and all(part["order_per_key_ok"] for part in (plain, usual, *runs)),
    }


def main(arguments: list[str]) -> int:
    """Measure and print. The status is 1 if the ratio or the order is missed."""
    parser = argparse.ArgumentParser(prog="consumer_runner", description=__doc__)
    parser.add_argument("--records", type=int, default=10_000)
    parser.add_argument("--keys", type=int, default=1_000)
    parser.add_argument("--handler-ms", type=float, default=5)
    parser.add_argument("--concurrency", type=int, default=1_000)
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    result = asyncio.run(measure(options.records, options.keys, options.handler_ms, options.concurrency))
    if options.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:28} {value}")
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
