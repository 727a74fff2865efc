"""The responses of the fake broker's handlers: a response, at once or later, none, or the end of the connection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.shared.testing.fake_broker.codec import Message


class DelayedResponse:
    """A response that is not available yet: the broker waits for data, or for a group's other members."""

    def __init__(self) -> None:
        self.is_done = False
        self.value: Any = None
        self._then: list[Callable[[Any], None]] = []

    def __repr__(self) -> str:
        return f"DelayedResponse({self.value!r})" if self.is_done else "DelayedResponse()"

    def complete(self, value: Any) -> None:
        """Set the response. Only the first call counts."""
        if not self.is_done:
            self.is_done = True
            self.value = value
            then = self._then
            self._then = []
            for call in then:
                call(value)

    def then(self, call: Callable[[Any], None]) -> None:
        """Call `call` with the response, at once if it is available."""
        if self.is_done:
            call(self.value)
        else:
            self._then.append(call)


class CloseConnection:
    """Returned by a handler if a broker answers by closing the connection."""


Response = Message | DelayedResponse | CloseConnection | None
"""None if the client expects no response."""
