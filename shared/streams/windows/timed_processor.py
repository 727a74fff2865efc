"""The base class of operators with event time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from penstock.shared.streams.processor import Processor

Emit = Literal["on_close", "on_update"]

NO_TIME = -1


class TimedProcessor(Processor):
    """A processor with times of its own, which are state: the progress record has them by the name of the store.

    `stream_time_ms` is the highest timestamp of a record; it advances when the source is idle. `close_time_ms` is the
    watermark by which windows were closed: stream time minus the grace, and minus the gap of sessions; None before the
    first record. It never goes back: with a longer grace it stays until stream time has caught up.
    """

    store_name: str
    stream_time_ms: int = NO_TIME
    close_time_ms: int | None = None

    @abstractmethod
    def advance_time(self, stream_time_ms: int) -> None:
        """Advance the operator's time without a record."""

    @abstractmethod
    def results_from_ms(self) -> int:
        """The lower limit of later results' timestamps, by the close time; NO_TIME if any timestamp may come."""
