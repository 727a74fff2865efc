"""Records between processors, and the coordinates of the source record."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Self

from typing_extensions import TypeVar

from penstock.shared.common.errors import DataError
from penstock.shared.common.records import INT64_MAX, AnyHeaders, Headers, header_pairs

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


def checked_record(record: Any) -> Record:
    """Return a forwarded record with its headers as a tuple.

    Raises TypeError if it is no Record or has headers that are neither pairs nor a dict. Raises DataError unless its
    timestamp is a whole number of ms from 0 to 2^63 - 1.
    """
    try:
        timestamp = record.timestamp
        headers = record.headers
    except AttributeError:
        raise TypeError(f"a node must forward a Record, got {type(record).__name__}") from None
    if not isinstance(timestamp, int) or not 0 <= timestamp <= INT64_MAX:
        raise DataError(f"a record's timestamp must be a whole number of ms from 0 to 2^63 - 1, got {timestamp!r}")
    checked: Record = record
    if type(headers) is tuple:
        return checked
    try:
        return checked._replace(headers=tuple(header_pairs(headers)))
    except TypeError:
        raise TypeError(f"a record's headers must be pairs or a dict, got {type(headers).__name__}") from None
