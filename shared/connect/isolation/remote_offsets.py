"""The worker's offset store as a task's process has it: each question goes over the link (an edge)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Mapping
from typing import Any

from shared.connect.isolation.messages import Message, encoded, error_of, from_pairs, to_pairs


class RemoteOffsets:
    """See `OffsetBackingStore`; it is the worker that starts and stops the store."""

    def __init__(self, say: Callable[[Message], None], topic: str | None) -> None:
        self._say, self._topic = say, topic
        self._asked: dict[int, asyncio.Future[Message]] = {}
        self._number = 0

    def __repr__(self) -> str:
        return f"<RemoteOffsets, {len(self._asked)} questions open>"

    @property
    def topic(self) -> str | None:
        return self._topic

    async def start(self) -> None:
        """The worker's is open."""

    async def stop(self) -> None:
        """The worker's stays open."""

    async def get(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        return from_pairs((await self._ask({"get": [encoded(key) for key in keys]}))["values"])

    async def set(self, values: Mapping[bytes, bytes | None]) -> None:
        await self._ask({"set": to_pairs(values)})

    async def connector_offsets(self, connector: str) -> dict[bytes, bytes]:
        found = from_pairs((await self._ask({"of": connector}))["values"])
        return {key: value for key, value in found.items() if value is not None}

    def on_answer(self, message: Message) -> None:
        """The worker's answer."""
        asked = self._asked.pop(message["answer"], None)
        if asked is None or asked.done():
            return
        if "error" in message:
            asked.set_exception(error_of(message["kind"], message["error"]))
        else:
            asked.set_result(message)

    async def _ask(self, question: Mapping[str, Any]) -> Message:
        self._number += 1
        asked: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        self._asked[self._number] = asked
        self._say({"ask": self._number, **question})
        return await asked
