"""Builds the stores of a topology, in memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.state.join_store import JoinStore
from penstock.shared.streams.state.key_value_store import KeyValueStore
from penstock.shared.streams.state_store import StateStore

if TYPE_CHECKING:
    from penstock.shared.streams.windows.aggregate_store import AggregateStore
    from penstock.shared.streams.windows.window_store import WindowStore


@dataclass(frozen=True, slots=True)
class StoreBuilder:
    """Builds one store of a topology. `schema` describes the store, also to readers of its changelog."""

    schema: StoreSchema
    aggregations: tuple[Aggregation[Any], ...] = ()
    """The aggregations of the store's states, bound to the stream's value type."""

    def build(self) -> StateStore:
        """Build the store in memory; `LocalState.store` builds it on disk."""
        schema = self.schema
        if schema.kind == "table":
            return KeyValueStore(schema.name, text_keys=schema.key == "string")
        if schema.kind == "join":
            return JoinStore(schema.name)
        return self._aggregates() if schema.kind == "aggregate" else self._windows()

    def _windows(self) -> WindowStore:
        """Build the store of a window, in memory."""
        # Imported here, because a reader of topologies that runs none needs no compiler.
        from penstock.shared.streams.windows.state_columns import StateColumns
        from penstock.shared.streams.windows.window_rule import WindowRule
        from penstock.shared.streams.windows.window_store import WindowStore

        schema = self.schema
        assert schema.kind in ("session", "tumbling", "hopping", "sliding")
        rule = WindowRule(schema.kind, schema.gap_ms or schema.size_ms, schema.grace_ms, schema.advance_ms)
        return WindowStore(schema.name, rule, StateColumns(self.aggregations), text_keys=schema.key == "string")

    def _aggregates(self) -> AggregateStore:
        """Build the store of an aggregation without windows, in memory."""
        # Imported here for the same reason.
        from penstock.shared.streams.windows.aggregate_store import AggregateStore
        from penstock.shared.streams.windows.state_columns import StateColumns

        schema = self.schema
        names = [one.name for one in schema.aggregations]
        return AggregateStore(schema.name, names, StateColumns(self.aggregations), text_keys=schema.key == "string")
