"""Descriptions of keys, rows and windows for messages.

>>> describe_window("s", "ann", 5, 9)
"store 's', key 'ann', window 5 to 9"
"""

from __future__ import annotations

from typing import Any

KEY_SHOWN_MAX = 100


def describe_key(key: Any) -> str:
    """Return the key of a window or a row for a message; a long key is shortened.

    >>> describe_key("a" * 5), describe_key(b"a" * 102)[95:]
    ("'aaaaa'", "aaaaaaa'... (102 bytes)")
    """
    if not isinstance(key, str | bytes) or len(key) <= KEY_SHOWN_MAX:
        text = repr(key)
        return text if len(text) <= 10 * KEY_SHOWN_MAX else f"{text[: 10 * KEY_SHOWN_MAX]}..."
    return f"{key[:KEY_SHOWN_MAX]!r}... ({len(key)} {'bytes' if isinstance(key, bytes) else 'characters'})"


def describe_window(store: str | None, key: Any, start: int, end: int) -> str:
    """Return the description of a window for a message."""
    return f"{describe_result(store, key)}, window {start} to {end}"


def describe_result(store: str | None, key: Any) -> str:
    """Return the description of a row for a message, or of a window if the key is a tuple (key, start, end).

    >>> describe_result("s", "ann"), describe_result("s", ("ann", 5, 9))
    ("store 's', key 'ann'", "store 's', key 'ann', window 5 to 9")
    """
    if isinstance(key, tuple):
        return describe_window(store, *key)
    return f"{f'store {store!r}, ' if store is not None else ''}key {describe_key(key)}"
