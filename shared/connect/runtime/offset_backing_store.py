"""The offset backing store, a map from bytes to bytes: the encoding of source offsets, and the reader for tasks.

A key is the JSON array of the connector's name and the source partition. A value is the JSON of the offset. Both have
the form in which Kafka Connect writes them to its offset topic. A value of None removes the partition's offset.

>>> key = offset_key("src", {"filename": "in.txt"})
>>> key, parse_offset_key(key)
(b'["src",{"filename":"in.txt"}]', ('src', {'filename': 'in.txt'}))
>>> parse_offset_key(b"session-key") is None
True
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any, Protocol

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.connect.record import Offset, Partition
from penstock.shared.connect.runtime.submitted_records import PartitionOffset, source_partition_key

OFFSET_BYTES_MAX = 900_000
"""A larger partition or offset would not fit into a record of the offset topic."""


class OffsetBackingStore(Protocol):
    """Stores the offsets of all connectors. The workers of a cluster share the stored offsets."""

    @property
    def topic(self) -> str | None:
        """The Kafka topic of the store, or None. Without a topic, exactly-once sources are impossible."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def get(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        """Return the stored values, with None for a missing value. They include every earlier `set` of any worker."""
        ...

    async def set(self, values: Mapping[bytes, bytes | None]) -> None:
        """Return when the values are stored, durably unless the store is in memory. Raises a PenstockError if that
        cannot be confirmed."""
        ...

    async def records(self, values: Mapping[bytes, bytes | None]) -> dict[bytes, bytes | None]:
        """Return the keys and values of the records that store these values.

        If the topic already has a record of a partition, its new record has the same key, byte for byte. Every writer
        must use this key, since a compaction compares bytes.
        """
        ...

    async def connector_offsets(self, connector: str) -> dict[bytes, bytes]:
        """Return every offset of a connector that is not None, by its key."""
        ...


class StoredOffsetReader:
    """The `OffsetStorageReader` for one connector's tasks. Reads from the offset backing store."""

    def __init__(self, store: OffsetBackingStore, connector: str) -> None:
        self._store = store
        self._connector = connector

    async def offset(self, partition: Partition) -> Offset | None:
        return (await self.offsets([partition]))[0]

    async def offsets(self, partitions: Iterable[Partition]) -> list[Offset | None]:
        keys = [offset_key(self._connector, partition) for partition in partitions]
        found = await self._store.get(keys)
        return [parse_offset_value(found.get(key)) for key in keys]


def offset_key(connector: str, partition: Partition) -> bytes:
    """Return the key of a source partition in an OffsetBackingStore. The partition's names may be in any order.

    Raises ConnectError if the partition has no JSON form, and DataError if the key exceeds OFFSET_BYTES_MAX.
    """
    key = b"[" + msgspec.json.encode(connector) + b"," + source_partition_key(partition) + b"]"
    return _limited_in_size(key, f"{connector}: source partition")


def offset_value(offset: Offset | None, connector: str = "") -> bytes | None:
    """Encode a source offset as the value that an OffsetBackingStore stores.

    Raises DataError if the offset cannot be written as JSON, or is too large.
    """
    if offset is None:
        return None
    what = f"{connector}: source offset"
    try:
        value = msgspec.json.encode(dict(offset))
    except (TypeError, ValueError, RecursionError) as e:
        raise DataError(f"{what} is not JSON: {e}") from None
    return _limited_in_size(value, what)


def encode_offsets(connector: str, offsets: Iterable[PartitionOffset]) -> dict[bytes, bytes | None]:
    """Return source offsets as keys and values of an OffsetBackingStore.

    Raises the errors of `offset_key` and `offset_value`.
    """
    return {offset_key(connector, partition): offset_value(offset, connector) for partition, offset in offsets}


def parse_offset_key(key: bytes) -> tuple[str, Partition] | None:
    """Return the connector and source partition of an OffsetBackingStore's key, or None if it has another form."""
    try:
        name, partition = decode_json(key, tuple[str, dict[str, Any]])
    except InvalidJson:
        return None
    return name, partition


def parse_offset_value(value: bytes | None) -> Offset | None:
    """Return the source offset of an OffsetBackingStore's value. Raises DataError if it is invalid."""
    if value is None:
        return None
    try:
        return decode_json(value, dict[str, Any])
    except InvalidJson as e:
        raise DataError(f"no source offset: {e}") from None


def _limited_in_size(data: bytes, what: str) -> bytes:
    if len(data) > OFFSET_BYTES_MAX:
        raise DataError(f"{what} has {len(data)} bytes, {OFFSET_BYTES_MAX} at most")
    return data
