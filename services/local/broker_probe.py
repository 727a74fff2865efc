"""Probes a broker with one hand-made ApiVersions request, the smallest request that only a working broker answers.

Request (version 0): size, api key 18, version 0, correlation id, null client id. Response: size, correlation id, error
code, the versions. A KRaft broker accepts connections before it serves them. It answers this only once it is unfenced.
"""

from __future__ import annotations

import asyncio
import struct

API_VERSIONS = 18
CORRELATION_ID = 1
MAX_RESPONSE_BYTES = 65_536  # a broker lists about a hundred APIs of six bytes; anything larger is not Kafka


def request() -> bytes:
    """Return the ApiVersions request, with its size.

    >>> len(request())
    14
    """
    body = struct.pack(">hhih", API_VERSIONS, 0, CORRELATION_ID, -1)
    return struct.pack(">i", len(body)) + body


def is_answer(body: bytes) -> bool:
    """Return whether a response's bytes (without the size) answer the request without an error."""
    return len(body) >= 6 and struct.unpack(">ih", body[:6]) == (CORRELATION_ID, 0)


async def answers(host: str, port: int, timeout_ms: int) -> bool:
    """Return whether a Kafka broker there answers within the time."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(request())
                (size,) = struct.unpack(">i", await reader.readexactly(4))
                return 0 < size <= MAX_RESPONSE_BYTES and is_answer(await reader.readexactly(size))
            finally:
                writer.close()
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        return False
