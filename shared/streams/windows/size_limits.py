"""The size limits of a window's key and states.

A result contains the window's key twice: in the record's key and in a field of the JSON value. A result that is too
large to be written is rejected when its window closes, after the store has taken all its records. To reject a record
instead, its key is measured before a store takes it, as twice its size in JSON. In JSON, a control character takes up
to six bytes, and bytes grow by a third. The key and states of a changelog entry are limited too: a record that makes
them too large is rejected.

>>> key_bytes("ann"), key_bytes(b"ann"), key_bytes("\\0")
(10, 12, 16)
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import msgspec

from penstock.shared.common.errors import ConfigError, DataError, RecordTooLarge
from penstock.shared.streams.aggregations.aggregation import Aggregation, ColumnValue, restored_state
from penstock.shared.streams.changelog.store_schema import StoreSchema
from penstock.shared.streams.windows.window_descriptions import describe_key

RESULT_BYTES_SPARE = 16 * 1024
"""The bytes of a result besides its key: names and numbers of the aggregations, bounds, headers."""

ENTRY_BYTES_SPARE = 256
"""The bytes of a changelog entry for its envelope, the window's bounds, and the record and batch around it."""

NUMBER_BYTES = 8
"""The bytes of an int64 or float64 in a changelog entry."""

LENGTH_BYTES = 4
"""The bytes of a length before bytes in a changelog entry."""

KEY_GROWTH_MAX = 12
"""A key of n characters or bytes takes at most n times this, plus the quotes: twice six, by JSON's escapes."""


def default_key_bytes_max(record_bytes_max: int) -> int:
    """Return the default limit of a key's size: the bytes of a result that remain for it, at least half.

    >>> default_key_bytes_max(1024 * 1024), default_key_bytes_max(1000)
    (1032192, 500)
    """
    return record_bytes_max - min(RESULT_BYTES_SPARE, record_bytes_max // 2)


def default_state_bytes_max(record_bytes_max: int) -> int:
    """Return the limit of the size of key and states: the bytes of a changelog entry that remain, at least half.

    >>> default_state_bytes_max(1024 * 1024), default_state_bytes_max(100)
    (1048320, 50)
    """
    return record_bytes_max - min(ENTRY_BYTES_SPARE, record_bytes_max // 2)


def key_bytes(key: str | bytes) -> int:
    """Return the bytes that a key takes in a result, which has its JSON twice. Text must be encodable as UTF-8."""
    return 2 * len(msgspec.json.encode(key))


def check_key(key: Any, store: str, key_bytes_max: int) -> None:
    """Raise DataError for an invalid key, RecordTooLarge for one that is too large for a result."""
    if not isinstance(key, str | bytes):
        raise DataError(f"store {store!r}: a key must be text or bytes, got {type(key).__name__}")
    if isinstance(key, bytes) or key.isascii():
        if len(key) * KEY_GROWTH_MAX + 4 <= key_bytes_max:
            return
    else:
        try:
            key.encode()
        except UnicodeEncodeError as e:
            message = f"store {store!r}: the key {describe_key(key)} is not encodable as UTF-8: {e.reason}"
            raise DataError(message) from None
    if (size := key_bytes(key)) > key_bytes_max:
        raise RecordTooLarge(
            f"store {store!r}: the key {describe_key(key)} takes {size} bytes in a result, which has its JSON "
            f"twice; the limit is key_bytes_max={key_bytes_max}"
        )


def check_state_size(
    store: str, aggregations: Sequence[Aggregation[Any]], key: str | bytes, states: Sequence[Any], *, bytes_max: int
) -> list[tuple[ColumnValue, ...]]:
    """Return the columns of each state.

    Raises RecordTooLarge if key and states exceed a changelog entry's limit, and the error of encoding a state.
    """
    columns = [one.to_columns(state) for one, state in zip(aggregations, states, strict=True)]
    size = len(key if isinstance(key, bytes) else key.encode())
    size += sum(LENGTH_BYTES + len(c) if isinstance(c, bytes) else NUMBER_BYTES for own in columns for c in own)
    if size > bytes_max:
        raise RecordTooLarge(
            f"store {store!r}: key {describe_key(key)}: key and state take {size} bytes in the changelog; at most "
            f"{bytes_max} fit, which is max_request_size minus the bytes around them"
        )
    return columns


def check_row(
    store: str, aggregations: Sequence[Aggregation[Any]], key: str | bytes, states: Sequence[Any], *, bytes_max: int
) -> list[Any]:
    """Return the states of a table's or a join's row as a restore gives them.

    Raises what `check_state_size` raises, and DataError if a restore would change a state.
    """
    columns = check_state_size(store, aggregations, key, states, bytes_max=bytes_max)
    return [restored_state(*one) for one in zip(aggregations, states, columns, strict=True)]


def require_missed_windows_fit(stores: Iterable[StoreSchema], state_bytes_max: int) -> None:
    """Raise ConfigError if a late record can miss more windows than half of a changelog entry's limit can list."""
    for store in stores:
        windows = -(-store.size_ms // store.advance_ms) if store.advance_ms else 1
        if NUMBER_BYTES * windows > state_bytes_max // 2:
            raise ConfigError(
                f"store {store.name!r}: a record can be in {windows} windows. The changelog entry of a late record "
                "lists them, and can be too large. Increase max_request_size, or configure fewer windows per record"
            )
