"""The table of stored idempotency keys of one partition."""

from __future__ import annotations

import random

import pytest

from penstock.api.ingest.atomic import IdempotencyKey, KeyReused, StoredResponse
from penstock.services.producer.idempotency_keys import StoredKeys, decode, encode
from penstock.shared.common.errors import BufferExhausted, DataError

F, G = b"f" * 32, b"g" * 32


def test_a_record_round_trips() -> None:
    """Fingerprint, response and time round-trip, and a foreign record is a DataError."""
    entry = decode(encode(F, StoredResponse(207, b'{"stored":1}'), 1_700_000_000_000))
    assert (entry.fingerprint, entry.at_ms) == (F, 1_700_000_000_000)
    assert entry.response == StoredResponse(207, b'{"stored":1}')
    for value in (b"", b"\x01" + b"x" * 60):
        with pytest.raises(DataError):
            decode(value)
    with pytest.raises(DataError, match="cannot be decoded"):
        _ = decode(encode(F, StoredResponse(200, b"{}"), 0)[:-1]).response


def test_a_key_belongs_to_one_request() -> None:
    """The same request has the same response, another one raises KeyReused, and an expired key is free."""
    keys = StoredKeys(1_000, 10, 10_000)
    keys.put(b"k", encode(F, StoredResponse(200, b"1"), 0))
    assert keys.get(IdempotencyKey(b"k", F), 999) == (200, b"1")
    with pytest.raises(KeyReused):
        keys.get(IdempotencyKey(b"k", G), 999)
    assert keys.get(IdempotencyKey(b"k", G), 1_000) is None
    assert len(keys) == 0


def test_a_full_table_rejects_new_keys() -> None:
    """New keys are rejected while the table is full, until older ones expire."""
    keys = StoredKeys(1_000, 2, 10_000)
    for i, digest in enumerate((b"a", b"b")):
        keys.check_room(0)
        keys.put(digest, encode(F, StoredResponse(200, b""), i))
    with pytest.raises(BufferExhausted, match="max_idempotency_keys=2"):
        keys.check_room(999)
    assert keys.get(IdempotencyKey(b"a", F), 999) is not None
    keys.check_room(1_000)


def test_the_tables_memory_has_a_limit() -> None:
    """Long responses fill the table before many keys do, and an expired or replaced response frees its memory."""
    keys = StoredKeys(1_000, 100, max_bytes=5_000)
    noise = random.Random(7).randbytes(3_000).hex().encode()
    keys.put(b"a", encode(F, StoredResponse(200, noise), 0))
    keys.put(b"a", encode(F, StoredResponse(200, noise), 0))
    keys.check_room(0)
    keys.put(b"b", encode(F, StoredResponse(200, noise), 500))
    with pytest.raises(BufferExhausted, match="max_idempotency_bytes=5000"):
        keys.check_room(999)
    keys.check_room(1_000)
    assert keys.get(IdempotencyKey(b"b", F), 1_499) == (200, noise)
    assert keys.get(IdempotencyKey(b"b", F), 1_500) is None
    assert keys.size_bytes == 0
