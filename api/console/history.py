"""The data of the dashboard's charts: points in time since the service started.

The service keeps the points, so a page that is opened or reloaded shows them all. Sans-IO. When the history is full,
every second point is dropped and the interval between points doubles. So the charts become coarser, but begin at the
service's start. If the wall clock is set back, the points after the new time are dropped.

>>> history = History(every_ms=1_000, points_max=4)
>>> for at in range(0, 8_000, 1_000):
...     history.add({"now_ms": at})
>>> [point["at_ms"] for point in history.points]
[0, 2000, 4000, 6000]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from typing_extensions import TypedDict

from penstock.api.http import field_types as of

EVERY_MS = 2_000
POINTS_MAX = 1_440


class Point(TypedDict):
    """One point; unknown values are None. The lag is unknown without groups, and if the lag of any group is unknown."""

    at_ms: of.TimeMs
    records_per_second: of.Rate | None
    p99_ms: of.Milliseconds | None
    lag: of.Lag | None
    state_rows: of.Count | None
    late_per_second: of.Rate | None
    dead_letters: of.Count | None


class HistoryResponse(TypedDict):
    """The points, oldest first."""

    points: list[Point]


class History:
    """At most `points_max` points, oldest first. A full history drops every second one and doubles the interval."""

    def __init__(self, every_ms: int = EVERY_MS, points_max: int = POINTS_MAX) -> None:
        self._every_ms = every_ms
        self._points_max = points_max
        self.points: list[Point] = []

    def add(self, overview: Mapping[str, Any]) -> None:
        """Add a point from an overview if the interval has passed."""
        at_ms = overview["now_ms"]
        # The wall clock was set back.
        while self.points and self.points[-1]["at_ms"] > at_ms:
            self.points.pop()
        if self.points and at_ms - self.points[-1]["at_ms"] < self._every_ms:
            return
        if len(self.points) >= self._points_max:
            del self.points[1::2]
            self._every_ms *= 2
            if at_ms - self.points[-1]["at_ms"] < self._every_ms:
                return
        self.points.append(point(overview))


def point(overview: Mapping[str, Any]) -> Point:
    """Return the point of an overview; unknown values are None."""
    ingest = overview.get("ingest", {})
    streams = overview.get("streams", {})
    # Without groups, Kafka usually did not answer.
    lags = [group["lag"] for group in overview.get("groups", ())]
    return {
        "at_ms": overview["now_ms"],
        "records_per_second": ingest.get("records_per_second"),
        "p99_ms": ingest.get("p99_ms"),
        "lag": sum(lags) if lags and None not in lags else None,
        "state_rows": streams.get("state_rows"),
        "late_per_second": streams.get("late_per_second"),
        "dead_letters": overview.get("dead_letters"),
    }
