"""Request heads against real services: their memory is bounded, and every service limits them.

No broker is needed: every service answers before it has found one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import httpx
import pytest
from pydantic import BaseModel

from penstock.services.admin.daemon import AdminDaemon
from penstock.services.admin.settings import AdminServiceSettings
from penstock.services.aggregator.main import Aggregator
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.consumer.daemon import ConsumerDaemon
from penstock.services.consumer.settings import ConsumerServiceSettings
from penstock.services.local.connect_worker import make_connect_worker
from penstock.services.local.gateway import GatewayDaemon
from penstock.services.local.ports import pick
from penstock.services.local.settings import ConnectWorkerSettings, GatewaySettings
from penstock.services.local.stack import ServiceSpec, Stack
from penstock.services.producer.daemon import ProducerDaemon
from penstock.services.producer.settings import ProducerServiceSettings
from tests.http_client import http_client

NO_KAFKA = "127.0.0.1:99"
"""No other test uses this address: a process logs only once in ten seconds that it cannot reach one."""
MAX_HEAD_BYTES = 80_000
CONNECTIONS = 16
SENDING_S = 0.4
GROWTH_MAX_KIB = 48 * 1024
"""16 connections with 256 KiB of one read, 64 KiB of a head and the copies that parsing makes of both, and the memory
of the service's first requests.
"""

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"


async def answering(url: str) -> None:
    """Wait until /health answers, with any status."""
    async with asyncio.timeout(60), http_client() as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                await client.get(f"{url}/health")
                return
            await asyncio.sleep(0.1)


async def send_for_ever(port: int, start: bytes, block: bytes) -> None:
    """Send `start` and then `block` repeatedly, as fast as the server reads; reconnect when the server closes."""

    async def read(reader: asyncio.StreamReader) -> None:
        while await reader.read(1_048_576):
            pass

    while True:
        with contextlib.suppress(OSError):
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            reading = asyncio.ensure_future(read(reader))
            try:
                writer.write(start)
                while not reading.done():
                    writer.write(block)
                    await writer.drain()
            finally:
                reading.cancel()
                await asyncio.gather(reading, return_exceptions=True)
                writer.close()


def peak_kib(pid: int) -> int:
    """The peak memory of a process."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found is not None
    return int(found[1])


SENT = {
    "fields": (HEAD, b"Y: " + b"a" * 60_000 + b"\r\n"),
    "one field": (HEAD + b"Y: ", b"a" * 65_536),
    "short fields": (HEAD, b"a:b\r\n" * 10_000),
    "path": (b"GET /health?", b"a" * 65_536),
    "requests": (b"", (HEAD + b"\r\n") * 1_000),
    "large requests": (b"", HEAD + b"Y: " + b"a" * 60_000 + b"\r\n\r\n"),
    "trailers": (CHUNKED, b"a:b\r\n" * 10_000),
    "one trailer": (CHUNKED + b"Y: ", b"a" * 65_536),
}
"""What a connection sends: once, and then repeatedly."""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="a process's peak memory is read from /proc")
async def test_memory_is_bounded_under_endless_heads(stack: Stack) -> None:
    """While 16 connections send endless heads, the peak memory grows only within its limit, and the service answers
    others.
    """
    service = await stack.start(ServiceSpec("producer", {"KAFKA__BOOTSTRAP_SERVERS": NO_KAFKA}))
    await answering(service.url)
    assert service._child is not None
    pid = service._child.pid
    before, grown = peak_kib(pid), {}
    for name, (start, block) in SENT.items():
        sending = [asyncio.ensure_future(send_for_ever(service.port, start, block)) for _ in range(CONNECTIONS)]
        try:
            async with http_client(timeout=20) as client:
                until = asyncio.get_running_loop().time() + SENDING_S
                while asyncio.get_running_loop().time() < until:
                    assert (await client.get(f"{service.url}/metrics")).status_code == 200
                    await asyncio.sleep(0.2)
            grown[name] = peak_kib(pid) - before
        finally:
            for one in sending:
                one.cancel()
            await asyncio.gather(*sending, return_exceptions=True)
    assert max(grown.values()) < GROWTH_MAX_KIB, grown


AGGREGATOR = {"topology": "penstock.services.local.topologies:sessions"}
HANDLER = {"topics": "t", "handler": "penstock.services.local.log_handler:log_record", "group_id": "g"}
SERVICES: dict[str, tuple[type[BaseModel], Callable[[Any], Any], dict[str, str]]] = {
    "producer": (ProducerServiceSettings, ProducerDaemon, {}),
    "admin": (AdminServiceSettings, AdminDaemon, {}),
    "consumer": (ConsumerServiceSettings, ConsumerDaemon, HANDLER),
    "aggregator": (AggregatorSettings, Aggregator, AGGREGATOR),
    "gateway": (GatewaySettings, GatewayDaemon, {}),
    "connect": (ConnectWorkerSettings, make_connect_worker, {}),
}
"""Each service's settings and daemon, and the settings that it needs."""


@contextlib.asynccontextmanager
async def starting(name: str) -> AsyncIterator[str]:
    """Start a service in this process, without Kafka, and yield its URL."""
    settings, make, needed = SERVICES[name]
    [port] = pick("127.0.0.1", 1)
    kafka, http = {"bootstrap_servers": NO_KAFKA}, {"port": port, "max_head_bytes": MAX_HEAD_BYTES}
    daemon = make(settings.model_validate({"kafka": kafka, "http": http, **needed}))
    try:
        async with asyncio.TaskGroup() as group:
            startup = group.create_task(daemon.startup())
            yield f"http://127.0.0.1:{port}"
            startup.cancel()
    finally:
        await daemon.shutdown()


async def assert_limits_heads(url: str) -> None:
    await answering(url)
    async with http_client(timeout=20) as client:
        responses = [await client.get(f"{url}/no-such", headers={"X": "a" * n}) for n in (79_000, 81_000)]
    assert responses[0].status_code != 431
    assert (responses[1].status_code, f"{MAX_HEAD_BYTES} bytes" in responses[1].json()["detail"]) == (431, True)


@pytest.mark.parametrize("name", SERVICES)
async def test_every_service_limits_heads(name: str) -> None:
    """Every service applies http.max_head_bytes, and a Connect worker rest.max.head.bytes."""
    async with starting(name) as url:
        await assert_limits_heads(url)


async def test_an_aggregator_with_workers_limits_heads(stack: Stack) -> None:
    """The process that serves HTTP for several workers applies http.max_head_bytes, which it reads from a variable."""
    own = {"HTTP__MAX_HEAD_BYTES": str(MAX_HEAD_BYTES), "WORKERS": "2", "TOPOLOGY": AGGREGATOR["topology"]}
    service = await stack.start(ServiceSpec("aggregator", {"KAFKA__BOOTSTRAP_SERVERS": NO_KAFKA} | own))
    await assert_limits_heads(service.url)
