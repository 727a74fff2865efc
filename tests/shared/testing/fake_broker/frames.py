"""Frames of the wire format from a client's side: requests are encoded, responses are decoded."""

from __future__ import annotations

import struct

from penstock.shared.testing.fake_broker.codec import Message
from penstock.shared.testing.fake_broker.protocol import Api, SupportedApi

HEADER = struct.Struct(">hhi")
CORRELATION = struct.Struct(">i")
LENGTH = struct.Struct(">h")


def encode_request(supported: SupportedApi, version: int, correlation_id: int, client_id: str, body: Message) -> bytes:
    """The frame of a request, without the length in front."""
    head = HEADER.pack(supported.api, version, correlation_id) + LENGTH.pack(len(client_id)) + client_id.encode()
    return head + (b"\0" if supported.is_flexible(version) else b"") + supported.request.encode(body, version)


def decode_response(supported: SupportedApi, version: int, frame: bytes) -> tuple[int, Message, int]:
    """A response's correlation id, its body and the position after it."""
    at = 5 if supported.is_flexible(version) and supported.api is not Api.API_VERSIONS else 4
    body, end = supported.response.decode(frame, version, at)
    return CORRELATION.unpack_from(frame)[0], body, end
