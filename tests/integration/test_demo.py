"""`penstock demo` with its flights and with a user's own events, and its command line."""

from __future__ import annotations

import gzip
import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from deltalake import DeltaTable, QueryBuilder

from penstock.services.local.demo.flights import FlightEvents

TIMEOUT_S = 420
SOAK_TIMEOUT_S = 900


def demo(*arguments: str | Path, cwd: Path, timeout_s: int = TIMEOUT_S) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "penstock.services.cli", "demo", *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=timeout_s, check=False)


def summary(run: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    assert run.returncode == 0, run.stdout + run.stderr
    last: dict[str, Any] = json.loads(run.stdout.splitlines()[-1])
    return last


def clicks(rows: int) -> list[str]:
    """Rows of `who,at`, a minute apart."""
    return [f"user-{i % 7},2024-05-{1 + i // 1440:02}T{i // 60 % 24:02}:{i % 60:02}:00Z" for i in range(rows)]


def test_flights_pass_all_services_and_a_crash(tmp_path: Path) -> None:
    """With the first 5,000 flights the audit passes, every event is accounted for, and a crash restores state from the
    snapshot and the changelog.
    """
    run = demo("--events", "5000", "--json", cwd=tmp_path)
    result = summary(run)
    assert result["audit_ok"] is True
    assert result["events_sent"] == result["events_acked"] == result["audit"]["records"] == 5_000
    accounted = result["audit"]["in_windows"] + result["late_records"] + result["dead_letters"]
    assert accounted == 5_000
    assert result["sessions_closed"] > 1_000
    assert result["late_records"] > 0
    cancelled = sum(json.loads(line)["dep_delay"] is None for line in FlightEvents(5_000).lines())
    assert result["dead_letters"] == result["dead_letters_expected"] == cancelled > 0
    assert result["dead_letters_ok"] is True
    assert "flights: cancelled: no departure" in run.stderr
    assert result["restored_windows"] > 0
    assert result["restored_changelog_windows"] > 0
    kept, wanted = notable_sessions(tmp_path / ".penstock" / "demo")
    assert kept == wanted
    assert len(kept) == result["notable"] > 0
    assert result["delta_rows"] == result["sessions_closed"] + result["sessions_open"]
    assert result["compactions"] >= 2
    assert (result["batch_rows"], result["batch_differences"]) == (result["delta_rows"] + result["late_records"], 0)
    assert result["restore_ms"] > 0
    assert "Longest banks" in run.stderr


def notable_sessions(folder: Path) -> tuple[set[tuple[str, int, int]], set[tuple[str, int, int]]]:
    """The sessions that the consumer kept, and the closed sessions of the lake that it should have kept."""
    kept = [json.loads(line) for line in (folder / "notable.jsonl").read_bytes().splitlines()]
    closed = DeltaTable(folder / "lake" / "departure-banks" / "closed" / "banks")
    sql = "SELECT key, window_start, window_end FROM banks WHERE flights >= 40 OR mean_delay >= 90"
    rows = pyarrow.table(QueryBuilder().register("banks", closed).execute(sql).read_all()).to_pylist()
    bounds = [tuple(round(row[f"window_{at}"].timestamp() * 1000) for at in ("start", "end")) for row in rows]
    wanted = {(row["key"], *between) for row, between in zip(rows, bounds, strict=True)}
    return {(s["key"], s["start"], s["end"]) for s in kept}, wanted


@pytest.mark.soak
def test_a_users_csv_with_bad_rows(tmp_path: Path) -> None:
    """Bad rows of a gzipped CSV become dead letters that name row and column, and the audit counts them."""
    rows = clicks(400)
    rows[100:103] = ["user-1,yesterday", ",2024-05-01T01:41:00Z", "user-3"]
    (tmp_path / "clicks.csv.gz").write_bytes(gzip.compress(("who,at\n" + "\n".join(rows) + "\n").encode()))
    arguments = ("--input", "clicks.csv.gz", "--key", "who", "--time", "at", "--gap", "5m", "--grace", "1m", "--json")
    run = demo(*arguments, cwd=tmp_path)
    result = summary(run)
    assert result["audit_ok"] is True
    assert (result["events_sent"], result["events_acked"], result["events_rejected"]) == (400, 400, 0)
    assert result["dead_letters"] == result["dead_letters_expected"] == result["audit"]["dead_letters"] == 3
    assert result["audit"]["in_windows"] + result["late_records"] == 397
    assert result["restored_windows"] > 0
    assert result["restored_changelog_windows"] > 0
    assert result["compactions"] == 2
    assert result["delta_rows"] == result["sessions_closed"] + result["sessions_open"] > 0
    for reason in (
        "row 101 (line 102), column 'at': 'yesterday' is not an ISO 8601 time",
        "row 102 (line 103), column 'who': the key is empty",
        "row 103 (line 104), column 'at': the row ends after 1 of 2 columns",
    ):
        assert f"such as: {reason}\n" in run.stderr
    assert "Longest sessions" in run.stderr


@pytest.mark.soak
def test_a_long_csv_is_compacted_while_it_runs(tmp_path: Path) -> None:
    """A long CSV is compacted while the demo runs, also after the crash, and the audit passes."""
    rows = [f"user-{i % 997},{1_714_557_600_000 + i * 250}" for i in range(1_500_000)]
    (tmp_path / "clicks.csv").write_text("who,at\n" + "\n".join(rows) + "\n")
    arguments = ("--input", "clicks.csv", "--key", "who", "--time", "at", "--time-format", "epoch_ms", "--gap", "4m")
    result = summary(demo(*arguments, "--json", cwd=tmp_path, timeout_s=SOAK_TIMEOUT_S))
    assert result["audit_ok"] is True
    assert result["events_acked"] == result["audit"]["records"] == len(rows)
    assert result["compactions"] >= 2
    print(json.dumps(result))


def test_an_interrupt_stops_the_demo(tmp_path: Path) -> None:
    """Ctrl-C is acknowledged before Kafka and the services stop, and the status is 130."""
    command = [sys.executable, "-m", "penstock.services.cli", "demo", "--events", "10", "--json"]
    with subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.PIPE, text=True) as run:
        assert run.stderr is not None
        assert any("Kafka is up" in line for line in run.stderr)
        run.send_signal(signal.SIGINT)
        assert any("stopping Kafka and all services" in line for line in run.stderr)
        assert run.wait(TIMEOUT_S) == 130
