"""The Spark session of the jobs: local by default, the same code on a cluster.

The Kafka and Delta connectors are not part of pyspark. Locally they come from a folder that is filled once
(`penstock jars spark`), which spares every start a resolution of two seconds and its need of a network. They are on
the JVM's class path, where the class archive can have them too (class_archive); a cluster's driver gets the same files
by `spark.jars` and hands them to its executors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

from py4j.protocol import Py4JError
from pyspark import SparkContext, cloudpickle
from pyspark.errors.exceptions.base import PySparkException
from pyspark.sql import SparkSession

from penstock.services.spark import class_archive, s3
from penstock.services.spark.masters import silence
from penstock.services.spark.properties import properties_file
from penstock.services.spark.scratch import scratch_folder
from penstock.services.spark.settings import SparkSettings
from penstock.shared.common.errors import FatalError
from penstock.shared.common.jars import JarSet, cache_root, fetch_jars, missing_jars, read_jar_set
from penstock.shared.common.java import Java, find_java

# Without what pyspark's own folder of jars has already: a second copy of another version would hide it.
SPARK_JARS = read_jar_set(Path(__file__).with_name("spark_jars.json"))
# Most of a short job's time is the JVM compiling itself: stopping at the quick compiler halved the CPU time of a job
# over 300,000 records. What is given as spark.driver.extraJavaOptions comes after it and so overrides it.
SKETCHES_MAX = 30_000  # in memory at a time in each task: 60 MB of the largest
LOCAL_JAVA_OPTIONS = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=192m"
ARROW_BATCH_ROWS = 50_000  # numpy's fixed costs vanish well below it
ARROW_BATCH_BYTES = 16 * 1024 * 1024  # a worker needs a few times as much, however big states are
JAVA_OPTIONS = "spark.driver.extraJavaOptions"
CLASS_PATH = "spark.driver.extraClassPath"
CAUSES_MAX = 20  # of one error: some chains are rings
_MEANINGS = {
    "stopped SparkContext": "its master does not answer, or takes no application",
    "JAVA_GATEWAY_EXITED": "Java ended at once, see what it said before (spark.driver_memory, spark.conf?)",
}
"""Of what is said once Spark, or its launcher, has given up."""
TASK_ATTEMPTS = 4  # at a task, as with Spark's clusters
_LOCAL = re.compile(r"local(?:\[(\d+|\*)\])?")
_CLASS_NAMES = re.compile(r"^(?:(?:[\w$]+\.)+[\w$]+(?:: |$))+")
_LOG4J = Path(__file__).with_name("log4j2.properties")


class SparkFailed(FatalError):
    """Spark could not be started, or a job of it failed for a reason that has no name of its own."""


def use_java(java: Java) -> None:
    """Have Spark's launcher, which looks at JAVA_HOME alone and then at PATH, take this Java."""
    if (java.home / "bin" / "java").exists():  # not so where a version manager stands between
        os.environ["JAVA_HOME"] = str(java.home)


def connector_jars(wanted: JarSet = SPARK_JARS) -> list[Path]:
    """The connectors' jars, downloaded if this user does not have them yet."""
    folder = cache_root() / wanted.folder
    if missing_jars(wanted):
        asyncio.run(fetch_jars(wanted))
    return sorted(folder / jar.name for jar in wanted.jars)


@contextmanager
def spark_session(settings: SparkSettings, application: str, *places: str) -> Iterator[SparkSession]:
    """A Spark session for one job, stopped at the end; `places` are where its tables and files are.

    Raises ConfigError (no Java, no jars) or SparkFailed.
    """
    if (said := silence(settings.master)) is not None:
        raise SparkFailed(f"Spark at {settings.master} did not start (spark.master): no master answers: {said}")
    java = find_java()
    use_java(java)
    logging.getLogger("py4j").setLevel(logging.WARNING)
    # Python workers must be this interpreter, with the same numpy and pyarrow.
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    with scratch_folder() as work:
        conf = configuration(settings, work, places, java)
        builder = SparkSession.builder.appName(application).master(with_attempts(settings.master))
        # What was given may hold secrets, which a JVM that is yet to be started would have on its command line.
        is_started = SparkContext._gateway is not None
        hidden = {} if is_started else {n: conf[n] for n in settings.conf if n != JAVA_OPTIONS}
        for name, value in conf.items():
            builder = builder if name in hidden else builder.config(name, value)
        try:
            with properties_file(hidden, work) if hidden else nullcontext():
                spark = builder.getOrCreate()
        except (PySparkException, Py4JError, RuntimeError, OSError) as e:
            said = last_cause(e)
            said = next((meaning for sign, meaning in _MEANINGS.items() if sign in said), said)
            raise SparkFailed(f"Spark at {settings.master} did not start (spark.master): {said}") from e
        try:
            yield spark
        finally:
            with suppress(Py4JError, ConnectionError):  # of a JVM that is gone
                spark.stop()


@contextmanager
def pickled_by_value(*modules: ModuleType) -> Iterator[None]:
    """Have what is handed to Spark meanwhile carry these modules' functions and classes with it, to workers that lack
    them."""
    for module in modules:
        cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in modules:
            cloudpickle.unregister_pickle_by_value(module)


def configuration(
    settings: SparkSettings, work: str, places: Iterable[str] = (), java: Java | None = None
) -> dict[str, str]:
    """Spark's configuration for a job that may write its scratch files to the folder `work`."""
    on_s3 = any(map(s3.is_s3, places))
    jars = connector_jars() + (connector_jars(s3.S3_JARS) if on_s3 else [])
    given = dict(settings.conf)
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
        "spark.sql.shuffle.partitions": str(settings.shuffle_partitions),
        "spark.sql.execution.arrow.maxRecordsPerBatch": str(ARROW_BATCH_ROWS),
        "spark.sql.execution.arrow.maxBytesPerBatch": str(ARROW_BATCH_BYTES),
        "spark.sql.warehouse.dir": f"{work}/warehouse",
        "spark.databricks.delta.snapshotPartitions": "2",
        # What is cached is read a few times and forgotten: looking for the best encoding costs more than it saves.
        "spark.sql.inMemoryColumnarStorage.compressed": "false",
        # Planning again after every stage costs these jobs more than it saves: many plans over little data.
        "spark.sql.adaptive.enabled": "false",
        # Sketches are hashed by their group, not sorted: by default 128 groups are too many.
        "spark.sql.objectHashAggregate.sortBased.fallbackThreshold": str(SKETCHES_MAX),
        # A join hashes its smaller side if that fits in memory: sorting both sides costs more.
        "spark.sql.join.preferSortMergeJoin": "false",
        "spark.sql.shuffledHashJoinFactor": "1",
    }
    if settings.master.startswith("local"):
        conf |= {"spark.driver.bindAddress": "127.0.0.1", "spark.driver.host": "127.0.0.1", "spark.local.dir": work}
        conf[JAVA_OPTIONS] += f" {LOCAL_JAVA_OPTIONS}"
        class_path = ":".join(map(str, jars))
        if not on_s3 and CLASS_PATH not in given and class_path.count(":") == len(jars) - 1:
            conf[CLASS_PATH] = class_path
            del conf["spark.jars"]
            if java is not None and (options := class_archive.options(class_archive.archive_of(java, jars))):
                conf[JAVA_OPTIONS] += f" {options}"
    if on_s3:
        conf |= s3.configuration(os.environ)
    if JAVA_OPTIONS in given:
        given[JAVA_OPTIONS] = f"{conf[JAVA_OPTIONS]} {given[JAVA_OPTIONS]}"
    return conf | given


def with_attempts(master: str) -> str:
    """A local master that tries a failed task again, as a cluster does; Spark's own local one does not.

    >>> with_attempts("local[*]"), with_attempts("local[2,1]"), with_attempts("spark://host:7077")
    ('local[*,4]', 'local[2,1]', 'spark://host:7077')
    """
    found = _LOCAL.fullmatch(master)
    return f"local[{found[1] or 1},{TASK_ATTEMPTS}]" if found else master


def first_line(error: BaseException) -> str:
    """What an error of Spark's says, without the stack traces that it carries."""
    cause = getattr(error, "java_exception", None)
    return _line(str(cause.toString()) if cause is not None else str(error)) or type(error).__name__


def causes(error: BaseException) -> list[str]:
    """What an error of Java's says and what its causes say, its own text first: a line each."""
    cause, texts = getattr(error, "java_exception", None) or getattr(error, "_origin", None), list[str]()
    while cause is not None and len(texts) < CAUSES_MAX:
        texts.append(_line(str(cause.toString())))
        cause = cause.getCause()
    return texts or [_line(str(error)) or type(error).__name__]


def last_cause(error: BaseException) -> str:
    """What the innermost cause says that says anything, without the names of Java's classes."""
    said = [_CLASS_NAMES.sub("", text) for text in causes(error)]
    return next((text for text in reversed(said) if text), causes(error)[0])


def _line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "")


def jvm(spark: SparkSession) -> Any:
    """The driver's Java virtual machine."""
    return spark.sparkContext._jvm


def make_archive() -> Path | None:
    """The class archive of this user's Java, made if it is not there yet; None where that could not be done."""
    archive = class_archive.archive_of(find_java(), connector_jars())
    if archive.is_file():
        return archive
    file = archive.with_name(f"{archive.name}.{os.getpid()}")
    options = {JAVA_OPTIONS: class_archive.recording_options(file)}
    settings = SparkSettings(master="local[1]", shuffle_partitions=1, conf=options)
    with tempfile.TemporaryDirectory(prefix="penstock-archive-") as folder:
        with spark_session(settings, "class archive") as spark:
            class_archive.use(spark, folder)
        return archive if class_archive.keep(SparkContext._gateway, file, archive) else None
