"""A request's body with a limit on every pause."""

from __future__ import annotations

import asyncio
import gzip
from typing import Any

import pytest

from penstock.api.http.body import CHUNK_BYTES, BodyReader, BodyStalled, ClientDisconnected, Drain, ServiceShuttingDown
from penstock.api.http.content_encoding import STEP_BYTES, Inflater
from penstock.api.http.problem import Problem
from penstock.api.ingest.turns import BULK_BYTES, BULK_EVENTS, FREE, Turns
from tests.api.conftest import after


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
    """Empty chunks are chunks; after the last one there is None, again and again."""
    reader = BodyReader(receiving(part(b"a"), part(b""), {"type": "http.request", "body": b"b"}), Drain(), 1_000)
    assert [await reader.next() for _ in range(5)] == [b"a", b"", b"b", None, None]


async def test_a_whole_body_is_bounded() -> None:
    """Exactly the limit is fine; one byte more is 413."""
    assert await BodyReader(receiving(part(b"ab"), part(b"c", False)), Drain(), 1_000).read_all(3) == b"abc"
    with pytest.raises(Problem, match="max_body_bytes=2"):
        await BodyReader(receiving(part(b"ab"), part(b"c", False)), Drain(), 1_000).read_all(2)


async def test_a_pause_over_the_limit_is_a_stall() -> None:
    """The error names the setting."""
    with pytest.raises(BodyStalled, match="body_timeout_ms=5"):
        await BodyReader(receiving(), Drain(), 5).next()


async def test_a_client_that_leaves_is_told_apart_from_the_end() -> None:
    """A cut-off body is not a complete one."""
    reader = BodyReader(receiving(part(b"a"), {"type": "http.disconnect"}), Drain(), 1_000)
    assert await reader.next() == b"a"
    with pytest.raises(ClientDisconnected):
        await reader.next()


@pytest.mark.parametrize("more", [True, False])
async def test_a_client_that_leaves_ends_the_inflating(more: bool) -> None:
    """A small body that holds much is not inflated to its end for nobody, whether or not more of it was to come."""
    left, body = asyncio.Event(), gzip.compress(bytes(100 * STEP_BYTES))
    messages = [part(body, more)]

    async def receive() -> dict[str, Any]:
        if messages:
            return messages.pop()
        await left.wait()
        return {"type": "http.disconnect"}

    reader = BodyReader(receive, Drain(), 1_000, inflater=Inflater("gzip"))
    assert await reader.next()
    assert await reader.next()
    left.set()
    with pytest.raises(ClientDisconnected):
        await reader.read_all(50 * STEP_BYTES)


async def test_draining_reaches_bodies_that_are_being_waited_for() -> None:
    """A long pause that was allowed before is cut to the grace; a shorter one is not made longer."""
    drain = Drain()
    waiting = [asyncio.ensure_future(BodyReader(receiving(), drain, ms).next()) for ms in (60_000, 1)]
    await asyncio.sleep(0)
    assert "waiting=2" in repr(drain)
    drain.begin(500)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServiceShuttingDown, BodyStalled]
    assert drain.begun


async def test_draining_reaches_bodies_that_are_read_later() -> None:
    """After the deadline nothing is waited for, but what has come already is still read."""
    drain = Drain()
    drain.begin(0)
    assert await BodyReader(receiving(part(b"a")), drain, 60_000).next() == b"a"
    with pytest.raises(ServiceShuttingDown):
        await BodyReader(receiving(), drain, 60_000).next()


def dripping(one: bytes, every_s: float = 0.004) -> Any:
    """A client that sends the same few bytes again and again, for ever."""

    async def receive() -> dict[str, Any]:
        await after(every_s)
        return part(one)

    return receive


async def test_a_line_that_never_ends_is_a_stall() -> None:
    """Bytes that come now and then do not make its time longer; a line that ends does."""
    reader = BodyReader(dripping(b"x"), Drain(), 30)

    async def read() -> None:
        while await reader.next():
            reader.chunk_parsed(ended=0, unfinished=True)

    with pytest.raises(BodyStalled, match="did not end within body_timeout_ms=30"):
        await read()
    lines = BodyReader(dripping(b"x\n", 0.02), Drain(), 400)
    for _ in range(30):
        await lines.next()
        lines.chunk_parsed(ended=1, unfinished=True)


async def test_time_that_the_service_takes_is_not_the_clients() -> None:
    """A line's time goes on only while its bytes are waited for: a request may wait long for its turn."""
    reader = BodyReader(receiving(part(b"x"), part(b"y")), Drain(), 30)
    await reader.next()
    reader.chunk_parsed(ended=0, unfinished=True)
    await after(0.06)
    assert await reader.next() == b"y"
    with pytest.raises(BodyStalled, match="did not end within body_timeout_ms=30"):
        await reader.next()


async def test_a_turn_is_needed_by_bulk_requests_alone() -> None:
    """By the length it declares, by what came of it, and by its events; where the service leaves nobody waits."""
    turns, drain = Turns(1, 1_000), Drain()

    def reader(declared: int = 0) -> BodyReader:
        return BodyReader(receiving(part(bytes(BULK_BYTES + 1))), drain, 1_000, declared_bytes=declared, turns=turns)

    held = await reader(BULK_BYTES + 1).turn(0)
    for small in (reader(), reader(BULK_BYTES)):
        assert await small.turn(BULK_EVENTS) is FREE
    long, many = reader(), reader()
    await long.next()
    waiting = [asyncio.ensure_future(long.turn(0)), asyncio.ensure_future(many.turn(BULK_EVENTS + 1))]
    await asyncio.sleep(0)
    assert repr(turns) == "Turns(free=0, waiting=2, in_flight=0)"
    drain.begin(0)
    outcomes = await asyncio.gather(*waiting, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [ServiceShuttingDown, ServiceShuttingDown]
    held.release()
    assert await BodyReader.of(b"1").turn(BULK_EVENTS + 1) is FREE


async def test_a_whole_body_has_a_deadline_of_its_own() -> None:
    """However steadily its bytes come."""
    with pytest.raises(BodyStalled, match="whole_body_timeout_ms=40"):
        await BodyReader(dripping(b"x"), Drain(), 30_000, whole_timeout_ms=40).read_all(1_000_000)


@pytest.mark.parametrize("size", [0, 1, CHUNK_BYTES, CHUNK_BYTES + 1, 3 * CHUNK_BYTES])
async def test_a_body_that_was_read_comes_in_parts(size: int) -> None:
    """All of it, none longer than CHUNK_BYTES."""
    reader, parts = BodyReader.of(bytes(size)), []
    while (chunk := await reader.next()) is not None:
        parts.append(chunk)
    assert sum(map(len, parts)) == size
    assert max(map(len, parts)) <= CHUNK_BYTES
