"""Integers of variable length, compared with aiokafka's."""

from __future__ import annotations

import numpy as np
import pytest
from aiokafka.record.util import encode_varint
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.varints import NOT_ONE, VARINT_BYTES_MAX, put_varint, read_varint, varint_size, zigzag


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_integer_is_written_as_aiokafka_writes_it(value: int) -> None:
    """A 64-bit integer has aiokafka's bytes and the computed size, and one of 63 bits round-trips."""
    expected = bytearray()
    encode_varint(value, expected.append)
    out = np.zeros(VARINT_BYTES_MAX, np.uint8)
    unsigned = np.uint64(zigzag(np.int64(value)))
    end = int(put_varint(out, 0, unsigned))
    assert out[:end].tobytes() == expected
    assert int(varint_size(unsigned)) == end <= VARINT_BYTES_MAX
    if -(2**62) <= value < 2**62:
        assert read_varint(out, 0, end) == (value, end)


@pytest.mark.parametrize("data", [b"", b"\x80", b"\xff" * 12])
def test_invalid_varints(data: bytes) -> None:
    """Truncated integers and those with too many bits are invalid."""
    assert read_varint(np.frombuffer(data, np.uint8), 0, len(data))[0] == NOT_ONE
