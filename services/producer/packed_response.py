"""The format of a response in the topic of Idempotency-Keys: small, however many offsets it contains.

Sans-IO. The JSON is compressed. The offsets of `?offsets=true` would be most of it, so they are stored separately, as
columns of differences. Positions, and offsets within a partition, mostly increase by one, so the differences compress
very well.

>>> rows = [{"line": i + 1, "partition": i % 3, "offset": 1_000 + i // 3} for i in range(30_000)]
>>> response = StoredResponse(200, msgspec.json.encode({"stored": 30_000, "offsets": rows, "offsets_omitted": 0}))
>>> unpack(200, pack(response)) == response, len(response.body) // len(pack(response)) > 500
(True, True)
"""

from __future__ import annotations

import struct
import zlib
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.api.ingest.atomic import StoredResponse
from penstock.shared.common.errors import DataError

_LENGTH = struct.Struct(">I")
OFFSETS = "offsets"


def pack(response: StoredResponse) -> bytes:
    """Return the response's body compressed, with the rows of `offsets` as columns of differences."""
    body = response.body
    columns = b""
    if b'"offsets":[{' in body:
        members = msgspec.json.decode(body)
        columns = _pack_rows(members[OFFSETS])
        members[OFFSETS] = None
        body = msgspec.json.encode(members)
    packed = zlib.compress(body)
    return _LENGTH.pack(len(packed)) + packed + columns


def unpack(status: int, data: bytes) -> StoredResponse:
    """Return the response that was packed. Raises DataError if `pack` did not write the data."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        body = zlib.decompress(data[_LENGTH.size : end])
        if end < len(data):
            members = msgspec.json.decode(body)
            members[OFFSETS] = _unpack_rows(data[end:])
            body = msgspec.json.encode(members)
    except (struct.error, zlib.error, ValueError) as e:
        raise DataError(f"a response in the topic of Idempotency-Keys cannot be decoded: {e}") from None
    return StoredResponse(status, body)


def _pack_rows(rows: Sequence[dict[str, Any]]) -> bytes:
    """Encode rows: the unit's name, then the columns of positions, partitions and offsets, each with its length."""
    (unit,) = rows[0].keys() - {"partition", "offset"}  # `line` or `index`
    positions = array("q")
    offsets = array("q")
    last_position = 0
    last_offsets: dict[int, int] = {}
    for row in rows:
        positions.append(row[unit] - last_position)
        offsets.append(row["offset"] - last_offsets.get(row["partition"], 0))
        last_position = row[unit]
        last_offsets[row["partition"]] = row["offset"]
    partitions = array("i", [row["partition"] for row in rows])
    parts = [unit.encode(), *(zlib.compress(_big_endian(column)) for column in (positions, partitions, offsets))]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _unpack_rows(data: bytes) -> list[dict[str, int]]:
    """Decode rows that `_pack_rows` encoded."""
    parts = []
    start = 0
    while start < len(data):
        end = start + _LENGTH.size + _LENGTH.unpack_from(data, start)[0]
        parts.append(data[start + _LENGTH.size : end])
        start = end
    unit, *packed = parts
    columns = [array(kind) for kind in "qiq"]
    for column, part in zip(columns, packed, strict=True):
        column.frombytes(zlib.decompress(part))
    columns = [array(column.typecode, _big_endian(column)) for column in columns]
    rows = []
    name = unit.decode()
    position = 0
    last_offsets: dict[int, int] = {}
    for position_delta, partition, offset_delta in zip(*columns, strict=True):
        position += position_delta
        offset = last_offsets.get(partition, 0) + offset_delta
        last_offsets[partition] = offset
        rows.append({name: position, "partition": partition, "offset": offset})
    return rows


def _big_endian(column: array[int]) -> bytes:
    """Return a column's bytes in big-endian order. Its own inverse."""
    swapped = array(column.typecode, column)
    if struct.pack("=H", 1) != struct.pack(">H", 1):
        swapped.byteswap()
    return swapped.tobytes()
