"""README's way of reading the lake, run on the lake that README's own topology leaves."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

from sybil import Sybil
from sybil.example import Example
from sybil.parsers.markdown import CodeBlockParser

from services.compactor.compact import Compaction
from services.compactor.settings import CompactSettings
from services.local.kafka import EmbeddedKafka
from shared.common.settings import KafkaSettings
from shared.testing.topology_test_driver import TopologyTestDriver

README = Path(__file__).resolve().parent.parent.parent.parent / "README.md"
TIMEOUT_SECONDS = 60


def nothing(_: Example) -> None:
    """Blocks are taken out here, not evaluated by Sybil."""


def block(language: str, containing: str) -> str:
    examples = Sybil(parsers=[CodeBlockParser(language, nothing)]).parse(README).examples()
    (found,) = [str(example.parsed) for example in examples if containing in str(example.parsed)]
    return found


def test_reading_the_lake(spark: Any, topics: Any, kafka: EmbeddedKafka, topic_name: str, tmp_path: Path) -> None:
    """The topology's closed sessions are where README says, and its program prints what it says."""
    scope: dict[str, Any] = {"__name__": "visits"}
    exec(block("python", "# visits.py"), scope)
    driver = TopologyTestDriver(scope["topology"]())
    for minute in (0, 10, 120):
        driver.pipe("clicks", key=b"ann", value=b'{"ms": 5, "page": "/"}', timestamp=minute * 60_000)
    asyncio.run(topics.create(topic_name, 1))
    topics.send_changelog(topic_name, driver.changelog)
    settings = CompactSettings(
        application="visits",
        changelog=f"{topic_name}-changelog",
        lake=str(tmp_path / "lake"),
        kafka=KafkaSettings(bootstrap_servers=kafka.bootstrap_servers),
    )
    assert Compaction(spark, settings, print).run().finals == 1
    program = block("py", "DeltaTable(")
    command = [sys.executable, "-c", program]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_SECONDS, check=False)
    assert run.returncode == 0, run.stderr
    (printed,) = [line[2:] for line in program.splitlines() if line.startswith("# ")]
    assert run.stdout == f"{printed}\n"

    text = (README.parent / "examples" / "lake_spark.sql").read_text(encoding="utf-8")
    folder = str(tmp_path / "lake" / "visits")
    lines = [line for line in text.format(folder=folder, store="visits").splitlines() if not line.startswith("--")]
    days, longest = (spark.sql(one).collect() for one in "\n".join(lines).split(";") if one.strip())
    assert [(str(row.day), row.windows, row["keys"]) for row in days] == [("1970-01-01", 1, 1)]
    assert [(row.key, row.ms) for row in longest] == [("ann", 0)]
