"""What a worker and a task's process say to each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.common.errors import DataError, KafkaTimeout, PenstockError, RetriableError
from shared.connect.isolation.messages import error_kind, error_of, from_pairs, pack, to_pairs, unpack

JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    max_leaves=10,
)


@given(st.dictionaries(st.text(), JSON))
def test_a_message_is_one_line(message: dict[str, object]) -> None:
    """Whatever a trace or a setting has in it, line ends too."""
    line = pack(message)
    assert line.count(b"\n") == 1
    assert unpack(line) == message


@given(st.dictionaries(st.binary(), st.none() | st.binary()))
def test_offsets_are_bytes_again(offsets: dict[bytes, bytes | None]) -> None:
    """Keys and values, and those that are taken away."""
    assert from_pairs(unpack(pack({"set": to_pairs(offsets)}))["set"]) == offsets


def test_what_is_no_message_says_so() -> None:
    """Such as what a library prints where it should not."""
    for line in (b"hello\n", b"[1]\n", b""):
        with pytest.raises(DataError):
            unpack(line)


def test_an_error_says_on_the_other_side_whether_to_try_again() -> None:
    """That, and its words, are what matters of it."""
    for error, kind in ((KafkaTimeout("slow"), RetriableError), (DataError("bad"), PenstockError)):
        again = error_of(error_kind(error), str(error))
        assert (type(again), str(again)) == (kind, str(error))
