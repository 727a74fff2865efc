"""Responses decoded in place from any chunks that the socket delivers."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.connection.connection import Connection
from penstock.shared.clients.connection.sockets import FRAME_BYTES_MAX, Frames, read_in_place
from penstock.shared.clients.protocol.fetch import FetchRequest
from penstock.shared.common.settings import KafkaSettings
from penstock.shared.testing.fake_broker import FakeCluster


class Whole:
    """A response that consists of its raw bytes."""

    @staticmethod
    def decode_frame(frame: bytearray) -> bytes:
        if frame[4:] == b"broken":
            raise ValueError("broken")
        return bytes(frame)


class FetchLike:
    RESPONSE_TYPE = Whole


class Other:
    RESPONSE_TYPE = object


class Response:
    """A future that records its result."""

    def __init__(self) -> None:
        self.result: bytes | None = None

    def done(self) -> bool:
        return self.result is not None

    def set_result(self, result: bytes) -> None:
        self.result = result


class Recording:
    """Records calls of the parts of aiokafka's connection that are used."""

    def __init__(self, *requests: tuple[int, Any]) -> None:
        self.responses = [Response() for _ in requests]
        self._requests = deque(
            (number, request, response) for (number, request), response in zip(requests, self.responses, strict=True)
        )
        self._last_action = 0.0
        self.handed_on: list[bytes] = []
        self.closed: list[Exception] = []

    def _handle_frame(self, frame: bytes) -> None:
        self.handed_on.append(frame)
        self._requests.popleft()

    def close(self, exc: Exception) -> None:
        self.closed.append(exc)


def framed(number: int, body: bytes) -> bytes:
    return (4 + len(body)).to_bytes(4, "big") + number.to_bytes(4, "big") + body


def feed(frames: Frames, data: bytes, sizes: list[int]) -> None:
    at, turn = 0, 0
    while at < len(data):
        buffer = frames.get_buffer(-1)
        size = min(len(buffer), len(data) - at, sizes[turn % len(sizes)])
        buffer[:size] = data[at : at + size]
        frames.buffer_updated(size)
        at, turn = at + size, turn + 1


@given(
    bodies=st.lists(st.tuples(st.booleans(), st.binary(max_size=50)), min_size=1, max_size=6),
    sizes=st.lists(st.integers(1, 30), min_size=1, max_size=5),
)
def test_frames_are_reassembled_from_any_chunks(bodies: list[tuple[bool, bytes]], sizes: list[int]) -> None:
    """For any chunks, each request gets its own response. Responses without an in-place decoder go to aiokafka."""
    connection = Recording(*((i, FetchLike() if ours else Other()) for i, (ours, _) in enumerate(bodies)))
    feed(Frames(connection, None), b"".join(framed(i, body) for i, (_, body) in enumerate(bodies)), sizes)
    whole = [framed(i, body)[4:] for i, (_, body) in enumerate(bodies)]
    if not connection.closed:
        assert [a.result for a, (ours, _) in zip(connection.responses, bodies, strict=True) if ours] == [
            frame for frame, (ours, _) in zip(whole, bodies, strict=True) if ours
        ]
        assert connection.handed_on == [frame for frame, (ours, _) in zip(whole, bodies, strict=True) if not ours]
        assert not connection._requests


def test_an_unexpected_correlation_id_is_passed_to_aiokafka() -> None:
    """A response with an unexpected correlation id is passed to aiokafka."""
    connection = Recording((1, FetchLike()))
    feed(Frames(connection, None), framed(2, b"x"), [100])
    assert (connection.handed_on, connection.responses[0].result) == ([framed(2, b"x")[4:]], None)


def test_a_response_that_cannot_be_read_closes_the_connection() -> None:
    """A response that cannot be decoded, or with an invalid size, closes the connection. aiokafka fails the request's
    future."""
    connection = Recording((1, FetchLike()))
    feed(Frames(connection, None), framed(1, b"broken"), [100])
    assert [str(e) for e in connection.closed] == ["broken"]
    for size in (0, 3, -1, FRAME_BYTES_MAX + 1):
        connection = Recording((1, FetchLike()))
        feed(Frames(connection, None), size.to_bytes(4, "big", signed=True), [4])
        assert str(connection.closed[0]).endswith(f"a response of {size} bytes")


async def test_a_connection_of_aiokafka() -> None:
    """An open connection is upgraded once, between two responses, and serves every kind of request afterwards."""
    async with FakeCluster() as cluster:
        cluster.create_topic("t")
        connection = Connection(KafkaSettings(bootstrap_servers=cluster.bootstrap_servers))
        await connection.open()
        node = connection.nodes()[0]
        request = FetchRequest(300, 1, 1 << 20, False, [("t", [(0, 0, -1, 1 << 20)])])
        waiting = asyncio.create_task(connection.fetch(node, request, "fetch"))
        assert (await waiting).partitions["t", 0].high_watermark == 0
        socket = connection._client._conns[node, 0]
        assert isinstance(socket._writer.transport.get_protocol(), Frames)
        assert read_in_place(socket)
        assert await connection.refresh_metadata()
        await connection.close()
