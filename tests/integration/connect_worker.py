"""A Connect worker in this process, on a real broker, with an HTTP client for its REST API."""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncIterator
from pathlib import Path

import httpx

from penstock.services.connect.daemon import ConnectDaemon
from penstock.services.connect.worker_command_line import read_command_line
from tests.http_client import http_client

JSON_CONVERTER = "org.apache.kafka.connect.json.JsonConverter"


def properties(bootstrap_servers: str, group: str | None = None, **more: str) -> dict[str, str]:
    """The properties of a worker, by default in a Connect cluster of its own. Underscores in names stand for dots."""
    group = group or f"connect-{uuid.uuid4().hex[:8]}"
    return {
        "bootstrap.servers": bootstrap_servers,
        "group.id": group,
        **{f"{store}.storage.topic": f"{group}-{store}" for store in ("config", "offset", "status")},
        **{f"{store}.storage.replication.factor": "1" for store in ("config", "offset", "status")},
        "offset.storage.partitions": "5",
        "key.converter": JSON_CONVERTER,
        "value.converter": JSON_CONVERTER,
        "listeners": "http://127.0.0.1:0",
        "offset.flush.interval.ms": "200",
        "heartbeat.interval.ms": "200",
        "scheduled.rebalance.max.delay.ms": "2000",
        **{name.replace("_", "."): value for name, value in more.items()},
    }


def properties_file(folder: Path, props: dict[str, str]) -> Path:
    """Write the properties to a file for a command line. By default file connectors may use the file's folder."""
    props = {"connect.files.allowed": str(folder), **props}
    path = folder / f"worker-{uuid.uuid4().hex[:6]}.properties"
    path.write_text("".join(f"{name}={value}\n" for name, value in props.items()))
    return path


@contextlib.asynccontextmanager
async def running(folder: Path, props: dict[str, str], mode: str = "distributed") -> AsyncIterator[httpx.AsyncClient]:
    """Start a worker, and yield a client of its REST API."""
    file = str(properties_file(folder, props))
    daemon = ConnectDaemon(read_command_line("standalone" if mode == "standalone" else "distributed", [file]))
    working: asyncio.Task[None] | None = None
    try:
        await daemon.startup()
        working = asyncio.create_task(daemon.main_loop())
        token = props.get("rest.auth.token")
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        url = daemon.server.url
        async with http_client(base_url=url, timeout=60, headers=headers) as client:
            async with asyncio.timeout(30):
                while (await client.get("/health")).status_code != 200:  # noqa: ASYNC110 - polled as a client would
                    await asyncio.sleep(0.05)
            yield client
    finally:
        if working is not None:
            working.cancel()
            await asyncio.wait([working])
        await daemon.shutdown()
