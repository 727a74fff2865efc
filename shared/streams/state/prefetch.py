"""What comes next is fetched together: the keys of a batch's records from the stores on disk that these records reach.

One look-up a record would read a block of the disk for each; many keys in the order of the disk read each block once.
A key is the record's own, as long as no topic lies between: a changed one comes in by a repartition topic, which is a
source as well. A store of a processor's own may have other keys, and is left alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.streams.state.persistent_stores import PersistentStore
from penstock.shared.streams.state.store import StateStore
from penstock.shared.streams.topology import ProcessorNode, Topology

KEYS_AT_ONCE = 1_000
"""Some milliseconds; and as many keys are in memory in vain, where the turn ends."""


class FetchAhead:
    """Of one task: `stores` are all that it has, by name."""

    def __init__(self, topology: Topology, stores: Mapping[str, StateStore]) -> None:
        on_disk = {name: store for name, store in stores.items() if isinstance(store, PersistentStore)}
        self._reached: dict[str, Sequence[PersistentStore[Any]]] = {}
        for source in topology.sources() if on_disk else ():
            self._reached[source.topic] = [
                store for name, store in on_disk.items() if _is_reached(topology, source.name, name)
            ]

    def slices(self, columns: Columns) -> Iterator[Columns]:
        """The records by slices, each once its keys were fetched; all at once where there is nothing to fetch."""
        stores = self._reached.get(columns.topic)
        if not stores:
            yield columns
            return
        for at in range(0, len(columns), KEYS_AT_ONCE):
            some = columns[at : at + KEYS_AT_ONCE]
            for store in stores:
                store.fetch_ahead(some.keys)
            yield some

    def records(self, columns: Columns) -> Iterator[ConsumerRecord]:
        """The records one by one, by such slices."""
        return (record for some in self.slices(columns) for record in some.records())


def _is_reached(topology: Topology, source: str, store: str) -> bool:
    nodes = [n.name for n in topology.nodes.values() if isinstance(n, ProcessorNode) and store in n.stores]
    return bool(topology.stores[store].schema.source) and source in topology.above(nodes)
