"""Reads a connection's responses in place: each into a buffer of its own size, without a stream in between.

aiokafka reads through asyncio's StreamReader, which copies every byte three times before a response is parsed. For
fetches that is half the work. `read_in_place` replaces the protocol of an open aiokafka connection. The socket then
writes into the response's own memory, and a response type that has `decode_frame` is given that memory. aiokafka still
handles everything else: requests, other responses, closing, timeouts.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from aiokafka import errors as kafka

SIZE_BYTES = 4
FRAME_BYTES_MAX = 1 << 30
"""A larger response is treated as a broken connection."""


class Frames(asyncio.BufferedProtocol):
    """Kafka's frames: four bytes of length, then the response."""

    def __init__(self, connection: Any, below: Any) -> None:
        self._connection = connection
        self._below = below
        self._size = bytearray(SIZE_BYTES)
        self._frame: bytearray | None = None
        self._view = memoryview(self._size)
        self._at = 0

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._view[self._at :]

    def buffer_updated(self, nbytes: int) -> None:
        self._at += nbytes
        if self._at < len(self._view):
            return
        frame = self._frame
        self._at = 0
        # The buffer that is full held the length: read the response into a buffer of that length.
        if frame is None:
            size = int.from_bytes(self._size, "big", signed=True)
            if not SIZE_BYTES <= size <= FRAME_BYTES_MAX:
                self._connection.close(exc=kafka.KafkaConnectionError(f"a response of {size} bytes"))
                return
            self._frame = bytearray(size)
            self._view = memoryview(self._frame)
            return
        self._frame, self._view = None, memoryview(self._size)
        # A response that cannot be matched or decoded ends the connection, as in aiokafka: nothing after it can be
        # trusted.
        try:
            self._handle_response_frame(frame)
        except Exception as e:
            self._connection.close(exc=e)

    def _handle_response_frame(self, frame: bytearray) -> None:
        connection = self._connection
        correlation_id, request, future = connection._requests[0]
        decode = getattr(getattr(request, "RESPONSE_TYPE", None), "decode_frame", None)
        if decode is None or int.from_bytes(frame[:SIZE_BYTES], "big", signed=True) != correlation_id:
            connection._handle_frame(bytes(frame))
            return
        # The caller may have been cancelled, or its timeout have passed.
        if not future.done():
            future.set_result(decode(frame))
        connection._last_action = time.monotonic()
        connection._requests.popleft()

    # The original protocol handles the rest.

    def eof_received(self) -> bool | None:
        answer: bool | None = self._below.eof_received()
        return answer

    def connection_lost(self, exc: Exception | None) -> None:
        self._below.connection_lost(exc)

    def pause_writing(self) -> None:
        self._below.pause_writing()

    def resume_writing(self) -> None:
        self._below.resume_writing()


def read_in_place(connection: Any) -> bool:
    """Make an open connection read in place. Returns False if requests or received bytes are pending."""
    if isinstance(connection._writer.transport.get_protocol(), Frames):
        return True
    # The new protocol would not see bytes that are in the stream already, and would read a response from its middle.
    if connection._requests or connection._reader._buffer:
        return False
    connection._writer.transport.set_protocol(Frames(connection, connection._protocol))
    return True
