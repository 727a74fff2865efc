"""The benchmark of state larger than memory: its figures and failures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import state

ROOT = Path(__file__).parents[2]
KEPT = {"held_mib": 17.0, "on_disk_mib": 8.0, "sessions_per_second": 9_000.0, "cpu_us_per_record": 40.0}


def run(store: str, sessions: int, data_mib: int) -> dict[str, Any]:
    """Runs one contestant in its own process."""
    given = ["--one", store, "--sessions", str(sessions), "--data-mib", str(data_mib)]
    ended = subprocess.run(
        [sys.executable, "-m", "bench.state", *given], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    result: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return result


def test_memory_that_is_limited_ends_the_one_in_memory() -> None:
    """With 8 MiB of data memory, the store in memory reports that 100,000 sessions do not fit."""
    assert run("in_memory", 100_000, 8) == {"failed": state.OUT_OF_MEMORY}


def test_sessions_on_disk_are_read_back(tmp_path: Path) -> None:
    """Sessions on disk are read back with their counts, and further records are added to them."""
    figures = state.contest("rocksDB", 3_000, None)
    assert float(figures["cpu_us_per_record"]) > 0
    assert float(figures["restore_seconds"]) > 0
    filled = state.Filled(tmp_path)
    for _ in range(3):
        filled.take(np.arange(5))
    assert filled.held(4)[0] == 3


@pytest.mark.soak
def test_rocksdb_holds_what_memory_does_not() -> None:
    """With 40 MiB of data memory, RocksDB holds 200,000 sessions and the store in memory does not."""
    assert run("in_memory", 200_000, 40) == {"failed": state.OUT_OF_MEMORY}
    kept = run("rocksDB", 200_000, 40)
    assert kept["held_mib"] < 40
    assert kept["on_disk_mib"] > 0


@pytest.mark.parametrize(
    ("in_memory", "on_disk", "status"),
    [
        (KEPT | {"held_mib": 50.0}, KEPT, 0),
        ({"failed": state.OUT_OF_MEMORY}, KEPT, 0),
        (KEPT | {"held_mib": 5.0}, KEPT, 1),
        (KEPT, {"failed": state.OUT_OF_MEMORY}, 1),
    ],
)
def test_state_on_disk_must_hold_its_sessions_in_less_memory(
    in_memory: dict[str, Any], on_disk: dict[str, Any], status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """The benchmark fails if RocksDB cannot hold its sessions, or needs more memory than a store in memory that can."""
    figures = {"in_memory": in_memory, "rocksDB": on_disk}
    assert state.report(300_000, figures, as_json=False) == status
    assert state.report(300_000, figures, as_json=True) == status
    output = capsys.readouterr().out
    assert output.startswith("300,000 open sessions")
    assert json.loads(output.splitlines()[-1]) == figures
