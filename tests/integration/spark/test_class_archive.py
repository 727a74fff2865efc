"""The class archive of a real Java: created once, and mapped by the next job's JVM, with Delta's classes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.services.spark import spark_session as spark
from penstock.shared.common.java.jars import cache_root

JOB = """
import sys
from penstock.services.compaction_settings import SparkSettings
from penstock.services.spark.spark_session import JAVA_OPTIONS, spark_session
conf = {JAVA_OPTIONS: f"-Xlog:class+load:file={sys.argv[1]}"}
with spark_session(SparkSettings(master="local[1]", conf=conf), "test") as session:
    session.range(3).write.format("delta").save(sys.argv[2])
"""


ARCHIVE = ("-m", "penstock", "jars", "spark", "--class-archive")


@pytest.mark.soak
def test_a_job_maps_the_archive(tmp_path: Path) -> None:
    """A second run reuses the archive, and a job's JVM loads Spark's and Delta's classes from it."""
    (tmp_path / "penstock").mkdir()
    (tmp_path / "penstock" / spark.SPARK_JARS.folder).symlink_to(cache_root() / spark.SPARK_JARS.folder)
    environment = os.environ | {"XDG_CACHE_HOME": str(tmp_path)}

    def run(*arguments: str | Path) -> str:
        command = [sys.executable, *map(str, arguments)]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    made = Path(run(*ARCHIVE).splitlines()[-1])
    written = made.stat().st_mtime_ns
    assert made.parent == tmp_path / "penstock"
    assert run(*ARCHIVE).splitlines()[-1] == str(made)
    assert made.stat().st_mtime_ns == written
    run("-c", JOB, tmp_path / "loaded.txt", tmp_path / "table")
    loaded = (tmp_path / "loaded.txt").read_text().splitlines()
    mapped = [line for line in loaded if line.endswith("source: shared objects file (top)")]
    assert len(mapped) > 5_000
    assert any("org.apache.spark.sql.delta" in line for line in mapped)
