"""COVERAGE.md names tests that exist, and every line has a test or a reason."""

from __future__ import annotations

import re
from pathlib import Path

HERE = Path(__file__).parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (HERE / "COVERAGE.md").read_text().splitlines()
    if re.match(r"\| (?:test|sender)", line)
]


def test_every_test_named_exists() -> None:
    """A test that is renamed or removed is missed here."""
    named = [name for _, ours in ROWS for name in re.findall(r"`([^`]+\.py::\w+)`", ours)]
    missing = []
    for name in named:
        file, _, function = name.partition("::")
        if f"def {function}(" not in (HERE / file).read_text():
            missing.append(name)
    assert missing == []
    assert len(named) > 90


def test_every_line_has_a_test_or_a_reason() -> None:
    """And each of theirs is listed once."""
    assert all("::test_" in ours or ours.startswith("none: ") for _, ours in ROWS)
    theirs = [name for name, _ in ROWS]
    assert len(set(theirs)) == len(theirs)


def test_every_test_of_theirs_is_in_the_map() -> None:
    """The names of `RecordAccumulatorTest` and `SenderTest`, as read from Kafka's trunk, are all there."""
    theirs = [line.split()[1] for line in (HERE / "data" / "reference_tests.txt").read_text().splitlines()]
    assert len(theirs) > 100
    assert sorted(theirs) == sorted(name for name, _ in ROWS)
