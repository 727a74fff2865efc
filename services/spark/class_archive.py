"""A class archive for the JVM of local jobs (an edge): most of a short job's start is loading and checking classes.

Java's application class-data sharing keeps classes as they are in memory in a file that the next JVM maps. With it, a
job that writes and reads one small Delta table took 13 s of CPU instead of 20. The archive is made once for each user,
Java and pyspark (`penstock jars spark --class-archive`). A JVM that finds another class path, jars of other times or
another Java than the archive was made with goes on without it and says nothing, so that it is never wrong, only of no
use.
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

from penstock.shared.common.jars import cache_root
from penstock.shared.common.java import Java
from penstock.shared.common.log import get_logger

EXIT_TIMEOUT_S = 120
"""How long the JVM may take to write its archive, some 180 MB, when it ends."""
# Not even a warning, where an archive does not fit or a class cannot be in one.
_QUIET = "-Xlog:cds=off -Xlog:cds+dynamic=off"

log = get_logger(__name__)


def archive_of(java: Java, jars: list[Path]) -> Path:
    """Where the archive of this Java, this pyspark and these jars is, or would be.

    Its name has two digests. The first one is of where they are, the second one of what they are. Java compares the
    times and sizes of jars too: after pyspark was installed again, an archive of before is of no use.
    """
    home = Path(pyspark.__file__).parent
    release = java.home / "release"
    release_id = release.read_bytes() if release.is_file() else str(java.version).encode()
    stats = [jar.stat() for jar in (*sorted((home / "jars").glob("*.jar")), *jars)]
    places = _digest(os.fsencode(java.home), os.fsencode(home), *map(os.fsencode, jars))
    contents = _digest(release_id, *(f"{int(stat.st_mtime)} {stat.st_size}".encode() for stat in stats))
    return cache_root() / f"spark-{pyspark.__version__}-{places}-{contents}.jsa"


def _digest(*parts: bytes) -> str:
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def options(archive: Path) -> str:
    """The Java options that use an archive; none where there is none."""
    return f"-XX:SharedArchiveFile={archive} {_QUIET}" if archive.is_file() else ""


def recording_options(file: Path) -> str:
    """The Java options that make a JVM write its archive when it ends."""
    return f"-XX:ArchiveClassesAtExit={file} -Xlog:disable"


def keep(gateway: Any, file: Path, archive: Path) -> bool:
    """End the JVM of a session that is over and had `recording_options(file)`, and keep what it wrote as the archive.

    The archive takes the place of those of the same places and other contents, 180 MB each. False where the JVM wrote
    none, which is logged.
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
    """A little of what compactions and audits do, on a table in this folder: what is used here is in the archive.

    One task at a time and two folders are enough: more of them load no other classes.
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
