"""Distributed Connect workers as processes of their own, to be stopped and killed."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx

from penstock.services.local.ports import pick
from tests.integration.connect_worker import properties_file

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 60, 60


class WorkerProcess:
    """One worker; `url` is its REST."""

    def __init__(self, folder: Path, props: dict[str, str], mode: str = "distributed", *more: str) -> None:
        [port] = pick("127.0.0.1", 1)
        self.url = f"http://127.0.0.1:{port}"
        self._log = folder / f"worker-{port}.log"
        file = properties_file(folder, {**props, "listeners": self.url})
        command = [
            sys.executable,
            "-m",
            "penstock.services.cli",
            "connect",
            mode,
            str(file),
            *more,
            "--log.format=json",
        ]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdout=log, stderr=log, env={**os.environ, "PYTHONPATH": str(ROOT)}
            )

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace")

    async def ready(self) -> None:
        """Return when it has its place in the group."""
        async with asyncio.timeout(START_S), httpx.AsyncClient(trust_env=False) as client:
            while True:
                assert self.process.poll() is None, self.log[-3_000:]
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.1)

    async def ended(self) -> int:
        """Its exit status, once it has ended."""
        async with asyncio.timeout(STOP_S):
            while (status := self.process.poll()) is None:  # noqa: ASYNC110 - a process gives no event
                await asyncio.sleep(0.05)
            return int(status)

    async def stop(self) -> int:
        """End it in good order; its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    def kill(self) -> None:
        """End it at once."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def workers(folder: Path, props: dict[str, str], count: int) -> Iterator[list[WorkerProcess]]:
    """So many workers of one group; those still running are killed at the end. More may be added to the list."""
    started = [WorkerProcess(folder, props) for _ in range(count)]
    try:
        yield started
    finally:
        for worker in started:
            if worker.process.poll() is None:
                worker.kill()


async def statuses(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    """The status of every connector, by name."""
    found = (await client.get(f"{url}/connectors?expand=status")).json()
    return {name: shown.get("status", {}) for name, shown in found.items()}


def all_running(found: dict[str, Any], tasks: int, among: set[str] | None = None) -> bool:
    """Whether every connector and each of its tasks runs, on one of these workers where they are given."""
    for status in found.values():
        parts = [status.get("connector", {}), *status.get("tasks", [])]
        if len(parts) != 1 + tasks or any(part.get("state") != "RUNNING" for part in parts):
            return False
        if among is not None and not {part["worker_id"] for part in parts} <= among:
            return False
    return True
