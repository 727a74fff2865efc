"""How large a window's key may be, and how a window is named in what is said about it.

A key that is taken into a store must come out of it again, and may then stand twice in one record: a result has the
window's key as its own and as a field of its JSON. If that record cannot be written, no commit that closes the window
can, and the partition stands still because of a record that lies far back. So a key is measured before a store has it,
as large as it can get: twice as JSON, where control characters grow sixfold and bytes by a third.

>>> key_bytes("ann"), key_bytes(b"ann"), key_bytes("\\0")
(10, 12, 16)
>>> name_window("s", "ann", 5, 9)
"store 's', key 'ann', window 5 to 9"
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.shared.common.errors import DataError, RecordTooLarge

RESULT_BYTES_SPARE = 16 * 1024
"""Of a result, for all that is not its key: names and numbers of the aggregations, bounds, headers."""

KEY_GROWTH_MAX = 12
"""A key of n characters or bytes takes no more than this times n, and the quotes: twice six, as JSON escapes."""

KEY_SHOWN_MAX = 100


def default_key_bytes_max(record_bytes_max: int) -> int:
    """What is left of a record for its key; of a small one half.

    >>> default_key_bytes_max(1024 * 1024), default_key_bytes_max(1000)
    (1032192, 500)
    """
    return record_bytes_max - min(RESULT_BYTES_SPARE, record_bytes_max // 2)


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
