"""Kafka's types of flexible versions (KIP-482), for requests that are encoded and decoded by hand.

They are compact strings and bytes, unsigned varints, and tagged fields. A compact length is a varint of the length plus
one; 0 means null. Every struct ends with its tagged fields.

>>> encode_compact_string("ab"), encode_compact_string(None), encode_unsigned_varint(300)
(b'\\x03ab', b'\\x00', b'\\xac\\x02')
>>> reader = FlexibleReader(memoryview(encode_compact_string("ab") + encode_compact_string(None) + NO_TAGS))
>>> reader.compact_string(), reader.compact_string(), reader.tagged_fields()
('ab', None, {})
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple

from aiokafka.protocol.api import RequestHeader_v2, ResponseHeader_v1

NO_TAGS = b"\x00"
_leader = struct.Struct(">ii")
_node = struct.Struct(">i")


class FlexibleReader:
    """Reads a response of a flexible version. Raises IndexError or struct.error if the bytes end within a field."""

    __slots__ = ("_at", "_data")

    def __init__(self, data: memoryview, at: int = 0) -> None:
        self._data = data
        self._at = at

    @property
    def size(self) -> int:
        """The size of the whole response in bytes."""
        return len(self._data)

    def read_struct(self, shape: struct.Struct) -> tuple[Any, ...]:
        """Read fields of a fixed size, which flexible versions encode as other versions do."""
        values = shape.unpack_from(self._data, self._at)
        self._at += shape.size
        return values

    def unsigned_varint(self) -> int:
        """Read an unsigned varint."""
        value = 0
        shift = 0
        while True:
            byte = self._data[self._at]
            self._at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7

    def compact_bytes(self) -> memoryview:
        """Return a view of bytes with a compact length; empty for null."""
        return self._take_bytes(max(0, self.unsigned_varint() - 1))

    def compact_string(self) -> str | None:
        """Read a string with a compact length; None for null."""
        size = self.unsigned_varint() - 1
        return None if size < 0 else str(self._take_bytes(size), "utf-8")

    def tagged_fields(self) -> dict[int, memoryview]:
        """Read the tagged fields that end a struct."""
        return {self.unsigned_varint(): self._take_bytes(self.unsigned_varint()) for _ in range(self.unsigned_varint())}

    def _take_bytes(self, size: int) -> memoryview:
        at = self._at
        self._at += size
        # A slice would silently be too short.
        if self._at > len(self._data):
            raise IndexError(f"the response ends at {len(self._data)}, its field at {self._at}")
        return self._data[at : self._at]


class FlexibleStruct:
    """A request of one version, as aiokafka's connection expects it. Subclasses encode the body."""

    __slots__ = ()

    def build_request_header(self, correlation_id: int, client_id: str) -> Any:
        return RequestHeader_v2(self, correlation_id=correlation_id, client_id=client_id)

    def parse_response_header(self, data: Any) -> Any:
        return ResponseHeader_v1.decode(data)


def leader_in(tags: Mapping[int, memoryview], tag: int) -> int | None:
    """Return the node id of the leader that a tagged field contains (KIP-951). Returns None if there is none."""
    if (tagged := tags.get(tag)) is None:
        return None
    node: int = _leader.unpack_from(tagged)[0]
    return node if node >= 0 else None


class Endpoint(NamedTuple):
    """A broker's address."""

    node: int
    host: str
    port: int


def endpoints_in(tags: Mapping[int, memoryview], tag: int) -> list[Endpoint]:
    """Return the addresses of new leaders that a tagged field names (KIP-951), which saves a metadata request."""
    if (tagged := tags.get(tag)) is None:
        return []
    reader = FlexibleReader(tagged)
    found: list[Endpoint] = []
    for _ in range(reader.unsigned_varint() - 1):
        (node,) = reader.read_struct(_node)
        host = reader.compact_string()
        (port,) = reader.read_struct(_node)
        # The rack is not used.
        reader.compact_string()
        reader.tagged_fields()
        found.append(Endpoint(node, host or "", port))
    return found


def encode_unsigned_varint(value: int) -> bytes:
    """Encode an unsigned varint, such as a length of a flexible version."""
    encoded = bytearray()
    while value >= 0x80:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)


def encode_compact_string(value: str | None) -> bytes:
    """Encode a string of a flexible version, with its compact length before it."""
    if value is None:
        return b"\x00"
    data = value.encode()
    return encode_unsigned_varint(len(data) + 1) + data
