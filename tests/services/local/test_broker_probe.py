"""The probe for a broker, against servers with valid, invalid and no responses."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from penstock.services.local.embedded_kafka import PROBE_RESPONSE_BYTES_MAX, broker_answers, probe_request

GOOD = struct.pack(">ihi", 1, 0, 0)
LIMIT_MS = 10_000


@asynccontextmanager
async def server(reply: bytes | None, received: list[bytes]) -> AsyncIterator[int]:
    """A server that accepts one request, sends `reply` and closes, or never answers if it is None."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        received.append(await reader.readexactly(len(probe_request())))
        if reply is None:
            await reader.read()
        else:
            writer.write(reply)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield listening.sockets[0].getsockname()[1]


@pytest.mark.parametrize(
    ("reply", "expected"),
    [
        (struct.pack(">i", len(GOOD)) + GOOD, True),
        (struct.pack(">i", len(GOOD)) + struct.pack(">ihi", 1, 35, 0), False),
        (struct.pack(">i", len(GOOD)) + struct.pack(">ihi", 2, 0, 0), False),
        (struct.pack(">i", PROBE_RESPONSE_BYTES_MAX + 1) + GOOD, False),
        (struct.pack(">i", -1), False),
        (struct.pack(">i", 2) + b"ab", False),
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", False),
        (b"", False),
    ],
)
async def test_only_an_answer_without_error_counts(reply: bytes, expected: bool) -> None:
    """Another correlation id, an error code, another protocol, and an incomplete answer are no valid response."""
    received: list[bytes] = []
    async with server(reply, received) as port:
        assert await broker_answers("127.0.0.1", port, LIMIT_MS) is expected
    assert received == [bytes.fromhex("0000000a 0012 0000 00000001 ffff")]


async def test_a_silent_server_is_a_timeout() -> None:
    """A server without a response is no broker after the timeout."""
    async with server(None, []) as port:
        assert not await broker_answers("127.0.0.1", port, 20)


async def test_closed_port_does_not_answer() -> None:
    """A refused connection is no broker."""
    async with server(b"", []) as port:
        pass
    assert not await broker_answers("127.0.0.1", port, LIMIT_MS)
