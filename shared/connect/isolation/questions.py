"""Questions to the other side of a link, each with its number, and the callers that wait for answers (an edge)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from typing import Any

from penstock.shared.connect.isolation.messages import Message, error_of


class Questions:
    """The open questions."""

    def __init__(self, say: Callable[[Message], None]) -> None:
        self._say = say
        self._open: dict[int, asyncio.Future[Message]] = {}
        self._number = 0
        self._ended: Exception | None = None

    def __repr__(self) -> str:
        return f"<Questions, {len(self._open)} open>"

    async def ask(self, question: Mapping[str, Any]) -> Message:
        """Sends a question and returns the answer. Raises the other side's error, or the error that ended the
        questions."""
        if self._ended is not None:
            raise self._ended
        self._number += 1
        number = self._number
        asked = self._open[number] = asyncio.get_running_loop().create_future()
        try:
            self._say({"ask": number, **question})
            answer: Message = await asked
            return answer
        finally:
            self._open.pop(number, None)

    def on_answer(self, message: Message) -> None:
        """Takes the other side's answer. An answer without a waiting caller is dropped."""
        asked = self._open.get(message["answer"])
        if asked is None or asked.done():
            return
        if "error" in message:
            asked.set_exception(error_of(message))
        else:
            asked.set_result(message)

    def end(self, error: Exception) -> None:
        """Ends all questions: waiting and later callers get the error."""
        self._ended = error
        for asked in self._open.values():
            if not asked.done():
                asked.set_exception(error)
