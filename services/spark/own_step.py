"""The user's own step after a run: `module:function`, called as `function(spark, tables)`.

`tables` has DataFrames by name: `closed/<store>`, `late/<store>` and `live/<store>` for each store with windows, as the
run left them (see `reading`). What the function raises is reported and does not undo the run.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import SparkSession

from penstock.services.spark.reading import Tables
from penstock.shared.common.errors import ConfigError, FatalError
from penstock.shared.streams.topology_loading import import_function


class AfterHookFailed(FatalError):
    """The user's own step raised; the run that it came after counts all the same."""


def call_hook(spark: SparkSession, name: str, folder: str) -> None:
    """Call the function of that name; ConfigError where there is none such, AfterHookFailed for what it raises."""
    function: Any = import_function(name, "after")
    try:
        function(spark, Tables(spark, folder).frames())
    except ConfigError:
        raise
    except Exception as e:
        raise AfterHookFailed(f"{name}: {type(e).__name__}: {e}") from e
