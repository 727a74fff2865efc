"""What windowed results are, and what all operators have that go by event time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, Literal, NamedTuple

import msgspec

from penstock.shared.streams.processor import K, Processor

Emit = Literal["on_close", "on_update"]

NO_TIME = -1


class WindowKey(NamedTuple, Generic[K]):
    """The key of a windowed result: the record key and the window's bounds in ms.

    The end of a session and of a sliding window is inclusive, that of a tumbling or hopping window is not.
    """

    key: K
    start: int
    end: int


class WindowResult(msgspec.Struct, Generic[K], frozen=True):
    """A window's results by name."""

    key: K
    start: int
    end: int
    results: dict[str, Any]

    def to_json(self) -> bytes:
        """One flat object: key, start, end, then the results."""
        return msgspec.json.encode({"key": self.key, "start": self.start, "end": self.end, **self.results})


class TimedProcessor(Processor):
    """A processor with a time of its own, which is state: the task keeps it under the name of the store."""

    store_name: str
    stream_time_ms: int = NO_TIME
    closed_by_ms: int = NO_TIME
    """What this time closes was closed, and no more: set by what closes. It is the stream time, but where a gap or
    grace was changed: later after longer ones, until time has reached it; earlier after shorter ones, until a record or
    an advance closes what is due."""

    def closing_ms(self, stream_time_ms: int) -> int:
        """The time by which windows close at a stream time."""
        closed_by_ms = self.closed_by_ms
        return stream_time_ms if stream_time_ms > closed_by_ms else closed_by_ms  # noqa: FURB136  (once a record: max is slow)

    @abstractmethod
    def advance_time(self, stream_time_ms: int) -> None:
        """Move the operator's time on without a record."""

    @abstractmethod
    def results_from_ms(self) -> int:
        """No result still to come has an earlier timestamp, by what was closed; there must be a time."""
