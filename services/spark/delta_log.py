"""What a Delta table's log says, read as it is: a query for it is a plan and a job, for a few kilobytes.

Delta's own classes are asked, in the driver, so that any storage that Spark reaches is reached the same way.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from py4j.protocol import Py4JJavaError
from pyspark.sql import Row, SparkSession

from penstock.services.spark.session import jvm

_FIELDS = ("operation", "operationParameters", "operationMetrics", "userMetadata")
_GONE = "java.io.FileNotFoundException"


def is_near(spark: SparkSession, path: str) -> bool:
    """Whether the log is on a disk of the driver's, where reading many files singly costs little."""
    return str(_log(spark, path).logPath().toUri().getScheme()) == "file"


def newest_version(spark: SparkSession, path: str) -> int:
    """The newest version of a table."""
    return int(_snapshot(spark, path).version())


def files(spark: SparkSession, path: str) -> int:
    """How many data files the newest version of a table has."""
    snapshot = _snapshot(spark, path)
    known = snapshot.checksumOpt()  # what Delta writes beside each version; without it all of the log is read
    return int(known.get().numFiles() if known.isDefined() else snapshot.numOfFiles())


def commits(spark: SparkSession, path: str) -> Iterator[Row]:
    """The versions of a table that its log still has, newest first, each read when it is asked for.

    Each has `version`, and of _FIELDS what its commit said of itself: None for what it did not say.
    """
    java: Any = jvm(spark)
    delta, log = java.org.apache.spark.sql.delta, _log(spark, path)
    conf, as_json = log.newDeltaHadoopConf(), delta.util.JsonUtils.mapper().writeValueAsString
    for version in range(newest_version(spark, path), -1, -1):
        file = delta.util.FileNames.unsafeDeltaFile(log.logPath(), version)
        try:
            found = delta.DeltaHistoryManager.getCommitInfoOpt(log.store(), file, conf)
        except Py4JJavaError as e:
            if e.java_exception.getClass().getName() == _GONE:
                return
            raise
        said = found.get() if found.isDefined() else None
        fields = (None,) * len(_FIELDS) if said is None else (getattr(said, name)() for name in _FIELDS)
        yield Row(version=version, **{name: json.loads(as_json(f)) for name, f in zip(_FIELDS, fields, strict=True)})


def transaction(spark: SparkSession, path: str, name: str) -> int:
    """The newest version that a table has of that transaction, -1 where it has none: no log forgets it."""
    found = _snapshot(spark, path).transactions().get(name)
    return int(found.get()) if found.isDefined() else -1


def _log(spark: SparkSession, path: str) -> Any:
    java: Any = jvm(spark)
    return java.org.apache.spark.sql.delta.DeltaLog.forTable(spark._jsparkSession, path)


def _snapshot(spark: SparkSession, path: str) -> Any:
    java: Any = jvm(spark)
    none = java.scala.Option.empty()
    return _log(spark, path).update(False, none, none)
