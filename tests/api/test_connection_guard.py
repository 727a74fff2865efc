"""Connections that never finish a request's head, over a real socket of this machine."""

from __future__ import annotations

import asyncio

import httpx
import pytest
from fastapi import APIRouter

from api import connection_guard
from api.app import create_app
from api.server import HttpServer
from shared.common.settings import HttpSettings


async def test_a_head_that_does_not_end_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first head of a connection and a later one alike; whoever sends whole requests is served meanwhile."""
    monkeypatch.setattr(connection_guard.GuardedHttp, "head_timeout_ms", 150)
    router = APIRouter()
    router.add_api_route("/ok", lambda: "ok")
    server = HttpServer(create_app(admin=router), HttpSettings())
    await server.start()
    try:
        first = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(50)]
        for _, writer in first:
            writer.write(b"GET /ok HTTP/1.1\r\nHost: localhost\r\nX-Slow: ")
        reader, later = await asyncio.open_connection("127.0.0.1", server.port)
        later.write(b"GET /ok HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 200")
        later.write(b"GET /ok HT")
        async with httpx.AsyncClient(trust_env=False) as client:
            assert (await client.get(f"{server.url}/ok")).status_code == 200
        async with asyncio.timeout(5):
            for held, _ in first:
                while await held.read(1_000):
                    pass
            while await reader.read(1_000):
                pass
        for _, writer in [*first, (reader, later)]:
            writer.close()
    finally:
        await server.stop(1_000)
