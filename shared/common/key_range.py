"""A range of keys: one key, or the keys between two bounds, as bytes.

Text keys are UTF-8, whose bytes have the same order as the text's code points.

>>> KeyRange.of("ann").has(b"ann"), KeyRange.of(low="b", high=b"c").has(b"bob"), KeyRange.of().has(b"\\xff")
(True, True, True)
>>> KeyRange.of("ann", low="b").has(b"ann")
False
"""

from __future__ import annotations

import base64
from typing import Any, NamedTuple

from penstock.shared.common.errors import ConfigError


class KeyRange(NamedTuple):
    """A range of keys. Both bounds are inclusive; None is no bound."""

    first: bytes | None = None
    last: bytes | None = None

    @classmethod
    def of(
        cls, key: str | bytes | None = None, low: str | bytes | None = None, high: str | bytes | None = None
    ) -> KeyRange:
        """One key, the keys from `low` to `high`, or, with a key and a bound, the key if it is in that range."""
        only, lows, highs = (None if one is None else raw_key(one) for one in (key, low, high))
        if only is None:
            return cls(lows, highs)
        return cls(max(only, lows or only), min(only, only if highs is None else highs))

    def has(self, key: bytes | None) -> bool:
        """Whether a key is in the range."""
        if key is None:
            return False
        return (self.first is None or key >= self.first) and (self.last is None or key <= self.last)

    def texts(self) -> tuple[str | None, str | None]:
        """The bounds as text. Raises ConfigError if one is not UTF-8."""
        try:
            return tuple(None if bound is None else bound.decode() for bound in self)  # type: ignore[return-value]
        except UnicodeDecodeError as e:
            raise ConfigError(f"the keys are text, and {e.object!r} is not UTF-8") from None


def raw_key(key: str | bytes) -> bytes:
    """The bytes of a key, or of a bound of a key range: text is encoded as UTF-8."""
    return key.encode() if isinstance(key, str) else key


def key_of_base64(text: str) -> bytes:
    """Decode a key from base64 or URL-safe base64. Raises ValueError for any other text.

    >>> key_of_base64("_wE="), key_of_base64("/wE=")
    (b'\\xff\\x01', b'\\xff\\x01')
    """
    try:
        return base64.b64decode(text.replace("-", "+").replace("_", "/"), validate=True)
    except ValueError as e:
        raise ValueError(f"is not base64: {e}") from None


def key_in_store_type(key: Any, is_text: bool) -> Any:
    """Convert a key to a store's type of key: to text if `is_text`, else to bytes, as UTF-8.

    A key of any other type is returned unchanged. So are bytes that are not UTF-8: no store of text keys has them.

    >>> key_in_store_type(b"ann", True), key_in_store_type("ann", False), key_in_store_type(b"\\xff", True)
    ('ann', b'ann', b'\\xff')
    """
    if is_text and isinstance(key, bytes):
        try:
            return key.decode()
        except UnicodeDecodeError:
            return key
    return key.encode() if isinstance(key, str) and not is_text else key
