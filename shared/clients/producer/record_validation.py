"""Checks of a record before it is enqueued. Their errors say what is wrong."""

from __future__ import annotations

from inspect import CO_COROUTINE, iscoroutinefunction
from operator import index
from typing import Any

from penstock.shared.clients.producer.settings import ProducerSettings
from penstock.shared.clients.protocol.record_batches import record_size
from penstock.shared.common.errors import DataError, InvalidTimestamp, PenstockError, RecordTooLarge, SerializationError
from penstock.shared.common.records import AnyHeaders, ProducerRecord
from penstock.shared.common.serialization import Serializer

TIMESTAMP_END = 2**63
PARTITION_END = 2**31

HeaderList = list[tuple[str, bytes | None]]

NO_VALUE: Any = object()
"""Stands for a value that was not given. None is a value: a tombstone."""


def record_of(
    topic: str | ProducerRecord, value: Any, key: Any, headers: AnyHeaders, partition: int | None, timestamp: int | None
) -> ProducerRecord:
    """Return the record that `send` was called with, whole or as fields. Raises TypeError for neither or both.

    >>> record_of("clicks", b"{}", b"ann", (), None, None)
    ProducerRecord(topic='clicks', value=b'{}', key=b'ann', headers=(), partition=None, timestamp=None)
    """
    if not isinstance(topic, ProducerRecord):
        if value is NO_VALUE:
            raise TypeError("send needs a topic and a value (None for a tombstone), or a ProducerRecord")
        return ProducerRecord(topic, value, key, headers, partition, timestamp)
    if value is not NO_VALUE or headers or (key, partition, timestamp) != (None, None, None):
        raise TypeError("send takes a ProducerRecord alone: value, key, headers, partition and timestamp are its own")
    return topic


def check_timestamp(topic: str, timestamp: object) -> None:
    """Raise InvalidTimestamp unless `timestamp` is None or an integer of milliseconds from 0 to 2^63 - 1."""
    # `index` also takes the integers of numpy, such as those of columns.
    try:
        fits = timestamp is None or (type(timestamp) is not bool and 0 <= index(timestamp) < TIMESTAMP_END)  # type: ignore[arg-type]
    except TypeError:
        fits = False
    if not fits:
        raise InvalidTimestamp(f"topic {topic}: timestamp {timestamp!r} is not an int from 0 to 2^63 - 1")


def check_partition(topic: str, partition: Any) -> None:
    """Raise DataError unless `partition` is None or a possible number of a partition. The partition need not exist."""
    # `index` also takes the integers of numpy, which partitioners compute with.
    try:
        fits = partition is None or 0 <= index(partition) < PARTITION_END
    except TypeError:
        fits = False
    if not fits:
        raise DataError(f"topic {topic}: partition {partition!r} is not an integer from 0 to 2^31 - 1")


def checked_headers(topic: str, headers: Any) -> HeaderList:
    """Return the headers as a list. Raises SerializationError unless each header is a pair of a str (without
    surrogates) and bytes, a bytearray, a memoryview or None.

    >>> checked_headers("clicks", (("trace", b"1"), ("empty", None)))
    [('trace', b'1'), ('empty', None)]
    """
    try:
        pairs = list(headers)
    except TypeError:
        raise SerializationError(f"topic {topic}: headers of type {type(headers).__name__}, not pairs") from None
    for number, pair in enumerate(pairs):
        where = f"topic {topic}, header {number}"
        if not isinstance(pair, tuple | list) or len(pair) != 2:
            raise SerializationError(f"{where}: not a pair of a name and a value")
        name, value = pair
        if not isinstance(name, str):
            raise SerializationError(f"{where}: the name must be str, got {type(name).__name__}")
        if value is not None and not isinstance(value, bytes | bytearray | memoryview):
            raise SerializationError(f"{where} {name!r}: the value must be bytes, got {type(value).__name__}")
        # A str may have surrogates, which UTF-8 lacks. The encoder would raise an error that names no header.
        try:
            name.encode()
        except UnicodeEncodeError as e:
            raise SerializationError(f"{where}: the name {name!r} cannot be written as UTF-8: {e.reason}") from None
    return [(name, value if value is None else bytes(value)) for name, value in pairs]


def serialized(topic: str, what: str, serializer: Serializer, value: Any) -> bytes | None:
    """Return the key or value as bytes.

    Raises SerializationError if the serializer raises, or returns neither bytes nor None. Penstock's own errors are
    raised unchanged.

    >>> serialized("clicks", "key", lambda topic, value: value["id"], {})
    Traceback (most recent call last):
        ...
    penstock.errors.SerializationError: topic clicks: the key's serializer raised KeyError('id')
    """
    try:
        data = serializer(topic, value)
    except PenstockError:
        raise
    # A user's serializer may raise anything.
    except Exception as e:
        raise SerializationError(f"topic {topic}: the {what}'s serializer raised {e!r}") from e
    if data is not None and not isinstance(data, bytes):
        raise SerializationError(f"topic {topic}: the {what}'s serializer gave {type(data).__name__}, not bytes")
    return data


def is_valid_callback(on_delivery: object) -> bool:
    """Whether `on_delivery` of a record is valid: callable, but not a coroutine function, which nothing would await."""
    code = getattr(on_delivery, "__code__", None)
    if code is not None:
        return not code.co_flags & CO_COROUTINE
    return callable(on_delivery) and not iscoroutinefunction(on_delivery)


def check_callback(on_delivery: object) -> None:
    """Raise TypeError unless `on_delivery` is None or a callable that is not a coroutine function."""
    if on_delivery is not None and not is_valid_callback(on_delivery):
        what = "a coroutine function" if callable(on_delivery) else f"a {type(on_delivery).__name__}"
        raise TypeError(f"on_delivery must be a function that is not async, got {what}")


def checked_size(
    topic: str, key: bytes | None, value: bytes | None, headers: HeaderList, settings: ProducerSettings
) -> int:
    """Return an upper bound of the bytes of a batch with this record alone. Raises RecordTooLarge, which names the
    exceeded setting."""
    size = record_size(key, value, headers)
    limits = {"max_request_size": settings.max_request_size, "buffer_memory": settings.buffer_memory}
    limit = min(limits, key=lambda name: limits[name])
    if size > limits[limit]:
        raise RecordTooLarge(f"topic {topic}: a record of {size} bytes; {limit}={limits[limit]}")
    return size
