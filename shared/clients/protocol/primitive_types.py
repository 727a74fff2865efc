"""Kafka's primitive types before flexible versions: for the messages between a group's members.

The length of a string has 16 bits, that of bytes or an array has 32 bits; -1 means null.

>>> read = PrimitiveReader(encode_string("ab") + encode_bytes(None), "a message")
>>> read.string(), read.blob(), read.at_end
('ab', None, True)
>>> PrimitiveReader(b"\\x00\\x05ab", "a message").string()
Traceback (most recent call last):
...
penstock.errors.SerializationError: a message: ends at byte 4, within a field
"""

from __future__ import annotations

import struct
from collections.abc import Iterable

from penstock.shared.common.errors import SerializationError


def encode_string(value: str | None) -> bytes:
    if value is None:
        return struct.pack(">h", -1)
    data = value.encode()
    return struct.pack(">h", len(data)) + data


def encode_bytes(value: bytes | None) -> bytes:
    return struct.pack(">i", -1) if value is None else struct.pack(">i", len(value)) + value


def encode_array(items: Iterable[bytes]) -> bytes:
    """Encode an array of encoded items."""
    encoded = list(items)
    return struct.pack(">i", len(encoded)) + b"".join(encoded)


class PrimitiveReader:
    """Reads one field after another. Raises SerializationError if a field is invalid."""

    def __init__(self, data: bytes, description: str) -> None:
        """`description` names the message in errors."""
        self._data = data
        self._at = 0
        self._description = description

    def __repr__(self) -> str:
        return f"<PrimitiveReader {self._description}, at byte {self._at} of {len(self._data)}>"

    @property
    def at_end(self) -> bool:
        return self._at >= len(self._data)

    def version(self) -> int:
        """Read the version that a message begins with."""
        version = self.int16()
        if version < 0:
            raise SerializationError(f"{self._description}: invalid version {version}")
        return version

    def int16(self) -> int:
        return self._read_number(">h", 2)

    def int32(self) -> int:
        return self._read_number(">i", 4)

    def int64(self) -> int:
        return self._read_number(">q", 8)

    def array_length(self) -> int:
        """Read the length of an array; 0 for null."""
        length = self.int32()
        # Each item has at least one byte. A larger length is damaged, and must not run a long loop.
        if not -1 <= length <= len(self._data):
            raise SerializationError(f"{self._description}: invalid array length {length} at byte {self._at - 4}")
        return max(0, length)

    def string(self) -> str | None:
        length = self.int16()
        if length < 0:
            return None
        try:
            return self._read_bytes(length).decode()
        except UnicodeDecodeError as e:
            raise SerializationError(f"{self._description}: invalid UTF-8 before byte {self._at}") from e

    def blob(self) -> bytes | None:
        length = self.int32()
        return None if length < 0 else self._read_bytes(length)

    def _read_number(self, form: str, size: int) -> int:
        return int(struct.unpack(form, self._read_bytes(size))[0])

    def _read_bytes(self, size: int) -> bytes:
        end = self._at + size
        if end > len(self._data):
            raise SerializationError(f"{self._description}: ends at byte {len(self._data)}, within a field")
        read = self._data[self._at : end]
        self._at = end
        return read
