"""Filters keys by a text that a user enters: a part of the key's text, JSON in any spacing and order, or a number.

>>> [KeyFilter("UA").has(key) for key in ("UA-EWR", b"UA-EWR", "ua")]
[True, True, False]
>>> KeyFilter('{"user": 5, "in": "a"}').has(b'{"in":"a","user":5}')
True
>>> KeyFilter("7").has(bytes(7) + b"\\x07"), KeyFilter("-1").has(b"\\xff" * 4), KeyFilter("7").has(bytes(7) + b"\\x08")
(True, True, False)
"""

from __future__ import annotations

from typing import Any

from penstock.shared.common.json_decoding import InvalidJson, decode_json
from penstock.shared.streams.topology import KeyType

# Kafka's IntegerSerializer and LongSerializer write keys of these sizes.
INTEGER_BYTES = (4, 8)


class KeyFilter:
    """Matches a key that contains the text, is the same JSON object or array, or is the text's integer as bytes.

    An empty text matches all keys.
    """

    def __init__(self, text: str) -> None:
        self._text = text
        self._json = _decode_json_key(text) if text[:1] in ("{", "[") else None
        self._numbers = _encode_integer_keys(text)

    def has(self, key: str | bytes) -> bool:
        """Return whether a key matches."""
        if self._text in key_text(key) or key in self._numbers:
            return True
        return self._json is not None and self._json == _decode_json_key(key)

    def exact(self, key_type: KeyType) -> list[str | bytes]:
        """Return the keys that the text names exactly, as a store of that type has them."""
        if not self._text:
            return []
        return [self._text] if key_type == "string" else [self._text.encode(), *self._numbers]


def key_text(key: Any) -> str:
    """Return a key as the text that a key filter searches, and that responses show.

    >>> key_text(b"UA-EWR"), key_text(7), key_text(b"\\xff")
    ('UA-EWR', '7', '\\\\xff')
    """
    return key.decode(errors="backslashreplace") if isinstance(key, bytes) else str(key)


def _encode_integer_keys(text: str) -> tuple[bytes, ...]:
    try:
        number = int(text)
    except ValueError:
        return ()
    return tuple(
        number.to_bytes(size, "big", signed=True)
        for size in INTEGER_BYTES
        if -(1 << (8 * size - 1)) <= number < 1 << (8 * size - 1)
    )


def _decode_json_key(text: str | bytes) -> Any:
    try:
        return decode_json(text)
    except InvalidJson:
        return None
