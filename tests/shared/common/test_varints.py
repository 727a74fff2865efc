"""Integers of variable length: as aiokafka writes and reads them."""

from __future__ import annotations

import numpy as np
import pytest
from aiokafka.record.util import encode_varint
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.varints import NOT_ONE, VARINT_BYTES_MAX, put_varint, read_varint, varint_size, zigzag


@given(st.integers(-(2**63), 2**63 - 1))
def test_an_integer_is_written_as_aiokafka_writes_it(value: int) -> None:
    """All 64 bits, in as many bytes as was said before; 63 bits are read back."""
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
def test_what_is_no_integer(data: bytes) -> None:
    """It is cut off, or has too many bits."""
    assert read_varint(np.frombuffer(data, np.uint8), 0, len(data))[0] == NOT_ONE
