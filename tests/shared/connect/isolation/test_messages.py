"""What a worker and a process of its own say to each other."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.common.errors import DataError, KafkaTimeout, RetriableError
from penstock.shared.common.records import TopicPartition
from penstock.shared.connect.errors import ConfigError, ConnectError, FailedThere, said_of, trace_of
from penstock.shared.connect.isolation.messages import (
    error_message,
    error_of,
    from_pairs,
    from_rows,
    pack,
    to_pairs,
    to_rows,
    unpack,
)

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


@pytest.mark.parametrize(
    ("error", "base"),
    [
        (KafkaTimeout("slow"), RetriableError),
        (ConfigError("no such column"), ConfigError),
        (ConnectError("no"), ConnectError),
        (KeyError("k"), FailedThere),
    ],
)
def test_an_error_is_itself_on_the_other_side(error: Exception, base: type[Exception]) -> None:
    """Its words, its class's name and its trace; and of a kind that says what to do about it."""
    try:
        raise error
    except Exception as raised:
        message = error_message(raised)
    again = error_of(unpack(pack(message)))
    assert isinstance(again, base)
    assert (said_of(again), trace_of(again)) == (said_of(error), trace_of(error))
    assert "test_messages.py" in again.trace


def test_a_sinks_offsets_are_partitions_again() -> None:
    """With those that are taken away."""
    offsets = {TopicPartition("t", 1): 7, TopicPartition("u", 0): None}
    assert from_rows(unpack(pack({"rows": to_rows(offsets)}))["rows"]) == offsets
