"""An HTTP server for tests that answers each request by a function and records the requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field


@dataclass
class Request:
    """One request; header names are in lower case."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes


@dataclass
class Server:
    """The server's URL and the requests that it received."""

    url: str
    requests: list[Request] = field(default_factory=list)


Response = tuple[int, dict[str, str], bytes]


@asynccontextmanager
async def serving(response: Callable[[Request], Response]) -> AsyncIterator[Server]:
    """Run a server on a free port."""
    found = Server("")

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while line := await reader.readline():
                method, path, _ = line.decode().split(" ", 2)
                headers = {}
                while header := (await reader.readline()).decode().strip():
                    name, _, value = header.partition(":")
                    headers[name.lower()] = value.strip()
                body = await reader.readexactly(int(headers.get("content-length", "0")))
                request = Request(method, path, headers, body)
                found.requests.append(request)
                status, more, content = response(request)
                lines = [
                    f"HTTP/1.1 {status} X",
                    f"Content-Length: {len(content)}",
                    *(f"{k}: {v}" for k, v in more.items()),
                ]
                writer.write("\r\n".join([*lines, "", ""]).encode() + content)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    found.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield found
    finally:
        server.close()
