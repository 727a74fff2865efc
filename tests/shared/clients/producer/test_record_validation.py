"""What is wrong with a record is said before it is enqueued, with the topic and the place."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from penstock.shared.clients.producer.record_validation import (
    checked_callback,
    checked_headers,
    checked_partition,
    checked_size,
    checked_timestamp,
    serialized,
)
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.common.errors import DataError, InvalidTimestamp, RecordTooLarge, SerializationError


@pytest.mark.parametrize("timestamp", [None, 0, 2**63 - 1])
def test_timestamps(timestamp: int | None) -> None:
    """None is now; else 64 bits, not negative."""
    checked_timestamp("t", timestamp)


@pytest.mark.parametrize("timestamp", [-1, 2**63, 1.0, "1", True])
def test_odd_timestamps(timestamp: object) -> None:
    """The error shows the value."""
    with pytest.raises(InvalidTimestamp, match=f"topic t: timestamp {timestamp!r}"):
        checked_timestamp("t", timestamp)


@pytest.mark.parametrize("partition", [None, 0, 2**31 - 1])
def test_partitions(partition: int | None) -> None:
    """None leaves the choice to the partitioner; else what a partition's number can be."""
    checked_partition("t", partition)


@pytest.mark.parametrize("partition", [-1, 2**31, 1.0, "0"])
def test_odd_partitions(partition: object) -> None:
    """The error shows the value, and nobody waits for such a partition to come."""
    with pytest.raises(DataError, match=f"topic t: partition {partition!r} is not a number"):
        checked_partition("t", partition)


def test_headers() -> None:
    """Pairs in any sequence come out as the builder takes them; a name may come twice, a value may be None or empty."""
    given = [("a", b"1"), ["a", bytearray(b"2")], ("", None), ("ä", memoryview(b""))]
    assert checked_headers("t", iter(given)) == [("a", b"1"), ("a", b"2"), ("", None), ("ä", b"")]


@pytest.mark.parametrize(
    ("headers", "said"),
    [
        (5, "topic t: headers of type int, not pairs"),
        ({"a": b"1"}, "topic t, header 0: not a pair"),
        ([("a", b"1"), ("b",)], "topic t, header 1: not a pair"),
        ([(b"a", b"1")], "topic t, header 0: the name must be str, got bytes"),
        ([("a", "1")], "topic t, header 0 'a': the value must be bytes, got str"),
        ([("a", 1)], "topic t, header 0 'a': the value must be bytes, got int"),
        ([("\ud800", b"1")], "topic t, header 0: the name .* cannot be written as UTF-8"),
    ],
)
def test_odd_headers(headers: Any, said: str) -> None:
    """The error says which header, and what it is."""
    with pytest.raises(SerializationError, match=said):
        checked_headers("t", headers)


def test_what_a_serializer_gives() -> None:
    """Bytes or nothing."""
    assert serialized("t", "key", lambda _, data: data, None) is None
    assert serialized("t", "key", lambda _, data: data, b"k") == b"k"
    with pytest.raises(SerializationError, match="topic t: the key's serializer gave str, not bytes"):
        serialized("t", "key", lambda _, data: data, "k")


@pytest.mark.parametrize("limit", ["max_request_size", "buffer_memory"])
def test_the_limit_is_named(limit: str) -> None:
    """A record is measured with its headers and those of a batch; the smaller setting is the limit."""
    settings = ProducerSettings.model_validate({limit: 200})
    assert 100 < checked_size("t", b"k", b"v" * 50, [("h", b"x")], settings) <= 200
    with pytest.raises(RecordTooLarge, match=rf"topic t: a record of \d+ bytes; {limit}=200"):
        checked_size("t", b"k", b"v" * 50, [("h", b"x" * 100)], settings)


class Callbacks:
    def plain(self, *_: object) -> None: ...

    async def waiting(self, *_: object) -> None: ...


async def waiting(*_: object) -> None: ...


@pytest.mark.parametrize("callback", [None, print, len, Callbacks().plain, lambda *_: None, partial(print, "x")])
def test_what_can_be_called(callback: Any) -> None:
    """Functions, methods, built-in ones and partial ones."""
    checked_callback(callback)


@pytest.mark.parametrize(
    ("callback", "what"),
    [
        (5, "a int"),
        ("print", "a str"),
        (waiting, "a coroutine function"),
        (Callbacks().waiting, "a coroutine function"),
        (partial(waiting, 1), "a coroutine function"),
    ],
)
def test_what_cannot_be_called(callback: Any, what: str) -> None:
    """A coroutine would be made, and never awaited."""
    with pytest.raises(TypeError, match=f"on_delivery must be a function that is not async, got {what}"):
        checked_callback(callback)
