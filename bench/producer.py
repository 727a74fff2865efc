"""Producers side by side: aiokafka's send, confluent-kafka's produce, Penstock with send and with send_many.

It uses one real embedded broker and one topic of four partitions. All send 100-byte JSON with 20,000 keys, acks=all,
idempotent, with batches of 64 KiB and 5 ms of linger. The broker's JVM is warmed up first, with rounds that do not
count: until it has compiled its own code, the broker limits the rate. Each contestant runs in its own process, in
turns, and its best round counts. Each sends 20,000 records in its own way before the measurement (for columns, this
loads the compiled kernels). The time runs from the first send to the last acknowledgement. CPU is the process' own in
that time. Latency is that of every 100th record (in bulk: of 10,000 records), from the send to its acknowledgement,
under full load. `send_many` gets 10,000 records at a time, as objects that are created in the measured time, or as
columns.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import gc
import io
import json
import pstats
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from bench._side_by_side import Figures, best_of, report
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Deliveries, Producer, ProducerSettings
from penstock.shared.common.records import ProducerRecord, RecordColumns
from penstock.shared.common.settings import KafkaSettings

TOPIC = "bench"
PARTITIONS = 4
KEYS = 20_000
BATCH_SIZE, LINGER_MS = 65_536, 5
SAMPLE_EVERY = 100
BULK = 10_000
WARM_UP = 20_000
PROFILE_LINES = 25
BROKER_WARM_UP_ROUNDS = 4
CONTESTANTS = (
    "aiokafka send",
    "confluent-kafka produce",
    "penstock send",
    "penstock send_many",
    "penstock send_many, columns",
)
WANTED = (
    ("penstock send", "aiokafka send", 5.0),
    ("penstock send_many", "confluent-kafka produce", 1.5),
    ("penstock send_many, columns", "confluent-kafka produce", 2.5),
)

Times = list[float]
Spent = tuple[float, float]
"""Seconds, and seconds of CPU."""
Bulk = Callable[[list[bytes], list[bytes]], Sequence[ProducerRecord]]


def payloads(count: int) -> tuple[list[bytes], list[bytes]]:
    """Keys and values of `count` records, about 100 bytes each."""
    values = [
        b'{"user":"u%d","path":"/item/%d","ms":%d,"status":200,"agent":"Mozilla","n":%07d,"session":"%08x"}'
        % (i % KEYS, i % 977, i % 1500, i, i * 2654435761 % 2**32)
        for i in range(count)
    ]
    return [b"u%d" % (i % KEYS) for i in range(count)], values


def as_objects(keys: list[bytes], values: list[bytes]) -> Sequence[ProducerRecord]:
    """A bulk of record objects, the usual form."""
    return [ProducerRecord(TOPIC, v, k) for k, v in zip(keys, values, strict=True)]


def as_columns(keys: list[bytes], values: list[bytes]) -> Sequence[ProducerRecord]:
    """A bulk of columns, for a caller that has keys and values as columns."""
    return RecordColumns(TOPIC, keys, values)


BULKS = {"penstock send_many": as_objects, "penstock send_many, columns": as_columns}


def started() -> Spent:
    """The times at the start of the measured part."""
    return time.perf_counter(), time.process_time()


def spent_since(start: Spent) -> Spent:
    """The duration and CPU time of the measured part."""
    return time.perf_counter() - start[0], time.process_time() - start[1]


async def penstock(servers: str, keys: list[bytes], values: list[bytes], latencies: Times, bulk: Bulk | None) -> Spent:
    """Penstock, with `send` or in bulks of this kind; returns the time of the measured part."""
    settings = ProducerSettings(batch_size=BATCH_SIZE, linger_ms=LINGER_MS)
    async with Producer(KafkaSettings(bootstrap_servers=servers), settings) as producer:
        warm = (bulk or as_objects)(keys[:WARM_UP], values[:WARM_UP])
        assert await (await producer.send_many(warm)).first_error() is None
        start = started()
        if bulk:
            waiting = []
            for at in range(0, len(keys), BULK):
                handed = time.perf_counter()
                deliveries = await producer.send_many(bulk(keys[at : at + BULK], values[at : at + BULK]))
                waiting.append(asyncio.ensure_future(settled(deliveries, handed, latencies)))
            await asyncio.gather(*waiting)
        else:
            send, sent = producer.send, []
            for i, (key, value) in enumerate(zip(keys, values, strict=True)):
                if i % SAMPLE_EVERY:
                    sent.append(await send(TOPIC, value, key=key))
                else:
                    sent.append(await send(TOPIC, value, key=key, on_delivery=timer(latencies)))
            for delivery in sent:
                await delivery
        return spent_since(start)


async def settled(deliveries: Deliveries, handed: float, latencies: Times) -> None:
    """Wait until a bulk is acknowledged, and record its latency."""
    assert await deliveries.first_error() is None
    latencies.append(time.perf_counter() - handed)


def timer(latencies: Times) -> Callable[..., None]:
    """A delivery callback that records the time since its creation."""
    handed = time.perf_counter()
    return lambda *_: latencies.append(time.perf_counter() - handed)


async def aiokafka(servers: str, keys: list[bytes], values: list[bytes], latencies: Times) -> Spent:
    """aiokafka's AIOKafkaProducer.send, every future awaited."""
    from aiokafka import AIOKafkaProducer

    producer = AIOKafkaProducer(
        bootstrap_servers=servers, enable_idempotence=True, max_batch_size=BATCH_SIZE, linger_ms=LINGER_MS
    )
    async with producer:
        for key, value in zip(keys[:WARM_UP], values, strict=False):
            future = await producer.send(TOPIC, value, key=key)
        await future
        start, sent = started(), []
        for i, (key, value) in enumerate(zip(keys, values, strict=True)):
            future = await producer.send(TOPIC, value, key=key)
            if i % SAMPLE_EVERY == 0:
                future.add_done_callback(timer(latencies))
            sent.append(future)
        await asyncio.gather(*sent)
        return spent_since(start)


def confluent(servers: str, keys: list[bytes], values: list[bytes], latencies: Times) -> Spent:
    """confluent-kafka's Producer.produce, a delivery callback for every record."""
    from confluent_kafka import Producer as Confluent

    producer = Confluent(
        {
            "bootstrap.servers": servers,
            "acks": "all",
            "enable.idempotence": True,
            "batch.size": BATCH_SIZE,
            "linger.ms": LINGER_MS,
            "queue.buffering.max.messages": 1_000_000,
            "partitioner": "murmur2_random",
        }
    )
    failed: list[Any] = []

    def delivered(error: Any, _: Any) -> None:
        if error is not None:
            failed.append(error)

    def send(key: bytes, value: bytes, callback: Callable[..., None]) -> None:
        while True:
            try:
                producer.produce(TOPIC, value, key, on_delivery=callback)
                return
            except BufferError:
                producer.poll(0.1)

    for key, value in zip(keys[:WARM_UP], values, strict=False):
        send(key, value, delivered)
    producer.flush()
    start = started()
    for i, (key, value) in enumerate(zip(keys, values, strict=True)):
        send(key, value, delivered if i % SAMPLE_EVERY else timer(latencies))
        if i % 1_000 == 0:
            producer.poll(0)
    producer.flush()
    spent = spent_since(start)
    assert not failed, failed[:3]
    return spent


def run_one(contestant: str, servers: str, count: int) -> Figures:
    """One round of one contestant, in this process."""
    keys, values = payloads(count)
    latencies: Times = []
    gc.freeze()  # a search of the payloads by the collector must not count as the contestant's time
    if contestant == "confluent-kafka produce":
        seconds, cpu = confluent(servers, keys, values, latencies)
    elif contestant == "aiokafka send":
        seconds, cpu = asyncio.run(aiokafka(servers, keys, values, latencies))
    else:
        seconds, cpu = asyncio.run(penstock(servers, keys, values, latencies, BULKS.get(contestant)))
    latencies.sort()
    return {
        "records_per_second": count / seconds,
        "cpu_us_per_record": cpu / count * 1e6,
        "p99_ms": latencies[int(len(latencies) * 0.99)] * 1000,
    }


async def run(count: int, rounds: int) -> dict[str, Figures]:
    """Every contestant on one broker, `rounds` times in turns."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as kafka:
            async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
                await admin.create_topics([NewTopic(TOPIC, PARTITIONS)])
            arguments = ["--servers", kafka.bootstrap_servers, "--records", str(count)]
            await best_of("bench.producer", ["penstock send_many"], arguments, BROKER_WARM_UP_ROUNDS)
            return await best_of("bench.producer", CONTESTANTS, arguments, rounds)


def profiled(contestant: str, servers: str, count: int) -> str:
    """One round under the profiler, in this process: the functions by their own time."""
    profiler, text = cProfile.Profile(), io.StringIO()
    profiler.runcall(run_one, contestant, servers, count)
    pstats.Stats(profiler, stream=text).sort_stats("tottime").print_stats(PROFILE_LINES)
    return f"{contestant}, {count:,} records and the warm-up:\n{text.getvalue()}"


async def profile(count: int) -> int:
    """Profile each of Penstock's contestants once, in its own process."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as kafka:
            async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
                await admin.create_topics([NewTopic(TOPIC, PARTITIONS)])
            rest = ("--profile", "--servers", kafka.bootstrap_servers, "--records", str(count))
            for contestant in CONTESTANTS:
                if contestant.startswith("penstock"):
                    child = await asyncio.create_subprocess_exec(
                        sys.executable, "-m", "bench.producer", "--one", contestant, *rest
                    )
                    if await child.wait():
                        return 1
    return 0


def main() -> int:
    """Run, print and compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench producer", description=__doc__)
    parser.add_argument("--records", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--profile", action="store_true", help="only profile the CPU time of Penstock's contestants")
    parser.add_argument("--one", choices=CONTESTANTS, help=argparse.SUPPRESS)
    parser.add_argument("--servers", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one and given.profile:
        print(profiled(given.one, given.servers, given.records))
        return 0
    if given.profile:
        return asyncio.run(profile(given.records))
    if given.one:
        print(json.dumps(run_one(given.one, given.servers, given.records)))
        return 0
    figures = asyncio.run(run(given.records, given.rounds))
    return report(f"{given.records:,} records, best of {given.rounds}", figures, WANTED, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
