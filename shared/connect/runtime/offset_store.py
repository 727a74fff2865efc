"""Where source connectors' offsets are kept: a map from bytes to bytes, and what the bytes are.

A key is the JSON array of the connector's name and the source partition, a value the JSON of the offset, as Kafka
Connect writes them to its offset topic; a value of None takes the partition's offset away.

>>> key = offset_key("src", {"filename": "in.txt"})
>>> key, parse_offset_key(key)
(b'["src",{"filename":"in.txt"}]', ('src', {'filename': 'in.txt'}))
>>> parse_offset_key(b"session-key") is None
True
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Protocol

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.connect.record import Offset, Partition

OFFSET_BYTES_MAX = 900_000
"""A larger partition or offset would not fit into a record of the offset topic."""


class OffsetBackingStore(Protocol):
    """Keeps offsets for all connectors of a worker; shared by the workers of a cluster."""

    @property
    def topic(self) -> str | None:
        """The Kafka topic it lies in; None: it lies in none, and exactly-once sources are impossible."""
        ...

    async def start(self) -> None: ...

    async def stop(self) -> None: ...

    async def get(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        """What is kept now: every earlier `set`, whoever made it, is in it; None for what is not there."""
        ...

    async def set(self, values: Mapping[bytes, bytes | None]) -> None:
        """Keep these; when it returns they are durable. Raises a PenstockError where that cannot be said."""
        ...

    async def connector_offsets(self, connector: str) -> dict[bytes, bytes]:
        """Every offset of a connector that is not None, by its key."""
        ...


def offset_key(connector: str, partition: Partition) -> bytes:
    """The key of a source partition; equal partitions give equal bytes. DataError where it is not JSON."""
    return _encoded([connector, _sorted(partition)], f"{connector}: source partition")


def offset_value(offset: Offset | None, connector: str = "") -> bytes | None:
    """The value of an offset."""
    return None if offset is None else _encoded(_sorted(offset), f"{connector}: source offset")


def parse_offset_key(key: bytes) -> tuple[str, Partition] | None:
    """Whose offset it is; None for what is no key of ours."""
    try:
        name, partition = msgspec.json.decode(key, type=tuple[str, dict[str, Any]])
    except msgspec.DecodeError:
        return None
    return name, partition


def parse_offset_value(value: bytes | None) -> Offset | None:
    """The offset; DataError where it is none."""
    if value is None:
        return None
    try:
        return msgspec.json.decode(value, type=dict[str, Any])
    except msgspec.DecodeError as e:
        raise DataError(f"no source offset: {e}") from None


def _sorted(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {name: mapping[name] for name in sorted(mapping)}


def _encoded(value: Any, what: str) -> bytes:
    try:
        data = msgspec.json.encode(value)
    except (TypeError, ValueError) as e:
        raise DataError(f"{what} is no JSON: {e}") from None
    if len(data) > OFFSET_BYTES_MAX:
        raise DataError(f"{what} has {len(data)} bytes, {OFFSET_BYTES_MAX} at most")
    return data
