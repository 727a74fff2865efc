"""Latency from a record's append to its readable result: 10,000 records a second, a commit every 100 ms.

Each record has its own key, and its event time is the moment at which it was due to be sent. Results are emitted on
update. So every record has its own result, whose timestamp is the record's due time. Any delay of the sender counts as
latency, and a rate that was not held is reported. Producer, stream worker and the reader of the results
(read_committed) share one process and one event loop, so the latency is higher than in production.
"""

from __future__ import annotations

import asyncio
import contextlib
import time

import numpy as np

from bench._sessions_data import PARTITIONS
from penstock.shared.clients.admin import Admin, event_time_topic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.records import RecordColumns, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.streams.aggregations.aggregation import Count
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.streams.runtime.stream_worker import StreamWorker
from penstock.shared.streams.settings import StreamsSettings
from penstock.shared.streams.task.task_context import Guarantee

RECORDS_PER_SECOND = 10_000
RATE_HELD_MIN = 0.98  # of the records that were due while sending
TICK_MS = 10
COMMIT_INTERVAL_MS = 100
WARM_UP_SECONDS = 2
POLL_MS = 50
TOPIC, RESULTS = "moments", "moments-seen"


async def latency(kafka: KafkaSettings, seconds: int, guarantee: Guarantee) -> dict[str, float]:
    """Milliseconds from a record's due time to its result, for records due after the first seconds.

    `offered_per_second` is the number of records sent per second.
    """
    source, results = f"{TOPIC}-{guarantee}", f"{RESULTS}-{guarantee}"
    async with Admin(kafka) as admin:
        await admin.create_topics([event_time_topic(name, PARTITIONS) for name in (source, results)])
    builder = StreamsBuilder()
    windows = builder.stream(source, value=bytes).group_by_key().session_window(gap=60_000)
    windows.aggregate("moments", n=Count()).on_update().to(results)
    settings = StreamsSettings(
        application_id=f"bench-latency-{guarantee}".replace("_", "-"),
        processing_guarantee=guarantee,
        commit_interval_ms=COMMIT_INTERVAL_MS,
        replication_factor=1,
    )
    restored = asyncio.Semaphore(0)
    worker = StreamWorker(kafka, settings, builder.build(), on_task=lambda _: restored.release())
    await worker.startup()
    loop = asyncio.create_task(_run(worker))
    try:
        for _ in range(PARTITIONS):
            await restored.acquire()
        wanted = RECORDS_PER_SECOND * seconds
        seen = asyncio.create_task(_read(kafka, results, wanted))
        offered = await _send(kafka, source, wanted)
        took = await asyncio.wait_for(seen, seconds + 30)
    finally:
        loop.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await loop
        await worker.shutdown()
    late = took[RECORDS_PER_SECOND * WARM_UP_SECONDS :]
    p50, p99 = np.percentile(late, (50, 99)).tolist()
    return {"p50_ms": p50, "p99_ms": p99, "max_ms": max(late), "offered_per_second": offered}


async def _run(worker: StreamWorker) -> None:
    while True:
        await worker.run_once()


async def _send(kafka: KafkaSettings, topic: str, wanted: int) -> float:
    """Send each tick's records when they are due, however late the tick before was; return the records per second."""
    a_tick = RECORDS_PER_SECOND * TICK_MS // 1000
    async with Producer(kafka, ProducerSettings(linger_ms=0)) as producer:
        started, started_ms = time.monotonic(), time.time_ns() // 1_000_000
        for first in range(0, wanted, a_tick):
            due_s = first / RECORDS_PER_SECOND
            await asyncio.sleep(max(0.0, started + due_s - time.monotonic()))
            due_ms = started_ms + round(due_s * 1000)
            keys = [b"k%d" % i for i in range(first, first + a_tick)]
            await producer.send_many(RecordColumns(topic, keys, [b"x" * 100] * a_tick, [due_ms] * a_tick))
        return wanted / max(time.monotonic() - started, wanted / RECORDS_PER_SECOND)


async def _read(kafka: KafkaSettings, topic: str, wanted: int) -> list[float]:
    settings = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed", max_poll_records=None)
    took: list[float] = []
    async with Consumer(kafka, settings) as consumer:
        consumer.assign([TopicPartition(topic, p) for p in range(PARTITIONS)])
        while len(took) < wanted:
            for columns in (await consumer.poll(POLL_MS)).values():
                took += (time.time_ns() / 1e6 - columns.timestamps).tolist()
    return took
