"""Disconnects a client that does not read a response that is streamed while its request arrives.

Such a response would otherwise wait for its client forever. It is not enough to close the connection: the server would
first wait until the client has read the bytes that are already written. So the connection is aborted.
"""

from __future__ import annotations

import asyncio

from starlette.types import Message, Scope, Send

from penstock.api.http.body import ClientDisconnected

CONNECTION = "penstock.connection"
"""The ASGI extension of `GuardedHttp`. Its member "abort" is a function that aborts the request's connection."""


def disconnect_if_unread(scope: Scope, send: Send, timeout_ms: int) -> Send:
    """Return `send` with a time limit for each part of the response.

    If a part cannot be written within `timeout_ms` because the client does not read, the connection is aborted. Then
    ClientDisconnected is raised.
    """

    async def send_in_time(message: Message) -> None:
        try:
            async with asyncio.timeout(timeout_ms / 1000):
                await send(message)
        except TimeoutError:
            scope["extensions"][CONNECTION]["abort"]()
            raise ClientDisconnected from None

    return send_in_time
