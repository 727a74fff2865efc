"""Events sent to the ingest endpoint."""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from services.local.demo.replay import IngestRefused, Replay


class Endpoint:
    """A server that stores every line but those that say so, and answers as the ingest does."""

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
            data = msgspec.json.encode(body)
            writer.write(b"HTTP/1.1 207 x\r\ncontent-length: %d\r\n\r\n%b" % (len(data), data))


async def test_a_refusal_is_counted_and_named_by_its_number() -> None:
    """The number is that of the event in the whole replay, not of the line in its request."""
    async with Endpoint() as endpoint:
        events = iter([b"good", b"good", b"bad", b"good", b"bad"])
        replay = Replay(endpoint.url, "t", events, lambda number, message: f"row {number}: {message}")
        assert await replay.send(2) is True
        assert await replay.send() is False
        await replay.close()
    counts = replay.counts
    assert (counts.sent, counts.acknowledged, counts.refused) == (5, 3, 2)
    assert counts.errors == ["row 3: no time", "row 5: no time"]


async def test_a_request_that_was_stopped_is_an_error() -> None:
    """What was not looked at must not be lost unseen."""
    async with Endpoint() as endpoint:
        replay = Replay(endpoint.url, "t", iter([b"stop"]), lambda number, message: message)
        with pytest.raises(IngestRefused, match="there were 1000 errors"):
            await replay.send()
        await replay.close()
