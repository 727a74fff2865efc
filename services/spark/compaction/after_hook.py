"""The after hook of a compaction: a function of the user that gets the compacted tables as DataFrames."""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from penstock.services.spark.lake_tables import LakeTables
from penstock.shared.common.errors import ConfigError, FatalError
from penstock.shared.streams.topology_loading import load_function


class AfterHookFailed(FatalError):
    """The after hook raised an error. The compaction before it stays committed."""


def call_after_hook(spark: SparkSession, name: str, folder: str) -> None:
    """Call the user's after hook `name`, a `module:function`, as `function(spark, tables)`.

    `tables` has the DataFrames `closed/<store>`, `late/<store>` and `live/<store>` of each windowed store. Raises
    ConfigError if there is no such function or it raises ConfigError, and AfterHookFailed if it raises another error.
    """
    function: Any = load_function(name, "after")
    try:
        function(spark, LakeTables(spark, folder).frames())
    # It ends the job with the exit status of invalid settings.
    except ConfigError:
        raise
    except Exception as e:
        raise AfterHookFailed(f"{name}: {type(e).__name__}: {e}") from e
