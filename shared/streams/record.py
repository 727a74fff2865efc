"""Records between processors, and the coordinates of the source record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self

from typing_extensions import TypeVar

from penstock.shared.common.errors import DataError
from penstock.shared.common.records import INT64_MAX, AnyHeaders, Headers

K = TypeVar("K", covariant=True, default=Any)
V = TypeVar("V", covariant=True, default=Any)


class _Record(NamedTuple, Generic[K, V]):
    key: K
    value: V
    timestamp: int
    headers: Headers = ()


class Record(_Record[K, V]):
    """A record between processors; `timestamp` is ms since the epoch, from 0 to 2^63 - 1.

    `headers` are pairs of name and value. A processor may also set a dict, which `context.forward` converts to pairs.
    """

    __slots__ = ()

    if TYPE_CHECKING:
        # The constructor accepts other forms of headers too, but the attribute is always typed as pairs.

        def __new__(cls, key: K, value: V, timestamp: int, headers: AnyHeaders = ()) -> Self: ...


class ProcessorRecordContext(NamedTuple):
    """The coordinates of the current source record."""

    topic: str
    partition: int
    offset: int


def check_timestamp(timestamp: Any) -> None:
    """Raise DataError unless a forwarded record's timestamp is a whole number of ms from 0 to 2^63 - 1."""
    if not isinstance(timestamp, int) or not 0 <= timestamp <= INT64_MAX:
        raise DataError(f"a record's timestamp must be a whole number of ms from 0 to 2^63 - 1, got {timestamp!r}")
