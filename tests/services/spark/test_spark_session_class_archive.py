"""The path of the class archive, and the jobs that use it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.services.compaction_settings import SparkSettings
from penstock.services.spark import spark_session as spark
from penstock.shared.common.java.class_archive import keep_archive, recorded_file, recording
from penstock.shared.common.java.installed_java import Java


@pytest.fixture
def java(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Java:
    """A Java 17, and a cache with the connectors' jars."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    home = tmp_path / "java"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    (home / "release").write_text('JAVA_VERSION="17.0.15"\n')
    jars = tmp_path / "penstock" / spark.SPARK_JARS.folder
    jars.mkdir(parents=True)
    for jar in spark.SPARK_JARS.jars:
        (jars / jar.name).touch()
        os.truncate(jars / jar.name, jar.size)  # takes no room on the disk
    return Java(home / "bin" / "java", 17, "PATH")


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A jar of a fake pyspark."""
    monkeypatch.setattr(spark.pyspark, "__file__", str(tmp_path / "pyspark" / "__init__.py"))
    jar = tmp_path / "pyspark" / "jars" / "spark-core.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"classes")
    return jar


def test_each_java_and_class_path_has_an_archive_of_its_own(java: Java) -> None:
    """An updated Java and another jar lead to another file. A repeated call returns the same file."""
    one, other = spark.connector_jars()[:2]
    first = spark.spark_archive(java, [one])
    assert first == spark.spark_archive(java, [one])
    assert first != spark.spark_archive(java, [other])
    (java.home / "release").write_text('JAVA_VERSION="17.0.16"\n')
    assert first != spark.spark_archive(java, [one])


def test_a_pyspark_that_is_installed_again_has_another_archive(java: Java, installed: Path) -> None:
    """Java compares modification times and sizes of jars, so the archive's name depends on both."""
    os.utime(installed, (1, 1))
    first = spark.spark_archive(java, [])
    os.utime(installed, (2, 2))
    second = spark.spark_archive(java, [])
    installed.write_bytes(b"other classes")
    os.utime(installed, (2, 2))
    assert len({first, second, spark.spark_archive(java, [])}) == 3


def test_a_new_archive_replaces_the_former(java: Java, installed: Path) -> None:
    """Older archives of the same paths are removed, and archives of other paths stay."""
    others = spark.spark_archive(java, spark.connector_jars())
    former = spark.spark_archive(java, [])
    os.utime(installed, (1, 1))
    archive = spark.spark_archive(java, [])
    others.touch()
    former.touch()
    recorded_file(archive).touch()
    assert keep_archive(archive, complete=True)
    assert set(archive.parent.glob("*.jsa")) == {archive, others}


def test_half_a_file_is_no_archive(tmp_path: Path) -> None:
    """What a killed JVM has written is removed, and a JVM that wrote nothing leaves no archive."""
    archive = tmp_path / "kafka-1-2.jsa"
    with recording(archive):
        recorded_file(archive).touch()
        assert not keep_archive(archive, complete=False)
    assert not list(tmp_path.iterdir())
    with recording(archive):
        assert not keep_archive(archive, complete=True)
    assert not list(tmp_path.iterdir())


def test_a_local_job_uses_the_archive_that_is_there(java: Java) -> None:
    """No option names a missing file.

    An existing file is an option of a local job's JVM, before the user's own options.
    """
    jars = spark.connector_jars()
    archive = spark.spark_archive(java, jars)

    def options(master: str) -> str:
        given = {spark.JAVA_OPTIONS: "-Xss4m"}
        return spark.configuration(SparkSettings(master=master, conf=given), "scratch", (), java)[spark.JAVA_OPTIONS]

    assert "-XX:SharedArchiveFile" not in options("local[2]")
    archive.touch()
    assert f"-XX:SharedArchiveFile={archive} " in options("local[2]")
    assert options("local[2]").endswith(" -Xss4m")
    assert "-XX:SharedArchiveFile" not in options("spark://m:7077")
