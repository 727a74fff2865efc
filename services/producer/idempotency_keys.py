"""The Idempotency-Keys in one partition of their topic, and the format of their records.

Sans-IO. A record's key is the key's digest. Its value is the fingerprint of the request and the response. A key expires
`ttl_ms` after it was written and is never dropped earlier: a full table rejects new keys instead.

>>> keys = StoredKeys(ttl_ms=1_000, max_keys=2, max_bytes=10_000)
>>> keys.put(b"k" * 32, encode(b"f" * 32, StoredResponse(200, b"{}"), 5_000))
>>> keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 5_999), keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 6_000)
(StoredResponse(status=200, body=b'{}'), None)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from penstock.api.ingest.atomic import IdempotencyKey, KeyReused, StoredResponse
from penstock.services.producer.packed_response import pack, unpack
from penstock.shared.common.errors import BufferExhausted, DataError

_HEAD = struct.Struct(">BqH")
FORMAT = 2
DIGEST_BYTES = 32
ENTRY_BYTES = 200
"""The approximate memory of an entry without its packed response: digest, fingerprint and table slot."""


class Entry(NamedTuple):
    """A stored key, written at `at_ms`, with the packed response to its request."""

    fingerprint: bytes
    at_ms: int
    status: int
    packed: bytes

    @property
    def response(self) -> StoredResponse:
        """The response to the request. Raises DataError if it cannot be decoded."""
        return unpack(self.status, self.packed)

    @property
    def size_bytes(self) -> int:
        """The entry's memory, approximately."""
        return ENTRY_BYTES + len(self.packed)


def encode(fingerprint: bytes, response: StoredResponse, at_ms: int) -> bytes:
    """Return the value of a key's record: format, time, status, fingerprint, packed response."""
    return _HEAD.pack(FORMAT, at_ms, response.status) + fingerprint + pack(response)


def decode(value: bytes) -> Entry:
    """Decode a record's value. Raises DataError if Penstock did not write it, or in another format."""
    head = _HEAD.size + DIGEST_BYTES
    if len(value) < head or value[0] != FORMAT:
        raise DataError("a record of the topic of Idempotency-Keys that Penstock did not write, or in another format")
    _, at_ms, status = _HEAD.unpack_from(value)
    return Entry(value[_HEAD.size : head], at_ms, status, value[head:])


class StoredKeys:
    """The keys of one partition, oldest first."""

    def __init__(self, ttl_ms: int, max_keys: int, max_bytes: int) -> None:
        self._ttl_ms = ttl_ms
        self._max_keys = max_keys
        self._max_bytes = max_bytes
        self._entries: dict[bytes, Entry] = {}
        self.size_bytes = 0
        """The memory of all entries, approximately."""

    def __repr__(self) -> str:
        return f"StoredKeys({len(self._entries)} of {self._max_keys})"

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: IdempotencyKey, now_ms: int) -> StoredResponse | None:
        """Return the response to the key's first request; None if the key is unknown or expired.

        Raises KeyReused if the key belongs to another request.
        """
        self._expire_keys(now_ms)
        entry = self._entries.get(key.digest)
        if entry is None or entry.at_ms + self._ttl_ms <= now_ms:
            return None
        if entry.fingerprint != key.fingerprint:
            message = "the Idempotency-Key was used for a request with another body, or other headers that make records"
            raise KeyReused(message)
        return entry.response

    def check_room(self, now_ms: int) -> None:
        """Raise BufferExhausted if the table is full."""
        self._expire_keys(now_ms)
        if len(self._entries) >= self._max_keys:
            raise BufferExhausted(f"this partition stores max_idempotency_keys={self._max_keys} keys")
        if self.size_bytes >= self._max_bytes:
            message = f"the keys of this partition use max_idempotency_bytes={self._max_bytes}"
            raise BufferExhausted(message)

    def put(self, digest: bytes, value: bytes) -> None:
        """Add the key of a record. Raises DataError if the value cannot be decoded."""
        entry = decode(value)
        self._drop_key(digest)
        self._entries[digest] = entry
        self.size_bytes += entry.size_bytes

    def _expire_keys(self, now_ms: int) -> None:
        """Drop the keys at the head of the table that are older than `ttl_ms`."""
        while self._entries:
            digest, entry = next(iter(self._entries.items()))
            if entry.at_ms + self._ttl_ms > now_ms:
                return
            self._drop_key(digest)

    def _drop_key(self, digest: bytes) -> None:
        if (entry := self._entries.pop(digest, None)) is not None:
            self.size_bytes -= entry.size_bytes
