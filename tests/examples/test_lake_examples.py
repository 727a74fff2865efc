"""The examples that read the lake with DuckDB and with Polars, on tables with the documented layout."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from examples import lake_duckdb, lake_polars
from tests.lake_tables import sliding_lake, small_lake

EACH_EXAMPLE = pytest.mark.parametrize("example", [lake_duckdb, lake_polars], ids=lambda example: example.__name__)


@EACH_EXAMPLE
def test_busiest_days_and_longest_windows(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Closed windows are counted by day, and open ones are listed by length, with the bounds of their newest rows."""
    example.main(small_lake(tmp_path), "s")
    assert capsys.readouterr().out.splitlines() == [
        "1970-01-01: 2 windows of 2 keys",
        "1970-01-02: 1 windows of 1 keys",
        "open: \\xff, 80 ms",
        "open: b, 30 ms",
    ]


@EACH_EXAMPLE
def test_closed_sliding_windows_are_not_open(
    example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Sliding windows that `state` keeps after they were closed are not listed."""
    example.main(sliding_lake(tmp_path), "s")
    assert capsys.readouterr().out.splitlines() == ["1970-01-01: 1 windows of 1 keys", "open: b, 100 ms"]


@EACH_EXAMPLE
def test_before_a_window_was_closed(example: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing tables, and a store without closed windows, are reported."""
    with pytest.raises(SystemExit, match="nothing was compacted"):
        example.main(str(tmp_path), "s")
    folder = small_lake(tmp_path, closes=False)
    example.main(folder, "s")
    assert capsys.readouterr().out.splitlines() == ["no window of s was closed yet", "open: a, 50 ms"]
    with pytest.raises(SystemExit, match="closed/nosuch"):
        example.main(folder, "nosuch")


@EACH_EXAMPLE
def test_without_arguments_the_usage_is_shown(
    example: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments the example ends with status 2 and its usage."""
    assert example.__file__ is not None
    name = Path(example.__file__).name
    monkeypatch.setattr(sys, "argv", [name])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(example.__file__, run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith(f"usage: {name} [-h] LAKE/APPLICATION STORE")
