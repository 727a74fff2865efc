"""Request heads against real services: their memory is bounded, and every service limits them.

No broker is needed: every service answers before it has found one.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import httpx
import pytest

from penstock.services.local.stack import Service, ServiceSpec, Stack

NO_KAFKA = {"KAFKA__BOOTSTRAP_SERVERS": "127.0.0.1:1"}
CONNECTIONS = 16
SENDING_S = 0.4
GROWTH_MAX_KIB = 48 * 1024
"""16 connections with 256 KiB of one read, 64 KiB of a head and the copies that parsing makes of both, and the memory
of the service's first requests.
"""

HEAD = b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
CHUNKED = b"POST /health HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\n1\r\na\r\n0\r\n"


async def answering(service: Service) -> None:
    """Wait until /health answers, with any status."""
    async with asyncio.timeout(60), httpx.AsyncClient(trust_env=False) as client:
        while True:
            with contextlib.suppress(httpx.TransportError):
                await client.get(f"{service.url}/health")
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
    service = await stack.start(ServiceSpec("producer", NO_KAFKA))
    await answering(service)
    assert service._child is not None
    pid = service._child.pid
    before, grown = peak_kib(pid), {}
    for name, (start, block) in SENT.items():
        sending = [asyncio.ensure_future(send_for_ever(service.port, start, block)) for _ in range(CONNECTIONS)]
        try:
            async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
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


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("producer", {}),
        ("admin", {}),
        ("consumer", {"TOPICS": "t", "HANDLER": "penstock.services.local.log_handler:log_record", "GROUP_ID": "g"}),
        ("aggregator", {"TOPOLOGY": "penstock.services.local.topologies:sessions"}),
        ("aggregator", {"TOPOLOGY": "penstock.services.local.topologies:sessions", "WORKERS": "2"}),
        ("gateway", {}),
        ("connect_worker", {}),
    ],
    ids=["producer", "admin", "consumer", "aggregator", "aggregator with workers", "gateway", "connect"],
)
async def test_every_service_limits_heads(stack: Stack, name: str, settings: dict[str, str]) -> None:
    """Every service applies http.max_head_bytes, and a Connect worker rest.max.head.bytes."""
    module = f"penstock.services.local.{name}" if name in ("gateway", "connect_worker") else "penstock.services.cli"
    own = {"HTTP__MAX_HEAD_BYTES": "80000"}
    service = await stack.start(ServiceSpec(name, NO_KAFKA | own | settings, module=module))
    await answering(service)
    async with httpx.AsyncClient(trust_env=False, timeout=20) as client:
        responses = [await client.get(f"{service.url}/no-such", headers={"X": "a" * n}) for n in (79_000, 81_000)]
    assert responses[0].status_code != 431
    assert (responses[1].status_code, "80000 bytes" in responses[1].json()["detail"]) == (431, True)
