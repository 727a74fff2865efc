"""Batches are compressed at the configured level, unless compression does not shrink them."""

from __future__ import annotations

import random
import zlib
from typing import Any

import pytest

from penstock.shared.clients.protocol.record_batches import (
    ATTRIBUTES_AT,
    CRC_AT,
    Compression,
    compression_of,
    crc32c,
    new_batch_builder,
    read_batch_records,
    read_batches,
    seal_batch,
)
from tests.shared.clients.protocol.compressions import COMPRESSION

RANDOM = random.Random(1)
TEXT = [b" ".join(RANDOM.choice((b"carrier", b"origin", b"delay", b"%d" % i)) for i in range(200)) for _ in range(20)]
NOISE = [RANDOM.randbytes(100)]


def sealed(values: list[bytes], compression: Compression) -> bytearray:
    builder = new_batch_builder(1 << 20, False)
    for index, value in enumerate(values):
        builder.append(index, 1_000 + index, b"key", value, [])
    return seal_batch(builder, (7, 1, 0), compression)


@pytest.mark.parametrize("name", list(COMPRESSION))
def test_compressed_batches_round_trip(name: str) -> None:
    """Records, codec, length and checksum are correct for every compression."""
    data = sealed(TEXT, COMPRESSION[name])
    assert [value for _, _, value, _ in read_batch_records(data)] == TEXT
    assert data[ATTRIBUTES_AT + 1] & 7 == COMPRESSION[name].codec
    assert int.from_bytes(data[8:12], "big") == len(data) - 12
    assert int.from_bytes(data[CRC_AT : CRC_AT + 4], "big") == crc32c(bytes(data[ATTRIBUTES_AT:]))
    (batch,) = read_batches(bytes(data))
    assert (batch.producer_id, batch.producer_epoch, batch.base_sequence) == (7, 1, 0)


@pytest.mark.parametrize("name", ["gzip", "snappy", "lz4", "zstd"])
def test_a_batch_that_would_grow_is_not_compressed(name: str) -> None:
    """A batch that compression would enlarge is written with codec `none`."""
    assert sealed(NOISE, COMPRESSION[name]) == sealed(NOISE, COMPRESSION["none"])


@pytest.mark.parametrize(("name", "low", "high"), [("gzip", 1, 9), ("lz4", 1, 12), ("zstd", -50, 19)])
def test_the_level_is_used(name: str, low: int, high: int) -> None:
    """A higher level makes a smaller batch of the same records."""
    sizes = {level: len(sealed(TEXT, compression_of(name, level))) for level in (low, high)}
    assert sizes[high] < sizes[low]
    assert all(read_batch_records(sealed(TEXT, compression_of(name, level)))[0][2] == TEXT[0] for level in sizes)


def test_the_default_levels_are_those_of_java() -> None:
    """gzip at zlib's default (6), lz4 at 9, zstd at 3."""

    def records(compression: Compression) -> Any:
        return sealed(TEXT, compression)[61:]

    plain = bytes(sealed(TEXT, COMPRESSION["none"])[61:])
    assert len(zlib.compress(plain, 6)) + 12 == len(records(COMPRESSION["gzip"]))
    assert records(COMPRESSION["lz4"]) == records(compression_of("lz4", 9))
    assert records(COMPRESSION["zstd"]) == records(compression_of("zstd", 3))
