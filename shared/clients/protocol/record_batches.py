"""Record batches: built, sealed and read with aiokafka's compiled code. Also compression and the checksum.

The builder does not compress, since it does not support compression levels. A batch is compressed when it is sealed,
if this makes it smaller.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import cramjam
import google_crc32c
import numpy as np
from aiokafka.codec import (
    gzip_decode,
    gzip_encode,
    lz4_decode,
    lz4_encode,
    snappy_decode,
    snappy_encode,
    zstd_decode,
    zstd_encode,
)
from aiokafka.record.default_records import DefaultRecordBatch, DefaultRecordBatchBuilder
from aiokafka.record.memory_records import MemoryRecords
from aiokafka.record.util import calc_crc32c

from penstock.shared.common.errors import CorruptRecord

MAGIC = 2
# Positions in a batch's header.
LENGTH_AT = 8
LENGTH_FROM = 12
"""The length counts the bytes from here on."""
CRC_AT = 17
ATTRIBUTES_AT = 21
"""The checksum covers the bytes from here on."""
PRODUCER_STATE_AT = 43
"""The producer id, epoch and base sequence."""
RECORDS_AT = 61
"""The end of the header."""

NO_PRODUCER = -1
"""The producer id, epoch and base sequence of a batch without a producer state."""

UNCOMPRESSED_BATCH_BYTES_MAX = 256 << 20
"""A compressed batch with more bytes of records is not read. Otherwise some kilobytes could take up all memory."""
TYPICAL_RATIO_MAX = 64

SealedBatch = bytearray | memoryview
"""The bytes of a sealed batch. A retry may write another producer state into them."""

_length = struct.Struct(">i")
_crc = struct.Struct(">I")
_producer_state = struct.Struct(">qhi")


class Compression(NamedTuple):
    """A codec: its number in a batch's attributes, and the function that compresses."""

    codec: int
    encode: Callable[[bytes], bytes] | None = None


def compression_of(name: str, level: int | None) -> Compression:
    """Return the compression with this Kafka name, such as `gzip`. `snappy` and `none` ignore the level."""
    return {
        "none": NO_COMPRESSION,
        "gzip": Compression(DefaultRecordBatch.CODEC_GZIP, partial(gzip_encode, compresslevel=level)),
        "snappy": Compression(DefaultRecordBatch.CODEC_SNAPPY, snappy_encode),
        "lz4": Compression(DefaultRecordBatch.CODEC_LZ4, partial(lz4_encode, level=level)),
        "zstd": Compression(DefaultRecordBatch.CODEC_ZSTD, partial(zstd_encode, level=level)),
    }[name]


NO_COMPRESSION = Compression(DefaultRecordBatch.CODEC_NONE)


def new_batch_builder(batch_size: int, transactional: bool) -> Any:
    """Return aiokafka's builder of one record batch.

    It takes the first record, whatever its size, then each record with which the batch has fewer than `batch_size`
    bytes.
    """
    codec = DefaultRecordBatch.CODEC_NONE
    return DefaultRecordBatchBuilder(
        MAGIC, codec, int(transactional), NO_PRODUCER, NO_PRODUCER, NO_PRODUCER, batch_size
    )


def seal_batch(builder: Any, state: tuple[int, int, int], compression: Compression = NO_COMPRESSION) -> SealedBatch:
    """Return the sealed batch with a producer id, epoch and base sequence. The builder cannot be used again."""
    builder.set_producer_state(*state)
    sealed: SealedBatch = builder.build()
    if compression.encode is None:
        return sealed
    records = bytes(sealed[RECORDS_AT:])
    encoded = compression.encode(records)
    # The buffer memory and the request size were reserved for the uncompressed batch.
    if len(encoded) >= len(records):
        return sealed
    compressed = bytearray(sealed[:RECORDS_AT]) + encoded
    # The codec is in the low byte of the attributes, an int16.
    compressed[ATTRIBUTES_AT + 1] |= compression.codec
    _length.pack_into(compressed, LENGTH_AT, len(compressed) - LENGTH_FROM)
    _crc.pack_into(compressed, CRC_AT, crc32c(memoryview(compressed)[ATTRIBUTES_AT:]))
    return compressed


def write_producer_state(data: SealedBatch, state: tuple[int, int, int]) -> None:
    """Write another producer id, epoch and base sequence into a sealed record batch, and compute its checksum again."""
    _producer_state.pack_into(data, PRODUCER_STATE_AT, *state)
    _crc.pack_into(data, CRC_AT, crc32c(memoryview(data)[ATTRIBUTES_AT:]))


def read_batches(data: bytes) -> list[Any]:
    """Return the record batches in these bytes of a log."""
    records = MemoryRecords(data)
    found: list[Any] = []
    while records.has_next():
        found.append(records.next_batch())
    return found


def record_size(key: bytes | None, value: bytes | None, headers: list[tuple[str, bytes | None]]) -> int:
    """Return an upper bound of a record's bytes in a batch of its own, headers of record and batch included."""
    size: int = DefaultRecordBatchBuilder.estimate_size_in_bytes(key, value, headers)
    return size


_checksum: Callable[[bytes], int] = google_crc32c.value if google_crc32c.implementation == "c" else calc_crc32c
"""Without its C extension google_crc32c is slower than aiokafka's checksum."""

_DECODE: dict[int, Callable[[Any], bytes]] = {
    DefaultRecordBatch.CODEC_GZIP: gzip_decode,
    DefaultRecordBatch.CODEC_SNAPPY: snappy_decode,
    DefaultRecordBatch.CODEC_LZ4: lz4_decode,
    DefaultRecordBatch.CODEC_ZSTD: zstd_decode,
}


_DECODE_INTO: dict[int, Callable[[Any, Any], int]] = {
    DefaultRecordBatch.CODEC_GZIP: cramjam.gzip.decompress_into,
    DefaultRecordBatch.CODEC_LZ4: cramjam.lz4.decompress_into,
    DefaultRecordBatch.CODEC_ZSTD: cramjam.zstd.decompress_into,
}
_RATIO_MAX = {
    DefaultRecordBatch.CODEC_GZIP: 1032,
    DefaultRecordBatch.CODEC_LZ4: 255,
    DefaultRecordBatch.CODEC_ZSTD: 1 << 15,
}
"""How many times as long as its compressed bytes a batch can be. Snappy's 22 times are no danger."""


def may_be_too_large(codec: int, size: int) -> bool:
    """Whether a batch of `size` compressed bytes may exceed UNCOMPRESSED_BATCH_BYTES_MAX."""
    return size * _RATIO_MAX.get(codec, 0) > UNCOMPRESSED_BATCH_BYTES_MAX


def decompress(codec: int, data: memoryview) -> bytes:
    """Return the uncompressed records of a batch.

    Raises CorruptRecord if they have more than UNCOMPRESSED_BATCH_BYTES_MAX, the decompressor's errors, and KeyError
    for an unknown codec.
    """
    if may_be_too_large(codec, len(data)):
        return _decompress_within(codec, data, min(UNCOMPRESSED_BATCH_BYTES_MAX, len(data) * TYPICAL_RATIO_MAX))
    decode = _DECODE[codec]
    # As aiokafka's reader calls them: only gzip's decoder gets a view.
    return decode(data if codec == DefaultRecordBatch.CODEC_GZIP else data.tobytes())


def _decompress_within(codec: int, data: memoryview, room: int) -> bytes:
    into = np.empty(room, np.uint8)
    try:
        size = _DECODE_INTO[codec](data, into)
    except cramjam.DecompressionError as e:
        # This is also raised for bytes that are not valid: then more room does not help.
        if "failed to write whole buffer" not in str(e):
            raise
        if room == UNCOMPRESSED_BATCH_BYTES_MAX:
            raise CorruptRecord(
                f"a batch of {len(data)} bytes has more than {room} bytes of records, which is the limit"
            ) from e
        return _decompress_within(codec, data, UNCOMPRESSED_BATCH_BYTES_MAX)
    return into[:size].tobytes()


def crc32c(data: bytes | bytearray | memoryview) -> int:
    """Return the checksum of record batches (CRC-32C)."""
    return int(_checksum(data if isinstance(data, bytes) else bytes(data)))


BatchRecord = tuple[int, bytes | None, bytes | None, list[tuple[str, bytes | None]]]
"""Timestamp (ms), key, value, headers."""


def read_batch_records(data: bytes | SealedBatch) -> list[BatchRecord]:
    """Return the records of one sealed record batch."""
    return [(r.timestamp, r.key, r.value, list(r.headers)) for r in read_batches(bytes(data))[0]]
