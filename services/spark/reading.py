"""The public functions that read an application's windows from the lake in Spark (`penstock.spark`).

They return DataFrames: closed windows, late records, open windows (`live`), and all of them merged (`corrected`).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from pyspark import SparkContext
from pyspark.sql import DataFrame, SparkSession

from penstock.services.compaction_settings import SparkSettings
from penstock.services.spark.lake_tables import LakeTables
from penstock.services.spark.merge_on_read import merged_windows
from penstock.services.spark.spark_session import spark_session
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.lake.location import hadoop_uri, lake_root


@contextmanager
def session(settings: SparkSettings | None = None, lake: str | None = None) -> Iterator[SparkSession]:
    """Yield a Spark session for reading Delta tables with `penstock.spark`, and stop it at the end.

    If `settings` is None, Spark runs on this machine (`local[*]`). Pass `lake` if it is on S3. Raises ConfigError if
    this process has a Spark session, if no suitable Java is found or if jars cannot be downloaded, SparkFailed if Spark
    does not start.
    """
    # pyspark would return that session, with some of its settings changed, and the end of this context would stop it.
    if SparkContext._active_spark_context is not None:
        raise ConfigError(
            "this process has a Spark session already: if it has Delta's connector, pass it to the functions of "
            "penstock.spark; otherwise stop it first"
        )
    # For a lake on S3, Spark loads the connector.
    uris = () if lake is None else (hadoop_uri(lake_root(lake)),)
    with spark_session(settings or SparkSettings(), "penstock.spark", *uris) as spark:
        yield spark


def closed(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Read a store's closed windows as a Spark DataFrame, one row each.

    Columns: `key` (text, or `key_bytes`), `window_start`, `window_end`, a column of results for each aggregation,
    `closed_at` (stream time), `state` (a struct of the aggregations' states), `partition`, `changelog_offset`,
    `topic_id`. Raises ConfigError if `lake` has no tables of the application, or no such windowed store.
    """
    found = _open_lake_tables(spark, lake, application)
    return found.closed(found.windowed_store(store))


def late(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Read a store's late records as a Spark DataFrame, one row each, with the results of that record alone.

    Columns: `key` (or `key_bytes`), `event_time`, `missed`, a column of results for each aggregation, `source_offset`,
    `state`, `partition`, `changelog_offset`, `topic_id`. Results and `state` are null if an aggregation rejected the
    record, or if the record's state was too large for the changelog. Raises the errors of `closed`.

    `missed` has the starts of the tumbling or hopping windows that the record missed. For a session it has the record's
    own time, for sliding windows the start of one missed window.
    """
    found = _open_lake_tables(spark, lake, application)
    return found.late(found.windowed_store(store))


def live(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Read a store's windows that were open when the newest compaction read the changelog, as a Spark DataFrame.

    Columns: `key` (or `key_bytes`), `window_start`, `window_end`, a column of results for each aggregation, `state`,
    `partition`. A table, or an aggregation without windows, has one row for each key, whose bounds are 1970-01-01.
    Raises ConfigError if `lake` has no tables of the application, or no such store.
    """
    found = _open_lake_tables(spark, lake, application)
    return found.live(found.store(store))


def corrected(spark: SparkSession, lake: str, application: str, store: str) -> DataFrame:
    """Read a store's windows as if no record had been late: closed and open windows with the late records merged in.

    Sessions within the gap of each other are joined. Late records whose `state` is null are not merged. Windows that
    retention deleted, wholly or possibly in part, are left out. The columns are those of `live`.

    Raises ConfigError for sliding windows, and for aggregations other than Count, Sum, Min, Max, Mean, CountDistinct
    and CollectSet. Raises the errors of `closed`.
    """
    found = _open_lake_tables(spark, lake, application)
    return merged_windows(found, found.windowed_store(store))


def _open_lake_tables(spark: SparkSession, lake: str, application: str) -> LakeTables:
    return LakeTables(spark, f"{hadoop_uri(lake_root(lake))}/{application}")
