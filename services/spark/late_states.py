"""Late records as windows of one record each, and windows made one, by the aggregations that the stream itself has.

Runs in Spark's Python workers, to which the aggregations travel with the job (`TRAVELS`): those need msgspec, and
datasketches where a sketch is kept, but not Penstock. What an aggregation would not have taken has a reason in place of
a state: the stream looks at a late record's time alone, and never at what is in it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import msgspec
import pyarrow as pa

from penstock.services.spark.bodies import TIME_MS_MAX, StoreLayout
from penstock.shared.common import errors
from penstock.shared.common.errors import ConfigError, DataError
from penstock.shared.streams import aggregations as numbers
from penstock.shared.streams import collecting, latest, quantiles
from penstock.shared.streams.aggregations import Aggregation, Count, CountDistinct, Max, Mean, Min, OfField, Sum
from penstock.shared.streams.changelog.format import AggregationSchema, StoreSchema
from penstock.shared.streams.collecting import CollectList, CollectSet, First, Last
from penstock.shared.streams.latest import Latest
from penstock.shared.streams.quantiles import Quantiles

KINDS = frozenset(("session", "tumbling", "hopping"))
TRAVELS = (errors, *map(import_module, ("penstock.errors", "penstock.streams")), numbers, collecting, quantiles, latest)
"""The modules of which classes go to workers by value, beside this one."""
_OF_FIELD: dict[str, Any] = {"sum": Sum, "mean": Mean, "min": Min, "max": Max, "count_distinct": CountDistinct}
_BY_TIME: dict[str, Any] = {"first": First, "last": Last}
_OF_FIELD |= _BY_TIME
_NUMBERS = frozenset(("sum", "mean", "min", "max"))
_TOLD: dict[str, Callable[[str, tuple[float, ...]], Aggregation[Any]]] = {
    "collect_list": lambda field, told: CollectList(field, int(told[0])),
    "collect_set": lambda field, told: CollectSet(field, int(told[0])),
    "quantiles": Quantiles,
}
"""Those that are what they are by parameters, which older changelogs do not say."""
_HEAD = ("late_partition", "late_offset", "partition", "source_offset", "closed_ms", "life", "timestamp_ms", "key")


class Places(NamedTuple):
    """Which source records there can be: by partition the offset at which the source ends, None where nobody knows.

    Below the offsets `own`, by partition of the late topic, are a backfill's: they may name a row of a file.
    """

    topic: str
    ends: Mapping[int, int | None]
    own: Mapping[int, int] = {}

    def refusal(self, partition: int | None, offset: int | None, late: tuple[int, int]) -> str | None:
        """Why a late record, itself at the place `late`, is of no source record that there is; None where it may be.

        >>> places = Places("clicks", {0: 9})
        >>> places.refusal(0, 8, (0, 5)), places.refusal(7, 5, (0, 5)), places.refusal(0, 9, (0, 5))
        (None, 'it says clicks-7, which there is not', 'it says clicks-0 at offset 9, which ends at 9')
        """
        if partition is None or offset is None:
            return "it does not say which source record it was"
        if partition not in self.ends:
            return f"it says {self.topic}-{partition}, which there is not"
        end = self.ends[partition]
        if offset < 0 or (end is not None and offset >= end and late[1] >= self.own.get(late[0], 0)):
            ends = "" if end is None else f", which ends at {end}"
            return f"it says {self.topic}-{partition} at offset {offset}{ends}"
        return None


def uncorrectable(store: StoreSchema) -> str | None:
    """Why late records cannot be put into this store's closed windows; None where they can."""
    if store.kind not in KINDS:
        return f"it holds no sessions, tumbling or hopping windows ({store.kind})"
    if store.upstream:
        return f"{', '.join(store.upstream)} stands before its window, and the late topic has records as they came"
    known = {"count", Latest.function, *_OF_FIELD, *_TOLD}
    if others := [f"{a.name} ({a.function})" for a in store.aggregations if a.function not in known]:
        return f"the aggregations {', '.join(others)} are the application's own code, which no job has"
    if others := [a.name for a in store.aggregations if a.function in _TOLD and not a.parameters]:
        return f"the changelog does not say the limits or ranks of {', '.join(others)}: the next commit does"
    if others := [a.name for a in store.aggregations if a.field and not a.verbatim]:
        return f"the source's JSON does not have the fields of {', '.join(others)} as they are aggregated"
    return None


def aggregation_of(schema: AggregationSchema) -> Aggregation[Any]:
    """The stream's own aggregation. ConfigError for one that cannot be corrected."""
    if schema.function == Latest.function:
        return Latest()
    if schema.function == "count":
        return Count()
    if schema.field is not None and schema.function in _TOLD and schema.parameters:
        return _TOLD[schema.function](schema.field, schema.parameters)
    if schema.field is None or schema.function not in _OF_FIELD:
        raise ConfigError(f"aggregation {schema.name!r}: {schema.function} cannot be corrected")
    made = _OF_FIELD[schema.function](schema.field)
    if schema.function in _NUMBERS:
        made.type = schema.state[0][1]
    if schema.function in _BY_TIME and schema.result != "json":
        made.type = schema.result
    return made  # type: ignore[no-any-return]


def late_states(
    schemas: Sequence[AggregationSchema], layout: StoreLayout, places: Places
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: late records (_HEAD and `value`) to _HEAD, `state` and `reason`, one of which is null."""
    aggregations = [aggregation_of(schema) for schema in schemas]
    read = ("late_partition", "late_offset", "partition", "source_offset", "key", "timestamp_ms", "value")

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            columns = zip(*(batch.column(name).to_pylist() for name in read), strict=True)
            states: list[dict[str, Any] | None] = []
            reasons: list[str | None] = []
            for late_partition, late_offset, partition, offset, key, timestamp_ms, value in columns:
                try:
                    if refusal := places.refusal(partition, offset, (late_partition, late_offset)):
                        raise DataError(refusal)
                    if key is None:
                        raise DataError("it has no key, and no window is of none")
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


def merged_states(
    schemas: Sequence[AggregationSchema], layout: StoreLayout, head: Sequence[str]
) -> Callable[[Iterator[Any]], Iterator[Any]]:
    """For mapInArrow: rows of `head` and `states` (a list of structs with a `state`, in the order in which they came)
    to `head` and `merged`. An aggregation that one of the states does not have, since the stream wrote it before there
    was that aggregation, is null: nobody knows what it would be."""
    aggregations = [(aggregation_of(a), [f"{a.name}_{column}" for column, _ in a.state]) for a in schemas]

    def merged(states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for aggregation, names in aggregations:
            columns = [[state[name] for name in names] for state in states]
            if any(None in values for values in columns):
                found |= dict.fromkeys(names)
                continue
            whole = functools.reduce(aggregation.merge, map(aggregation.from_columns, columns), aggregation.initial())
            found |= zip(names, aggregation.to_columns(whole), strict=True)
        return found

    def run(batches: Iterator[Any]) -> Iterator[Any]:
        for batch in batches:
            rows = [merged([one["state"] for one in states]) for states in batch.column("states").to_pylist()]
            own = pa.array(rows, layout.struct())
            yield pa.record_batch([*(batch.column(n) for n in head), own], names=[*head, "merged"])

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
