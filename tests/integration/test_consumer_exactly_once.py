"""Handlers that produce exactly once, in processes that are killed and stopped, on a real broker."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import signal
import sys
import time
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.consumer import Consumer, ConsumerSettings
from penstock.shared.clients.producer import Producer
from penstock.shared.common.records import ProducerRecord, TopicPartition
from penstock.shared.common.settings import KafkaSettings
from tests.shared_broker import Broker

ROOT = Path(__file__).parents[2]
PARTITIONS, KEYS = 4, 100
WAIT_S = 60
TRANSACTION_TIMEOUT_MS = 2_000

HANDLER = """
import asyncio, random
from penstock.shared.common.records import ConsumerRecord, ProducerRecord


async def handle(record: ConsumerRecord) -> list[ProducerRecord]:
    await asyncio.sleep(random.random() * 0.01)
    if random.random() < 0.05:
        raise ConnectionError("try again")
    return [ProducerRecord(record.topic + "-out", record.value + part, record.key) for part in (b"a", b"b")]
"""


class Workers:
    """Processes of `penstock consumer` in one group."""

    def __init__(self, servers: str, topic: str, folder: Path) -> None:
        (folder / "producing_handler.py").write_text(HANDLER)
        self._folder = folder
        arguments = {
            "topics": topic, "group-id": topic, "handler": "producing_handler:handle", "max-attempts": "50",
            "kafka.bootstrap-servers": servers, "consumer.session-timeout-ms": "1500", "http.port": "0",
            "consumer.heartbeat-interval-ms": "200", "consumer.auto-offset-reset": "earliest",
            "consumer.partition-assignment-strategy": "cooperative-sticky", "processing-guarantee": "exactly_once",
            "producer.transaction-timeout-ms": str(TRANSACTION_TIMEOUT_MS), "retry.backoff-ms": "10",
            "log.format": "json",
        }  # fmt: skip
        self._arguments = [f"--{name}={value}" for name, value in arguments.items()]
        self.running: list[asyncio.subprocess.Process] = []

    async def start(self) -> None:
        with (self._folder / "log").open("ab") as log:
            process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "penstock.services.consumer.main", *self._arguments, cwd=self._folder,
                env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=log, stderr=log,
            )  # fmt: skip
        self.running.append(process)

    async def kill(self, process: asyncio.subprocess.Process) -> None:
        self.running.remove(process)
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def stop_for(self, process: asyncio.subprocess.Process, seconds: float) -> None:
        """Stop a process with SIGSTOP for some seconds, and then continue it."""
        process.send_signal(signal.SIGSTOP)
        await asyncio.sleep(seconds)
        process.send_signal(signal.SIGCONT)

    def check_alive(self) -> None:
        for process in self.running:
            assert process.returncode is None, (self._folder / "log").read_text()[-3_000:]

    async def end(self) -> None:
        """Stop all processes with SIGTERM; each exits with status 0."""
        for process in self.running:
            process.terminate()
        assert [await process.wait() for process in self.running] == [0] * len(self.running)
        self.running.clear()


@contextlib.asynccontextmanager
async def workers(servers: str, topic: str, folder: Path) -> AsyncIterator[Workers]:
    own = Workers(servers, topic, folder)
    try:
        yield own
    finally:
        for process in list(own.running):
            await own.kill(process)


async def read_to(admin: Admin, group: str) -> int:
    return sum(at.offset for at in (await admin.group_offsets(group)).values())


async def until_read(admin: Admin, group: str, offset: int, own: Workers) -> None:
    deadline = time.monotonic() + WAIT_S
    while await read_to(admin, group) < offset:
        own.check_alive()
        assert time.monotonic() < deadline, f"read {await read_to(admin, group)} of {offset}"
        await asyncio.sleep(0.05)


async def output(connection: KafkaSettings, topic: str) -> dict[bytes | None, list[bytes | None]]:
    """Read all committed records, by key, in order; wait until no transaction is open."""
    found: dict[bytes | None, list[bytes | None]] = defaultdict(list)
    settings = ConsumerSettings(auto_offset_reset="earliest", isolation_level="read_committed", max_poll_records=None)
    async with Consumer(connection, settings) as committed, Consumer(connection) as uncommitted:
        tps = [TopicPartition(topic, p) for p in range(PARTITIONS)]
        ends = await uncommitted.end_offsets(tps)
        committed.assign(tps)
        async with asyncio.timeout(WAIT_S):
            while any([await committed.position(tp) < ends[tp] for tp in tps]):
                for columns in (await committed.poll(200)).values():
                    for key, value in zip(columns.keys, columns.values, strict=True):
                        found[key].append(value)
    return found


def check(found: dict[bytes | None, list[bytes | None]], total: int) -> None:
    """Assert that each input has its two outputs once, and that each key's outputs are in the order of its inputs."""
    values = Counter(value for each in found.values() for value in each)
    assert values == Counter(b"%d%s" % (i, part) for i in range(total) for part in (b"a", b"b"))
    for each in found.values():
        numbers = [int((value or b"")[:-1]) for value in each]
        assert numbers == sorted(numbers)


async def set_up(connection: KafkaSettings, topic: str) -> None:
    async with Admin(connection) as admin:
        await admin.create_topics([NewTopic(name, PARTITIONS) for name in (topic, f"{topic}-out", f"{topic}-dlq")])


async def send(connection: KafkaSettings, topic: str, numbers: range) -> None:
    async with Producer(connection) as producer:
        records = [ProducerRecord(topic, b"%d" % i, b"key-%d" % (i % KEYS)) for i in numbers]
        assert await (await producer.send_many(records)).first_error() is None


async def test_a_kill_under_load_loses_and_repeats_no_record(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """If one of two processes is killed within its transactions, each output is there once, in order per key."""
    total = 4_000
    connection = KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)
    await set_up(connection, topic_name)
    await send(connection, topic_name, range(total))
    async with Admin(connection) as admin, workers(kafka.bootstrap_servers, topic_name, tmp_path) as own:
        await own.start()
        await own.start()
        await until_read(admin, topic_name, total // 4, own)
        await own.kill(own.running[0])
        await until_read(admin, topic_name, total, own)
        await own.end()
    check(await output(connection, f"{topic_name}-out"), total)


@pytest.mark.soak
async def test_kills_and_stops_for_a_minute(kafka: Broker, topic_name: str, tmp_path: Path) -> None:
    """Processes are killed, stopped past their session and transaction timeouts, and added for 60 s: each output is
    there once.
    """
    rng, connection, total = random.Random(3), KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), 0
    await set_up(connection, topic_name)
    kills = stops = 0
    stopping: list[asyncio.Task[None]] = []
    async with Admin(connection) as admin, workers(kafka.bootstrap_servers, topic_name, tmp_path) as own:
        started = time.monotonic()
        while time.monotonic() - started < 60:
            while len(own.running) < 3:
                await own.start()
            await send(connection, topic_name, range(total, total + 500))
            total += 500
            await asyncio.sleep(1)
            victim = rng.choice(own.running)
            if rng.random() < 0.2:
                await own.kill(victim)
                kills += 1
            elif rng.random() < 0.2:
                stopping.append(asyncio.create_task(own.stop_for(victim, 4)))
                stops += 1
        await asyncio.gather(*stopping, return_exceptions=True)
        await until_read(admin, topic_name, total, own)
    check(await output(connection, f"{topic_name}-out"), total)
    print(f"{total} records, {kills} kills, {stops} stops")
    assert kills > 3
    assert stops > 3
