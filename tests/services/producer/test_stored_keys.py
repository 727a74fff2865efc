"""The stored idempotency keys of one partition, and the encoding of their responses."""

from __future__ import annotations

import random
import zlib
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.ingest.atomic import IdempotencyKey, KeyReused, StoredResponse
from penstock.services.producer.stored_keys import (
    ENTRY_BYTES,
    StoredKeys,
    decode_stored_key,
    encode_stored_key,
    pack_stored_response,
    unpack_stored_response,
)
from penstock.shared.common.errors import BufferExhausted, SchemaMismatch

RECORD_BYTES_MAX = 1_048_576
"""A broker's default limit of a record."""

int31 = st.integers(0, 2**31 - 1)
coordinates = st.lists(st.tuples(int31, int31, st.integers(0, 2**62)), max_size=30)

F, G = b"f" * 32, b"g" * 32


def test_a_record_round_trips() -> None:
    """Fingerprint, response and time round-trip, and a foreign record is a SchemaMismatch."""
    entry = decode_stored_key(encode_stored_key(F, StoredResponse(207, b'{"stored":1}'), 1_700_000_000_000))
    assert (entry.fingerprint, entry.at_ms) == (F, 1_700_000_000_000)
    assert entry.response == StoredResponse(207, b'{"stored":1}')
    for value in (b"", b"\x01" + b"x" * 60):
        with pytest.raises(SchemaMismatch):
            decode_stored_key(value)
    with pytest.raises(SchemaMismatch, match="cannot be decoded"):
        _ = decode_stored_key(encode_stored_key(F, StoredResponse(200, b"{}"), 0)[:-1]).response


def test_a_key_belongs_to_one_request() -> None:
    """The same request has the same response, another one raises KeyReused, and an expired key is free."""
    keys = StoredKeys(1_000, 10_000)
    keys.put(b"k", encode_stored_key(F, StoredResponse(200, b"1"), 0))
    assert keys.get(IdempotencyKey(b"k", F), 999) == (200, b"1")
    with pytest.raises(KeyReused):
        keys.get(IdempotencyKey(b"k", G), 999)
    assert keys.get(IdempotencyKey(b"k", G), 1_000) is None
    assert len(keys) == 0


def test_a_full_table_rejects_new_keys() -> None:
    """New keys are rejected while the table is full, until older ones expire."""
    keys = StoredKeys(1_000, max_bytes=2 * ENTRY_BYTES)
    for i, digest in enumerate((b"a", b"b")):
        keys.check_room(0)
        keys.put(digest, encode_stored_key(F, StoredResponse(200, b""), i))
    with pytest.raises(BufferExhausted, match="max_idempotency_bytes=400"):
        keys.check_room(999)
    assert keys.get(IdempotencyKey(b"a", F), 999) is not None
    keys.check_room(1_000)


def test_the_tables_memory_has_a_limit() -> None:
    """Long responses fill the table before many keys do, and an expired or replaced response frees its memory."""
    keys = StoredKeys(1_000, max_bytes=5_000)
    noise = random.Random(7).randbytes(3_000).hex().encode()
    keys.put(b"a", encode_stored_key(F, StoredResponse(200, noise), 0))
    keys.put(b"a", encode_stored_key(F, StoredResponse(200, noise), 0))
    keys.check_room(0)
    keys.put(b"b", encode_stored_key(F, StoredResponse(200, noise), 500))
    with pytest.raises(BufferExhausted, match="max_idempotency_bytes=5000"):
        keys.check_room(999)
    keys.check_room(1_000)
    assert keys.get(IdempotencyKey(b"b", F), 1_499) == (200, noise)
    assert keys.get(IdempotencyKey(b"b", F), 1_500) is None
    assert keys.size_bytes == 0


@given(rows=coordinates, unit=st.sampled_from(["line", "index"]), rest=st.dictionaries(st.text(), st.integers()))
def test_a_response_is_unpacked_byte_for_byte(rows: list[Any], unit: str, rest: dict[str, int]) -> None:
    """A response round-trips byte by byte, with coordinates in any order, without any, and with other fields."""
    offsets = [{unit: position, "partition": p, "offset": offset} for position, p, offset in rows]
    response = StoredResponse(207, msgspec.json.encode({"stored": 1, "offsets": offsets} | {"more": rest}))
    assert unpack_stored_response(207, pack_stored_response(response)) == response


def test_the_largest_response_fits_into_a_record() -> None:
    """A response for 100,000 records in 64 partitions with other writers, and 1,000 errors, fits into a record."""
    rng = random.Random(1)
    ends = [10**12] * 64
    rows = []
    for line in range(1, 100_001):
        partition = rng.randrange(64)
        ends[partition] += rng.choice((1, 1, 1, 1, 1, 7))
        rows.append({"line": line, "partition": partition, "offset": ends[partition]})
    errors = [{"line": i, "column": i % 90, "error_code": "MALFORMED_JSON", "message": f"no {i}"} for i in range(1_000)]
    body = msgspec.json.encode({"stored": 100_000, "offsets": rows, "offsets_omitted": 0, "errors": errors})
    assert len(body) > 5 * RECORD_BYTES_MAX
    assert len(pack_stored_response(StoredResponse(207, body))) < RECORD_BYTES_MAX / 4


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        pack_stored_response(StoredResponse(200, b"{}"))[:-1],
        pack_stored_response(StoredResponse(200, b"{}")) + b"\0",
        zlib.compress(b'{"offsets":{' * 100_000),
        zlib.compress(b'[{"offsets":{}}]'),
        zlib.compress(b'{"offsets":{}}'),
        zlib.compress(b'{"a":{"offsets":{}}}'),
        zlib.compress(b'{"offsets":{"line":1,"partition":1,"offset":1}}'),
        zlib.compress(b'{"offsets":{"line":[1],"partition":[],"offset":[]}}'),
    ],
)
def test_invalid_data_raises_schema_mismatch(data: bytes) -> None:
    """Empty, truncated or corrupt data, data with a suffix, and JSON nested too deeply or of another type are a
    SchemaMismatch."""
    with pytest.raises(SchemaMismatch):
        unpack_stored_response(200, data)
