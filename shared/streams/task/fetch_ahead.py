"""Fetches the rows of records' keys from stores on disk into memory, for a slice of records at once."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.state.persistent_stores import PersistentStore
from penstock.shared.streams.state_store import StateStore
from penstock.shared.streams.topology import ProcessorNode, Topology

KEYS_AT_ONCE = 1_000
"""The most keys of one fetch, which takes some milliseconds. At most as many are fetched in vain when a turn ends."""


class FetchAhead:
    """Fetches the rows of many records' keys into memory at once, from the stores on disk that the records reach.

    `stores` are all the task's stores by name. Stores of a user's processor are skipped, because they may have other
    keys than the records.
    """

    def __init__(self, topology: Topology, stores: Mapping[str, StateStore]) -> None:
        on_disk = {name: store for name, store in stores.items() if isinstance(store, PersistentStore)}
        self._reached: dict[str, Sequence[PersistentStore[Any]]] = {}
        for source in topology.sources() if on_disk else ():
            self._reached[source.topic] = [
                store for name, store in on_disk.items() if _store_is_fed_by_source(topology, source.name, name)
            ]

    def slices(self, columns: Columns) -> Iterator[Columns]:
        """Yield the records in slices, each after its keys were fetched; all at once if there is nothing to fetch."""
        stores = self._reached.get(columns.topic)
        if not stores:
            yield columns
            return
        for at in range(0, len(columns), KEYS_AT_ONCE):
            # Single look-ups would read a block of the disk for each record. Look-ups of many keys in their order on
            # disk read each block once.
            some = columns[at : at + KEYS_AT_ONCE]
            for store in stores:
                store.fetch_ahead(some.keys)
            yield some

    def records(self, columns: Columns) -> Iterator[ConsumerRecord]:
        """Yield the records one by one, fetched in slices."""
        return (record for some in self.slices(columns) for record in some.records())


def _store_is_fed_by_source(topology: Topology, source: str, store: str) -> bool:
    # Such a store has the records' own keys: records with changed keys reach stores only by a repartition topic, which
    # is another source. The store of a user's processor has no source.
    nodes = [n.name for n in topology.nodes.values() if isinstance(n, ProcessorNode) and store in n.stores]
    return bool(topology.stores[store].schema.source) and source in topology.above(nodes)
