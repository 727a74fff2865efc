"""Records between processors, and the keys and values of windowed results."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self

import msgspec
from typing_extensions import TypeVar

from penstock.shared.common.records import AnyHeaders, ConsumerRecord, Headers

K = TypeVar("K", covariant=True, default=Any)
V = TypeVar("V", covariant=True, default=Any)


class _Record(NamedTuple, Generic[K, V]):
    key: K
    value: V
    timestamp: int
    headers: Headers = ()


class Record(_Record[K, V]):
    """A record between processors; `timestamp` is ms since the epoch, from 0 to 2^63 - 1.

    `headers` are pairs, or a dict if no name occurs twice; `context.forward` converts it to pairs.
    """

    __slots__ = ()

    if TYPE_CHECKING:  # accepts several forms of headers; processors that get the record read pairs

        def __new__(cls, key: K, value: V, timestamp: int, headers: AnyHeaders = ()) -> Self: ...


class ProcessorRecordContext(NamedTuple):
    """The coordinates of the current source record."""

    topic: str
    partition: int
    offset: int


def coordinates_of(record: ConsumerRecord) -> str:
    """Return a source record's coordinates as text: `topic-partition@offset`."""
    return f"{record.topic}-{record.partition}@{record.offset}"


class WindowKey(NamedTuple, Generic[K]):
    """The key of a windowed result: the record key and the window's bounds in ms.

    The end of a session and of a sliding window is inclusive, that of a tumbling or hopping window is not.
    """

    key: K
    start: int
    end: int


class WindowResult(msgspec.Struct, Generic[K], frozen=True):
    """A window's results by name."""

    key: K
    start: int
    end: int
    results: dict[str, Any]

    def to_json(self) -> bytes:
        """Return one flat object: key, start, end, then the results."""
        return msgspec.json.encode({"key": self.key, "start": self.start, "end": self.end, **self.results})
