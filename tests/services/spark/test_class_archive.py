"""The path of the class archive, and the jobs that use it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.services.spark import class_archive
from penstock.services.spark import spark_session as spark
from penstock.services.spark.settings import SparkSettings
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
    monkeypatch.setattr(class_archive.pyspark, "__file__", str(tmp_path / "pyspark" / "__init__.py"))
    jar = tmp_path / "pyspark" / "jars" / "spark-core.jar"
    jar.parent.mkdir(parents=True)
    jar.write_bytes(b"classes")
    return jar


def test_each_java_and_class_path_has_an_archive_of_its_own(java: Java) -> None:
    """An updated Java and another jar lead to another file. A repeated call returns the same file."""
    one, other = spark.connector_jars()[:2]
    first = class_archive.archive_of(java, [one])
    assert first == class_archive.archive_of(java, [one])
    assert first != class_archive.archive_of(java, [other])
    (java.home / "release").write_text('JAVA_VERSION="17.0.16"\n')
    assert first != class_archive.archive_of(java, [one])


def test_a_pyspark_that_is_installed_again_has_another_archive(java: Java, installed: Path) -> None:
    """Java compares modification times and sizes of jars, so the archive's name depends on both."""
    os.utime(installed, (1, 1))
    first = class_archive.archive_of(java, [])
    os.utime(installed, (2, 2))
    second = class_archive.archive_of(java, [])
    installed.write_bytes(b"other classes")
    os.utime(installed, (2, 2))
    assert len({first, second, class_archive.archive_of(java, [])}) == 3


def test_a_new_archive_takes_the_place_of_the_former(tmp_path: Path, java: Java, installed: Path) -> None:
    """Older archives of the same paths are removed, and archives of other paths stay."""
    others = class_archive.archive_of(java, spark.connector_jars())
    former = class_archive.archive_of(java, [])
    os.utime(installed, (1, 1))
    archive = class_archive.archive_of(java, [])
    others.touch()
    former.touch()
    written = tmp_path / "written"
    written.touch()
    process = SimpleNamespace(stdin=SimpleNamespace(close=lambda: None), wait=lambda _: 0, poll=lambda: 0)
    gateway: Any = SimpleNamespace(shutdown=lambda: None, proc=process)
    assert class_archive.keep(gateway, written, archive)
    assert set(archive.parent.glob("*.jsa")) == {archive, others}


def test_a_local_job_uses_the_archive_that_is_there(java: Java) -> None:
    """No option names a missing file.

    An existing file is an option of a local job's JVM, before the user's own options.
    """
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
