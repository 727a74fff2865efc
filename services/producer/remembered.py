"""Idempotency-Keys that one partition of their topic holds, and what each record of it says.

Sans-IO. A record's key is the key's digest, its value the fingerprint of the request and the answer that was given. A
key is forgotten `ttl_ms` after it was written; until then it is never let go: a full table refuses new ones instead.

>>> keys = RememberedKeys(ttl_ms=1_000, max_keys=2)
>>> keys.put(b"k" * 32, encode(b"f" * 32, Remembered(200, b"{}"), 5_000))
>>> keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 5_999), keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 6_000)
(Remembered(status=200, body=b'{}'), None)
"""

from __future__ import annotations

import struct
from typing import NamedTuple

from api.atomic import IdempotencyKey, KeyReused, Remembered
from shared.common.errors import BufferExhausted, DataError

_HEAD = struct.Struct(">BqH")
FORMAT = 1
DIGEST_BYTES = 32


class Entry(NamedTuple):
    """One remembered key."""

    fingerprint: bytes
    answer: Remembered
    at_ms: int


def encode(fingerprint: bytes, answer: Remembered, at_ms: int) -> bytes:
    """The value of a key's record: format, time, status, fingerprint, body."""
    return _HEAD.pack(FORMAT, at_ms, answer.status) + fingerprint + answer.body


def decode(value: bytes) -> Entry:
    """A record's value; DataError where it is not one of ours."""
    head = _HEAD.size + DIGEST_BYTES
    if len(value) < head or value[0] != FORMAT:
        raise DataError("a record of the topic of Idempotency-Keys that Penstock did not write")
    _, at_ms, status = _HEAD.unpack_from(value)
    return Entry(value[_HEAD.size : head], Remembered(status, value[head:]), at_ms)


class RememberedKeys:
    """The keys of one partition, in the order of their writing."""

    def __init__(self, ttl_ms: int, max_keys: int) -> None:
        self._ttl_ms, self._max_keys = ttl_ms, max_keys
        self._entries: dict[bytes, Entry] = {}

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
            said = "the Idempotency-Key was used for a request with another body, or other headers that make its records"
            raise KeyReused(said)
        return entry.answer

    def check_room(self, now_ms: int) -> None:
        """BufferExhausted where no further key can be remembered."""
        self._forget(now_ms)
        if len(self._entries) >= self._max_keys:
            raise BufferExhausted(f"max_idempotency_keys={self._max_keys} keys of this partition are remembered")

    def put(self, digest: bytes, value: bytes) -> None:
        """Remember what a record says."""
        self._entries.pop(digest, None)
        self._entries[digest] = decode(value)

    def _forget(self, now_ms: int) -> None:
        while self._entries:
            digest, entry = next(iter(self._entries.items()))
            if entry.at_ms + self._ttl_ms > now_ms:
                return
            del self._entries[digest]
