"""The offsets of source connectors, by connector and source partition.

A record's key is the JSON array of the connector's name and the source partition. The order of a partition's members
does not matter. The cache keeps the key that is in the topic. The next record of the partition uses it, and so replaces
the earlier one even under a compaction that compares bytes.

>>> cache = OffsetCache()
>>> cache.apply(b'["files",{"b":1,"a":2}]', b'{"position":17}')
>>> cache.value(b'["files",{"a":2,"b":1}]'), cache.key_for(b'["files",{"a":2,"b":1}]')
(b'{"position":17}', b'["files",{"b":1,"a":2}]')
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.shared.common.errors import SerializationError

_SORTED = msgspec.json.Encoder(order="deterministic")
_NULL = b"null"


class OffsetCache:
    """The newest offset of each partition. It must get every record in order."""

    def __init__(self) -> None:
        self._values: dict[str, dict[bytes, bytes]] = {}
        self._keys: dict[bytes, bytes] = {}
        """The key in the topic, by the same key with its members in order."""

    def __repr__(self) -> str:
        return f"<OffsetCache of {sum(map(len, self._values.values()))} partitions>"

    def apply(self, key: bytes | None, value: bytes | None) -> None:
        """Takes one record. Raises SerializationError if it is invalid."""
        connector, name = _read_key(key or b"")
        self._keys[name] = key or b""
        if value is None or value == _NULL:
            self._values.get(connector, {}).pop(name, None)
        else:
            _check_offset(value)
            self._values.setdefault(connector, {})[name] = value

    def key_for(self, key: bytes) -> bytes:
        """Returns the partition's key in the topic, or the given key if there is none."""
        return self._keys.get(_read_key(key)[1], key)

    def value(self, key: bytes) -> bytes | None:
        """Returns the offset of the partition that a key names."""
        connector, name = _read_key(key)
        return self._values.get(connector, {}).get(name)

    def of_connector(self, connector: str) -> dict[bytes, bytes]:
        """Returns every offset of a connector by its key."""
        return {self._keys[name]: value for name, value in self._values.get(connector, {}).items()}

    def connectors(self) -> list[str]:
        """Returns every connector that has an offset."""
        return sorted(connector for connector, values in self._values.items() if values)

    def raw(self) -> dict[bytes, bytes]:
        """Returns every current record."""
        return {key: value for connector in self._values for key, value in self.of_connector(connector).items()}


def _read_key(key: bytes) -> tuple[str, bytes]:
    """Returns the connector of a key, and the same key for every order of its members."""
    parts = _decoded(key, "offset key")
    if not isinstance(parts, list) or len(parts) != 2 or not isinstance(parts[0], str):
        raise SerializationError(f"offset key {key!r}: no array of connector and partition")
    if parts[1] is not None and not isinstance(parts[1], dict):
        raise SerializationError(f"offset key {key!r}: the partition is no object")
    return parts[0], _SORTED.encode(parts)


def _check_offset(value: bytes) -> None:
    if not isinstance(_decoded(value, "offset"), dict):
        raise SerializationError(f"offset {value!r}: no object")


def _decoded(data: bytes, what: str) -> Any:
    try:
        return msgspec.json.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as e:
        raise SerializationError(f"{what} {data!r}: {e}") from None
