"""The compact encoding of responses."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.ingest.atomic import StoredResponse
from penstock.services.producer.packed_response import pack, unpack
from penstock.shared.common.errors import DataError

RECORD_BYTES_MAX = 1_048_576
"""A broker's default limit of a record."""

int31 = st.integers(0, 2**31 - 1)
coordinates = st.lists(st.tuples(int31, int31, st.integers(0, 2**62)), max_size=30)


@given(rows=coordinates, unit=st.sampled_from(["line", "index"]), rest=st.dictionaries(st.text(), st.integers()))
def test_a_response_is_unpacked_byte_for_byte(rows: list[Any], unit: str, rest: dict[str, int]) -> None:
    """A response round-trips byte by byte, with coordinates in any order, without any, and with other fields."""
    offsets = [{unit: position, "partition": p, "offset": offset} for position, p, offset in rows]
    response = StoredResponse(207, msgspec.json.encode({"stored": 1, "offsets": offsets} | {"more": rest}))
    assert unpack(207, pack(response)) == response


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
    assert len(pack(StoredResponse(207, body))) < RECORD_BYTES_MAX / 4


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x09abc", b"\0\0\0\x03abc", pack(StoredResponse(200, b"{}")) + b"\0"])
def test_invalid_data_raises_data_error(data: bytes) -> None:
    """Empty, truncated or corrupt data, and data with a suffix, are a DataError."""
    with pytest.raises(DataError):
        unpack(200, data)
