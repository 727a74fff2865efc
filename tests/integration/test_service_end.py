"""A service in a separate process and the signals that stop it."""

from __future__ import annotations

import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

END_LIMIT_SECONDS = 20
LIMIT_MS = 500

PROGRAM = """
import asyncio, sys
from penstock.services import service_lifecycle

async def cooperative():
    await asyncio.Event().wait()

async def stubborn():
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        print("cancelled", flush=True)
        await asyncio.Event().wait()

class Service:
    async def startup(self):
        if sys.argv[1] == "starting":
            print("up", flush=True)
            await asyncio.Event().wait()

    async def main_loop(self):
        print("up", flush=True)
        await (stubborn() if sys.argv[1] == "stubborn" else cooperative())

    async def shutdown(self):
        print("shutdown", flush=True)
        if sys.argv[1] == "endless":
            await asyncio.Event().wait()

sys.exit(asyncio.run(service_lifecycle.run(Service(), int(sys.argv[2]))))
"""


@contextmanager
def service(kind: str, limit_ms: int = LIMIT_MS) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", PROGRAM, kind, str(limit_ms)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "up\n"
            yield process
        finally:
            process.kill()


def remaining_output(process: subprocess.Popen[str]) -> list[str]:
    """The service's own lines in the rest of its output, without logs."""
    rest, _ = process.communicate(timeout=END_LIMIT_SECONDS)
    return [line for line in rest.splitlines() if line in ("shutdown", "cancelled", "up")]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_shuts_down(number: signal.Signals) -> None:
    """SIGTERM or SIGINT ends the main loop, shuts down once, and the exit status is 0."""
    with service("plain") as process:
        process.send_signal(number)
        assert remaining_output(process) == ["shutdown"]
        assert process.returncode == 0


def test_a_signal_during_startup() -> None:
    """A service that is still starting is shut down too."""
    with service("starting") as process:
        process.send_signal(signal.SIGTERM)
        assert remaining_output(process) == ["shutdown"]
        assert process.returncode == 0


def test_a_shutdown_over_its_limit() -> None:
    """A shutdown that exceeds its time limit is aborted, and the exit status is 1. A second SIGTERM changes nothing."""
    with service("endless") as process:
        process.send_signal(signal.SIGTERM)
        await_shutdown(process)
        process.send_signal(signal.SIGTERM)
        process.wait(END_LIMIT_SECONDS)
        assert process.returncode == 1


def await_shutdown(process: subprocess.Popen[str]) -> None:
    assert process.stdout is not None
    while process.stdout.readline() != "shutdown\n":
        assert process.poll() is None


def test_a_second_ctrl_c_ends_it_at_once() -> None:
    """SIGINT ends a service whose shutdown hangs, with status 130."""
    with service("endless", limit_ms=600_000) as process:
        process.send_signal(signal.SIGINT)
        await_shutdown(process)
        process.send_signal(signal.SIGINT)
        process.wait(END_LIMIT_SECONDS)
        assert process.returncode == 130


def test_a_main_loop_that_ignores_cancellation() -> None:
    """A main loop that ignores its cancellation is abandoned after the limit, and the exit status is 1."""
    with service("stubborn") as process:
        process.send_signal(signal.SIGTERM)
        words = remaining_output(process)
        assert words[:2] == ["cancelled", "shutdown"]
        assert process.returncode == 1
