"""The configuration with which Spark starts."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pyspark
import pytest

from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.compaction_settings import SparkSettings
from penstock.services.exit_status import ExitStatus
from penstock.services.spark import spark_session as spark
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.main import compact_main
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.java import installed_java
from penstock.shared.common.java.jars import JarSet, cache_root


def cached(jars: JarSet) -> list[str]:
    """Put files of the jars' sizes, without content, into the cache.

    Returns their paths in the order of Spark's settings.
    """
    folder = cache_root() / jars.folder
    folder.mkdir(parents=True)
    for jar in jars.jars:
        with (folder / jar.name).open("wb") as file:
            file.truncate(jar.size)
    return sorted(str(folder / jar.name) for jar in jars.jars)


def test_given_settings_win_and_java_options_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's properties override ours.

    The user's Java options follow ours, so they have precedence. The S3 connector is included as soon as one of the
    job's locations is on S3.
    """
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    jars, s3_jars = cached(spark.SPARK_JARS), cached(spark.S3_JARS)
    given = {"spark.sql.shuffle.partitions": "9", spark.JAVA_OPTIONS: "-Xss4m"}
    conf = spark.configuration(SparkSettings(conf=given), "scratch")
    assert conf[spark.CLASS_PATH] == ":".join(jars)
    assert "spark.jars" not in conf
    assert conf["spark.sql.shuffle.partitions"] == "9"
    assert conf["spark.sql.execution.arrow.maxBytesPerBatch"] == str(spark.ARROW_BATCH_BYTES)
    assert conf[spark.JAVA_OPTIONS].endswith(f"{spark.LOCAL_JAVA_OPTIONS} -Xss4m")
    cluster = spark.configuration(SparkSettings(master="spark://m:7077"), "scratch")
    assert "spark.driver.host" not in cluster
    assert cluster["spark.jars"] == ",".join(jars)
    assert spark.CLASS_PATH not in cluster
    flags = ["--application=a", "--lake=lake", "--topology=m:f", "--files=S3://bucket/*.json", "--live-from=latest"]
    with_files = spark.configuration(SparkSettings(), "scratch", BatchSettings.load(flags, environ={}).spark_uris)
    assert with_files["spark.jars"] == ",".join([*jars, *s3_jars])
    own = spark.configuration(SparkSettings(conf={spark.CLASS_PATH: "mine.jar"}), "scratch")
    assert (own[spark.CLASS_PATH], own["spark.jars"]) == ("mine.jar", ",".join(jars))
    assert spark.LOCAL_JAVA_OPTIONS not in cluster[spark.JAVA_OPTIONS]


def test_days_are_those_of_utc() -> None:
    """Jobs and the aggregator reject another session time zone by the setting's name."""
    zone = "spark.sql.session.timeZone"
    job = ("--application", "a", "--lake", "lake", "--spark.conf")
    aggregator = ("--topology", "m:f", "--compaction.spark.conf")
    for utc in ("UTC", "Etc/UTC", "Z", "+00:00"):
        given = CompactSettings.load([*job, f"{zone}={utc}"], environ={}).spark.conf
        assert given == AggregatorSettings.load([*aggregator, f"{zone}={utc}"], environ={}).compaction.spark.conf
        assert given == {zone: utc}
    message = f"{zone}=Europe/Berlin"
    with pytest.raises(ConfigError, match=f"spark.conf.*{message}"):
        CompactSettings.load([*job, f"{zone}=Europe/Berlin"], environ={})
    with pytest.raises(ConfigError, match=f"compaction.spark.conf.*{message}"):
        AggregatorSettings.load([*aggregator, f"{zone}=Europe/Berlin"], environ={})


def test_a_missing_or_unsupported_java_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without Java, or with a Java that is too new, a job ends with status 2. Its one line names the command to install
    one."""
    monkeypatch.setattr(installed_java, "_LINUX_FOLDER", tmp_path / "jvm")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.chdir(tmp_path)
    handlers, level = logging.root.handlers[:], logging.root.level
    flags = ["--application", "a", "--lake", "lake"]
    try:
        assert compact_main(flags) == ExitStatus.WRONG_SETTING
        (tmp_path / "java").write_text("#!/bin/sh\necho 'openjdk version \"25.0.1\"' >&2\n")
        (tmp_path / "java").chmod(0o755)
        assert compact_main(flags) == ExitStatus.WRONG_SETTING
    finally:
        logging.root.handlers[:], logging.root.level = handlers, level
    none, too_new = capsys.readouterr().err.splitlines()
    assert none.startswith("Java 17 to 22 is needed and none was found")
    assert too_new.startswith(f"Java 17 to 22 is needed, but {tmp_path}/java (PATH) is Java 25")
    assert all("openjdk-17-jre-headless" in line for line in (none, too_new))


def test_spark_takes_the_java_that_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Spark's launcher reads JAVA_HOME before PATH. A launcher outside a Java home leaves the environment unchanged."""
    monkeypatch.setenv("JAVA_HOME", "before")
    shim = tmp_path / "shims" / "java"
    spark.use_java(installed_java.Java(shim, 17, "PATH"))
    assert os.environ["JAVA_HOME"] == "before"
    home = tmp_path / "jvm" / "java-17"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "java").touch()
    spark.use_java(installed_java.Java(home / "bin" / "java", 17, "PATH"))
    assert os.environ["JAVA_HOME"] == str(home)


def test_the_locks_are_of_the_installed_spark() -> None:
    """Another pyspark needs other connectors and its own folder. None of them is in pyspark's own folder."""
    own = {jar.name for jar in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    assert spark.SPARK_JARS.folder == f"spark-{pyspark.__version__}"
    assert not own & {jar.name for jar in spark.SPARK_JARS.jars}
    (hadoop,) = (name for name in own if name.startswith("hadoop-client-api-"))
    version = hadoop.removeprefix("hadoop-client-api-").removesuffix(".jar")
    assert spark.S3_JARS.roots == (f"org.apache.hadoop:hadoop-aws:{version}",)
