"""COVERAGE.md names existing tests, and lists each Kafka test once."""

from __future__ import annotations

import re
from itertools import chain
from pathlib import Path

HERE = Path(__file__).parent
TESTS = HERE.parents[2]
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (HERE / "COVERAGE.md").read_text().splitlines()
    if re.match(r"\| `(?:test|should)", line)
]


def test_every_test_named_exists() -> None:
    """Every test that COVERAGE.md names exists."""
    files = chain(HERE.glob("test_*.py"), (TESTS / "integration").glob("test_*.py"), HERE.parent.rglob("test_*.py"))
    functions = {name for file in files for name in re.findall(r"def (test_\w+)\(", file.read_text())}
    named = {name for _, ours in ROWS for name in re.findall(r"`(test_\w+)`", ours)}
    assert named - functions == set()
    assert len(named) > 50


def test_each_of_theirs_is_listed_once() -> None:
    """Each Kafka test has one row, with a test or a reason."""
    theirs = [name for names, _ in ROWS for name in re.findall(r"`((?:test|should)\w+)`", names)]
    twice = sorted({name for name in theirs if theirs.count(name) > 1})
    assert twice == []
    assert len(theirs) > 100


def test_every_test_of_theirs_is_listed() -> None:
    """COVERAGE.md lists every test of Kafka's `ConsumerCoordinatorTest`."""
    theirs = (HERE / "data" / "reference_tests.txt").read_text().split()
    listed = {name for names, _ in ROWS for name in re.findall(r"`((?:test|should)\w+)`", names)}
    assert set(theirs) == listed
