"""The size limits of a window's key and states, and the names of windows in messages.

A key that a store takes must also be written, and it may occur twice in one record: a result has the window's key as
its own key and as a field of its JSON. If that record cannot be written, no commit that closes the window succeeds, and
an old record stops the partition. So a key is measured at its maximum size before a store takes it: twice as JSON,
where control characters grow sixfold and bytes by a third. The key and states of a changelog entry are also measured
before a store takes them.

>>> key_bytes("ann"), key_bytes(b"ann"), key_bytes("\\0")
(10, 12, 16)
>>> name_window("s", "ann", 5, 9)
"store 's', key 'ann', window 5 to 9"
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from penstock.shared.common.errors import DataError, RecordTooLarge
from penstock.shared.streams.aggregations.aggregation import Aggregation

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

KEY_SHOWN_MAX = 100


def default_key_bytes_max(record_bytes_max: int) -> int:
    """Return the bytes of a result that remain for its key: at least half.

    >>> default_key_bytes_max(1024 * 1024), default_key_bytes_max(1000)
    (1032192, 500)
    """
    return record_bytes_max - min(RESULT_BYTES_SPARE, record_bytes_max // 2)


def default_state_bytes_max(record_bytes_max: int) -> int:
    """Return the bytes of a changelog entry that remain for its key and states: at least half.

    >>> default_state_bytes_max(1024 * 1024), default_state_bytes_max(100)
    (1048320, 50)
    """
    return record_bytes_max - min(ENTRY_BYTES_SPARE, record_bytes_max // 2)


def key_bytes(key: str | bytes) -> int:
    """Return the bytes of a key in a result: twice as JSON. Raises SerializationError for text without UTF-8."""
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
            message = f"store {store!r}: the key {shown_key(key)} is not encodable as UTF-8: {e.reason}"
            raise DataError(message) from None
    if (size := key_bytes(key)) > key_bytes_max:
        raise RecordTooLarge(
            f"store {store!r}: the key {shown_key(key)} takes {size} bytes in a result, where it stands twice as JSON; "
            f"key_bytes_max={key_bytes_max}"
        )


def check_states(
    store: str, aggregations: Sequence[Aggregation[Any]], key: str | bytes, states: Sequence[Any], *, bytes_max: int
) -> None:
    """Raise RecordTooLarge for a row that no changelog entry can hold, or the error of encoding a state."""
    columns = [column for one, state in zip(aggregations, states, strict=True) for column in one.to_columns(state)]
    size = len(key if isinstance(key, bytes) else key.encode())
    size += sum(LENGTH_BYTES + len(c) if isinstance(c, bytes) else NUMBER_BYTES for c in columns)
    if size > bytes_max:
        raise RecordTooLarge(
            f"store {store!r}: key {shown_key(key)}: key and state take {size} bytes in the changelog; at most "
            f"{bytes_max} fit, which is max_request_size minus the bytes around them"
        )


def shown_key(key: Any) -> str:
    """Return a key as messages show it.

    >>> shown_key("a" * 5), shown_key(b"a" * 102)[95:]
    ("'aaaaa'", "aaaaaaa'... (102 bytes)")
    """
    if not isinstance(key, str | bytes) or len(key) <= KEY_SHOWN_MAX:
        text = repr(key)
        return text if len(text) <= 10 * KEY_SHOWN_MAX else f"{text[: 10 * KEY_SHOWN_MAX]}..."
    return f"{key[:KEY_SHOWN_MAX]!r}... ({len(key)} {'bytes' if isinstance(key, bytes) else 'characters'})"


def name_window(store: str | None, key: Any, start: int, end: int) -> str:
    """Return a window's description for a message."""
    return f"{name_result(store, key)}, window {start} to {end}"


def name_result(store: str | None, key: Any) -> str:
    """Return the description of a row, or of the window that is a result's key.

    >>> name_result("s", "ann"), name_result("s", ("ann", 5, 9))
    ("store 's', key 'ann'", "store 's', key 'ann', window 5 to 9")
    """
    if isinstance(key, tuple):
        return name_window(store, *key)
    return f"{f'store {store!r}, ' if store is not None else ''}key {shown_key(key)}"
