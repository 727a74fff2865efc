"""A source task's access to the offset store: the offsets that it reads, and those written for it."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.shared.connect.record import Offset, Partition
from penstock.shared.connect.runtime.offset_backing_store import (
    OffsetBackingStore,
    offset_key,
    offset_value,
    parse_offset_value,
)
from penstock.shared.connect.runtime.submitted_records import PartitionOffset


class StoredOffsetReader:
    """Reads one connector's offsets; see `OffsetStorageReader`."""

    def __init__(self, store: OffsetBackingStore, connector: str) -> None:
        self._store = store
        self._connector = connector

    async def offset(self, partition: Partition) -> Offset | None:
        return (await self.offsets([partition]))[0]

    async def offsets(self, partitions: Iterable[Partition]) -> list[Offset | None]:
        keys = [offset_key(self._connector, partition) for partition in partitions]
        found = await self._store.get(keys)
        return [parse_offset_value(found.get(key)) for key in keys]


def encoded(connector: str, offsets: Iterable[PartitionOffset]) -> dict[bytes, bytes | None]:
    """Return offsets in the store's encoding. Raises DataError if one is not JSON."""
    return {offset_key(connector, partition): offset_value(offset, connector) for partition, offset in offsets}
