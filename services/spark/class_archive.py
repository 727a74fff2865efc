"""A class archive for the JVM of local jobs (an edge).

A short job spends most of its start on loading and checking classes. Java's application class-data sharing stores
classes as they are in memory in a file that the next JVM maps. With it, a job that writes and reads one small Delta
table took 13 s of CPU instead of 20. The archive is made once for each user, Java and pyspark (`penstock jars spark
--class-archive`). A JVM with another class path, jars with other modification times or another Java ignores the archive
silently: an archive that does not fit is useless, but never harmful.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession
from pyspark.sql import functions as F  # noqa: N812  (the name that Spark's own documentation uses)

from penstock.shared.common.java.installed_java import Java
from penstock.shared.common.java.jars import cache_root
from penstock.shared.common.log import get_logger

EXIT_TIMEOUT_S = 120
"""How long the JVM may take to write its archive, some 180 MB, when it ends."""
# Suppresses the warnings about an archive that does not fit and about classes that cannot be archived.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"

log = get_logger(__name__)


def archive_of(java: Java, jars: list[Path]) -> Path:
    """Returns the path of the archive for this Java, this pyspark and these jars, whether or not it exists.

    The file name has two digests: the first of the paths, the second of the contents. Java also compares the
    modification times and sizes of jars, so an archive is useless after pyspark is installed again.
    """
    home = Path(pyspark.__file__).parent
    release = java.home / "release"
    release_id = release.read_bytes() if release.is_file() else str(java.version).encode()
    stats = [jar.stat() for jar in (*sorted((home / "jars").glob("*.jar")), *jars)]
    paths_digest = _archive_digest(os.fsencode(java.home), os.fsencode(home), *map(os.fsencode, jars))
    contents_digest = _archive_digest(release_id, *(f"{int(stat.st_mtime)} {stat.st_size}".encode() for stat in stats))
    return cache_root() / f"spark-{pyspark.__version__}-{paths_digest}-{contents_digest}.jsa"


def _archive_digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def options(archive: Path) -> str:
    """Returns the Java options that use an archive; empty if the file does not exist."""
    return f"-XX:SharedArchiveFile={archive} {_QUIET}" if archive.is_file() else ""


def recording_options(file: Path) -> str:
    """Returns the Java options that make a JVM write its archive when it ends."""
    return f"-XX:ArchiveClassesAtExit={file} -Xlog:disable"


def keep(gateway: Any, file: Path, archive: Path) -> bool:
    """End the JVM of a stopped session that had `recording_options(file)`, and keep its file as the archive.

    Removes the archives of the same paths with other contents, which take 180 MB each. Logs a warning and returns False
    if the JVM wrote no file.
    """
    gateway.shutdown()
    gateway.proc.stdin.close()  # the JVM ends with its standard input
    with contextlib.suppress(subprocess.TimeoutExpired):
        gateway.proc.wait(EXIT_TIMEOUT_S)
    if gateway.proc.poll() is None or not file.is_file():
        log.warning("no class archive was made; Spark starts without one", archive=str(archive))
        file.unlink(missing_ok=True)
        return False
    file.replace(archive)
    for former in archive.parent.glob(f"{archive.name.rpartition('-')[0]}-*.jsa"):
        if former != archive:
            former.unlink(missing_ok=True)
    return True


def use(spark: SparkSession, folder: str) -> None:
    """Do a little of the work of compactions and audits on a table in `folder`, so that the archive has their classes.

    One task at a time and two folders are enough: more of them would load no further classes.
    """
    table = f"{folder}/table"
    rows = spark.range(0, 100, 1, 1).select("id", (F.col("id") % 2).alias("k"), F.timestamp_seconds("id").alias("at"))
    rows.write.format("delta").partitionBy("k").save(table)
    read = spark.read.format("delta").load(table)
    length = F.session_window("at", "5 seconds")
    sessions = read.groupBy("k", length).agg(F.count("*").alias("n"), F.max("id").alias("most")).drop("session_window")
    alone = sessions.localCheckpoint().join(read, "k", "left_anti")
    alone.select("k").mapInArrow(lambda batches: batches, "k bigint").collect()
    jvm: Any = spark.sparkContext._jvm
    jvm.java.lang.Class.forName("org.apache.spark.sql.kafka010.KafkaSourceProvider")
