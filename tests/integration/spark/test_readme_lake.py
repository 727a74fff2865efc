"""README's way of reading the lake, run on the lake that README's own topology leaves."""

from __future__ import annotations

import asyncio
import re
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import duckdb
import polars as pl
import pytest

from examples import lake_duckdb, lake_polars
from penstock.services.local.kafka import EmbeddedKafka
from penstock.services.spark.compact import Compaction
from penstock.services.spark.settings import CompactSettings
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.topology_test_driver import TopologyTestDriver
from tests.documents import DOCS, README, block, names_of

TIMEOUT_SECONDS = 60


@pytest.fixture
def lake(spark: Any, topics: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path) -> Callable[..., int]:
    """Gives README's topology clicks (minute, key), after those before, and compacts what it wrote: how many closed."""
    scope = names_of(README, block(README, "python", "# visits.py"))
    driver = TopologyTestDriver(scope["topology"]())
    asyncio.run(topics.create(topic_name, 1))
    settings = CompactSettings(
        application="visits",
        changelog=f"{topic_name}-changelog",
        lake=str(tmp_path / "lake"),
        kafka=KafkaSettings(bootstrap_servers=kafka.bootstrap_servers),
    )

    def click(*clicks: tuple[int, str]) -> int:
        for minute, key in clicks:
            driver.pipe("clicks", key=key.encode(), value=b'{"ms": 5, "page": "/"}', timestamp=minute * 60_000)
        topics.send_changelog(topic_name, driver.changelog)
        return Compaction(spark, settings, print).run().finals

    return click


def test_reading_the_lake(
    spark: Any,
    lake: Callable[..., int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The topology's closed sessions are where README says, and its program prints what it says.

    So do the examples, on a table of live windows of which a compaction has deleted some by a deletion vector.
    """
    assert lake((0, "ann"), (10, "ann"), (120, "ann"), (121, "bob"), (122, "cat"), (123, "dan")) == 1
    program = block(README, "py", "DeltaTable(")
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert run.returncode == 0, run.stderr
    (printed,) = [line[2:] for line in program.splitlines() if line.startswith("# ")]
    assert run.stdout == f"{printed}\n"

    assert lake((125, "ann"), (158, "eve")) == 2
    folder = tmp_path / "lake" / "visits"
    commits = [path.read_text() for path in (folder / "state" / "_delta_log").glob("*.json")]
    assert any('"deletionVector":{' in commit for commit in commits)
    capsys.readouterr()
    for example in (lake_duckdb, lake_polars):
        example.main(str(folder), "visits")
        said = ["1970-01-01: 3 windows of 3 keys", "open: ann, 300000 ms", "open: dan, 0 ms", "open: eve, 0 ms"]
        assert capsys.readouterr().out.splitlines() == said

    # The document's program takes the session that is there, and leaves it there.
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(README.parent / "examples")
    exec(block(DOCS / "lake.md", "python", "SparkSession.builder"), {})
    days, longest = capsys.readouterr().out.split("\n\n")[:2]
    assert [line.split("|")[1:-1] for line in days.splitlines()[3:-1]] == [["1970-01-01", "      3", "   3"]]
    assert re.findall(r"\| *(\w+) *\| *(\d+) *\|", longest) == [("ann", "300000"), ("dan", "0"), ("eve", "0")]

    # By their own readers of Delta as well; DuckDB's is an extension, which is said where it is not at hand.
    live = pl.read_delta(str(folder / "state")).filter(pl.col("row") == "window")
    assert sorted(live["key"].to_list()) == [b"ann", b"dan", b"eve"]
    (line,) = re.findall(r"`(FROM delta_scan\(.+?\))`", README.read_text(encoding="utf-8"))
    try:
        duckdb.load_extension("delta")
    except (duckdb.IOException, duckdb.HTTPException) as e:
        warnings.warn(f"delta_scan was not tried, DuckDB's extension is not at hand: {e}", stacklevel=1)
        return
    assert sorted(duckdb.sql(f"SELECT key {line}").fetchall()) == [("ann",), ("bob",), ("cat",)]
    live_too = duckdb.sql("SELECT key FROM delta_scan('lake/visits/state') WHERE row = 'window' ORDER BY key")
    assert live_too.fetchall() == [(b"ann",), (b"dan",), (b"eve",)]
