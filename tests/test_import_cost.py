"""What an import loads and costs, in processes of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.documents import ROOT

CPU_SECONDS_MAX = 0.05
RUNS = 7  # the least of them counts: a busy machine makes single runs slow
LOADED = "import sys; {}; print(*sys.modules)"
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
"""What the import of a name leaves alone."""


def ran(code: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("name", OTHERS)
def test_a_client_loads_no_other(name: str) -> None:
    """Neither another client nor a package of an extra, and of Penstock what clients are made of alone."""
    loaded = set(ran(LOADED.format(f"from penstock import {name}")).split())
    assert {module.partition(".")[0] for module in loaded} & HEAVY == set()
    assert loaded & OTHERS[name] == set()
    of_penstock = {module for module in loaded if module.startswith("penstock.")}
    rooms = ("penstock.clients", "penstock.shared", f"{CLIENTS}", "penstock.shared.common")
    assert [m for m in of_penstock if m not in rooms and not m.startswith((f"{CLIENTS}.", f"{rooms[-1]}."))] == []


def test_the_package_loads_nothing() -> None:
    """`import penstock` loads no module of its own and no dependency."""
    loaded = set(ran(LOADED.format("import penstock")).split())
    foreign = {m.partition(".")[0] for m in loaded} - set(sys.stdlib_module_names) - {"__main__"}
    at_start = {m.partition(".")[0] for m in ran(LOADED.format("pass")).split()}  # by .pth files
    assert foreign - at_start == {"penstock"}
    assert [m for m in loaded if m.startswith("penstock.")] == []


def test_the_package_is_imported_at_once() -> None:
    """CPU time of `import penstock`, the least of a few runs."""
    assert min(float(ran(TIMED.format("import penstock"))) for _ in range(RUNS)) < CPU_SECONDS_MAX
