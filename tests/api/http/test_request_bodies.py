"""Reading of request bodies within limits of time and size, and their decompression, step by step."""

from __future__ import annotations

import asyncio
import gzip
import random
import zlib
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.datastructures import Headers

from penstock.api.http.body import (
    CHUNK_BYTES,
    BodyDrain,
    BodyReader,
    BodyStalled,
    ClientDisconnected,
    ServiceShuttingDown,
)
from penstock.api.http.content_encoding import STEP_BYTES, CorruptBody, Inflater, inflater_of, zstd
from penstock.api.http.problem import Problem
from penstock.api.http.turns import BULK_BYTES, BULK_EVENTS, FREE, Turns
from tests.virtual_time import let_pass


def receiving(*messages: dict[str, Any]) -> Any:
    left = list(messages)

    async def receive() -> dict[str, Any]:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


def part(body: bytes, more: bool = True) -> dict[str, Any]:
    return {"type": "http.request", "body": body, "more_body": more}


async def test_chunks_come_in_order_and_end() -> None:
    """Chunks are returned in order, empty ones too, and then None."""
    reader = BodyReader(receiving(part(b"a"), part(b""), {"type": "http.request", "body": b"b"}), BodyDrain(), 1_000)
    assert [await reader.next() for _ in range(5)] == [b"a", b"", b"b", None, None]


async def test_a_whole_body_is_bounded() -> None:
    """A body of exactly the limit is accepted; one byte more is a Problem that names the setting."""
    assert await BodyReader(receiving(part(b"ab"), part(b"c", False)), BodyDrain(), 1_000).read_all(3) == b"abc"
    with pytest.raises(Problem, match="max_body_bytes=2"):
        await BodyReader(receiving(part(b"ab"), part(b"c", False)), BodyDrain(), 1_000).read_all(2)


async def test_a_pause_over_the_limit_is_a_stall() -> None:
    """A pause over the limit raises BodyStalled with the setting's name."""
    with pytest.raises(BodyStalled, match="body_timeout_ms=5"):
        await BodyReader(receiving(), BodyDrain(), 5).next()


async def test_a_disconnect_is_not_the_end_of_the_body() -> None:
    """A disconnect raises ClientDisconnected."""
    reader = BodyReader(receiving(part(b"a"), {"type": "http.disconnect"}), BodyDrain(), 1_000)
    assert await reader.next() == b"a"
    with pytest.raises(ClientDisconnected):
        await reader.next()


@pytest.mark.parametrize("more", [True, False])
async def test_a_disconnect_stops_decompression(more: bool) -> None:
    """A disconnect stops the decompression of a body, whether it was complete or not."""
    left, body = asyncio.Event(), gzip.compress(bytes(100 * STEP_BYTES))
    messages = [part(body, more)]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    reader = BodyReader(receive, BodyDrain(), 1_000, inflater=Inflater("gzip"))
    assert await reader.next()
    assert await reader.next()
    left.set()
    with pytest.raises(ClientDisconnected):
        await reader.read_all(50 * STEP_BYTES)


async def test_draining_shortens_waits_for_bodies() -> None:
    """Draining shortens waits for bodies to the grace period and lengthens none."""
    drain = BodyDrain()
    waiting = [asyncio.ensure_future(BodyReader(receiving(), drain, ms).next()) for ms in (60_000, 1)]
    await asyncio.sleep(0)
    assert "waiting=2" in repr(drain)
    drain.begin(500)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServiceShuttingDown, BodyStalled]
    assert drain.begun


async def test_draining_reaches_bodies_that_are_read_later() -> None:
    """After the drain's deadline received data is still read, but no more is awaited."""
    drain = BodyDrain()
    drain.begin(0)
    assert await BodyReader(receiving(part(b"a")), drain, 60_000).next() == b"a"
    with pytest.raises(ServiceShuttingDown):
        await BodyReader(receiving(), drain, 60_000).next()


def dripping(one: bytes, every_s: float = 0.004) -> Any:
    """A client that sends the same few bytes repeatedly, without end."""

    async def receive() -> dict[str, Any]:
        await let_pass(every_s)
        return part(one)

    return receive


async def test_a_line_that_never_ends_is_a_stall() -> None:
    """A line that does not end in time raises BodyStalled, even if bytes keep coming; each
    ended line restarts the time.
    """
    reader = BodyReader(dripping(b"x"), BodyDrain(), 30)

    async def read() -> None:
        while await reader.next():
            reader.chunk_split(ended=0, unfinished=True)

    with pytest.raises(BodyStalled, match="body_timeout_ms=30"):
        await read()
    lines = BodyReader(dripping(b"x\n", 0.02), BodyDrain(), 400)
    for _ in range(30):
        await lines.next()
        lines.chunk_split(ended=1, unfinished=True)


async def test_a_lines_time_excludes_the_services_own_time() -> None:
    """A line's time runs only while its bytes are awaited, so a request may wait for its turn."""
    reader = BodyReader(receiving(part(b"x"), part(b"y")), BodyDrain(), 30)
    await reader.next()
    reader.chunk_split(ended=0, unfinished=True)
    await let_pass(0.06)
    assert await reader.next() == b"y"
    with pytest.raises(BodyStalled, match="body_timeout_ms=30"):
        await reader.next()


async def test_a_turn_is_needed_by_bulk_requests_alone() -> None:
    """Only a request with many declared bytes, received bytes or events needs a turn; shutting
    down ends the wait for one.
    """
    turns, drain = Turns(1, 1_000), BodyDrain()

    def reader(declared: int = 0) -> BodyReader:
        return BodyReader(receiving(part(bytes(BULK_BYTES + 1))), drain, 1_000, declared_bytes=declared, turns=turns)

    held = await reader(BULK_BYTES + 1).wait_for_turn(0)
    for small in (reader(), reader(BULK_BYTES)):
        assert await small.wait_for_turn(BULK_EVENTS) is FREE
    long, many = reader(), reader()
    await long.next()
    waiting = [asyncio.ensure_future(long.wait_for_turn(0)), asyncio.ensure_future(many.wait_for_turn(BULK_EVENTS + 1))]
    await asyncio.sleep(0)
    assert repr(turns) == "Turns(free=0, waiting=2, in_flight=0)"
    drain.begin(0)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServiceShuttingDown, ServiceShuttingDown]
    held.release()
    assert await BodyReader.of(b"1").wait_for_turn(BULK_EVENTS + 1) is FREE


async def test_a_whole_body_has_a_deadline_of_its_own() -> None:
    """`whole_body_timeout_ms` limits the time of a whole body."""
    with pytest.raises(BodyStalled, match="whole_body_timeout_ms=40"):
        await BodyReader(dripping(b"x"), BodyDrain(), 30_000, whole_timeout_ms=40).read_all(1_000_000)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_a_body_that_was_read_comes_in_parts(size: int) -> None:
    """A body that was read is returned completely in parts of at most CHUNK_BYTES."""
    reader, parts = BodyReader.of(bytes(size)), []
    while (chunk := await reader.next()) is not None:
        parts.append(chunk)
    assert sum(map(len, parts)) == size
    assert max(map(len, parts)) <= CHUNK_BYTES


Compress = Callable[[bytes], bytes]
CHECKED = {zstd.CompressionParameter.checksum_flag: 1}
COMPRESS: dict[str, Compress] = {"gzip": gzip.compress, "zstd": lambda data: zstd.compress(data, options=CHECKED)}
ENCODINGS = list(COMPRESS)


def steps(encoding: str, *chunks: bytes) -> list[bytes]:
    """The result of each step for a whole body."""
    inflater, found = Inflater(encoding), []
    for chunk in chunks:
        inflater.feed(chunk)
        while inflater.pending:
            found.append(inflater.step())
    inflater.close()
    return found


@pytest.mark.parametrize("encoding", ENCODINGS)
@given(parts=st.lists(st.binary(max_size=300), min_size=1, max_size=4), cut=st.integers(1, 50))
def test_the_data_is_the_same_however_the_body_is_cut(encoding: str, parts: list[bytes], cut: int) -> None:
    """The data is the same however the body is split, and with several members or frames."""
    body = b"".join(COMPRESS[encoding](part) for part in parts)
    found = steps(encoding, *(body[i : i + cut] for i in range(0, len(body), cut)))
    assert b"".join(found) == b"".join(parts)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("repeats", [1, 4])
def test_no_step_returns_more_than_the_limit(encoding: str, repeats: int) -> None:
    """A small body that decompresses to 64 MB is returned in steps of 64 KiB."""
    body = COMPRESS[encoding](bytes(16 * 1_048_576)) * repeats
    assert len(body) < 100_000
    found = steps(encoding, body)
    assert max(map(len, found)) == STEP_BYTES
    assert sum(map(len, found)) == repeats * 16 * 1_048_576


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_data_that_cannot_be_compressed_is_whole(encoding: str) -> None:
    """Random data over several chunks is returned completely."""
    data = random.Random(7).randbytes(500_000)
    body = COMPRESS[encoding](data)
    assert b"".join(steps(encoding, *(body[i : i + 65_536] for i in range(0, len(body), 65_536)))) == data


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("kept", [0, 1, 5, 12, -1])
def test_a_body_that_ends_too_early_is_corrupt(encoding: str, kept: int) -> None:
    """A truncated or empty body is a CorruptBody."""
    body = COMPRESS[encoding](b"some data that is long enough")
    with pytest.raises(CorruptBody, match=encoding):
        steps(encoding, body[:kept])


@pytest.mark.parametrize("encoding", ENCODINGS)
def test_a_body_that_is_something_else_is_corrupt(encoding: str) -> None:
    """Plain text, a flipped byte and trailing data are a CorruptBody."""
    body = COMPRESS[encoding](random.Random(7).randbytes(1_000))
    flipped = bytes([*body[:500], body[500] ^ 1, *body[501:]])
    for wrong in (b'{"a":1}', flipped, body + b"more"):
        with pytest.raises(CorruptBody, match=encoding):
            steps(encoding, wrong)


def test_a_deflate_stream_is_not_gzip() -> None:
    """A zlib stream is not accepted as gzip."""
    with pytest.raises(CorruptBody):
        steps("gzip", zlib.compress(b"a"))


def test_a_frame_with_a_large_window_is_an_error() -> None:
    """A zstd frame with a window over 8 MiB is a CorruptBody."""
    options = {zstd.CompressionParameter.window_log: 27, zstd.CompressionParameter.content_size_flag: 0}
    frame = zstd.compress(random.Random(7).randbytes(1_000) * 20_000, options=options)
    with pytest.raises(CorruptBody, match="memory"):
        steps("zstd", frame)


@pytest.mark.parametrize("named", [[], [""], ["identity"], ["Identity", ""]])
def test_a_plain_body_needs_no_inflater(named: list[str]) -> None:
    """A body without an encoding or with `identity` is not decompressed."""
    assert inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named])) is None


@pytest.mark.parametrize("named", [["gzip"], ["GZIP"], ["x-gzip"], ["zstd"], ["identity, gzip"]])
def test_a_known_encoding_is_accepted(named: list[str]) -> None:
    """A known encoding is accepted in any case and by its old name."""
    assert inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named])) is not None


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (["br"], "'br' is not supported"),
        (["gzip, zstd"], "several"),
        (["gzip", "gzip"], "several"),
        (["b" * 99], "bbb'"),
    ],
)
def test_an_unknown_encoding_is_a_415(named: list[str], message: str) -> None:
    """An unknown encoding or several are a 415 with the supported encodings in the Accept-Encoding header."""
    with pytest.raises(Problem) as e:
        inflater_of(Headers(raw=[(b"content-encoding", name.encode()) for name in named]))
    response = e.value.response()
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, zstd")
    assert message in e.value.detail
    assert len(e.value.detail) < 200
