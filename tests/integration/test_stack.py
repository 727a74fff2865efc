"""How the services of one machine are ended, with real processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from services.local.stack import KILL_GRACE_MS, ServiceSpec, Stack

PROGRAM = """
import os, signal, sys, time
stop = []
signal.signal(signal.SIGTERM, lambda *_: stop.append(1))
print("up", flush=True)
while not stop:
    time.sleep(0.01)
limit_s = int(os.environ["PENSTOCK_SHUTDOWN_TIMEOUT_MS"]) / 1000
time.sleep(limit_s if os.environ["KIND"] == "slow" else 600)
print("done", flush=True)
"""
LIMIT_MS = 1_000


async def test_a_service_has_the_whole_time_that_it_was_told(tmp_path: Path) -> None:
    """One that takes all of its limit ends in order; one that takes more is killed soon after, and holds up none."""
    (tmp_path / "program.py").write_text(PROGRAM)
    stack = Stack(tmp_path, hermetic=True)
    for kind in ("slow", "stubborn"):
        environment = {"KIND": kind, "PYTHONPATH": str(tmp_path)}
        spec = ServiceSpec(kind, {}, module="program", environment=environment, shutdown_timeout_ms=LIMIT_MS)
        await stack.start(spec)
    logs = {kind: tmp_path / "logs" / f"{kind}.log" for kind in ("slow", "stubborn")}
    async with asyncio.timeout(30):
        while not all("up" in log.read_text() for log in logs.values()):  # noqa: ASYNC110 - files of other processes
            await asyncio.sleep(0.05)
    before = time.monotonic()
    await stack.stop()
    took_ms = (time.monotonic() - before) * 1000
    assert "done" in logs["slow"].read_text()
    assert "done" not in logs["stubborn"].read_text()
    assert LIMIT_MS + KILL_GRACE_MS <= took_ms < LIMIT_MS + KILL_GRACE_MS + 5_000
