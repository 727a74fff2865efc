"""Decodes keys and values in REST Proxy's embedded formats.

JSON is stored as the received bytes. BINARY is base64, STRING is UTF-8. A null key is no key, and a null value is a
tombstone.

>>> decode_embedded(msgspec.Raw(b'{"a": 1}'), "JSON", "value"), decode_embedded(msgspec.Raw(b'"YW5u"'), "BINARY", "key")
(b'{"a": 1}', b'ann')
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Literal

import msgspec

from penstock.api.ingest.event import EventRejected
from penstock.shared.common.json_decoding import InvalidJson, decode_json

EmbeddedFormat = Literal["BINARY", "JSON", "STRING"]
INVALID = "INVALID_RECORD"


def decode_embedded(data: msgspec.Raw, data_format: EmbeddedFormat, name: str) -> bytes | None:
    """Return the bytes of a key or a value in an embedded format; None for null.

    Raises EventRejected if `data` does not have the format. `name` ("key" or "value") is for the error message.
    """
    if data_format == "JSON":
        content = bytes(data)
        try:
            # msgspec does not check that a Raw value is UTF-8.
            content.decode()
        except UnicodeDecodeError:
            raise EventRejected(INVALID, f"{name} is not UTF-8") from None
        return None if content == b"null" else content
    text = decode_request(bytes(data), str | None)
    if text is None or data_format == "STRING":
        return None if text is None else text.encode()
    return decode_base64(text, name)


def decode_base64(text: str, name: str) -> bytes:
    """Return the bytes of a BINARY key or value, or of a header, which a request to REST Proxy has in base64.

    Raises EventRejected, with `name` in its message, if `text` is not base64.
    """
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise EventRejected(INVALID, f"{name} is not base64") from None


def decode_request(body: bytes, kind: Any) -> Any:
    """Return a value of a type, decoded from JSON in a request to REST Proxy. Raises EventRejected for other data."""
    try:
        return decode_json(body, kind)
    except InvalidJson as e:
        raise EventRejected(INVALID, str(e)) from None
