"""What Spark is started with."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.compactor import spark
from services.compactor.settings import SparkSettings
from shared.common.errors import ConfigError


def test_given_settings_win_and_java_options_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a user passes overrides ours; Java options come after ours, so that they win."""
    jars = tmp_path / "penstock" / spark.SPARK_JARS.folder
    jars.mkdir(parents=True)
    (jars / "a.jar").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    given = {"spark.sql.shuffle.partitions": "9", spark.JAVA_OPTIONS: "-Xss4m"}
    conf = spark.configuration(SparkSettings(conf=given), "scratch")
    assert conf["spark.jars"] == str(jars / "a.jar")
    assert conf["spark.sql.shuffle.partitions"] == "9"
    assert conf[spark.JAVA_OPTIONS].endswith(f"{spark.LOCAL_JAVA_OPTIONS} -Xss4m")
    cluster = spark.configuration(SparkSettings(master="spark://m:7077"), "scratch")
    assert "spark.driver.host" not in cluster
    assert spark.LOCAL_JAVA_OPTIONS not in cluster[spark.JAVA_OPTIONS]


def test_no_java_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a Java launcher a job ends with one sentence that says where it looked."""
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"JAVA_HOME .* has no bin/java"):
        spark.java_executable()
    monkeypatch.delenv("JAVA_HOME")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ConfigError, match="none was found by JAVA_HOME or PATH"):
        spark.java_executable()
