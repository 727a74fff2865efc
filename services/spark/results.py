"""The typed results of windows, as Arrow columns, from the columns of their states."""

from __future__ import annotations

from typing import Any

import datasketches
import pyarrow as pa
import pyarrow.compute as pc

from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.aggregations.latest import shown
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema

RESULT_TYPES = {"int64": pa.int64(), "float64": pa.float64(), "json": pa.string()}


def results(store: StoreSchema, states: pa.StructArray) -> dict[str, pa.Array]:
    """By aggregation its results; null for a state that is null, or that has no columns of it."""
    found = {}
    for aggregation in shown(store):
        columns = {name: pc.struct_field(states, f"{aggregation.name}_{name}") for name, _ in aggregation.state}
        found[aggregation.name] = _result(aggregation, columns).cast(RESULT_TYPES[aggregation.result])
    return found


def _result(aggregation: AggregationSchema, state: dict[str, Any]) -> Any:
    match aggregation.function:
        case "count":
            return state["n"]
        case "sum" | "min" | "max" as function:
            return _where(pc.greater(state["n"], 0), state[function])
        case "mean":
            some = pc.greater(state["n"], 0)
            total, n = (state[name].cast(pa.float64(), safe=False) for name in ("sum", "n"))
            return _where(some, pc.divide(total, pc.if_else(some, n, 1.0)))
        case "first" | "last" if aggregation.result != "json":
            return _where(pc.greater_equal(state["at_ms"], 0), state["value"])
        case "count_distinct":
            return pa.array([_estimate(sketch) for sketch in state["hll"].to_pylist()], pa.int64())
        case "aggregate" | "collect_list" | "collect_set" | "quantiles" | "first" | "last":
            text = state["json"].cast(pa.string())
            return _where(pc.greater(pc.binary_length(text), 0), text)
    raise SchemaMismatch(
        f"aggregation {aggregation.name!r}: this release does not know the function {aggregation.function!r}"
    )


def _where(condition: Any, values: Any) -> Any:
    return pc.if_else(condition, values, pa.scalar(None, values.type))


def _estimate(sketch: bytes | None) -> int | None:
    return None if not sketch else round(datasketches.hll_sketch.deserialize(sketch).get_estimate())
