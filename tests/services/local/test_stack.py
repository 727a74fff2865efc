"""The services of one machine: their commands, their health and their shutdown timeout."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from penstock.services.local.stack import KILL_GRACE_MS, SHUTDOWN_TIMEOUT_MS, ServiceSpec, Stack, failing_checks
from penstock.shared.common.settings import ServiceSettings


def test_a_service_is_run_by_its_name_unless_it_has_a_module() -> None:
    """A service runs as `penstock NAME`, or as `python -m MODULE` if it has a module."""
    assert ServiceSpec("aggregator", {}).command() == [sys.executable, "-m", "penstock.services.cli", "aggregator"]
    assert ServiceSpec("gateway", {}, module="penstock.services.local.gateway").command()[2:] == [
        "penstock.services.local.gateway"
    ]


def test_a_stack_without_services_has_nothing_to_check(tmp_path: Path) -> None:
    """The check of a stack without services passes."""
    stack = Stack(tmp_path, hermetic=True)
    stack.check()
    assert stack.services == {}


def test_a_service_is_killed_after_its_shutdown_timeout(tmp_path: Path) -> None:
    """A service is killed only after its shutdown timeout and a grace period."""
    assert ServiceSettings().shutdown_timeout_ms == SHUTDOWN_TIMEOUT_MS
    assert ServiceSpec("a", {}).stop_timeout_ms == SHUTDOWN_TIMEOUT_MS + KILL_GRACE_MS
    assert ServiceSpec("a", {}, shutdown_timeout_ms=1_000).stop_timeout_ms == 1_000 + KILL_GRACE_MS


async def test_the_shutdown_timeout_is_passed_to_the_service(tmp_path: Path) -> None:
    """The shutdown timeout is in the child's environment."""
    program = "import os, time; print(os.environ['PENSTOCK_SHUTDOWN_TIMEOUT_MS'], flush=True); time.sleep(60)"
    (tmp_path / "ends.py").write_text(program)
    stack = Stack(tmp_path, hermetic=True)
    path = {"PYTHONPATH": str(tmp_path)}
    spec = ServiceSpec("ends", {}, module="ends", environment=path, shutdown_timeout_ms=1_234)
    service = await stack.start(spec)
    log = tmp_path / "logs" / "ends.log"
    async with asyncio.timeout(30):
        while "1234" not in log.read_text():  # noqa: ASYNC110 - a file of another process
            await asyncio.sleep(0)
        await stack.stop()
    assert not service.ended


@pytest.mark.parametrize("health", ["<html>", "[]", "{}", "[" * 100_000])
def test_an_invalid_health_response_is_shown_as_it_is(health: str) -> None:
    """A health response that is not JSON, is nested too deeply or has no checks is returned unchanged."""
    assert failing_checks(health) == health
