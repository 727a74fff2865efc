"""Ingest over HTTP: acknowledged records/s by request size and number of connections, compared with a bare handler.

It uses one real embedded broker, one topic of four partitions, the producer service (`penstock producer`) and a load
generator, each in its own process. Requests are NDJSON with 1, 100 and 10,000 records of 100 bytes with a key pointer,
over 1, 32 and 256 keep-alive connections. A request counts if it is answered with 200. `bare` is the upper limit: the
same server with a handler that reads the body, parses each line and answers, without Kafka. CPU is the service's alone.
`--body-mb` posts one body of that many MB and reports the growth of the service's memory.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import msgspec
from fastapi import APIRouter, Request

from penstock.api.http.app import create_app
from penstock.api.http.server import HttpServer
from penstock.services.local.embedded_kafka import EmbeddedKafka
from penstock.services.local.ports import pick
from penstock.shared.clients.admin import Admin, NewTopic
from penstock.shared.common.settings import HttpSettings, KafkaSettings

TOPIC = "bench"
PARTITIONS = 4
SIZES = (1, 100, 10_000)
CONNECTIONS = (1, 32, 256)
SECONDS = 4.0
WARM_UP_SECONDS = 1.5
WANTED_RECORDS, WANTED_REQUESTS = 200_000, 3_000
MEMORY_GROWTH_MB = 50
PATH = f"/v1/topics/{TOPIC}/events"
PRODUCER = "import sys; from penstock.services.producer.main import main; sys.exit(main(sys.argv[1:]))"


def lines(count: int) -> bytes:
    """NDJSON of `count` records, 100 bytes each with its line end."""
    made = []
    for i in range(count):
        row = b'{"user":"u%05d","path":"/item/%d","ms":%d,"status":200,"n":%d,"p":"' % (
            i * 7919 % 20_000,
            i % 977,
            i % 1_500,
            i,
        )
        made.append(row + b"x" * (100 - len(row) - 3) + b'"}\n')
    return b"".join(made)


class Client(asyncio.Protocol):
    """One keep-alive connection that sends the same request repeatedly until the end."""

    def __init__(self, request: bytes, ends_at: float) -> None:
        self._request = request
        self._ends_at = ends_at
        self._answer = bytearray()
        self._sent_at = 0.0
        self.latencies: list[tuple[float, float]] = []
        self.failed: list[bytes] = []
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: Any) -> None:
        self._transport = transport
        self._send()

    def _send(self) -> None:
        self._sent_at = time.perf_counter()
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._answer += data
        head, found, rest = bytes(self._answer).partition(b"\r\n\r\n")
        if not found:
            return
        lower = head.lower()
        at = lower.index(b"content-length:") + 15
        if len(rest) < int(lower[at:].split(b"\r\n", 1)[0]):
            return
        now = time.perf_counter()
        self.latencies.append((now, now - self._sent_at))
        if not head.startswith(b"HTTP/1.1 200"):
            self.failed.append(bytes(self._answer[:300]))
        self._answer.clear()
        if now < self._ends_at and not self.failed:
            self._send()
        else:
            self._transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        if not self.done.done():
            self.done.set_result(None)


async def load(url: str, size: int, connections: int, seconds: float) -> dict[str, Any]:
    """Send requests for `seconds`; return the figures of those acknowledged after the warm-up."""
    host, port = urlsplit(url).hostname, urlsplit(url).port
    body = lines(size)
    head = (
        f"POST {PATH} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/x-ndjson\r\nContent-Length: {len(body)}"
    )
    begins, loop = time.perf_counter() + WARM_UP_SECONDS, asyncio.get_running_loop()
    request = head.encode() + b"\r\n\r\n" + body
    clients = []
    for _ in range(connections):
        _, client = await loop.create_connection(lambda: Client(request, begins + seconds), host, port)
        clients.append(client)
    await asyncio.gather(*(client.done for client in clients))
    failed = [response for client in clients for response in client.failed]
    if failed:
        raise SystemExit(f"not answered 200: {failed[0]!r}")
    taken = sorted(t for client in clients for at, t in client.latencies if begins <= at <= begins + seconds)
    quantiles = statistics.quantiles(taken, n=100) if len(taken) > 1 else (taken or [0.0]) * 99
    return {"requests": len(taken), "p50_ms": quantiles[49] * 1e3, "p99_ms": quantiles[98] * 1e3}


async def bare(port: int) -> None:
    """The upper limit: the same server, without Kafka."""
    router, decode = APIRouter(), msgspec.json.Decoder().decode

    @router.post(PATH)
    async def events(request: Request) -> Any:
        stored = 0
        for line in (await request.body()).splitlines():
            decode(line)
            stored += 1
        return {"stored": stored}

    @router.get("/health")
    async def health() -> str:
        return "ok"

    server = HttpServer(create_app(ingest=router), HttpSettings(port=port))
    await server.start()
    await server.wait()


@asynccontextmanager
async def serving(kind: str, bootstrap_servers: str) -> AsyncIterator[tuple[str, int]]:
    """Run a service in its own process; yield its address and process id."""
    port = pick("127.0.0.1", 1)[0]
    topics = {TOPIC: {"key": ["/user"]}}
    own = {
        "PENSTOCK_KAFKA__BOOTSTRAP_SERVERS": bootstrap_servers,
        "PENSTOCK_HTTP__PORT": str(port),
        "PENSTOCK_INGEST__TOPICS": json.dumps(topics),
        "PENSTOCK_LOG__LEVEL": "error",
        "PENSTOCK_PRODUCER__LINGER_MS": "5",
        "PENSTOCK_PRODUCER__BATCH_SIZE": "131072",
    }
    command = [sys.executable, "-c", PRODUCER] if kind == "ingest" else [sys.executable, "-m", "bench.ingest", "--bare"]
    process = subprocess.Popen(  # noqa: ASYNC220 - only starts the process
        [*command, *([str(port)] if kind == "bare" else [])], env=os.environ | own
    )
    url = f"http://127.0.0.1:{port}"
    try:
        async with httpx.AsyncClient(trust_env=False) as client, asyncio.timeout(30):
            while True:
                try:
                    if (await client.get(f"{url}/health")).status_code == httpx.codes.OK:
                        break
                except httpx.TransportError:
                    pass
                await asyncio.sleep(0.1)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(timeout=30)


def cpu_seconds(pid: int) -> float:
    """User and system time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory_mb(pid: int) -> float:
    """Resident memory of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.partition("VmRSS:")[2].split()[0]) / 1_024


async def measure(url: str, pid: int, size: int, connections: int, seconds: float) -> dict[str, Any]:
    """One row. The load comes from another process."""
    arguments = ["--load", url, str(size), str(connections), str(seconds)]
    before, started = cpu_seconds(pid), time.perf_counter()
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.ingest", *arguments, stdout=subprocess.PIPE
    )
    output, _ = await process.communicate()
    if process.returncode:
        raise SystemExit(f"the load generator ended with {process.returncode}")
    took, used = time.perf_counter() - started, cpu_seconds(pid) - before
    found = json.loads(output)
    share = (seconds + WARM_UP_SECONDS) / took
    records = found["requests"] * size
    cpu = used * share * seconds / (seconds + WARM_UP_SECONDS)
    return {
        "size": size,
        "connections": connections,
        "records_per_s": records / seconds,
        "requests_per_s": found["requests"] / seconds,
        "p50_ms": found["p50_ms"],
        "p99_ms": found["p99_ms"],
        "cpu_us_per_record": cpu * 1e6 / max(records, 1),
    }


async def long_body(url: str, pid: int, megabytes: int) -> dict[str, float]:
    """Send one NDJSON body of `megabytes` MB; return the maximum growth of the service's memory meanwhile."""
    chunk = lines(10_000)
    warm = httpx.AsyncClient(trust_env=False, timeout=600)
    headers = {"Content-Type": "application/x-ndjson"}
    for _ in range(20):
        await warm.post(url + PATH, content=chunk, headers=headers)
    before = most = memory_mb(pid)

    async def body() -> AsyncIterator[bytes]:
        nonlocal most
        for _ in range(megabytes):
            yield chunk
            most = max(most, memory_mb(pid))

    started = time.perf_counter()
    response = await warm.post(url + PATH, content=body(), headers=headers)
    took = time.perf_counter() - started
    await warm.aclose()
    if response.status_code != httpx.codes.OK or response.json()["stored"] != megabytes * 10_000:
        raise SystemExit(f"not all stored: {response.status_code} {response.text[:300]}")
    return {"megabytes": megabytes, "records_per_s": megabytes * 10_000 / took, "grew_mb": most - before}


def show(kind: str, row: dict[str, Any]) -> None:
    """One line of the table."""
    print(
        f"{kind:<7} {row['size']:>6} x {row['connections']:>3}  {row['records_per_s']:>9,.0f} records/s"
        f" {row['requests_per_s']:>8,.0f} requests/s  p50 {row['p50_ms']:>8.2f} ms  p99 {row['p99_ms']:>8.2f} ms"
        f"  {row['cpu_us_per_record']:>7.2f} us CPU/record",
        flush=True,
    )


async def run(options: argparse.Namespace) -> int:
    figures: dict[str, Any] = {"ingest": [], "bare": []}
    with tempfile.TemporaryDirectory() as folder:
        async with EmbeddedKafka(Path(folder) / "kafka") as kafka:
            async with Admin(KafkaSettings(bootstrap_servers=kafka.bootstrap_servers)) as admin:
                await admin.create_topics([NewTopic(TOPIC, PARTITIONS)])
            for kind in ("bare", "ingest"):
                async with serving(kind, kafka.bootstrap_servers) as (url, pid):
                    for size in options.sizes:
                        for connections in options.connections:
                            row = await measure(url, pid, size, connections, options.seconds)
                            figures[kind].append(row)
                            show(kind, row)
                    if kind == "ingest" and options.body_mb:
                        figures["long_body"] = await long_body(url, pid, options.body_mb)
                        print(
                            "one body of {megabytes} MB: {records_per_s:,.0f} records/s, +{grew_mb:.1f} MB".format(
                                **figures["long_body"]
                            )
                        )
    status = verdict(figures)
    if options.json:
        print(json.dumps(figures))
    return status


def verdict(figures: dict[str, Any]) -> int:
    """The exit status: 0 if every figure reached its target."""
    records = max((r["records_per_s"] for r in figures["ingest"] if r["size"] == 10_000), default=WANTED_RECORDS)
    requests = max((r["requests_per_s"] for r in figures["ingest"] if r["size"] == 1), default=WANTED_REQUESTS)
    grew = figures.get("long_body", {}).get("grew_mb", 0.0)
    good = records >= WANTED_RECORDS and requests >= WANTED_REQUESTS and grew <= MEMORY_GROWTH_MB
    print(f"{records:,.0f} records/s, {requests:,.0f} requests/s: {'target reached' if good else 'target MISSED'}")
    return 0 if good else 1


def main() -> int:
    if sys.argv[1:2] == ["--load"]:
        url, size, connections, seconds = sys.argv[2:6]
        print(json.dumps(asyncio.run(load(url, int(size), int(connections), float(seconds)))))
        return 0
    if sys.argv[1:2] == ["--bare"]:
        asyncio.run(bare(int(sys.argv[2])))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="+", default=SIZES)
    parser.add_argument("--connections", type=int, nargs="+", default=CONNECTIONS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--body-mb", type=int, default=1_000)
    return asyncio.run(run(parser.parse_args()))


if __name__ == "__main__":
    raise SystemExit(main())
