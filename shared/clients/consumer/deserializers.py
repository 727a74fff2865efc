"""The deserializers of one consumer: they decode the keys and values of columns.

A record that cannot be decoded blocks its partition. The records before it are returned first. After them polls raise
SerializationError with topic, partition and offset, again and again until the user seeks past the record. In between
they return records of other partitions.

>>> from penstock.shared.common.records import ConsumerRecord
>>> from penstock.shared.common.serialization import json_deserializer
>>> columns = Columns.of([ConsumerRecord("clicks", 0, 7 + i, 0, b"ann", v) for i, v in enumerate([b"1", b"{"])])
>>> decoded, error = Deserializers(value=json_deserializer).decode(columns)
>>> decoded.values, decoded.keys, error.offset, str(error.error)
([1], [b'ann'], 8, 'clicks-0 at offset 8: value: clicks: not JSON: Input data was truncated')
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from penstock.shared.common.errors import ConfigError, SerializationError
from penstock.shared.common.records import Columns
from penstock.shared.common.serialization import Deserializer, bytes_deserializer


@dataclass(frozen=True, slots=True)
class Undecodable:
    """The first record that cannot be decoded."""

    offset: int
    error: SerializationError


@dataclass(frozen=True, slots=True)
class Deserializers:
    """A consumer's deserializers of keys and of values; bytes stay as they are by default."""

    key: Deserializer = bytes_deserializer
    value: Deserializer = bytes_deserializer

    def __post_init__(self) -> None:
        for name, deserializer in (("key", self.key), ("value", self.value)):
            if not callable(deserializer):
                raise ConfigError(
                    f"{name}_deserializer must be a function of a topic and bytes, got {deserializer!r}; "
                    "bytes_deserializer, the default, leaves bytes as they are"
                )

    @property
    def is_plain(self) -> bool:
        """Whether there are no deserializers to call."""
        return self.key is bytes_deserializer and self.value is bytes_deserializer

    def decode(self, columns: Columns) -> tuple[Columns[Any, Any] | None, Undecodable | None]:
        """Return the decoded records up to the first that cannot be decoded (None if there are none), and that one."""
        keys, wrong_key = _decode_column(self.key, columns.topic, columns.keys)
        values, wrong_value = _decode_column(self.value, columns.topic, columns.values[: len(keys)])
        keys = keys[: len(values)]
        decoded = replace(columns[: len(values)], keys=keys, values=values) if values else None
        cause, part = (wrong_value, "value") if wrong_value is not None else (wrong_key, "key")
        if cause is None:
            return decoded, None
        offset = int(columns.offsets[len(values)])
        where = f"{columns.topic_partition} at offset {offset}"
        error = SerializationError(f"{where}: {part}: {cause}")
        error.__cause__ = cause
        return decoded, Undecodable(offset, error)


def _decode_column(
    deserializer: Deserializer, topic: str, column: Sequence[bytes | None]
) -> tuple[Sequence[Any], Exception | None]:
    if deserializer is bytes_deserializer:
        return column, None
    decoded: list[Any] = []
    try:
        for data in column:
            decoded.append(deserializer(topic, data))  # noqa: PERF401 - keeps the values before an error
    except Exception as e:  # user code
        return decoded, e
    return decoded, None
