"""The import path of Spark's Python workers."""

from __future__ import annotations

from pathlib import Path

from penstock.services.spark.worker_daemon import without_archives


def test_archives_of_a_pyspark_that_is_there_as_a_folder_go(tmp_path: Path) -> None:
    """Pip's pyspark has both. A Spark without a folder on the path keeps its archives, and so do other packages."""
    site, spark = tmp_path / "site-packages", tmp_path / "opt" / "spark"
    (site / "pyspark" / "python" / "lib").mkdir(parents=True)
    (site / "pyspark" / "__init__.py").touch()
    archives = [str(site / "pyspark" / of) for of in ("python/lib/pyspark.zip", "jars/spark-core.jar")]
    others = ["", str(spark / "python" / "lib" / "pyspark.zip"), str(site / "own.zip"), "/job", str(site)]
    assert without_archives([*others[:2], *archives, *others[2:]]) == others
    assert without_archives(archives) == archives
