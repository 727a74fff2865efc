"""`penstock demo` end to end: real Kafka, real Spark, a real crash, and the audit's verdict."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

TIMEOUT_S = 420


def demo(*arguments: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "services.cli", "demo", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)


def summary(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stdout + run.stderr
    last: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return last


def test_flights_go_through_the_whole_chain_and_a_crash(tmp_path: Path) -> None:
    """A prefix of the flights: the audit passes, every event is accounted for, and the state came from the snapshot."""
    run = demo("--events", "20000", "--json", cwd=tmp_path)
    result = summary(run)
    assert result["audit_ok"] is True
    assert result["events_sent"] == result["events_acked"] == result["audit"]["records"] == 20_000
    placed = result["audit"]["accepted"] + result["late_records"] + result["dead_letters"]
    assert placed == 20_000
    assert result["sessions_closed"] > 5_000
    assert result["late_records"] > 0
    assert result["dead_letters"] > 0
    assert result["restored_windows"] > 0
    assert result["restored_changelog_records"] > 0
    assert result["delta_rows"] == result["sessions_closed"] + result["sessions_open"]
    assert result["compactions"] >= 2
    assert result["restore_ms"] > 0
    assert "Longest banks" in run.stderr


@pytest.mark.soak
def test_a_users_own_csv_goes_the_same_way(tmp_path: Path) -> None:
    """A gzipped CSV with a bad row: the row is refused by the ingest and named, the rest is audited."""
    rows = [f"user-{i % 7},2024-05-01T{i // 60 % 24:02}:{i % 60:02}:00Z" for i in range(2_000)]
    rows[100] = "user-1,yesterday"
    (tmp_path / "clicks.csv.gz").write_bytes(gzip.compress(("who,at\n" + "\n".join(rows) + "\n").encode()))
    arguments = ("--input", "clicks.csv.gz", "--key", "who", "--time", "at", "--gap", "5m", "--grace", "1m", "--json")
    run = demo(*arguments, cwd=tmp_path)
    result = summary(run)
    assert result["audit_ok"] is True
    assert (result["events_sent"], result["events_acked"], result["events_refused"]) == (2_000, 1_999, 1)
    assert result["audit"]["records"] == 1_999
    assert "refused" in run.stderr
    assert "Longest sessions" in run.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--key", "who"), "--key and --time go with --input"),
        (("--input", "nowhere.csv"), "--input also needs --key COLUMN and --time COLUMN"),
        (("--input", "nowhere.csv", "--key", "a", "--time", "b"), "nowhere.csv: No such file"),
        (("--data-dir", "."), "is not empty, and no demo made it"),
    ],
)
def test_wrong_arguments_are_named(tmp_path: Path, arguments: tuple[str, ...], says: str) -> None:
    """Status 2 and the argument's name, before anything is started."""
    (tmp_path / "something").touch()
    run = demo(*arguments, cwd=tmp_path)
    assert run.returncode == 2
    assert says in run.stderr
