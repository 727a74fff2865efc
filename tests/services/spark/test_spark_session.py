"""The Spark session: its configuration, its Java's class archive, its scratch folders, and an unreachable master."""

from __future__ import annotations

import logging
import os
import shlex
import socket
from contextlib import nullcontext
from pathlib import Path

import pyspark
import pytest
from pyspark import SparkContext

from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.compaction_settings import SparkSettings
from penstock.services.exit_status import ExitStatus
from penstock.services.spark import reading
from penstock.services.spark import spark_session as spark
from penstock.services.spark.batch.batch import BatchFenced, BatchReport
from penstock.services.spark.batch.settings import BatchSettings
from penstock.services.spark.compaction.settings import CompactSettings
from penstock.services.spark.errors import SparkFailed
from penstock.services.spark.main import FENCED, batch_main, compact_main
from penstock.services.spark.spark_session import (
    SCRATCH_LOCK,
    SCRATCH_PREFIX,
    SUBMIT_ARGS,
    connection_failure,
    is_s3,
    master_addresses,
    properties_file,
    s3_configuration,
    scratch_folder,
    spark_session,
)
from penstock.services.spark.worker_daemon import without_archives
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.java import installed_java
from penstock.shared.common.java.class_archive import keep_archive, recorded_file, recording
from penstock.shared.common.java.installed_java import Java
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


async def test_missing_jars_are_downloaded_in_a_notebook(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A session can download its jars although an event loop runs, as it does in a notebook."""
    fetched: list[str] = []

    async def fetch(jars: JarSet) -> None:
        fetched.extend(cached(jars))

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(spark, "fetch_jars", fetch)
    assert list(map(str, spark.connector_jars())) == fetched


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


def test_a_fenced_batch_ends_with_status_3(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The command prints the error's message, which names the members of the group."""

    class Fenced:
        """A batch that a live instance fences."""

        def __init__(self, *_: object) -> None:
            pass

        def run(self) -> BatchReport:
            raise BatchFenced("the group a has members")

    monkeypatch.setattr(spark, "spark_session", lambda *_: nullcontext())
    monkeypatch.setattr("penstock.services.spark.batch.batch.BatchJob", Fenced)
    assert batch_main(["--application=a", "--lake=lake", "--topology=a:b"]) == FENCED == 3
    assert capsys.readouterr().err.splitlines()[-1] == "the group a has members"


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


def test_the_usual_variables_of_s3_in_hadoops_words() -> None:
    """Region and endpoint come from AWS's variables. A self-hosted server is addressed by path."""
    assert s3_configuration({}) == {}
    own = s3_configuration({"AWS_ENDPOINT_URL": "http://127.0.0.1:9", "AWS_DEFAULT_REGION": "us-east-1"})
    assert own == {
        "spark.hadoop.fs.s3a.endpoint.region": "us-east-1",
        "spark.hadoop.fs.s3a.endpoint": "http://127.0.0.1:9",
        "spark.hadoop.fs.s3a.path.style.access": "true",
        "spark.hadoop.fs.s3a.connection.ssl.enabled": "false",
    }
    both = {
        "AWS_ENDPOINT_URL": "http://a",
        "AWS_ENDPOINT_URL_S3": "https://b",
        "AWS_REGION": "r",
        "AWS_DEFAULT_REGION": "d",
    }
    assert s3_configuration(both)["spark.hadoop.fs.s3a.endpoint"] == "https://b"
    assert s3_configuration(both)["spark.hadoop.fs.s3a.connection.ssl.enabled"] == "true"
    assert s3_configuration(both)["spark.hadoop.fs.s3a.endpoint.region"] == "r"


def test_only_a_lake_on_s3_needs_the_connector() -> None:
    """The connector, half a gigabyte, is not downloaded for a local folder."""
    assert is_s3("s3a://bucket/app")
    assert not is_s3("/lake/app")
    assert not is_s3("gs://bucket/app")


def test_only_the_owner_reads_the_properties(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher receives the file's path, before its existing arguments."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    for before, after in ((None, "pyspark-shell"), ("--verbose pyspark-shell", "--verbose pyspark-shell")):
        monkeypatch.delenv(SUBMIT_ARGS, raising=False) if before is None else monkeypatch.setenv(SUBMIT_ARGS, before)
        with properties_file({"spark.hadoop.fs.s3a.secret.key": "hunter=2"}, str(folder)):
            arguments = shlex.split(os.environ[SUBMIT_ARGS])
            file = Path(arguments[arguments.index("--properties-file") + 1])
            assert " ".join(arguments).endswith(after)
            assert (file.stat().st_mode & 0o777, file.read_text()) == (
                0o600,
                "spark.hadoop.fs.s3a.secret.key=hunter\\=2\n",
            )
        assert os.environ.get(SUBMIT_ARGS) == before


def test_only_a_standalone_master_has_addresses() -> None:
    """A standalone master may have standby addresses. Other kinds of masters are not checked."""
    assert master_addresses("spark://a:7077,b.c:1") == [("a", 7077), ("b.c", 1)]
    assert [master_addresses(master) for master in ("local[*]", "yarn", "k8s://https://host:443")] == [[], [], []]
    assert connection_failure("yarn") is None


def test_one_master_that_answers_is_enough() -> None:
    """The session starts if one of the masters is reachable. If none is, each has its reason in the error."""
    with socket.create_server(("127.0.0.1", 0)) as there, socket.create_server(("127.0.0.1", 0)) as gone:
        ports = [server.getsockname()[1] for server in (there, gone)]
        gone.close()
        assert connection_failure(f"spark://127.0.0.1:{ports[1]},127.0.0.1:{ports[0]}") is None
        master = f"spark://127.0.0.1:{ports[1]},127.0.0.1:{ports[1]}"
    failure = f"127.0.0.1:{ports[1]}: Connection refused"
    assert connection_failure(master) == f"{failure}; {failure}"
    assert "a..b:7077: " in (connection_failure("spark://a..b:7077") or "")
    assert "a:99999: " in (connection_failure("spark://a:99999") or "")
    expected = rf"{master} .*spark\.master.*{failure}"
    with pytest.raises(SparkFailed, match=expected), spark_session(SparkSettings(master=master), "test"):
        raise AssertionError("there is no Spark")


def test_a_session_for_reading_needs_a_process_without_a_session(monkeypatch: pytest.MonkeyPatch) -> None:
    """pyspark would return the session that is there, and the end of the context would stop it."""
    monkeypatch.setattr(reading, "spark_session", lambda *_: nullcontext("started"))
    with reading.session() as started:
        assert started == "started"
    monkeypatch.setattr(SparkContext, "_active_spark_context", object())
    with pytest.raises(ConfigError, match="has a Spark session already"), reading.session():
        raise AssertionError("it took the session over")


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


def test_a_scratch_folder_goes_with_its_job(tmp_path: Path) -> None:
    """A folder in use and a folder that is still being made by another job are not removed."""
    made = tmp_path / f"{SCRATCH_PREFIX}made"
    made.mkdir()
    with scratch_folder(tmp_path) as work, scratch_folder(tmp_path) as other:
        assert Path(work).is_dir()
        assert other != work
    assert list(tmp_path.iterdir()) == [made]


def test_the_next_job_removes_the_folder_of_a_killed_one(tmp_path: Path) -> None:
    """The folder's lock is free, so the folder is removed with its content. A symbolic link is left alone."""
    left, elsewhere = tmp_path / f"{SCRATCH_PREFIX}left", tmp_path / "elsewhere"
    for folder in (left, elsewhere):
        (folder / "blockmgr").mkdir(parents=True)
        (folder / SCRATCH_LOCK).touch()
    link = tmp_path / f"{SCRATCH_PREFIX}link"
    link.symlink_to(elsewhere)
    with scratch_folder(tmp_path):
        assert not left.exists()
    assert sorted(tmp_path.iterdir()) == [elsewhere, link]
    assert (elsewhere / "blockmgr").is_dir()


def test_workers_import_no_archives_of_a_pyspark_that_is_a_folder(tmp_path: Path) -> None:
    """Pip's pyspark has both. A Spark without a folder on the path keeps its archives, and so do other packages."""
    site, spark = tmp_path / "site-packages", tmp_path / "opt" / "spark"
    (site / "pyspark" / "python" / "lib").mkdir(parents=True)
    (site / "pyspark" / "__init__.py").touch()
    archives = [str(site / "pyspark" / of) for of in ("python/lib/pyspark.zip", "jars/spark-core.jar")]
    others = ["", str(spark / "python" / "lib" / "pyspark.zip"), str(site / "own.zip"), "/job", str(site)]
    assert without_archives([*others[:2], *archives, *others[2:]]) == others
    assert without_archives(archives) == archives
