"""The folders and the errors of `penstock jars`, and the set of Kafka's jars.

Downloads are tested in tests/shared/common/java/test_jar_downloads.py and tests/integration/test_kafka_jars.py.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.services.cli import app
from penstock.services.local.broker_config import KAFKA_JARS
from penstock.services.spark.spark_session import S3_JARS, SPARK_JARS
from penstock.shared.common.java.jars import cache_root


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with all jars, by name and size."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for jars in (KAFKA_JARS, SPARK_JARS, S3_JARS):
        folder = cache_root() / jars.folder
        folder.mkdir(parents=True)
        for jar in jars.jars:
            (folder / jar.name).touch()
            os.truncate(folder / jar.name, jar.size)  # The file is sparse.
    return cache_root()


def test_the_command_prints_the_folders(cache: Path) -> None:
    """The command prints the folder of each set, in the order of its arguments."""
    ran = CliRunner().invoke(app, ["jars", "s3", "kafka", "spark"])
    assert (ran.exit_code, ran.stdout.split()) == (
        0,
        [str(cache / j.folder) for j in (S3_JARS, KAFKA_JARS, SPARK_JARS)],
    )


def test_a_cache_that_cannot_be_written_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Missing jars are announced with title and folder, and a cache that cannot be written is an error of one line."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    ran = CliRunner().invoke(app, ["jars", "s3"])
    announced, failed = ran.stderr.splitlines()
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert S3_JARS.title in announced
    assert failed.startswith("penstock jars: the cache folder")


@pytest.mark.parametrize("arguments", [[], ["hadoop"], ["s3", "--class-archive"]])
def test_invalid_arguments_have_status_2(arguments: list[str]) -> None:
    """An unknown set, no set, and a class archive of jars that have none end with status 2."""
    ran = CliRunner().invoke(app, ["jars", *arguments])
    assert (ran.exit_code, ran.stdout) == (2, "")
    assert "penstock jars" in ran.stderr


def test_the_jars_have_kafkas_version() -> None:
    """The folder has Kafka's version, so an upgrade downloads its jars, and all of Kafka's own
    jars have that version.
    """
    kafka_version = KAFKA_JARS.folder.removeprefix("kafka-")
    assert f"org.apache.kafka:kafka_2.13:{kafka_version}" in KAFKA_JARS.roots
    own = [jar.path.split("/") for jar in KAFKA_JARS.jars if jar.path.startswith("org/apache/kafka/")]
    assert {version for *_, version, _ in own} == {kafka_version}
    assert {"kafka_2.13", "kafka-clients", "kafka-server"} <= {name for *_, name, _, _ in own}


def test_logging_has_one_binding() -> None:
    """The jars contain slf4j 1.7 and exactly one binding for it."""
    names = [jar.name for jar in KAFKA_JARS.jars]
    assert [name for name in names if name.startswith("slf4j-api-")] == ["slf4j-api-1.7.36.jar"]
    assert sum("slf4j" in name for name in names) == 2
    assert any(name.startswith("log4j-slf4j-impl-") for name in names)
