"""COVERAGE.md names tests that exist, and every line has a test or a reason."""

from __future__ import annotations

from pathlib import Path

from tests.coverage_maps import CoverageMap

MAP = CoverageMap.of(Path(__file__).parent, "test", "should")


def test_every_test_named_exists() -> None:
    """A test that is renamed or removed is missed here."""
    assert len(MAP.named()) > 40
    assert MAP.missing() == []


def test_every_line_has_a_test_or_a_reason() -> None:
    """Every line of the map has a test or a reason, and no line is listed twice."""
    assert MAP.without_test_or_reason() == []
    assert MAP.duplicates() == []
