"""The format of an answer in the topic of Idempotency-Keys: small, however many records have offsets in it.

Sans-IO. The JSON is compressed. The offsets of `?offsets=true` would be most of it, so they are stored separately, as
columns of differences. Positions, and offsets within a partition, mostly grow by one, which compresses very well.

>>> rows = [{"line": i + 1, "partition": i % 3, "offset": 1_000 + i // 3} for i in range(30_000)]
>>> answer = StoredResponse(200, msgspec.json.encode({"stored": 30_000, "offsets": rows, "offsets_omitted": 0}))
>>> unpack(200, pack(answer)) == answer, len(answer.body) // len(pack(answer)) > 500
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


def pack(answer: StoredResponse) -> bytes:
    """Return the answer's body compressed, with the rows of `offsets` as columns of differences."""
    body, columns = answer.body, b""
    if b'"offsets":[{' in body:
        response = msgspec.json.decode(body)
        rows, response[OFFSETS] = response[OFFSETS], None
        body, columns = msgspec.json.encode(response), _columns(rows)
    packed = zlib.compress(body)
    return _LENGTH.pack(len(packed)) + packed + columns


def unpack(status: int, data: bytes) -> StoredResponse:
    """Return the answer that was packed. Raises DataError if `pack` did not write the data."""
    try:
        end = _LENGTH.size + _LENGTH.unpack_from(data)[0]
        body = zlib.decompress(data[_LENGTH.size : end])
        if end < len(data):
            response = msgspec.json.decode(body)
            response[OFFSETS] = _rows(data[end:])
            body = msgspec.json.encode(response)
    except (struct.error, zlib.error, ValueError) as e:
        raise DataError(f"an answer in the topic of Idempotency-Keys that cannot be read: {e}") from None
    return StoredResponse(status, body)


def _columns(rows: Sequence[dict[str, Any]]) -> bytes:
    (unit,) = rows[0].keys() - {"partition", "offset"}
    positions, offsets = array("q"), array("q")
    last_position, last_offsets = 0, dict[int, int]()
    for row in rows:
        positions.append(row[unit] - last_position)
        offsets.append(row["offset"] - last_offsets.get(row["partition"], 0))
        last_position, last_offsets[row["partition"]] = row[unit], row["offset"]
    partitions = array("i", [row["partition"] for row in rows])
    parts = [unit.encode(), *(zlib.compress(_big_endian(column)) for column in (positions, partitions, offsets))]
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def _rows(data: bytes) -> list[dict[str, int]]:
    parts, at = [], 0
    while at < len(data):
        end = at + _LENGTH.size + _LENGTH.unpack_from(data, at)[0]
        parts.append(data[at + _LENGTH.size : end])
        at = end
    unit, *packed = parts
    columns = [array(kind) for kind in "qiq"]
    for column, part in zip(columns, packed, strict=True):
        column.frombytes(zlib.decompress(part))
    columns = [array(column.typecode, _big_endian(column)) for column in columns]
    rows, position, last_offsets, name = [], 0, dict[int, int](), unit.decode()
    for step, partition, further in zip(*columns, strict=True):
        position += step
        offset = last_offsets[partition] = last_offsets.get(partition, 0) + further
        rows.append({name: position, "partition": partition, "offset": offset})
    return rows


def _big_endian(column: array[int]) -> bytes:
    swapped = array(column.typecode, column)
    if struct.pack("=H", 1) != struct.pack(">H", 1):
        swapped.byteswap()
    return swapped.tobytes()
