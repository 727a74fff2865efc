"""Late records as windows of one record each, by the aggregations that the stream itself has.

Runs in Spark's Python workers. What an aggregation would not have taken has a reason in place of a state: the stream
looks at a late record's time alone, and never at what is in it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import pyarrow as pa

from services.compactor.bodies import TIME_MS_MAX, StoreLayout
from shared.common.errors import ConfigError, DataError
from shared.streams.aggregations import Aggregation, Count, CountDistinct, Max, Mean, Min, OfField, Sum
from shared.streams.changelog_format import AggregationSchema, StoreSchema
from shared.streams.latest import Latest

KINDS = frozenset(("session", "tumbling", "hopping"))
_NUMBERS: dict[str, Any] = {"sum": Sum, "mean": Mean, "min": Min, "max": Max}
_HEAD = ("late_partition", "late_offset", "partition", "source_offset", "closed_ms", "timestamp_ms", "key")


def uncorrectable(store: StoreSchema) -> str | None:
    """Why late records cannot be put into this store's closed windows; None where they can."""
    if store.kind not in KINDS:
        return f"it holds no sessions, tumbling or hopping windows ({store.kind})"
    if store.upstream:
        return f"{', '.join(store.upstream)} stands before its window, and the late topic has records as they came"
    known = {"count", "count_distinct", Latest.function, *_NUMBERS}
    if others := [f"{a.name} ({a.function})" for a in store.aggregations if a.function not in known]:
        return f"the aggregations {', '.join(others)} cannot be merged by Spark"
    if others := [a.name for a in store.aggregations if a.field and not a.verbatim]:
        return f"the source's JSON does not have the fields of {', '.join(others)} as they are aggregated"
    return None


def aggregation_of(schema: AggregationSchema) -> Aggregation[Any]:
    """The stream's own aggregation. ConfigError for one that cannot be corrected."""
    if schema.function == Latest.function:
        return Latest()
    if schema.function == "count":
        return Count()
    if schema.field is not None and schema.function == "count_distinct":
        return CountDistinct(schema.field)
    if schema.field is None or schema.function not in _NUMBERS:
        raise ConfigError(f"aggregation {schema.name!r}: {schema.function} cannot be corrected")
    number = _NUMBERS[schema.function](schema.field)
    number.type = schema.state[0][1]
    return number  # type: ignore[no-any-return]


def late_states(schemas: Sequence[AggregationSchema], layout: StoreLayout) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: late records (_HEAD and `value`) to _HEAD, `state` and `reason`, one of which is null."""

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        aggregations = [aggregation_of(schema) for schema in schemas]
        for batch in batches:
            columns = zip(
                *(batch.column(n).to_pylist() for n in ("partition", "source_offset", "key", "timestamp_ms", "value")),
                strict=True,
            )
            states: list[dict[str, Any] | None] = []
            reasons: list[str | None] = []
            for partition, offset, key, timestamp_ms, value in columns:
                try:
                    if partition is None or offset is None or key is None:
                        raise DataError("it does not say which source record it was")
                    if not 0 <= timestamp_ms <= TIME_MS_MAX:
                        raise DataError(f"no timestamp before the year 10000 can say its time, {timestamp_ms} ms")
                    found = state_of(aggregations, value, timestamp_ms)
                    states.append(dict(zip((name for name, _ in layout.columns), found, strict=True)))
                    reasons.append(None)
                except DataError as e:
                    states.append(None)
                    reasons.append(str(e))
            own = [pa.array(states, layout.struct()), pa.array(reasons, pa.string())]
            yield pa.record_batch([*(batch.column(n) for n in _HEAD), *own], names=[*_HEAD, "state", "reason"])

    return run


def state_of(aggregations: Sequence[Aggregation[Any]], value: bytes | None, timestamp_ms: int) -> list[Any]:
    """The state columns of a window of one record. DataError where an aggregation does not take it."""
    fields: Any = None
    if any(isinstance(a, OfField) for a in aggregations):
        try:
            fields = msgspec.json.decode(value or b"")
        except msgspec.DecodeError as e:
            raise DataError(f"the value is no JSON: {e}") from None
    columns: list[Any] = []
    for aggregation in aggregations:
        columns += aggregation.to_columns(aggregation.add_at(aggregation.initial(), fields, timestamp_ms))
    return columns
