"""The Spark session of the jobs: local by default, the same code on a cluster.

The Kafka and Delta connectors are not part of pyspark. `penstock jars spark` downloads their jars once to a folder. So
a start needs no network, and saves the two seconds in which Spark would resolve dependencies. Without S3, a local
master has the jars on the JVM's class path, where the class archive can include them. A cluster's driver receives the
same files by `spark.jars` and passes them to its executors.

The sections below: the session, Spark's configuration, the class archive, a standalone master's addresses, Spark's
properties file, the job's scratch folder, and S3.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any

import pyspark
from py4j.protocol import Py4JError
from pyspark import SparkContext, cloudpickle
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.services.compaction_settings import SparkSettings
from penstock.services.spark.errors import SparkFailed, last_cause
from penstock.shared.common.file_lock import FileLock
from penstock.shared.common.java.class_archive import (
    DUMP_TIMEOUT_MS,
    archive_options,
    archive_path,
    keep_archive,
    recording,
)
from penstock.shared.common.java.installed_java import Java, find_java
from penstock.shared.common.java.jars import JarSet, cache_root, fetch_jars, missing_jars, read_jar_set
from penstock.shared.common.java.properties_file import render_properties

# Excludes the jars that pyspark ships: a second copy in another version would hide pyspark's own.
SPARK_JARS = read_jar_set(Path(__file__).with_name("spark_jars.json"))
# Of the same version as pyspark's hadoop-client: another version of the connector would not load.
S3_JARS = read_jar_set(Path(__file__).with_name("s3_jars.json"))
# A task holds at most this many sketches in memory. The largest ones take 60 MB.
SKETCHES_MAX = 30_000
# Most of a short job's time is the JVM compiling itself: stopping at the quick compiler halved the CPU time of a job
# over 300,000 records. A configured spark.driver.extraJavaOptions comes after these options and so overrides them.
LOCAL_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=192m"
# For batches of this many rows, numpy's fixed costs are negligible.
ARROW_BATCH_ROWS = 50_000
# A Python worker needs a few times this much memory, however large states are.
ARROW_BATCH_BYTES = 16 * 1024 * 1024
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
CLASS_PATH = "spark.driver.extraClassPath"
_MEANINGS = {
    "stopped SparkContext": "the master does not respond, or accepts no application",
    "JAVA_GATEWAY_EXITED": "Java exited at once; its output is above (check spark.driver_memory and spark.conf)",
}
"""The meaning of the messages with which Spark or its launcher fails to start, by a text that they contain."""
# After a stop, jobs are cancelled at this interval, because another one may start.
STOP_POLL_S = 0.5
# A local master attempts a task this many times, like a cluster.
TASK_ATTEMPTS = 4
STANDALONE_SCHEME = "spark://"
S3_SCHEME = "s3a://"
# Each address of a master has this long to accept a connection.
CONNECT_TIMEOUT_S = 5.0
# pyspark passes the arguments in this variable to Spark's launcher.
SUBMIT_ARGS = "PYSPARK_SUBMIT_ARGS"
SCRATCH_PREFIX = "penstock-spark-"
SCRATCH_LOCK = "in-use"
_DEFAULT_SUBMIT_ARGS = "pyspark-shell"
_LOCAL = re.compile(r"local(?:\[(\d+|\*)\])?")
_LOG4J = Path(__file__).with_name("log4j2.properties")


def use_java(java: Java) -> None:
    """Set JAVA_HOME to this Java's home, if that has `bin/java`, for the next Spark session.

    Spark's launcher uses the Java of JAVA_HOME, or else the one on PATH.
    """
    # The `java` of a version manager may lie outside of a Java home.
    if (java.home / "bin" / "java").exists():
        os.environ["JAVA_HOME"] = str(java.home)


def connector_jars(wanted: JarSet = SPARK_JARS) -> list[Path]:
    """Return the jars of the connectors for a Spark session. Download them if this user lacks them."""
    folder = cache_root() / wanted.folder
    if missing_jars(wanted):
        try:
            asyncio.get_running_loop()
        except RuntimeError:
            asyncio.run(fetch_jars(wanted))
        else:
            # This thread runs an event loop, as that of a notebook does, and cannot run a second one.
            with ThreadPoolExecutor(1) as thread:
                thread.submit(asyncio.run, fetch_jars(wanted)).result()
    return sorted(folder / jar.name for jar in wanted.jars)


@contextmanager
def spark_session(settings: SparkSettings, application: str, *uris: str) -> Iterator[SparkSession]:
    """Yield a Spark session for one job and stop it at the end. `uris` are the locations of its tables and files.

    Raises ConfigError without a suitable Java or if missing jars cannot be downloaded, SparkFailed if Spark does not
    start.
    """
    if (failure := connection_failure(settings.master)) is not None:
        raise SparkFailed(f"Spark at {settings.master} did not start (spark.master): no master answers: {failure}")
    java = find_java()
    use_java(java)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # Python workers must be this interpreter, with the same numpy and pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with scratch_folder() as work:
        conf = configuration(settings, work, uris, java)
        builder = SparkSession.builder.appName(application).master(with_attempts(settings.master))
        # Configured properties may hold secrets. A JVM that is started now would show them on its command line.
        is_started = SparkContext._gateway is not None
        hidden = {} if is_started else {n: conf[n] for n in settings.conf if n != JAVA_OPTIONS}
        for name, value in conf.items():
            builder = builder if name in hidden else builder.config(name, value)
        try:
            with properties_file(hidden, work) if hidden else nullcontext():
                spark = builder.getOrCreate()
        except (PySparkException, Py4JError, RuntimeError, OSError) as e:
            cause = last_cause(e)
            cause = next((meaning for sign, meaning in _MEANINGS.items() if sign in cause), cause)
            raise SparkFailed(f"Spark at {settings.master} did not start (spark.master): {cause}") from e
        try:
            yield spark
        finally:
            with suppress(Py4JError, ConnectionError):
                # The JVM may have ended.
                spark.stop()


@contextmanager
def pickled_by_value(*modules: ModuleType) -> Iterator[None]:
    """Within the context, pickle the functions and classes of these modules by value, for workers that lack them."""
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


@contextmanager
def session_setting(spark: SparkSession, name: str, value: str) -> Iterator[None]:
    """Within the context, give a setting of the Spark session another value."""
    before = spark.conf.get(name)
    spark.conf.set(name, value)
    try:
        yield
    finally:
        spark.conf.set(name, before)


@contextmanager
def jobs_cancelled_on(stop: Event, spark: SparkSession) -> Iterator[None]:
    """Within the context, a thread cancels the session's running and later jobs as soon as `stop` is set."""
    is_over = Event()

    def cancel_jobs_when_stopped() -> None:
        while not is_over.is_set():
            if stop.wait(STOP_POLL_S):
                spark.sparkContext.cancelAllJobs()
                is_over.wait(STOP_POLL_S)

    watcher = Thread(target=cancel_jobs_when_stopped, name="stop", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        is_over.set()
        watcher.join()


def configuration(
    settings: SparkSettings, work: str, uris: Iterable[str] = (), java: Java | None = None
) -> dict[str, str]:
    """Return Spark's configuration for a job that may write its scratch files to the folder `work`."""
    on_s3 = any(map(is_s3, uris))
    # Hadoop's connector for S3 includes Amazon's whole SDK, half a gigabyte. So it is fetched only if a table or file
    # is on S3.
    jars = connector_jars() + (connector_jars(S3_JARS) if on_s3 else [])
    user_conf = dict(settings.conf)
    conf = {
        "spark.jars": ",".join(map(str, jars)),
        "spark.jars.ivy": str(cache_root() / "ivy"),
        "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
        "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
        "spark.driver.memory": settings.driver_memory,
        JAVA_OPTIONS: f"-Dlog4j2.configurationFile={_LOG4J.as_uri()} -Dderby.system.home={work}",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        "spark.sql.session.timeZone": "UTC",
        "spark.python.daemon.module": "penstock.services.spark.worker_daemon",
        # Otherwise F.col and each method of a Column call Java ten more times, to record the caller's line for errors.
        "spark.python.sql.dataFrameDebugging.enabled": "false",
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BATCH_BYTES),
        "spark.sql.warehouse.dir": f"{work}/warehouse",
        "spark.databricks.delta.snapshotPartitions": "2",
        # Cached rows are read only a few times: choosing the best encoding costs more than it saves.
        "spark.sql.inMemoryColumnarStorage.compressed": "false",
        # These jobs run many plans over little data: planning again after every stage costs more than it saves.
        "spark.sql.adaptive.enabled": "false",
        # Aggregate sketches by hashing their groups, not by sorting: the default falls back to sorting at 128 groups.
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": str(SKETCHES_MAX),
        # A join hashes its smaller side if that fits in memory: sorting both sides costs more.
        "spark.sql.join.preferSortMergeJoin": "false",
        "spark.sql.shuffledHashJoinFactor": "1",
    }
    if settings.master.startswith("local"):
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.local.dir": work}
        conf[JAVA_OPTIONS] += f" {LOCAL_JAVA_OPTIONS}"
        class_path = ":".join(map(str, jars))
        if not on_s3 and CLASS_PATH not in user_conf and class_path.count(":") == len(jars) - 1:
            conf[CLASS_PATH] = class_path
            del conf["spark.jars"]
            if java is not None:
                archive = spark_archive(java, jars)
                conf[JAVA_OPTIONS] = " ".join((conf[JAVA_OPTIONS], *archive_options(archive)))
    if on_s3:
        conf |= s3_configuration(os.environ)
    if JAVA_OPTIONS in user_conf:
        user_conf[JAVA_OPTIONS] = f"{conf[JAVA_OPTIONS]} {user_conf[JAVA_OPTIONS]}"
    return conf | user_conf


def with_attempts(master: str) -> str:
    """Return the master URL, with a number of attempts for a local master that has none.

    By default a cluster retries a failed task, and a local master does not.

    >>> with_attempts("local[*]"), with_attempts("local[2,1]"), with_attempts("spark://host:7077")
    ('local[*,4]', 'local[2,1]', 'spark://host:7077')
    """
    found = _LOCAL.fullmatch(master)
    return f"local[{found[1] or 1},{TASK_ATTEMPTS}]" if found else master


def jvm(spark: SparkSession) -> Any:
    """Return the driver's Java virtual machine."""
    return spark.sparkContext._jvm


# --- the class archive (shared/common/java/class_archive.py) ---


def make_archive() -> Path | None:
    """Return the class archive of Spark for this user's Java, made if it is missing.

    Returns None if the JVM did not write it, or did not end in time.
    """
    archive = spark_archive(find_java(), connector_jars())
    if archive.is_file():
        return archive
    with recording(archive) as options:
        conf = {JAVA_OPTIONS: " ".join(options)}
        settings = SparkSettings(master="local[1]", shuffle_partitions=1, conf=conf)
        with spark_session(settings, "class archive") as spark:
            _use_classes(spark)
        return archive if keep_archive(archive, complete=_end_jvm(SparkContext._gateway)) else None


def spark_archive(java: Java, jars: list[Path]) -> Path:
    """Return the path of Spark's class archive for this Java and these connector jars, whether or not it exists."""
    own_jars = sorted((Path(pyspark.__file__).parent / "jars").glob("*.jar"))
    return archive_path(cache_root(), f"spark-{pyspark.__version__}", java, (*own_jars, *jars))


def _end_jvm(gateway: Any) -> bool:
    """End the JVM of a stopped session. The JVM then writes its class archive.

    Returns whether it has ended within DUMP_TIMEOUT_MS.
    """
    gateway.shutdown()
    # The JVM ends when its standard input closes.
    gateway.proc.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(DUMP_TIMEOUT_MS / 1000)
    return gateway.proc.poll() is not None


def _use_classes(spark: SparkSession) -> None:
    """Do a little of the work of compactions and audits on a table, so that the archive has their classes.

    One task at a time and two partitions are enough: more would load no further classes.
    """
    with tempfile.TemporaryDirectory(prefix="penstock-archive-") as folder:
        table = f"{folder}/table"
        numbers = spark.range(0, 100, 1, 1)
        rows = numbers.select("id", (F.col("id") % 2).alias("k"), F.timestamp_seconds("id").alias("at"))
        rows.write.format("delta").partitionBy("k").save(table)
        read = spark.read.format("delta").load(table)
        length = F.session_window("at", "5 seconds")
        sessions = read.groupBy("k", length).agg(F.count("*").alias("n"), F.max("id").alias("most"))
        alone = sessions.drop("session_window").localCheckpoint().join(read, "k", "left_anti")
        alone.select("k").mapInArrow(lambda batches: batches, "k bigint").collect()
    jvm: Any = spark.sparkContext._jvm
    jvm.java.lang.Class.forName("org.apache.spark.sql.kafka010.KafkaSourceProvider")


# --- a standalone master ---


def master_addresses(master: str) -> list[tuple[str, int]]:
    """Return the hosts and ports of a standalone master and its standby masters; empty for any other kind of master.

    >>> master_addresses("spark://one:7077,[::1]:7078")
    [('one', 7077), ('::1', 7078)]
    >>> master_addresses("local[2]")
    []
    """
    if not master.startswith(STANDALONE_SCHEME):
        return []
    pairs = [text.rpartition(":") for text in master.removeprefix(STANDALONE_SCHEME).split(",")]
    return [(host.strip("[]"), int(port)) for host, _, port in pairs]


def connection_failure(master: str) -> str | None:
    """Return why no address of a standalone master accepts a connection.

    Return None if an address does, or for another kind of master. Check before the JVM starts: Spark would try to
    connect for a minute.
    """
    failures = []
    for host, port in master_addresses(master):
        try:
            with socket.create_connection((host, port), CONNECT_TIMEOUT_S):
                return None
        except (OSError, OverflowError, UnicodeError) as e:
            # OverflowError means an invalid port, UnicodeError an invalid host.
            failures.append(f"{host}:{port}: {getattr(e, 'strerror', None) or e}")
    return "; ".join(failures) or None


# --- Spark's properties file ---


@contextmanager
def properties_file(conf: Mapping[str, str], folder: str) -> Iterator[None]:
    """Within the context, a JVM that starts reads `conf` from a file in `folder` that only this user can read.

    `conf` may contain credentials for the storage, and all users of a machine can read a process's command line.
    """
    before = os.environ.get(SUBMIT_ARGS)
    file = Path(folder) / "spark.properties"
    file.touch(0o600)
    file.write_text(render_properties(conf), encoding="ascii")
    arguments = before or _DEFAULT_SUBMIT_ARGS
    os.environ[SUBMIT_ARGS] = f"--load-spark-defaults --properties-file {shlex.quote(str(file))} {arguments}"
    try:
        yield
    finally:
        if before is None:
            del os.environ[SUBMIT_ARGS]
        else:
            os.environ[SUBMIT_ARGS] = before


# --- the job's scratch folder ---


@contextmanager
def scratch_folder(root: Path | None = None) -> Iterator[str]:
    """Yield a new folder below `root` (default: the machine's temporary folder) that only this user can read.

    The folder is removed at the end. If this job was killed, this user's next job with the same `root` removes it,
    unless the job was killed while it made or removed the folder.
    """
    root = Path(tempfile.gettempdir()) if root is None else root
    # A folder is in use while its lock file is locked; the lock ends with the process that holds it. A folder without a
    # lock file is still being made, or belongs to no job, and is not removed.
    remove_abandoned(root)
    with tempfile.TemporaryDirectory(prefix=SCRATCH_PREFIX, dir=root, ignore_cleanup_errors=True) as work:
        made = Path(work) / f"{SCRATCH_LOCK}.made"
        lock = FileLock(made)
        lock.try_acquire()
        # Other jobs see the lock file only once it is locked.
        made.rename(made.with_name(SCRATCH_LOCK))
        try:
            yield work
        finally:
            lock.release()


def remove_abandoned(root: Path) -> None:
    """Remove the scratch folders of jobs that were killed."""
    for folder in root.glob(f"{SCRATCH_PREFIX}*"):
        lock = FileLock(folder / SCRATCH_LOCK)
        with suppress(OSError):
            # The folder may belong to another user.
            if not folder.is_symlink() and (folder / SCRATCH_LOCK).is_file() and lock.try_acquire():
                shutil.rmtree(folder, ignore_errors=True)
        lock.release()


# --- S3 ---


def is_s3(uri: str) -> bool:
    """Return True if a folder or file, as Spark names it, is on S3."""
    return uri.startswith(S3_SCHEME)


def s3_configuration(environ: Mapping[str, str]) -> dict[str, str]:
    """Return Spark's configuration for S3, from Amazon's environment variables.

    The region is AWS_REGION, or else AWS_DEFAULT_REGION. The endpoint is AWS_ENDPOINT_URL_S3, or else AWS_ENDPOINT_URL.
    Credentials need no configuration: Spark passes on those in the driver's environment, and without them Hadoop uses
    the machine's role.

    >>> s3_configuration({"AWS_REGION": "eu-west-1"})
    {'spark.hadoop.fs.s3a.endpoint.region': 'eu-west-1'}
    """
    conf = {}
    if region := environ.get("AWS_REGION") or environ.get("AWS_DEFAULT_REGION"):
        conf["spark.hadoop.fs.s3a.endpoint.region"] = region
    if endpoint := environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL"):
        conf["spark.hadoop.fs.s3a.endpoint"] = endpoint
        # A self-hosted server seldom has a host name for each bucket.
        conf["spark.hadoop.fs.s3a.path.style.access"] = "true"
        conf["spark.hadoop.fs.s3a.connection.ssl.enabled"] = str(endpoint.startswith("https")).lower()
    return conf
