"""Commits by what their stores were when they were written: the stores may have got aggregations since.

Each commit's progress record says what the stores are. Commits that say the same are a generation; a body is read by
its own generation, and what that does not have is null in the tables. In a partition later commits may know more than
earlier ones, never less or something else: that is refused by the name of the store and the aggregation. Partitions
may be at different generations, as instances are upgraded one after the other.
"""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shared.common.errors import SchemaMismatch
from penstock.shared.streams.changelog.format import StoreSchema
from penstock.shared.streams.changelog.reader import AGGREGATIONS_STAY, STORES_STAY, changed_aggregations

Stores = tuple[StoreSchema, ...]


def newest_of(given: Iterable[Stores]) -> Stores:
    """The stores that know most: more of them, and then more aggregations. None given: no stores."""
    return max(given, key=lambda stores: (len(stores), sum(len(s.aggregations) for s in stores)), default=())


def require_successor(earlier: Stores, later: Stores) -> None:
    """Raise SchemaMismatch unless every earlier store is there under its number, with its key and aggregations."""
    for number, store in enumerate(earlier):
        if number >= len(later) or later[number].name != store.name:
            now = later[number].name if number < len(later) else "none"
            raise SchemaMismatch(
                f"store {number} of the changelog was {store.name!r} and is {now!r} now. {STORES_STAY}"
            )
        if later[number].key != store.key:
            raise SchemaMismatch(f"store {store.name!r}: key was {store.key!r}, is now {later[number].key!r}")
        if changed := changed_aggregations(store, later[number]):
            raise SchemaMismatch(
                f"store {store.name!r}: the aggregations changed: {', '.join(changed)}. {AGGREGATIONS_STAY}"
            )
