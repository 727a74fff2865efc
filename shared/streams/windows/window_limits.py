"""How large a window's key and states may be, and how a window is named in what is said about it.

A key that is taken into a store must come out of it again, and may then stand twice in one record: a result has the
window's key as its own and as a field of its JSON. If that record cannot be written, no commit that closes the window
can, and the partition stands still because of a record that lies far back. So a key is measured before a store has it,
as large as it can get: twice as JSON, where control characters grow sixfold and bytes by a third. So are key and states
of a changelog entry, before a store has them.

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
"""Of a result, for all that is not its key: names and numbers of the aggregations, bounds, headers."""

ENTRY_BYTES_SPARE = 256
"""Of a changelog entry, for its envelope, the bounds of its window, and the record and batch around it."""

NUMBER_BYTES = 8
"""What an int64 or float64 takes in a changelog entry."""

LENGTH_BYTES = 4
"""What stands before bytes in a changelog entry."""

KEY_GROWTH_MAX = 12
"""A key of n characters or bytes takes no more than this times n, and the quotes: twice six, as JSON escapes."""

KEY_SHOWN_MAX = 100


def default_key_bytes_max(record_bytes_max: int) -> int:
    """What is left of a result for its key; of a small one half.

    >>> default_key_bytes_max(1024 * 1024), default_key_bytes_max(1000)
    (1032192, 500)
    """
    return record_bytes_max - min(RESULT_BYTES_SPARE, record_bytes_max // 2)


def default_state_bytes_max(record_bytes_max: int) -> int:
    """What is left of a changelog entry for its key and states; of a small one half.

    >>> default_state_bytes_max(1024 * 1024), default_state_bytes_max(100)
    (1048320, 50)
    """
    return record_bytes_max - min(ENTRY_BYTES_SPARE, record_bytes_max // 2)


def key_bytes(key: str | bytes) -> int:
    """The bytes that a key takes in a result: twice as JSON. SerializationError for text that has no UTF-8."""
    return 2 * len(msgspec.json.encode(key))


def check_key(key: Any, store: str, key_bytes_max: int) -> None:
    """Refuse what a store could not give back: DataError for what is no key, RecordTooLarge for too large a one."""
    if not isinstance(key, str | bytes):
        raise DataError(f"store {store!r}: a key must be text or bytes, got {type(key).__name__}")
    if isinstance(key, bytes) or key.isascii():
        if len(key) * KEY_GROWTH_MAX + 4 <= key_bytes_max:
            return
    else:
        try:
            key.encode()
        except UnicodeEncodeError as e:
            said = f"store {store!r}: the key {shown_key(key)} is not encodable as UTF-8: {e.reason}"
            raise DataError(said) from None
    if (size := key_bytes(key)) > key_bytes_max:
        raise RecordTooLarge(
            f"store {store!r}: the key {shown_key(key)} takes {size} bytes in a result, where it stands twice as JSON; "
            f"key_bytes_max={key_bytes_max}"
        )


def check_states(
    store: str, aggregations: Sequence[Aggregation[Any]], key: str | bytes, states: Sequence[Any], *, bytes_max: int
) -> None:
    """Refuse a row that no changelog entry can hold: RecordTooLarge, or what encoding a state raises."""
    columns = [column for one, state in zip(aggregations, states, strict=True) for column in one.to_columns(state)]
    size = len(key if isinstance(key, bytes) else key.encode())
    size += sum(LENGTH_BYTES + len(c) if isinstance(c, bytes) else NUMBER_BYTES for c in columns)
    if size > bytes_max:
        raise RecordTooLarge(
            f"store {store!r}: key {shown_key(key)}: key and state take {size} bytes in the changelog; at most "
            f"{bytes_max} fit, which is max_request_size less what stands around them"
        )


def shown_key(key: Any) -> str:
    """A key as a message can hold it.

    >>> shown_key("a" * 5), shown_key(b"a" * 102)[95:]
    ("'aaaaa'", "aaaaaaa'... (102 bytes)")
    """
    if not isinstance(key, str | bytes) or len(key) <= KEY_SHOWN_MAX:
        text = repr(key)
        return text if len(text) <= 10 * KEY_SHOWN_MAX else f"{text[: 10 * KEY_SHOWN_MAX]}..."
    return f"{key[:KEY_SHOWN_MAX]!r}... ({len(key)} {'bytes' if isinstance(key, bytes) else 'characters'})"


def name_window(store: str | None, key: Any, start: int, end: int) -> str:
    """A window in words."""
    return f"{name_result(store, key)}, window {start} to {end}"


def name_result(store: str | None, key: Any) -> str:
    """A row in words, or the window that is the key of a result.

    >>> name_result("s", "ann"), name_result("s", ("ann", 5, 9))
    ("store 's', key 'ann'", "store 's', key 'ann', window 5 to 9")
    """
    if isinstance(key, tuple):
        return name_window(store, *key)
    return f"{f'store {store!r}, ' if store is not None else ''}key {shown_key(key)}"
