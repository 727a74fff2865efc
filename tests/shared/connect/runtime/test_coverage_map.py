"""COVERAGE.md names existing tests."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent


def test_every_test_named_exists() -> None:
    """Every test and file that COVERAGE.md names exists."""
    text = (HERE / "COVERAGE.md").read_text()
    bodies = {file.name: file.read_text() for file in HERE.glob("test_*.py")}
    named = re.findall(r"`(?:(test_\w+\.py)::)?(test_\w+)`", text)
    assert len(named) >= 35
    missing = [
        name
        for file, name in named
        if not any(f"def {name}(" in body for where, body in bodies.items() if not file or where == file)
    ]
    assert missing == []
    assert [file for file in re.findall(r"`(test_\w+\.py)`", text) if file not in bodies] == []
