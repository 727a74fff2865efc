"""Idempotency-Keys that one partition of their topic holds, and what each record of it says.

Sans-IO. A record's key is the key's digest, its value the fingerprint of the request and the answer that was given. A
key is forgotten `ttl_ms` after it was written; until then it is never let go: a full table refuses new ones instead.

>>> keys = RememberedKeys(ttl_ms=1_000, max_keys=2, max_bytes=10_000)
>>> keys.put(b"k" * 32, encode(b"f" * 32, Remembered(200, b"{}"), 5_000))
>>> keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 5_999), keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 6_000)
(Remembered(status=200, body=b'{}'), None)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from penstock.api.ingest.atomic import IdempotencyKey, KeyReused, Remembered
from penstock.services.producer.remembered_answer import pack, unpack
from penstock.shared.common.errors import BufferExhausted, DataError

_HEAD = struct.Struct(">BqH")
FORMAT = 2
DIGEST_BYTES = 32
ENTRY_BYTES = 200
"""What an entry costs beside its value: its digest, its place in the table, and its record."""


class Entry(NamedTuple):
    """One remembered key; the answer is still packed."""

    fingerprint: bytes
    at_ms: int
    status: int
    packed: bytes

    @property
    def answer(self) -> Remembered:
        """The answer that was given; DataError where it cannot be read."""
        return unpack(self.status, self.packed)

    @property
    def size_bytes(self) -> int:
        """About the memory that it takes."""
        return ENTRY_BYTES + len(self.packed)


def encode(fingerprint: bytes, answer: Remembered, at_ms: int) -> bytes:
    """The value of a key's record: format, time, status, fingerprint, packed answer."""
    return _HEAD.pack(FORMAT, at_ms, answer.status) + fingerprint + pack(answer)


def decode(value: bytes) -> Entry:
    """A record's value; DataError where it is not one of ours."""
    head = _HEAD.size + DIGEST_BYTES
    if len(value) < head or value[0] != FORMAT:
        raise DataError("a record of the topic of Idempotency-Keys that Penstock did not write, or in another format")
    _, at_ms, status = _HEAD.unpack_from(value)
    return Entry(value[_HEAD.size : head], at_ms, status, value[head:])


class RememberedKeys:
    """The keys of one partition, in the order of their writing."""

    def __init__(self, ttl_ms: int, max_keys: int, max_bytes: int) -> None:
        self._ttl_ms, self._max_keys, self._max_bytes = ttl_ms, max_keys, max_bytes
        self._entries: dict[bytes, Entry] = {}
        self.size_bytes = 0
        """About the memory that all of them take."""

    def __repr__(self) -> str:
        return f"RememberedKeys({len(self._entries)} of {self._max_keys})"

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: IdempotencyKey, now_ms: int) -> Remembered | None:
        """The answer that a request was given before; KeyReused where the key stands for another request."""
        self._forget(now_ms)
        entry = self._entries.get(key.digest)
        if entry is None or entry.at_ms + self._ttl_ms <= now_ms:
            return None
        if entry.fingerprint != key.fingerprint:
            said = "the Idempotency-Key was used for a request with another body, or other headers that make records"
            raise KeyReused(said)
        return entry.answer

    def check_room(self, now_ms: int) -> None:
        """BufferExhausted where no further key can be remembered."""
        self._forget(now_ms)
        if len(self._entries) >= self._max_keys:
            raise BufferExhausted(f"max_idempotency_keys={self._max_keys} keys of this partition are remembered")
        if self.size_bytes >= self._max_bytes:
            said = f"the remembered keys of this partition take max_idempotency_bytes={self._max_bytes}"
            raise BufferExhausted(said)

    def put(self, digest: bytes, value: bytes) -> None:
        """Remember what a record says."""
        entry = decode(value)
        self._drop(digest)
        self._entries[digest] = entry
        self.size_bytes += entry.size_bytes

    def _forget(self, now_ms: int) -> None:
        while self._entries:
            digest, entry = next(iter(self._entries.items()))
            if entry.at_ms + self._ttl_ms > now_ms:
                return
            self._drop(digest)

    def _drop(self, digest: bytes) -> None:
        if (entry := self._entries.pop(digest, None)) is not None:
            self.size_bytes -= entry.size_bytes
