"""The programs and queries of docs/lake.md, run on tables with the documented layout."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import duckdb
import msgspec
import polars as pl
import pytest

from examples.lake_duckdb import connect
from penstock.shared.streams.aggregations.aggregation import Count, Max, Min, Sum
from penstock.shared.streams.dsl.builder import StreamsBuilder
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.documents import DOCS, README, ROOT, block, names_of
from tests.lake_tables import LakeWriter, late_records, windows

HOUR, GRACE = 3_600_000, 600_000
SALES = {"orders": Count(), "total": Sum("price"), "least": Min("price"), "most": Max("price")}
TIMEOUT_SECONDS = 120


def sales(grace: int) -> TopologyTestDriver:
    builder = StreamsBuilder()
    hours = builder.stream("in").group_by_key().tumbling_window(HOUR, grace=grace)
    hours.aggregate("sales", **SALES).on_close().to("out")
    return TopologyTestDriver(builder.build())


def test_corrected_windows_in_sql(tmp_path: Path) -> None:
    """The document's query returns the same windows as a stream with a long grace, as `penstock.spark.corrected` does
    (spark/test_reading.py)."""
    rnd = random.Random(7)
    short, long, now = sales(GRACE), sales(10**12), 0
    short.task.keeps_late = True
    writer = LakeWriter(tmp_path / "app")
    for number in range(150):
        now += rnd.choice([0, 60_000, HOUR // 3])
        at = max(0, now - rnd.choice([0, 0, 120_000, HOUR, 3 * HOUR]))
        key, value = rnd.choice([b"north", b"south"]), {"price": rnd.choice([None, 1.5, -20.25, 300.0])}
        for driver in (short, long):
            driver.pipe("in", key=key, value=msgspec.json.encode(value), timestamp=at)
        if number == 75:
            writer.run({0: short.changelog})
    writer.run({0: short.changelog})
    assert len(late_records(short.changelog)) > 10
    short.pipe("in", key=b"north", value=b'{"price": 1}', timestamp=now + 9 * HOUR)
    writer.run({0: short.changelog}, crash=True)

    query = block(DOCS / "lake.md", "sql", "WITH covered")
    rows = connect(str(tmp_path / "app"), "sales").sql(query).to_arrow_table().to_pylist()
    truth = sorted(
        (key.decode(), start, end, *(results[name] for name in SALES))
        for (_, key, start), (end, results) in windows(long.changelog).items()
    )
    bounds = [[round(row[f"window_{at}"].timestamp() * 1000) for at in ("start", "end")] for row in rows]
    values = [[row[name] for name in SALES] for row in rows]
    given = zip(rows, bounds, values, strict=True)
    assert sorted((row["key"], *between, *results) for row, between, results in given) == truth


@pytest.fixture
def visits(tmp_path: Path) -> Path:
    """README's topology after a few clicks, in a lake `lake` in this folder."""
    scope = names_of(README, block(README, "python", "# visits.py"))
    driver = TopologyTestDriver(scope["topology"]())
    writer = LakeWriter(tmp_path / "lake" / "visits")
    clicks = [(0, "ann"), (10, "ann"), (120, "ann"), (121, "bob"), (122, "cat"), (123, "dan")]
    for minute, key in clicks:
        driver.pipe("clicks", key=key.encode(), value=b'{"ms": 5, "page": "/"}', timestamp=minute * 60_000)
    writer.run({0: driver.changelog})
    return tmp_path


def test_reading_the_lake(visits: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The document's program prints its documented output, and Polars reads the tables."""
    program = block(DOCS / "lake.md", "py", "DeltaTable(")
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=visits, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert run.returncode == 0, run.stderr
    (printed,) = [line[2:] for line in program.splitlines() if line.startswith("# ")]
    assert run.stdout == f"{printed}\n"

    monkeypatch.chdir(visits)
    live = pl.read_delta("lake/visits/state").filter((pl.col("row") == "window") & pl.col("live"))
    assert {b"ann", b"bob", b"cat", b"dan"} == set(live["key"].to_list())


def test_duckdb_reads_the_tables_by_its_own_extension(visits: Path) -> None:
    """Skipped if DuckDB's extension cannot be downloaded."""
    try:
        duckdb.load_extension("delta")
    except (duckdb.IOException, duckdb.HTTPException) as e:
        pytest.skip(f"DuckDB has no extension `delta` here: {e}")
    found = duckdb.sql(f"SELECT key FROM delta_scan('{visits}/lake/visits/closed/visits')").fetchall()
    assert found == [("ann",)]


def test_the_documents_spark_program(visits: Path) -> None:
    """The program prints both results in its own process and Spark session."""
    (visits / "examples").symlink_to(ROOT / "examples")
    program = block(DOCS / "lake.md", "python", "spark.session()")
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=visits, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert run.returncode == 0, run.stderr
    days, longest = run.stdout.split("\n\n")[:2]
    assert [line.split("|")[1:-1] for line in days.splitlines()[3:-1]] == [["1970-01-01", "      1", "   1"]]
    assert [line.split("|")[1].strip() for line in longest.splitlines()[3:-1]] == ["ann", "bob", "cat"]
