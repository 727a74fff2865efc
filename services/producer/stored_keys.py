"""The Idempotency-Keys in one partition of their topic, and the format of their records.

Sans-IO. A record's key is the digest of the Idempotency-Key. Its value has the request's fingerprint, the response and
the time. A key expires `ttl_ms` after it was written and is never dropped earlier: a full table rejects new keys
instead.

A stored response is small, however many offsets it contains. Its JSON is compressed. The rows of `?offsets=true` would
be most of the JSON, so they become columns first. The columns of positions (`line` or `index`) and offsets hold
differences between consecutive rows, of the same partition for offsets. Most differences are one, so they compress very
well.

>>> keys = StoredKeys(ttl_ms=1_000, max_bytes=10_000)
>>> keys.put(b"k" * 32, encode_stored_key(b"f" * 32, StoredResponse(200, b"{}"), 5_000))
>>> keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 5_999), keys.get(IdempotencyKey(b"k" * 32, b"f" * 32), 6_000)
(StoredResponse(status=200, body=b'{}'), None)
>>> rows = [{"line": i + 1, "partition": i % 3, "offset": 1_000 + i // 3} for i in range(30_000)]
>>> response = StoredResponse(200, msgspec.json.encode({"stored": 30_000, "offsets": rows, "offsets_omitted": 0}))
>>> unpack_stored_response(200, pack_stored_response(response)) == response
True
>>> len(response.body) // len(pack_stored_response(response)) > 500
True
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from penstock.api.ingest.atomic import IdempotencyKey, KeyReused, StoredResponse
from penstock.shared.common.errors import BufferExhausted, SchemaMismatch
from penstock.shared.common.json_decoding import decode_json

OFFSETS = "offsets"

_RECORD_HEAD = struct.Struct(">BqH")
FORMAT = 3
DIGEST_BYTES = 32
ENTRY_BYTES = 200
"""The approximate memory of an entry without its packed response: digest, fingerprint and table slot."""


class StoredKey(NamedTuple):
    """A stored key, written at `at_ms`, with the packed response to its request."""

    fingerprint: bytes
    at_ms: int
    status: int
    packed: bytes

    @property
    def response(self) -> StoredResponse:
        """The response to the request. Raises SchemaMismatch if it cannot be decoded."""
        return unpack_stored_response(self.status, self.packed)

    @property
    def size_bytes(self) -> int:
        """The entry's memory, approximately."""
        return ENTRY_BYTES + len(self.packed)


def encode_stored_key(fingerprint: bytes, response: StoredResponse, at_ms: int) -> bytes:
    """Return the value of a key's record: format, time, status, fingerprint, packed response."""
    return _RECORD_HEAD.pack(FORMAT, at_ms, response.status) + fingerprint + pack_stored_response(response)


def decode_stored_key(value: bytes) -> StoredKey:
    """Decode a record's value, but not the response in it.

    Raises SchemaMismatch if the value is too short or not of FORMAT.
    """
    head = _RECORD_HEAD.size + DIGEST_BYTES
    if len(value) < head or value[0] != FORMAT:
        raise SchemaMismatch(
            "not a stored Idempotency-Key, or in another format; delete the record, or no key of this partition works"
        )
    _, at_ms, status = _RECORD_HEAD.unpack_from(value)
    return StoredKey(value[_RECORD_HEAD.size : head], at_ms, status, value[head:])


class StoredKeys:
    """The keys of one partition, oldest first."""

    def __init__(self, ttl_ms: int, max_bytes: int) -> None:
        self._ttl_ms = ttl_ms
        self._max_bytes = max_bytes
        self._entries: dict[bytes, StoredKey] = {}
        self.size_bytes = 0
        """The memory of all entries, approximately."""

    def __repr__(self) -> str:
        return f"StoredKeys({len(self._entries)}, {self.size_bytes} of {self._max_bytes} bytes)"

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: IdempotencyKey, now_ms: int) -> StoredResponse | None:
        """Return the stored response of the key's request; None if the key is unknown or expired.

        Raises KeyReused if that request had another fingerprint, and SchemaMismatch if the stored response cannot be
        decoded.
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
        if self.size_bytes >= self._max_bytes:
            message = f"the keys of this partition use max_idempotency_bytes={self._max_bytes}"
            raise BufferExhausted(message)

    def put(self, digest: bytes, value: bytes) -> None:
        """Add the key of a record. Raises SchemaMismatch if the value cannot be decoded."""
        entry = decode_stored_key(value)
        self._drop_key(digest)
        self._entries[digest] = entry
        self.size_bytes += entry.size_bytes

    def _expire_keys(self, now_ms: int) -> None:
        """Drop the expired keys at the head of the table."""
        while self._entries:
            digest, entry = next(iter(self._entries.items()))
            if entry.at_ms + self._ttl_ms > now_ms:
                return
            self._drop_key(digest)

    def _drop_key(self, digest: bytes) -> None:
        if (entry := self._entries.pop(digest, None)) is not None:
            self.size_bytes -= entry.size_bytes


def pack_stored_response(response: StoredResponse) -> bytes:
    """Return a response's body, compressed for the record of a stored Idempotency-Key.

    The rows of `offsets` become columns (see `_columns_of`).
    """
    body = response.body
    if b'"offsets":[{' in body:
        members = msgspec.json.decode(body)
        members[OFFSETS] = _columns_of(members[OFFSETS])
        body = msgspec.json.encode(members)
    return zlib.compress(body)


def unpack_stored_response(status: int, data: bytes) -> StoredResponse:
    """Return the response with this status from the data of a stored Idempotency-Key's record.

    Raises SchemaMismatch if the data cannot be decoded.
    """
    try:
        stream = zlib.decompressobj()
        body = stream.decompress(data)
        if not stream.eof or stream.unused_data:
            raise ValueError("its compressed data is cut off, or has a suffix")
        if b'"offsets":{' in body:
            members: dict[str, Any] = decode_json(body, dict[str, msgspec.Raw])
            members[OFFSETS] = _rows_of(decode_json(members[OFFSETS], dict[str, list[int]]))
            body = msgspec.json.encode(members)
    except (zlib.error, ValueError, KeyError) as e:
        raise SchemaMismatch(f"a response in the topic of Idempotency-Keys cannot be decoded: {e}") from None
    return StoredResponse(status, body)


def _columns_of(rows: Sequence[dict[str, int]]) -> dict[str, list[int]]:
    """Return the rows of `offsets` as columns.

    A position is the difference from the previous row's, an offset the difference from the previous one of its
    partition.
    """
    # The third member is the position: `line` or `index`.
    (unit,) = rows[0].keys() - {"partition", "offset"}
    positions = []
    offsets = []
    last_position = 0
    last_offsets: dict[int, int] = {}
    for row in rows:
        positions.append(row[unit] - last_position)
        offsets.append(row["offset"] - last_offsets.get(row["partition"], 0))
        last_position = row[unit]
        last_offsets[row["partition"]] = row["offset"]
    return {unit: positions, "partition": [row["partition"] for row in rows], "offset": offsets}


def _rows_of(columns: dict[str, list[int]]) -> list[dict[str, int]]:
    """Return the rows of `offsets` whose columns `_columns_of` returned."""
    (unit, positions), (_, partitions), (_, offsets) = columns.items()
    rows = []
    position = 0
    last_offsets: dict[int, int] = {}
    for position_delta, partition, offset_delta in zip(positions, partitions, offsets, strict=True):
        position += position_delta
        offset = last_offsets.get(partition, 0) + offset_delta
        last_offsets[partition] = offset
        rows.append({unit: position, "partition": partition, "offset": offset})
    return rows
