"""The user's own step after a run: `module:function`, called as `function(spark, tables)`.

`tables` has DataFrames by name: `closed/<store>`, `late/<store>` and `live/<store>` for each store, as the run left
them. What the function raises is said and does not undo the run.
"""

from __future__ import annotations

from typing import Any

from pyspark.sql import DataFrame, SparkSession

from penstock.services.spark import tables, upkeep
from penstock.shared.common.errors import ConfigError, FatalError
from penstock.shared.streams.topology_loading import import_function


class StepFailed(FatalError):
    """The user's own step raised; the run that it came after counts all the same."""


def call_step(spark: SparkSession, name: str, folder: str) -> None:
    """Call the function of that name; ConfigError where there is none such, StepFailed for what it raises."""
    function: Any = import_function(name, "after")
    try:
        function(spark, frames(spark, folder))
    except ConfigError:
        raise
    except Exception as e:
        raise StepFailed(f"{name}: {type(e).__name__}: {e}") from e


def frames(spark: SparkSession, folder: str) -> dict[str, DataFrame]:
    """An application's tables by name."""
    found = {}
    for kind in ("closed", "late"):
        for store in upkeep.tables_below(spark, f"{folder}/{kind}"):
            if (frame := tables.snapshot(spark, f"{folder}/{kind}/{store}")) is not None:
                found[f"{kind}/{store}"] = frame
    state = tables.snapshot(spark, f"{folder}/state")
    for store in [] if state is None else tables.stores_in(state):
        assert state is not None
        found[f"live/{store}"] = tables.live(state, store)
    return found
