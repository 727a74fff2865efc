"""Where the class archive is, and when it is used."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.services.compactor import class_archive, spark
from penstock.services.compactor.settings import SparkSettings
from penstock.shared.common.java import Java


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Java:
    """A Java 17 and a cache with one jar."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    (home / "release").write_text('JAVA_VERSION="17.0.15"\n')
    jars = tmp_path / "penstock" / spark.SPARK_JARS.folder
    jars.mkdir(parents=True)
    (jars / "a.jar").touch()
    return Java(home / "bin" / "java", 17, "PATH")


def test_each_java_and_class_path_has_an_archive_of_its_own(java: Java) -> None:
    """An update of Java in its place, and another jar, lead to another file; asking again leads to the same."""
    first = class_archive.archive_of(java, [Path("a.jar")])
    assert first == class_archive.archive_of(java, [Path("a.jar")])
    assert first != class_archive.archive_of(java, [Path("b.jar")])
    (java.home / "release").write_text('JAVA_VERSION="17.0.16"\n')
    assert first != class_archive.archive_of(java, [Path("a.jar")])


def test_a_local_job_uses_the_archive_that_is_there(java: Java) -> None:
    """Without the file no option names it; with it a local job's JVM gets it, before the user's own options."""
    jars = spark.connector_jars()
    archive = class_archive.archive_of(java, jars)

    def options(master: str) -> str:
        given = {spark.JAVA_OPTIONS: "-Xss4m"}
        return spark.configuration(SparkSettings(master=master, conf=given), "scratch", (), java)[spark.JAVA_OPTIONS]

    assert "-XX:SharedArchiveFile" not in options("local[2]")
    archive.touch()
    assert f"-XX:SharedArchiveFile={archive} " in options("local[2]")
    assert options("local[2]").endswith(" -Xss4m")
    assert "-XX:SharedArchiveFile" not in options("spark://m:7077")
