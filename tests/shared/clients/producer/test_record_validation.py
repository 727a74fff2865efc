"""Invalid records are rejected before they are enqueued, with topic and coordinates."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from penstock.shared.clients.producer.record_validation import (
    check_callback,
    check_partition,
    check_timestamp,
    checked_headers,
    checked_size,
    serialized,
)
from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.common.errors import DataError, InvalidTimestamp, RecordTooLarge, SerializationError


@pytest.mark.parametrize("timestamp", [None, 0, 2**63 - 1])
def test_timestamps(timestamp: int | None) -> None:
    """None means now. Otherwise a timestamp is a non-negative 64-bit integer."""
    check_timestamp("t", timestamp)


@pytest.mark.parametrize("timestamp", [-1, 2**63, 1.0, "1", True])
def test_odd_timestamps(timestamp: object) -> None:
    """The error shows the value."""
    with pytest.raises(InvalidTimestamp, match=f"topic t: timestamp {timestamp!r}"):
        check_timestamp("t", timestamp)


@pytest.mark.parametrize("partition", [None, 0, 2**31 - 1])
def test_partitions(partition: int | None) -> None:
    """None lets the partitioner choose. Otherwise it is a valid partition number."""
    check_partition("t", partition)


@pytest.mark.parametrize("partition", [-1, 2**31, 1.0, "0"])
def test_invalid_partitions(partition: object) -> None:
    """The error has the value, and there is no wait for the partition."""
    with pytest.raises(DataError, match=f"topic t.*{partition!r}"):
        check_partition("t", partition)


def test_headers() -> None:
    """Any sequence of pairs is accepted. Names may repeat, and a value may be None or empty."""
    given = [("a", b"1"), ["a", bytearray(b"2")], ("", None), ("ä", memoryview(b""))]
    assert checked_headers("t", iter(given)) == [("a", b"1"), ("a", b"2"), ("", None), ("ä", b"")]


@pytest.mark.parametrize(
    ("headers", "named"),
    [
        (5, "topic t: headers .*int"),
        ({"a": b"1"}, "topic t, header 0:.*pair"),
        ([("a", b"1"), ("b",)], "topic t, header 1:.*pair"),
        ([(b"a", b"1")], "topic t, header 0: .*name.*got bytes"),
        ([("a", "1")], "topic t, header 0 'a': .*got str"),
        ([("a", 1)], "topic t, header 0 'a': .*got int"),
        ([("\ud800", b"1")], "topic t, header 0: .*name.*UTF-8"),
    ],
)
def test_invalid_headers(headers: Any, named: str) -> None:
    """The error names the header and its value."""
    with pytest.raises(SerializationError, match=named):
        checked_headers("t", headers)


def test_serializer_results() -> None:
    """A serializer returns bytes or None."""
    assert serialized("t", "key", lambda _, data: data, None) is None
    assert serialized("t", "key", lambda _, data: data, b"k") == b"k"
    with pytest.raises(SerializationError, match=r"topic t.*key.*str"):
        serialized("t", "key", lambda _, data: data, "k")


@pytest.mark.parametrize("limit", ["max_request_size", "buffer_memory"])
def test_the_limit_is_named(limit: str) -> None:
    """A record's size includes its headers and the batch header. The smaller setting is the limit."""
    settings = ProducerSettings.model_validate({limit: 200})
    assert 100 < checked_size("t", b"k", b"v" * 50, [("h", b"x")], settings) <= 200
    with pytest.raises(RecordTooLarge, match=rf"topic t.*{limit}=200"):
        checked_size("t", b"k", b"v" * 50, [("h", b"x" * 100)], settings)


class Callbacks:
    def plain(self, *_: object) -> None: ...

    async def waiting(self, *_: object) -> None: ...


async def waiting(*_: object) -> None: ...


@pytest.mark.parametrize("callback", [None, print, len, Callbacks().plain, lambda *_: None, partial(print, "x")])
def test_callable_callbacks(callback: Any) -> None:
    """Functions, methods, builtins and partials are accepted."""
    check_callback(callback)


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
def test_invalid_callbacks(callback: Any, what: str) -> None:
    """A coroutine function is rejected, because its coroutine would never be awaited."""
    with pytest.raises(TypeError, match=f"on_delivery.*{what}"):
        check_callback(callback)
