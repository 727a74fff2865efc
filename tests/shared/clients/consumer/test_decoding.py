"""Deserializers over columns."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.consumer.decoding import Decoding
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.common.serialization import json_deserializer, string_deserializer


def columns(*records: tuple[bytes | None, bytes | None]) -> Columns:
    return Columns.of([ConsumerRecord("t", 0, 10 + 2 * i, i, k, v, (("h", b"1"),)) for i, (k, v) in enumerate(records)])


def test_both_columns_are_decoded() -> None:
    """Keys, values and tombstones; offsets, timestamps and headers stay with their records."""
    decoded, error = Decoding(string_deserializer, json_deserializer).decode(columns((b"a", b"1"), (None, None)))
    assert error is None
    assert decoded is not None
    assert (decoded.keys, decoded.values) == (["a", None], [1, None])
    assert (decoded.offsets.tolist(), decoded.timestamps.tolist()) == ([10, 12], [0, 1])
    assert decoded.headers == [(("h", b"1"),)] * 2


@pytest.mark.parametrize(
    ("records", "good", "offset", "what"),
    [
        ([(b"a", b"1"), (b"\xff", b"2"), (b"c", b"{")], 1, 12, "key"),
        ([(b"a", b"1"), (b"b", b"{"), (b"\xff", b"3")], 1, 12, "value"),
        ([(b"\xff", b"1")], 0, 10, "key"),
        ([(b"a", b"{")], 0, 10, "value"),
    ],
)
def test_the_first_that_cannot_be_decoded(
    records: list[tuple[bytes, bytes]], good: int, offset: int, what: str
) -> None:
    """What is before it is given; it is named by topic, partition, offset and part."""
    decoded, wrong = Decoding(string_deserializer, json_deserializer).decode(columns(*records))
    assert (0 if decoded is None else len(decoded)) == good
    assert wrong is not None
    assert wrong.offset == offset
    assert str(wrong.error).startswith(f"t-0 at offset {offset}: {what}: t: not ")


def test_whatever_a_deserializer_raises() -> None:
    """User code may raise anything; that is the cause."""

    def broken(topic: str, data: bytes | None) -> object:
        raise ZeroDivisionError("in user code")

    _, wrong = Decoding(value=broken).decode(columns((b"a", b"1")))
    assert wrong is not None
    assert isinstance(wrong.error.__cause__, ZeroDivisionError)


def test_plain_bytes() -> None:
    """Without deserializers the columns are what they were."""
    plain = columns((b"a", b"1"))
    decoded, _ = Decoding().decode(plain)
    assert Decoding().is_plain
    assert not Decoding(value=json_deserializer).is_plain
    assert decoded is not None
    assert decoded.values is plain.values or decoded.values == plain.values


@pytest.mark.parametrize("which", ["key", "value"])
def test_what_is_no_function_is_refused(which: str) -> None:
    """A deserializer that is None would fail at the first record: it is said at once, and by its name."""
    with pytest.raises(ConfigError, match=f"{which}_deserializer"):
        Decoding(**{which: None})  # type: ignore[arg-type]


@pytest.mark.parametrize("wrong", ["", 0, ()])
def test_a_consumer_takes_nothing_empty_for_no_deserializer(wrong: Any) -> None:
    """Only None is that."""
    for name in ("key_deserializer", "value_deserializer"):
        with pytest.raises(ConfigError, match=f"{name} must be a function"):
            Consumer("localhost:9092", **{name: wrong})
    Consumer("localhost:9092", key_deserializer=None, value_deserializer=None)
