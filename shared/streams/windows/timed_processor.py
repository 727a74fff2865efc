"""What all operators have that go by event time."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from penstock.shared.streams.processor import Processor

Emit = Literal["on_close", "on_update"]

NO_TIME = -1


class TimedProcessor(Processor):
    """A processor with times of its own, which are state: the progress record has them under the name of the store.

    `stream_time_ms` is the highest timestamp of a record, moved on where the source is idle. `close_time_ms` is the
    watermark by which windows were closed: stream time less the grace, and less the gap of sessions; None before the
    first record. It never goes back: under a longer grace it stands still until stream time has got as far.
    """

    store_name: str
    stream_time_ms: int = NO_TIME
    close_time_ms: int | None = None

    @abstractmethod
    def advance_time(self, stream_time_ms: int) -> None:
        """Move the operator's time on without a record."""

    @abstractmethod
    def results_from_ms(self) -> int:
        """No result still to come has an earlier timestamp, by the close time; NO_TIME where any may come."""
