"""Deserializers applied to columns."""

from __future__ import annotations

import json
from functools import partial, wraps
from typing import Any

import pytest

from penstock.shared.clients.consumer import Consumer
from penstock.shared.clients.consumer.consumer import Deserializers
from penstock.shared.clients.producer import Producer
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.records import Columns, ConsumerRecord
from penstock.shared.common.serialization import json_deserializer, string_deserializer


def columns(*records: tuple[bytes | None, bytes | None]) -> Columns:
    return Columns.of([ConsumerRecord("t", 0, 10 + 2 * i, i, k, v, (("h", b"1"),)) for i, (k, v) in enumerate(records)])


def test_both_columns_are_decoded() -> None:
    """Keys, values and tombstones are deserialized. Offsets, timestamps and headers stay with their records."""
    decoded, error = Deserializers(string_deserializer, json_deserializer).decode(columns((b"a", b"1"), (None, None)))
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
def test_a_record_that_cannot_be_deserialized(
    records: list[tuple[bytes, bytes]], good: int, offset: int, what: str
) -> None:
    """Records before the failure are returned. The error names topic, partition, offset, and key or value."""
    decoded, wrong = Deserializers(string_deserializer, json_deserializer).decode(columns(*records))
    assert (0 if decoded is None else len(decoded)) == good
    assert wrong is not None
    assert wrong.offset == offset
    assert str(wrong.error).startswith(f"t-0 at offset {offset}: {what}: t: not ")


def test_any_exception_of_a_deserializer_is_wrapped() -> None:
    """Any exception of a deserializer becomes the cause of the error."""

    def broken(topic: str, data: bytes | None) -> object:
        raise ZeroDivisionError("in user code")

    _, wrong = Deserializers(value=broken).decode(columns((b"a", b"1")))
    assert wrong is not None
    assert isinstance(wrong.error.__cause__, ZeroDivisionError)


def test_plain_bytes() -> None:
    """Without deserializers the columns are unchanged."""
    plain = columns((b"a", b"1"))
    decoded, _ = Deserializers().decode(plain)
    assert Deserializers().is_plain
    assert not Deserializers(value=json_deserializer).is_plain
    assert decoded is not None
    assert decoded.values is plain.values or decoded.values == plain.values


async def decode(topic: str, data: bytes | None) -> bytes | None:
    return data


@pytest.mark.parametrize("which", ["key", "value"])
@pytest.mark.parametrize("wrong", [None, json.loads, lambda data: data, decode], ids=range(4))
def test_a_deserializer_that_is_no_function_of_topic_and_bytes_is_rejected(which: str, wrong: Any) -> None:
    """It is rejected at once, with its setting's name, and so is a serializer. Any callable of two arguments works."""
    with pytest.raises(ConfigError, match=f"{which}_deserializer"):
        Deserializers(**{which: wrong})
    with pytest.raises(ConfigError, match=f"{which}_serializer"):
        Producer("localhost:1", **{f"{which}_serializer": wrong})
    decorated = wraps(json.loads)(lambda topic, data: json.loads(data))
    for right in (partial(lambda base, topic, data: data, 1), lambda *both: both, max, decorated):
        Deserializers(**{which: right})


@pytest.mark.parametrize("wrong", ["", 0, ()])
def test_only_none_means_no_deserializer(wrong: Any) -> None:
    """Only None means "no deserializer". Other falsy values are rejected."""
    for name in ("key_deserializer", "value_deserializer"):
        with pytest.raises(ConfigError, match=f"{name} must be a function"):
            Consumer("localhost:9092", **{name: wrong})
    Consumer("localhost:9092", key_deserializer=None, value_deserializer=None)
