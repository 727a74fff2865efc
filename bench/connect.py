"""Connect sinks side by side: Kafka Connect's FileStreamSink and Penstock's file sink; also Penstock's Postgres sink.

It uses one real embedded broker, one topic of one partition with 100-byte records, and one task with string converters
(Postgres: JSON). Each contestant runs in its own process, in turns, and the best round of each counts. The time runs
from the first record in the file or table to the last. CPU is the whole process', its start included. Kafka Connect's
jars are downloaded once a user. Postgres is started from the binaries on the machine, or is the one that `--postgres`
names; without either that contestant is left out. Rows are upserted by `user`, of which there are 20,000, so nearly
every record updates a row.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from bench._side_by_side import Figures, best_of, report
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.clients.producer import Producer, ProducerSettings
from penstock.shared.common.java.installed_java import find_java
from penstock.shared.common.java.jars import fetch_jars, read_jar_set
from penstock.shared.common.records import ProducerRecord
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.connect.runtime.plugins import Plugins
from penstock.shared.connect.runtime.states import ConnectorTaskId, State, TargetState
from penstock.shared.connect.runtime.task_factory import TaskFactory
from penstock.shared.connect.runtime.worker import Worker
from penstock.shared.connect.runtime.worker_config import WorkerConfig
from penstock.shared.connect.runtime.worker_task import TaskSpec
from penstock.shared.connect.storage.offset_store import MemoryOffsetStore
from tests.integration.connect.postgres import is_installed, server

TOPIC = "bench"
STRING = "org.apache.kafka.connect.storage.StringConverter"
JSON = "org.apache.kafka.connect.json.JsonConverter"
LIMIT_SECONDS = 300
BULK = 20_000
THEIRS, OURS, POSTGRES = "kafka connect file", "penstock file", "penstock postgres"
WANTED = ((OURS, THEIRS, 1.0),)
RATES = {POSTGRES: 30_000}
"""The targets in rows a second."""
USERS = 20_000
CONNECT_JARS = read_jar_set(Path(__file__).with_name("connect_jars.json"))


class Quiet:
    """A status listener that prints only failures."""

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *message: print(*message, file=sys.stderr) if name == "on_failure" else None


def value_of(i: int) -> bytes:
    """A value of about 100 bytes."""
    return b'{"id":%07d,"user":"u%07d","path":"/item/%04d","ms":%04d,"status":200,"agent":"Mozilla 5.0, and so on"}' % (
        1_000_000 + i,
        i % USERS,
        i % 977,
        1_000 + i % 1500,
    )


async def fill(kafka: KafkaSettings, records: int) -> None:
    """Create the topic, with all records."""
    async with Admin(kafka) as admin, Producer(kafka, ProducerSettings(batch_size=65_536)) as producer:
        await admin.create_topics([NewTopic(TOPIC, 1)])
        for first in range(0, records, BULK):
            batch = [ProducerRecord(TOPIC, value_of(i)) for i in range(first, min(first + BULK, records))]
            error = await (await producer.send_many(batch)).first_error()
            assert error is None, error


class Progress:
    """The times of the first and the last record."""

    def __init__(self, records: int) -> None:
        self._records = records
        self._first = (0.0, 0)

    def seen(self, count: int) -> float | None:
        """Records a second, once all are there."""
        now = time.perf_counter()
        if count and not self._first[1]:
            self._first = (now, count)
        if count < self._records:
            return None
        left = self._records - self._first[1]
        return left / (now - self._first[0]) if left else float(self._records)


def lines_in(path: Path, size: int) -> int:
    """The number of complete records in a file, computed from its size: all records have the same size."""
    return path.stat().st_size // size if path.exists() else 0


async def ours(bootstrap: str, name: str, records: int, postgres: str, folder: Path) -> Figures:
    """One of Penstock's sinks, in this process."""
    started = time.process_time()
    props = {"bootstrap.servers": bootstrap, "key.converter": STRING, "value.converter": STRING}
    props |= {"connect.files.allowed": str(folder)}
    plugins, store = Plugins.installed(), MemoryOffsetStore()
    config = WorkerConfig(props, resolve=plugins.any_kind)
    worker = Worker(config, plugins, store, TaskFactory(config, plugins, store))
    connector = f"bench-{time.time_ns()}"
    settings = {"name": connector, "topics": TOPIC}
    out = folder / connector
    if name == OURS:
        settings |= {"connector.class": "FileStreamSink", "file": str(out)}
    else:
        settings |= {"connector.class": "PostgresSink", "connection.url": postgres, "auto.create": "true"}
        settings |= {
            "insert.mode": "upsert",
            "pk.mode": "record_value",
            "pk.fields": "user",
            "table.name.format": connector,
        }
        settings |= {"value.converter": JSON, "value.converter.schemas.enable": "false"}
    await worker.startup()
    id = ConnectorTaskId(connector, 0)
    await worker.start_task(TaskSpec(id, settings, settings), TargetState.STARTED, Quiet())
    progress, size, rate = Progress(records), len(value_of(0)) + 1, None
    while rate is None:
        await asyncio.sleep(0.02)
        assert worker.state(id) is not State.FAILED
        written = int({i: m for i, _, m in worker.task_metrics()}[id]["sink_record_send_total"])
        rate = progress.seen(written)
    await worker.shutdown()
    if name == OURS:
        assert out.stat().st_size == records * size, "the file does not hold every record once"
    cpu = time.process_time() - started
    return {"records_per_second": rate, "cpu_us_per_record": cpu / records * 1e6}


def theirs(bootstrap: str, records: int, folder: Path) -> Figures:
    """Kafka Connect, standalone, in its own process."""
    java = find_java()
    jars = asyncio.run(fetch_jars(CONNECT_JARS))
    out = folder / f"theirs-{time.time_ns()}"
    worker, sink = folder / "worker.properties", folder / "sink.properties"
    worker.write_text(
        f"bootstrap.servers={bootstrap}\nkey.converter={STRING}\nvalue.converter={STRING}\n"
        f"offset.storage.file.filename={folder}/offsets\nlisteners=http://127.0.0.1:0\nplugin.discovery=service_load\n"
    )
    sink.write_text(f"name={out.name}\nconnector.class=FileStreamSink\ntasks.max=1\ntopics={TOPIC}\nfile={out}\n")
    main = "org.apache.kafka.connect.cli.ConnectStandalone"
    command = [str(java.executable), "-Xmx1g", "-cp", f"{jars}/*", main, str(worker), str(sink)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    progress, size, rate = Progress(records), len(value_of(0)) + 1, None
    deadline = time.perf_counter() + LIMIT_SECONDS
    try:
        while rate is None:
            time.sleep(0.02)
            assert process.poll() is None, "Kafka Connect ended"
            assert time.perf_counter() < deadline, "Kafka Connect did not write all records"
            rate = progress.seen(lines_in(out, size))
    finally:
        process.terminate()
        process.wait()
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return {"records_per_second": rate, "cpu_us_per_record": (used.ru_utime + used.ru_stime) / records * 1e6}


def postgres_of(url: str) -> AbstractContextManager[str]:
    """The Postgres to use: the one in `url`, or one started from the machine's binaries if there are any."""
    return server() if not url and is_installed() else nullcontext(url)


async def measure(records: int, rounds: int, postgres: str) -> dict[str, Figures]:
    """The best of each contestant."""
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder)) as kafka:
            await fill(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers), records)
            contestants = [THEIRS, OURS, *([POSTGRES] if postgres else [])]
            arguments = ["--bootstrap", kafka.bootstrap_servers, "--records", str(records), "--postgres", postgres]
            return await best_of("bench.connect", contestants, arguments, rounds)


def main() -> int:
    """Measure, print, compare."""
    parser = argparse.ArgumentParser(prog="scripts/bench connect", description=__doc__)
    parser.add_argument("--records", type=int, default=2_000_000)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--postgres", default="", help="URL of a Postgres to use (default: start one)")
    parser.add_argument("--bootstrap", default="")
    parser.add_argument("--one", default="")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    if given.one:
        with tempfile.TemporaryDirectory() as folder:
            if given.one == THEIRS:
                figures = theirs(given.bootstrap, given.records, Path(folder))
            else:
                figures = asyncio.run(ours(given.bootstrap, given.one, given.records, given.postgres, Path(folder)))
        print(json.dumps(figures))
        return 0
    with postgres_of(given.postgres) as postgres:
        figures_of = asyncio.run(measure(given.records, given.rounds, postgres))
    title = f"{given.records:,} records of {len(value_of(0))} bytes, best of {given.rounds}"
    return report(title, figures_of, WANTED, rates=RATES, as_json=given.json)


if __name__ == "__main__":
    sys.exit(main())
