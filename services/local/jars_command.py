"""`penstock jars`: downloads the jars of Kafka, Spark and S3 into the cache ahead of their first use.

There is one copy for each user and version, such as `~/.cache/penstock/kafka-4.1.1` (see shared/common/java/jars.py).
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from collections.abc import Sequence
from pathlib import Path

from penstock.services.local.broker_config import KAFKA_JARS
from penstock.shared.common.extras import needs
from penstock.shared.common.java.jars import JarSet, announcement, fetch_jars
from penstock.shared.common.log import configure
from penstock.shared.common.settings import LogSettings

SETS = {
    "kafka": "the embedded Kafka",
    "spark": "Spark's connectors for Kafka and Delta, for the jobs",
    "s3": "Spark's connector for a lake or files on S3, half a gigabyte",
}
"""The sets of jars that the command downloads."""
ARCHIVED = frozenset({"kafka", "spark"})
"""The sets whose JVMs start with a class archive."""


def main(arguments: Sequence[str]) -> int:
    """Run `penstock jars`: download each requested set if it is missing, and print its folder.

    With `--class-archive`, also make the class archives of the requested sets in ARCHIVED if missing, and print their
    paths. Returns 1 if a JVM did not write its class archive, else 0. Raises JarsUnavailable or MissingExtra. With
    `--class-archive`, also raises JavaNotFound, WrongJava, or an error of the broker or of Spark.
    """
    sets = "\n".join(f"  {name:<6} {what}" for name, what in SETS.items())
    parser = argparse.ArgumentParser(
        prog="penstock jars",
        description=f"Download jars into the cache, ahead of their first use, and print their folders.\n\n{sets}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("sets", nargs="+", choices=tuple(SETS), metavar="SET", help=" or ".join(SETS))
    parser.add_argument(
        "--class-archive",
        action="store_true",
        help="with kafka or spark: also make a class archive, which shortens their start on one machine, and print it",
    )
    given = parser.parse_args(arguments)
    if given.class_archive and not ARCHIVED.intersection(given.sets):
        parser.error("--class-archive is for kafka or spark: penstock jars kafka --class-archive")
    configure(LogSettings(level="warning"), "jars")
    for name in given.sets:
        wanted = _jar_set(name)
        if (message := announcement(wanted)) is not None:
            print(f"penstock: {message}", file=sys.stderr, flush=True)
        print(asyncio.run(fetch_jars(wanted)), flush=True)
    status = 0
    for name in given.sets:
        if given.class_archive and name in ARCHIVED:
            archive = _make_archive(name)
            print(archive or f"no class archive for {name}", flush=True)
            status = status if archive is not None else 1
    return status


def _make_archive(name: str) -> Path | None:
    """Return the path of the class archive of the embedded Kafka or of Spark's jobs, which is made if it is missing.

    Returns None if the JVM did not write it. Raises JarsUnavailable, JavaNotFound, WrongJava, or an error of the broker
    or of Spark, which write it.
    """
    if name == "kafka":
        from penstock.services.local import kafka_archive

        return asyncio.run(kafka_archive.make_archive())
    from penstock.services.spark import spark_session

    return spark_session.make_archive()


def _jar_set(name: str) -> JarSet:
    """Return the set of that name. Raises MissingExtra if the extra that uses it is not installed."""
    if name == "kafka":
        return KAFKA_JARS
    with needs(f"penstock jars {name}", "spark"):
        from penstock.services.spark.spark_session import S3_JARS, SPARK_JARS
    return SPARK_JARS if name == "spark" else S3_JARS
