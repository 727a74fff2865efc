"""COVERAGE.md names existing tests, and every line has a test or a reason."""

from __future__ import annotations

from pathlib import Path

from tests.coverage_maps import CoverageMap

MAP = CoverageMap.of(Path(__file__).parent, "test", "sender")


def test_every_test_named_exists() -> None:
    """Every test that COVERAGE.md names exists."""
    assert len(MAP.named()) > 90
    assert MAP.missing() == []


def test_every_line_has_a_test_or_a_reason() -> None:
    """Every line has a test or a reason, and each Kafka test is listed once."""
    assert MAP.without_test_or_reason() == []
    assert MAP.duplicates() == []


def test_every_test_of_theirs_is_in_the_map() -> None:
    """COVERAGE.md lists every test of Kafka's `RecordAccumulatorTest` and `SenderTest`."""
    theirs = [line.split()[1] for line in (MAP.folder / "data" / "reference_tests.txt").read_text().splitlines()]
    assert len(theirs) > 100
    assert sorted(theirs) == sorted(MAP.theirs())
