"""Connect's REST while 200 connectors are created: the time until all run, and the response times meanwhile.

It uses one real embedded broker and one distributed worker, each in its own process. Half of the connectors are file
sources, half file sinks, with one task each. They are created one after another by `PUT /connectors/NAME/config`.
Meanwhile a second client requests the list with statuses and single statuses, ten times a second. `create` is the time
of the PUTs, which wait for the previous rebalance to end. `read` is the time of all other requests. `rest` is both
together; the limit applies to it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.settings import KafkaSettings

ROOT = Path(__file__).resolve().parents[1]
TOPIC = "bench"
STRING = "org.apache.kafka.connect.storage.StringConverter"
LIMIT_SECONDS = 300
P99_MS = 200.0
READ_INTERVAL_SECONDS = 0.1


def percentile(times_ms: Sequence[float], part: float) -> float:
    """The time that this part of the requests does not exceed."""
    ordered = sorted(times_ms)
    return ordered[min(len(ordered) - 1, int(len(ordered) * part))] if ordered else 0.0


def connector(number: int, folder: Path) -> dict[str, str]:
    """A file source for an even number, a file sink for an odd one."""
    common = {"tasks.max": "1", "key.converter": STRING, "value.converter": STRING}
    if number % 2:
        return common | {"connector.class": "FileStreamSink", "topics": TOPIC, "file": str(folder / f"{number}.out")}
    return common | {"connector.class": "FileStreamSource", "topic": TOPIC, "file": str(folder / "in.txt")}


def worker_file(folder: Path, bootstrap: str, port: int) -> Path:
    """Write a distributed worker's properties."""
    stores = ("config", "offset", "status")
    props = {
        "bootstrap.servers": bootstrap,
        "group.id": "bench",
        **{f"{store}.storage.topic": f"bench-{store}" for store in stores},
        **{f"{store}.storage.replication.factor": "1" for store in stores},
        "key.converter": STRING,
        "value.converter": STRING,
        "listeners": f"http://127.0.0.1:{port}",
        "connect.files.allowed": str(folder),
    }
    path = folder / "worker.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in props.items()))
    return path


class StatusReads:
    """Sends requests to a worker's REST all the time, and records each response time."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client
        self.times_ms: list[float] = []
        self.failed = 0

    async def run(self) -> None:
        while True:
            for path in ("/connectors?expand=status", "/connectors/c-0/status", "/"):
                began = time.perf_counter()
                response = await self._client.get(path)
                self.times_ms.append((time.perf_counter() - began) * 1000)
                self.failed += response.status_code >= httpx.codes.INTERNAL_SERVER_ERROR
            await asyncio.sleep(READ_INTERVAL_SECONDS)


async def until_healthy(client: httpx.AsyncClient, process: asyncio.subprocess.Process) -> None:
    """Wait until the worker has joined its group."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            assert process.returncode is None, "the worker ended"
            try:
                if (await client.get("/health")).is_success:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


async def until_running(client: httpx.AsyncClient, count: int) -> None:
    """Wait until every connector and each of its tasks runs."""
    async with asyncio.timeout(LIMIT_SECONDS):
        while True:
            found = (await client.get("/connectors?expand=status")).json()
            states = [
                part["state"]
                for shown in found.values()
                for part in (shown["status"]["connector"], *shown["status"]["tasks"])
            ]
            assert "FAILED" not in states, "a connector failed"
            if len(found) == count and states.count("RUNNING") == 2 * count:
                return
            await asyncio.sleep(0.2)


async def measure(count: int, folder: Path) -> dict[str, float]:
    """Seconds until all run, and the response times in ms."""
    (folder / "in.txt").write_text("one line\n")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    async with EmbeddedKafka(folder / "kafka") as kafka:
        async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
            await admin.create_topics([NewTopic(TOPIC, 1)])
        command = [sys.executable, "-m", "penstock.services.cli", "connect", "distributed"]
        command += [str(worker_file(folder, kafka.bootstrap_servers, port)), "--log.level=warning"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        quiet = subprocess.DEVNULL
        worker = await asyncio.create_subprocess_exec(*command, stdout=quiet, stderr=quiet, env=environment)
        try:
            return await drive(count, folder, f"http://127.0.0.1:{port}", worker)
        finally:
            worker.kill()
            await worker.wait()


async def drive(count: int, folder: Path, url: str, worker: asyncio.subprocess.Process) -> dict[str, float]:
    """Create the connectors of a worker, and send it requests."""
    creates: list[float] = []
    async with (
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=100) as client,
        httpx.AsyncClient(base_url=url, trust_env=False, timeout=100) as second,
    ):
        await until_healthy(client, worker)
        reads = StatusReads(second)
        began = time.perf_counter()
        reading = asyncio.create_task(reads.run())
        for number in range(count):
            at = time.perf_counter()
            response = await client.put(f"/connectors/c-{number}/config", json=connector(number, folder))
            response.raise_for_status()
            creates.append((time.perf_counter() - at) * 1000)
        made = time.perf_counter() - began
        await until_running(client, count)
        running = time.perf_counter() - began
        reading.cancel()
        await asyncio.wait([reading])
    return {
        "connectors": float(count),
        "made_seconds": made,
        "running_seconds": running,
        "create_p50_ms": percentile(creates, 0.5),
        "create_p99_ms": percentile(creates, 0.99),
        "read_p50_ms": percentile(reads.times_ms, 0.5),
        "read_p99_ms": percentile(reads.times_ms, 0.99),
        "rest_p99_ms": percentile([*creates, *reads.times_ms], 0.99),
        "reads": float(len(reads.times_ms)),
        "failed": float(reads.failed),
    }


def main() -> int:
    """Measure and print. The status is 1 if the 99th percentile exceeds its limit, or a response was an error."""
    parser = argparse.ArgumentParser(prog="scripts/bench connect_rest", description=__doc__)
    parser.add_argument("--connectors", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure(given.connectors, Path(folder)))
    for name, value in found.items():
        print(f"  {name:<16} {value:12,.1f}")
    if given.json:
        print(json.dumps(found))
    return 1 if found["rest_p99_ms"] > P99_MS or found["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
