"""The example that reads the lake with DuckDB, on tables written here as the layout says."""

from __future__ import annotations

import datetime
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import write_deltalake

from examples import lake_duckdb
from examples.lake_duckdb import main


def test_busiest_days_and_longest_windows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Windows count by day as their newest revisions say, and of the store's open ones the longest come first."""
    first, second = datetime.date(2026, 1, 2), datetime.date(2026, 1, 3)
    rows = [("a", 4, 5, 0, first), ("b", 6, 6, 0, first), ("a", 7, 7, 0, second)]
    rows += [("a", 4, 5, 1, first), ("c", 1, 2, 0, first), ("c", 1, 2, 1, first)]
    names = ("key", "start_ms", "end_ms", "revision", "day")
    closed = pa.table(dict(zip(names, map(list, zip(*rows, strict=True)), strict=True)))
    states = pa.array([{"n": 1}] * 5 + [None], pa.struct([("n", pa.int64())]))
    closed = closed.append_column("partition", pa.array([0] * 6)).append_column("state", states)
    write_deltalake(str(tmp_path / "closed" / "s"), closed, partition_by=["day"])
    state = {"row": ["window", "progress", "window", "window"], "store": ["s", "", "s", "t"], "partition": [0] * 4}
    state |= {"key": [b"x", b"", b"y", b"z"], "start_ms": [0, 0, 10, 0], "end_ms": [50, 0, 99, 1000]}
    write_deltalake(str(tmp_path / "state"), pa.table(state), partition_by=["partition"])
    main(str(tmp_path), "s")
    assert capsys.readouterr().out.splitlines() == [
        "2026-01-02: 2 windows of 2 keys",
        "2026-01-03: 1 windows of 1 keys",
        "open: y, 89 ms",
        "open: x, 50 ms",
    ]


def test_before_a_window_was_closed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What is not there yet is said; keys that are no text are shown by their bytes."""
    with pytest.raises(SystemExit, match="there is no such table: nothing was compacted yet"):
        main(str(tmp_path), "s")
    state = {"row": ["window"], "store": ["s"], "partition": [0], "key": [b"\xff\x00"], "start_ms": [0], "end_ms": [50]}
    write_deltalake(str(tmp_path / "state"), pa.table(state))
    main(str(tmp_path), "s")
    assert capsys.readouterr().out.splitlines() == ["no window of s was closed yet", "open: \\xff\x00, 50 ms"]
    with pytest.raises(SystemExit, match=r"closed/nosuch: there is no such table, and no window of nosuch is open"):
        main(str(tmp_path), "nosuch")


def test_without_arguments_it_says_what_it_needs() -> None:
    """A usage line, and no traceback."""
    command = [sys.executable, lake_duckdb.__file__]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 2
    assert run.stderr.startswith("usage: lake_duckdb.py [-h] LAKE/APPLICATION STORE")
