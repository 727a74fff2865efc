"""Continuations of responses that are divided into pages: the position of a page's last row, as text.

The request for the next page contains the text. A position identifies a row, so another instance, or a restarted one,
can return the next page. The text contains a digest of the query, and is rejected in a request with another query.

>>> pages = ContinuationCodec(RowPosition, "shop", "sessions")
>>> pages.decode(pages.encode(RowPosition(0, b"ann", 5)))
RowPosition(partition=0, key=b'ann', start=5)
"""

from __future__ import annotations

import base64
import binascii
from hashlib import blake2b
from typing import Any, Generic, TypeVar

import msgspec

from penstock.shared.common.errors import DataError
from penstock.shared.common.row_positions import OpenPosition, RowPosition, WindowPosition

DIGEST_BYTES = 8
SHOWN_MAX = 100
"""Characters of a continuation that an error shows; keys may be long."""

PositionT = TypeVar("PositionT", RowPosition, WindowPosition, OpenPosition)


class WrongContinuation(DataError):
    """A continuation that no response to this query returned."""


class ContinuationCodec(Generic[PositionT]):
    """Encodes the continuations for one query. `query` are values that msgpack can encode.

    A request for the first page has the continuation None, and so has the response with the last page.
    """

    def __init__(self, kind: type[PositionT], *query: Any) -> None:
        packed_query = msgspec.msgpack.encode((kind.__name__, query))
        self._shape: Any = tuple[bytes, kind]  # type: ignore[valid-type]
        self._digest = blake2b(packed_query, digest_size=DIGEST_BYTES).digest()

    def encode(self, position: PositionT | None) -> str | None:
        """The continuation after a position: text that a URL can contain without escapes; None for None."""
        if position is None:
            return None
        packed = msgspec.msgpack.encode((self._digest, position))
        return base64.urlsafe_b64encode(packed).decode().rstrip("=")

    def decode(self, text: str | None) -> PositionT | None:
        """The position in a continuation; None for None.

        Raises WrongContinuation if the text is not a continuation for this query.
        """
        if text is None:
            return None
        shown = repr(text if len(text) <= SHOWN_MAX else text[:SHOWN_MAX] + "…")
        try:
            packed = base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
            digest, position = msgspec.msgpack.decode(packed, type=self._shape)
        except (binascii.Error, ValueError, msgspec.MsgspecError) as e:
            raise WrongContinuation(
                f"continuation {shown} is invalid: use the one of the previous page unchanged"
            ) from e
        if digest != self._digest:
            raise WrongContinuation(
                f"continuation {shown} belongs to another query: only the number of rows may differ"
            )
        found: PositionT = position
        return found
