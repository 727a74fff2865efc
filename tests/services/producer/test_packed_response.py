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
"""What a broker takes as it comes."""

places = st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1), st.integers(0, 2**62)), max_size=30)


@given(rows=places, unit=st.sampled_from(["line", "index"]), rest=st.dictionaries(st.text(), st.integers()))
def test_an_answer_comes_back_byte_for_byte(rows: list[Any], unit: str, rest: dict[str, int]) -> None:
    """This holds with coordinates in any order, without any, and with other fields."""
    offsets = [{unit: position, "partition": p, "offset": offset} for position, p, offset in rows]
    answer = StoredResponse(207, msgspec.json.encode({"stored": 1, "offsets": offsets} | {"more": rest}))
    assert unpack(207, pack(answer)) == answer


def test_the_largest_answer_fits_into_a_record() -> None:
    """A hundred thousand records, each in any of 64 partitions that others write to as well, and a thousand errors."""
    chance, ends = random.Random(1), [10**12] * 64
    rows = []
    for line in range(1, 100_001):
        partition = chance.randrange(64)
        ends[partition] += chance.choice((1, 1, 1, 1, 1, 7))
        rows.append({"line": line, "partition": partition, "offset": ends[partition]})
    errors = [{"line": i, "column": i % 90, "error_code": "MALFORMED_JSON", "message": f"no {i}"} for i in range(1_000)]
    body = msgspec.json.encode({"stored": 100_000, "offsets": rows, "offsets_omitted": 0, "errors": errors})
    assert len(body) > 5 * RECORD_BYTES_MAX
    assert len(pack(StoredResponse(207, body))) < RECORD_BYTES_MAX / 4


@pytest.mark.parametrize("data", [b"", b"\0\0\0\x09abc", b"\0\0\0\x03abc", pack(StoredResponse(200, b"{}")) + b"\0"])
def test_what_is_not_such_an_answer_is_said_to_be_none(data: bytes) -> None:
    """Any invalid response raises DataError."""
    with pytest.raises(DataError):
        unpack(200, data)
