"""The example that reads the lake with DuckDB, on tables with the documented layout."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

from examples import lake_duckdb
from examples.lake_duckdb import main
from tests.lake_tables import sliding_lake, small_lake


def test_busiest_days_and_longest_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Closed windows are counted by day, and open ones are listed by length, with the bounds of their newest rows."""
    main(small_lake(tmp_path), "s")
    assert capsys.readouterr().out.splitlines() == [
        "1970-01-01: 2 windows of 2 keys",
        "1970-01-02: 1 windows of 1 keys",
        "open: \\xff, 80 ms",
        "open: b, 30 ms",
    ]


def test_closed_sliding_windows_are_not_open(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Sliding windows that `state` keeps after they were closed are not listed."""
    main(sliding_lake(tmp_path), "s")
    assert capsys.readouterr().out.splitlines() == ["1970-01-01: 1 windows of 1 keys", "open: b, 100 ms"]


def test_before_a_window_was_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Missing tables, and a store without closed windows, are reported."""
    with pytest.raises(SystemExit, match="nothing was compacted"):
        main(str(tmp_path), "s")
    folder = small_lake(tmp_path, closes=False)
    main(folder, "s")
    assert capsys.readouterr().out.splitlines() == ["no window of s was closed yet", "open: a, 50 ms"]
    with pytest.raises(SystemExit, match="closed/nosuch"):
        main(folder, "nosuch")


def test_without_arguments_the_usage_is_shown(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without arguments the example ends with status 2 and its usage."""
    monkeypatch.setattr(sys, "argv", ["lake_duckdb.py"])
    with pytest.raises(SystemExit) as ended:
        runpy.run_path(lake_duckdb.__file__, run_name="__main__")
    assert ended.value.code == 2
    assert capsys.readouterr().err.startswith("usage: lake_duckdb.py [-h] LAKE/APPLICATION STORE")
