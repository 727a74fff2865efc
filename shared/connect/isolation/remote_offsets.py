"""The worker's offset store, as a task's process uses it: each call is a question over the link (an edge)."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from penstock.shared.connect.isolation.messages import encoded, from_pairs, to_pairs
from penstock.shared.connect.isolation.questions import Questions


class RemoteOffsets:
    """See `OffsetBackingStore`. The worker starts and stops the store."""

    def __init__(self, questions: Questions, topic: str | None) -> None:
        self._questions, self._topic = questions, topic

    def __repr__(self) -> str:
        return f"<RemoteOffsets of {self._questions!r}>"

    @property
    def topic(self) -> str | None:
        return self._topic

    async def start(self) -> None:
        """Does nothing: the worker's store is open."""

    async def stop(self) -> None:
        """Does nothing: the worker's store stays open."""

    async def get(self, keys: Collection[bytes]) -> dict[bytes, bytes | None]:
        return from_pairs((await self._questions.ask({"get": [encoded(key) for key in keys]}))["values"])

    async def set(self, values: Mapping[bytes, bytes | None]) -> None:
        await self._questions.ask({"set": to_pairs(values)})

    async def connector_offsets(self, connector: str) -> dict[bytes, bytes]:
        found = from_pairs((await self._questions.ask({"of": connector}))["values"])
        return {key: value for key, value in found.items() if value is not None}
