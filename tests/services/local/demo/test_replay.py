"""Sending events to the ingest endpoint."""

from __future__ import annotations

import asyncio

import httpx
import msgspec
import pytest

from penstock.services.local.demo.replay import EventReplay, IngestRejected


class Endpoint:
    """A server that stores all lines but `bad` and answers like the ingest endpoint.

    `statuses` are those of the first requests, which store nothing.
    """

    def __init__(self, *statuses: int) -> None:
        self.statuses = list(statuses)
        self.requests = 0

    async def __aenter__(self) -> Endpoint:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := (await reader.readuntil(b"\r\n\r\n")).lower():
            lines = (await reader.readexactly(int(head.partition(b"content-length:")[2].split()[0]))).splitlines()
            bad = [number for number, line in enumerate(lines, start=1) if line == b"bad"]
            body = {"stored": len(lines) - len(bad), "errors": [{"line": n, "message": "no time"} for n in bad]}
            if b"stop" in lines:
                body |= {"stopped_at_line": 1, "stop_reason": "there were 1000 errors"}
            self.requests += 1
            status = self.statuses.pop(0) if self.statuses else 207
            if status != 207:
                unknown = len(lines) if status == 504 else 0
                body = {"stored": 0, "unknown": unknown, "errors": [{"line": 1, "message": "not acknowledged"}]}
            data = msgspec.json.encode(body)
            head = b"HTTP/1.1 %d x\r\nretry-after: 0\r\ncontent-length: %d\r\n\r\n" % (status, len(data))
            writer.write(head + data)


async def test_a_rejected_event_is_counted_with_its_number() -> None:
    """The number of a rejected event is counted in the whole replay, not in its request."""
    async with Endpoint() as endpoint:
        events = iter([b"good", b"good", b"bad", b"good", b"bad"])
        replay = EventReplay(endpoint.url, "t", events, lambda number, message: f"row {number}: {message}")
        assert await replay.send(2) is True
        assert await replay.send() is False
        await replay.close()
    counts = replay.counts
    assert (counts.sent, counts.acknowledged, counts.rejected) == (5, 3, 2)
    assert counts.errors == ["row 3: no time", "row 5: no time"]


async def test_a_request_that_was_stopped_is_an_error() -> None:
    """If the endpoint stopped reading a request, the replay ends with an error, so no event is lost unnoticed."""
    async with Endpoint() as endpoint:
        replay = EventReplay(endpoint.url, "t", iter([b"stop"]), lambda number, message: message)
        with pytest.raises(IngestRejected, match="there were 1000 errors"):
            await replay.send()
        await replay.close()


@pytest.mark.parametrize("content", [b"<html>", b"[]", b"[" * 100_000])
async def test_an_invalid_response_is_an_error(content: bytes) -> None:
    """A response that is not JSON, is nested too deeply or lacks the counts is an error with the endpoint's address."""
    replay = EventReplay("http://ingest", "t", iter([b"good"]), lambda number, message: message)
    with pytest.raises(IngestRejected, match=r"http://ingest.* answered 200"):
        replay._count_response(httpx.Response(200, content=content), 0, 1)
    await replay.close()


async def test_a_batch_of_which_nothing_was_stored_is_sent_again() -> None:
    """A 429 or 503 means that nothing is stored, so the batch is sent again until it is stored once."""
    async with Endpoint(503, 429, 503) as endpoint:
        replay = EventReplay(endpoint.url, "t", iter([b"good", b"good"]), lambda number, message: message)
        await replay.send()
        await replay.close()
        assert endpoint.requests == 4
    assert (replay.counts.sent, replay.counts.acknowledged, replay.counts.rejected) == (2, 2, 0)


async def test_a_batch_that_may_be_stored_is_not_sent_again() -> None:
    """A 504 ends the replay with an error, since a second copy could be stored."""
    async with Endpoint(504) as endpoint:
        replay = EventReplay(endpoint.url, "t", iter([b"good", b"good"]), lambda number, message: message)
        with pytest.raises(IngestRejected, match=r"504.*2 events 2"):
            await replay.send()
        await replay.close()
        assert endpoint.requests == 1
