"""How the services of one machine are started."""

from __future__ import annotations

import sys
from pathlib import Path

from services.local.stack import ServiceSpec, Stack


def test_a_service_is_run_by_its_name_unless_it_has_a_module() -> None:
    """`penstock NAME` for a service, `python -m MODULE` for what only the local set-up has."""
    assert ServiceSpec("aggregator", {}).command() == [sys.executable, "-m", "services.cli", "aggregator"]
    assert ServiceSpec("gateway", {}, module="services.local.gateway").command()[2:] == ["services.local.gateway"]


def test_a_stack_without_services_has_nothing_to_check(tmp_path: Path) -> None:
    """`check` raises for services that ended; there are none."""
    stack = Stack(tmp_path, hermetic=True)
    stack.check()
    assert stack.services == {}
