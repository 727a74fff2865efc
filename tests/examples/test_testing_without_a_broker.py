"""The example of tests without a broker."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "testing_without_a_broker.py"


def test_the_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    """All tests of the example pass and are reported."""
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    tests = EXAMPLE.read_text(encoding="utf-8").count("async def test_")
    assert sum(line.startswith("ok  ") for line in capsys.readouterr().out.splitlines()) == tests > 0
