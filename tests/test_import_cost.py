"""The modules that an import loads and the time that it takes, in separate processes."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import ROOT
from tests.forked_imports import ran_in_forks

CPU_SECONDS_MAX = 0.05
RUNS = 7  # the minimum counts: a busy machine slows single runs down
LOADED = "import sys; {}; print(*sys.modules)"
SHARED = "import aiokafka, msgspec, numpy, prometheus_client, pydantic_settings, structlog"
"""The dependencies that nearly every module imports, and that bring nothing heavy."""
TIMED = "import time; began = time.process_time(); {}; print(time.process_time() - began)"
HEAVY = {
    "asyncpg", "datasketches", "deltalake", "fastapi", "fastavro", "fsspec", "httpx", "numba", "pandas", "pyarrow",
    "pyspark", "rocksdict", "starlette", "typer", "uvicorn",
}  # fmt: skip
CLIENTS = "penstock.shared.clients"
OTHERS = {
    "Producer": {f"{CLIENTS}.consumer", f"{CLIENTS}.admin", f"{CLIENTS}.group"},
    "Consumer": {f"{CLIENTS}.producer", f"{CLIENTS}.admin"},
    "Admin": {f"{CLIENTS}.producer", f"{CLIENTS}.consumer"},
    "TopicPartition": {f"{CLIENTS}.producer", f"{CLIENTS}.consumer", f"{CLIENTS}.admin", f"{CLIENTS}.connection"},
}
"""Modules that the import of a name must not load."""
SERVICES = [
    f"penstock.services.{name}"
    for name in ("admin.main", "connect.main", "consumer.main", "local.gateway", "producer.main")
]
"""Those that run no topology."""


def ran(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.fixture(scope="module")
def loaded_by() -> dict[str, set[str]]:
    """The modules that are loaded after the import of each client, and after that of the services."""
    imports = {name: f"from penstock import {name}" for name in OTHERS} | {"services": f"import {', '.join(SERVICES)}"}
    shown = ran_in_forks(SHARED, *map(LOADED.format, imports.values()))
    return {name: set(modules.split()) for name, modules in zip(imports, shown, strict=True)}


@pytest.mark.parametrize("name", OTHERS)
def test_a_client_loads_no_other(name: str, loaded_by: dict[str, set[str]]) -> None:
    """Importing a client loads no other client, no package of an extra, and of Penstock only modules of clients."""
    loaded = loaded_by[name]
    assert {module.partition(".")[0] for module in loaded} & HEAVY == set()
    assert loaded & OTHERS[name] == set()
    of_penstock = {module for module in loaded if module.startswith("penstock.")}
    assert "penstock.shared.common" in of_penstock
    rooms = ("penstock.clients", "penstock.shared", f"{CLIENTS}", "penstock.shared.common")
    assert [m for m in of_penstock if m not in rooms and not m.startswith((f"{CLIENTS}.", f"{rooms[-1]}."))] == []


def test_services_without_a_topology_load_no_streams(loaded_by: dict[str, set[str]]) -> None:
    """Importing the services that run no topology loads neither the streams engine nor numba."""
    loaded = loaded_by["services"]
    assert set(SERVICES) <= loaded
    assert {m for m in loaded if m == "numba" or m.startswith("penstock.shared.streams.")} == set()


def test_the_package_loads_nothing() -> None:
    """`import penstock` loads no further module and no dependency."""
    loaded = set(ran(LOADED.format("import penstock")).split())
    foreign = {m.partition(".")[0] for m in loaded} - set(sys.stdlib_module_names) - {"__main__"}
    at_start = {m.partition(".")[0] for m in ran(LOADED.format("pass")).split()}  # by .pth files
    assert foreign - at_start == {"penstock"}
    assert [m for m in loaded if m.startswith("penstock.")] == []


def test_the_package_is_imported_quickly() -> None:
    """The CPU time of `import penstock`, the minimum of several runs, is below its limit."""
    assert min(float(ran(TIMED.format("import penstock"))) for _ in range(RUNS)) < CPU_SECONDS_MAX
