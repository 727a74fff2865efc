"""Distributed Connect workers as separate processes that tests can stop and kill."""

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
from tests.http_client import http_client
from tests.integration.connect_worker import properties_file

ROOT = Path(__file__).resolve().parents[2]
START_S, STOP_S = 60, 60


class WorkerProcess:
    """One worker; `url` is the address of its REST API."""

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
        """Wait until the worker is healthy, that is, has joined its group."""
        async with asyncio.timeout(START_S), http_client() as client:
            while True:
                assert self.process.poll() is None, self.log[-3_000:]
                with contextlib.suppress(httpx.HTTPError):
                    if (await client.get(f"{self.url}/health")).status_code == 200:
                        return
                await asyncio.sleep(0.1)

    async def ended(self) -> int:
        """Wait until the process ends, and return its exit status."""
        async with asyncio.timeout(STOP_S):
            while (status := self.process.poll()) is None:  # noqa: ASYNC110 - a process has no event to wait for
                await asyncio.sleep(0.05)
            return int(status)

    async def stop(self) -> int:
        """Stop the worker with SIGTERM, and return its exit status."""
        self.process.send_signal(signal.SIGTERM)
        return await self.ended()

    def kill(self) -> None:
        """Kill the worker with SIGKILL."""
        self.process.kill()
        self.process.wait()


@contextlib.contextmanager
def workers(folder: Path, props: dict[str, str], count: int) -> Iterator[list[WorkerProcess]]:
    """Start `count` workers of one group.

    The caller may add workers to the list; all that still run are killed on exit.
    """
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
    """Whether every connector and all its tasks run, on the workers `among` if given."""
    for status in found.values():
        parts = [status.get("connector", {}), *status.get("tasks", [])]
        if len(parts) != 1 + tasks or any(part.get("state") != "RUNNING" for part in parts):
            return False
        if among is not None and not {part["worker_id"] for part in parts} <= among:
            return False
    return True
