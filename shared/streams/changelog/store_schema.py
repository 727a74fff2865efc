"""The schema of a store for readers of its changelog, and the schema changes that are allowed.

Every progress record has the store schemas of the topology that wrote it. Another topology may restore the state only
if its own stores can read what was written under those schemas.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.common.topic_names import REPARTITION_SUFFIX
from penstock.shared.streams.aggregations.aggregation import Aggregation, Column, ColumnType, ResultType
from penstock.shared.streams.aggregations.latest import LATEST

StoreKind = Literal["session", "tumbling", "hopping", "sliding", "aggregate", "table", "join"]

WINDOWED = frozenset(("session", "tumbling", "hopping", "sliding"))
"""The kinds of stores that hold windows."""


class AggregationSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """The description of one aggregation for readers of the changelog.

    `verbatim` means that the stream's JSON values have the aggregated field under the name `field`, in the form that
    the aggregation takes. `parameters` are the limit of `CollectList` and `CollectSet`, or the ranks of `Quantiles`.
    """

    name: str
    function: str
    field: str | None
    state: tuple[tuple[str, ColumnType], ...]
    result: ResultType
    verbatim: bool = True
    parameters: tuple[float, ...] = ()

    @classmethod
    def of(cls, name: str, aggregation: Aggregation[Any]) -> AggregationSchema:
        """Return the schema of a store's aggregation with this name."""
        columns = tuple(aggregation.state_columns)
        more = (columns, aggregation.result_type, aggregation.verbatim, aggregation.parameters)
        return cls(name, aggregation.function, aggregation.field, *more)


class StoreSchema(msgspec.Struct, frozen=True, omit_defaults=True):
    """One store: the definition of its windows, and its state columns. All times are in ms."""

    name: str
    kind: StoreKind
    """`aggregate` is an aggregation without windows, `table` the last value of each key, `join` one side of a join of
    streams."""
    key: Literal["string", "bytes"]
    """The type of the record keys: `string` is UTF-8, `bytes` is opaque."""
    gap_ms: int
    """The gap of sessions; 0 for all other kinds."""
    grace_ms: int
    emit: Literal["on_close", "on_update"]
    """When results are forwarded."""
    source: str
    """The topic whose records enter the store (of merged streams, the first one's); empty for the store of a user's
    processor."""
    results: str | None
    """The topic to which a sink directly below writes the results in the default encoding; None if there is no such
    sink."""
    late: str | None
    """The topic for late records; None if the store closes nothing."""
    dead_letters: str | None
    """The topic for records that could not be decoded or processed; None for the kind `table`."""
    aggregations: tuple[AggregationSchema, ...]
    upstream: tuple[str, ...] = ()
    """The names of the nodes above the store that may drop, change or add records, and of sources that are internal or
    read another topic."""
    size_ms: int = 0
    """The size of windows, or a sliding window's time difference; 0 for all other kinds."""
    advance_ms: int = 0
    """The advance of tumbling and hopping windows; 0 for all other kinds."""

    @property
    def is_table(self) -> bool:
        """Whether each key has one row that never closes; its start and end are 0."""
        return self.kind in ("aggregate", "table")

    @property
    def close_delay_ms(self) -> int:
        """How long after its end a window is closed, in ms."""
        return self.gap_ms + self.grace_ms

    def shown_aggregations(self) -> list[AggregationSchema]:
        """Return the aggregations that have a result, without the operator's own."""
        return [aggregation for aggregation in self.aggregations if aggregation.name != LATEST]

    def state_columns(self) -> tuple[Column, ...]:
        """Return all aggregations' columns, each named `<aggregation>_<column>`, in declared order."""
        return tuple(Column(f"{a.name}_{name}", type_) for a in self.aggregations for name, type_ in a.state)


ROWS = frozenset(("table", "join"))
"""The kinds of stores whose rows are values of the user instead of aggregations."""

SCHEMA_REMEDY = (
    "Run the topology as it was; or give this one an application_id of its own, which reads the sources from their "
    "beginning; or stop all instances, delete everything with `penstock streams reset`, and start again, after "
    "`penstock batch` if the sources no longer have the whole history."
)

STORES_STAY = (
    "An application's stores cannot change: a new one would lack every record that was read before, and a removed "
    f"one could not be restored. {SCHEMA_REMEDY}"
)

REPARTITION_TOPICS_STAY = (
    "A store's repartition topic cannot change, even if all records of the old one were read. Without a name, a topic "
    "is named after a node's position in the topology. To keep the old topic, pass the part of its name between the "
    f"application_id and `{REPARTITION_SUFFIX}` as `name` to the key_by before it. Otherwise: {SCHEMA_REMEDY}"
)

WINDOWS_STAY = f"The definition of a store cannot change, because its rows were made with it. {SCHEMA_REMEDY}"

AGGREGATIONS_STAY = (
    "A window may get further aggregations, but those that it has cannot change (docs/changelog-format.md, Versions). "
    "Run the topology as it was, or give this one an application_id of its own"
)

EMISSION_STAYS = f"Windows that are live would be forwarded only if a later record changes them. {SCHEMA_REMEDY}"

TYPES_GROW = (
    "A row of an earlier topology does not fit the type of the store's rows. Give fields that were added to the type a "
    "default, or run the topology as it was"
)


def check_schema(stored: tuple[StoreSchema, ...], own: tuple[StoreSchema, ...]) -> None:
    """Raise SchemaMismatch, naming the difference, if state written under the schemas `stored` cannot be read by `own`.

    The stores must agree in number, name, order, kind, key, source topic, gap, size and advance. Existing aggregations
    must keep their name, order, function, field and state columns. A store may get further aggregations, except one of
    the kind `table` or `join`. All else may change, except as `check_restorable` says.
    """
    # The grace and the output topics are not compared: they only affect later records.
    if [one.name for one in stored] != [one.name for one in own]:
        raise SchemaMismatch(f"{_other_stores(stored, own)}. {STORES_STAY}")
    for old, new in zip(stored, own, strict=True):
        for field in ("kind", "key", "source", "gap_ms", "size_ms", "advance_ms"):
            if getattr(old, field) != getattr(new, field):
                difference = f"store {new.name!r}: {field} was {getattr(old, field)!r}, is now {getattr(new, field)!r}"
                # The new name may have been that of another topic of the old topology, with records for another store.
                is_renamed = field == "source" and old.source.endswith(REPARTITION_SUFFIX)
                raise SchemaMismatch(f"{difference}. {REPARTITION_TOPICS_STAY if is_renamed else WINDOWS_STAY}")
        if changed := incompatible_aggregations(old, new):
            raise SchemaMismatch(
                f"store {old.name!r}: the aggregations changed: {', '.join(changed)}. {AGGREGATIONS_STAY}"
            )


def check_restorable(stored: tuple[StoreSchema, ...], own: tuple[StoreSchema, ...]) -> None:
    """As `check_schema`, for a topology that continues with the state. Windows with `on_close` stay so.

    A compaction forwards nothing, so it does not compare the emission.
    """
    check_schema(stored, own)
    for old, new in zip(stored, own, strict=True):
        if new.kind in WINDOWED and (old.emit, new.emit) == ("on_close", "on_update"):
            # A commit forwards only windows that have changed since the last one, and a close does not forward them.
            raise SchemaMismatch(f"store {new.name!r}: emit was 'on_close', is now 'on_update'. {EMISSION_STAYS}")


def _other_stores(stored: tuple[StoreSchema, ...], own: tuple[StoreSchema, ...]) -> str:
    was = [one.name for one in stored]
    now = [one.name for one in own]
    changes = [f"{name!r} is new" for name in now if name not in was]
    changes += [f"{name!r} is gone" for name in was if name not in now]
    changes = changes or ["their order changed: create them in the old order"]
    had, has = (", ".join(map(repr, names)) or "none" for names in (was, now))
    return f"the state has the stores {had}, the topology has {has}: {', '.join(changes)}"


def incompatible_aggregations(old: StoreSchema, new: StoreSchema) -> list[str]:
    """Return the names of the aggregations because of which the schema `new` cannot read the states of `old`; [] if it
    can.

    A store may get further aggregations, except one of the kind `table` or `join`. If only the order of the old ones
    has changed, return ["their order"].
    """
    was = {a.name: (a.function, a.field, a.state) for a in old.aggregations}
    now = {a.name: (a.function, a.field, a.state) for a in new.aggregations}
    # Rows of the user have one value and no aggregations that could be appended.
    compared = was.keys() | now.keys() if new.kind in ROWS else was.keys()
    if changed := sorted(name for name in compared if was.get(name) != now.get(name)):
        return changed
    return [] if [name for name in now if name in was] == list(was) else ["their order"]
