"""How a stack stops its services and waits for their health, with real processes."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from penstock.services.local.stack import KILL_GRACE_MS, Service, ServiceSpec, ServiceStuck, Stack
from penstock.shared.common.child_process import ChildDied

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


async def test_a_service_may_use_its_whole_shutdown_timeout(tmp_path: Path) -> None:
    """A service may use its whole shutdown timeout; one that takes longer is killed and delays no other."""
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


HEALTH = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer

STEP_S, STEPS = float(os.environ["STEP_S"]), int(os.environ["STEPS"])
requests = []

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        requests.append(time.monotonic())
        step = int((requests[-1] - requests[0]) / STEP_S)
        if os.environ["END"] == "dies" and step >= STEPS:
            sys.exit("no such topology")
        ok = os.environ["END"] == "healthy" and step >= STEPS
        detail = f"starting: {'abcdefgh'[min(step, STEPS - 1)]}, for {len(requests)} requests"
        body = json.dumps({"checks": {"tasks": {"status": "ok" if ok else "failing", "detail": detail}}}).encode()
        self.send_response(200 if ok else 503)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass

HTTPServer((os.environ["PENSTOCK_HTTP__HOST"], int(os.environ["PENSTOCK_HTTP__PORT"])), Handler).serve_forever()
"""
STILL_MS = 2_000


async def health_of(tmp_path: Path, steps: int, step_s: float, end: str) -> tuple[Stack, Service]:
    """Start a service whose `/health` reports `steps` details, each for `step_s`, and then is healthy, stays stuck or
    dies.
    """
    (tmp_path / "health.py").write_text(HEALTH)
    stack = Stack(tmp_path, hermetic=True)
    environment = {"PYTHONPATH": str(tmp_path), "STEPS": str(steps), "STEP_S": str(step_s), "END": end}
    spec = ServiceSpec("service", {}, module="health", environment=environment, shutdown_timeout_ms=1_000)
    return stack, await stack.start(spec)


async def test_a_service_that_makes_progress_is_awaited(tmp_path: Path) -> None:
    """The stack waits for a service whose health makes progress, also longer than the limit without progress."""
    stack, service = await health_of(tmp_path, 5, 0.8, "healthy")
    before = time.monotonic()
    try:
        await service.healthy(still_ms=STILL_MS)
    finally:
        await stack.stop()
    assert (time.monotonic() - before) * 1000 > STILL_MS


async def test_a_service_without_progress_is_stuck(tmp_path: Path) -> None:
    """A service whose health does not change raises ServiceStuck with the detail and the log's path; a rising number is
    no progress.
    """
    stack, service = await health_of(tmp_path, 1, 0.1, "stuck")
    try:
        with pytest.raises(ServiceStuck, match=r"starting: a.*service\.log"):
            await service.healthy(still_ms=STILL_MS)
    finally:
        await stack.stop()


async def test_a_service_that_dies_is_reported(tmp_path: Path) -> None:
    """A service that dies raises ChildDied with its last output."""
    stack, service = await health_of(tmp_path, 2, 0.2, "dies")
    try:
        with pytest.raises(ChildDied, match="no such topology"):
            await service.healthy(still_ms=60_000)
    finally:
        await stack.stop()
