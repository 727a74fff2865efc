"""COVERAGE.md names existing tests, and every row has a test or a reason."""

from __future__ import annotations

from pathlib import Path

from tests.coverage_maps import CoverageMap

MAP = CoverageMap.of(Path(__file__).parent, "test")


def test_every_test_named_exists() -> None:
    """Every test that COVERAGE.md names exists."""
    assert len(MAP.named()) > 45
    assert MAP.missing() == []


def test_every_line_has_a_test_or_a_reason() -> None:
    """Every row has a test or a reason, and the reference's tests are listed once."""
    assert MAP.without_test_or_reason() == []
    assert MAP.duplicates() == []
