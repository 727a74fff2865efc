"""The example of tests without a broker."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "testing_without_a_broker.py"
TIMEOUT_S = 60


def test_the_example_runs() -> None:
    """All tests of the example pass and are reported."""
    run = subprocess.run([sys.executable, EXAMPLE], capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert run.returncode == 0, run.stderr
    tests = EXAMPLE.read_text(encoding="utf-8").count("async def test_")
    assert sum(line.startswith("ok  ") for line in run.stdout.splitlines()) == tests > 0
