"""Values that need earlier samples: recent latency, the change of lag, and rebalances.

Sans-IO. A group catches up at the rate at which its lag fell over the last seconds:

>>> watch = GroupWatch()
>>> banks = {"group": "banks", "state": "Stable", "members": 1, "lag": 100}
>>> watch.observe([banks], now_ms=0, monotonic_ms=0)[0]["catch_up_s"]
>>> watch.observe([banks | {"lag": 80}], now_ms=2_000, monotonic_ms=2_000)[0]["catch_up_s"]
8.0
>>> _ = watch.observe([banks | {"lag": 80, "members": 2}], now_ms=3_000, monotonic_ms=3_000)
>>> [(event["at_ms"], event["what"]) for event in watch.events]
[(3000, 'members 1 to 2')]
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from penstock.api.console.samples import ServiceSample

LAG_WINDOW_MS = 30_000
LATENCY_WINDOW_MS = 10_000
EVENTS_MAX = 200
GROUPS_MAX = 500
"""The most groups in an overview."""

LATENCY_BUCKET = "penstock_ingest_request_seconds_bucket|"


class GroupWatch:
    """Derives lag rates and rebalances from samples of the groups. `events` are the rebalances, newest first."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._lags: dict[str, deque[tuple[int, int]]] = {}
        self._last: dict[str, Mapping[str, Any]] = {}

    def observe(self, groups: Sequence[Mapping[str, Any]], *, now_ms: int, monotonic_ms: int) -> list[dict[str, Any]]:
        """Add a sample. Returns the groups with `lag_per_second` (negative: catching up) and `catch_up_s`.

        Both are None if unknown.
        """
        rows = []
        for group in groups[:GROUPS_MAX]:
            name = str(group["group"])
            self._record_changes(name, group, now_ms)
            rate = self._lag_rate(name, int(group["lag"]), monotonic_ms)
            catch_up_s: float | None = None
            if group["lag"] == 0:
                catch_up_s = 0.0
            elif rate is not None and rate < 0:
                catch_up_s = -group["lag"] / rate
            rows.append({**group, "lag_per_second": rate, "catch_up_s": catch_up_s})
        if groups:  # no groups at all: Kafka did not answer, and the next sample continues
            for name in self._last.keys() - {str(group["group"]) for group in groups}:
                del self._last[name]
                self._lags.pop(name, None)
        return rows

    def _record_changes(self, name: str, group: Mapping[str, Any], now_ms: int) -> None:
        """Add an event if the group's state or its number of members changed since the last sample."""
        before = self._last.get(name)
        self._last[name] = group
        if before is None:
            return
        changes = [
            f"{field} {before.get(field)} to {group.get(field)}"
            for field in ("state", "members")
            if before.get(field) != group.get(field)
        ]
        if changes:
            self.events.appendleft({"at_ms": now_ms, "group": name, "what": ", ".join(changes)})

    def _lag_rate(self, name: str, lag: int, monotonic_ms: int) -> float | None:
        """Return the change of a group's lag per second over LAG_WINDOW_MS; None for the first sample."""
        points = self._lags.setdefault(name, deque())
        points.append((monotonic_ms, lag))
        while len(points) > 2 and points[1][0] <= monotonic_ms - LAG_WINDOW_MS:
            points.popleft()
        first_ms, first = points[0]
        return None if monotonic_ms <= first_ms else (lag - first) * 1_000 / (monotonic_ms - first_ms)


class Latency:
    """Quantiles of the ingest latency over the last seconds, from histograms that only grow."""

    def __init__(self) -> None:
        self._points: deque[tuple[int, dict[float, float]]] = deque()

    def observe(self, services: Sequence[ServiceSample], monotonic_ms: int) -> dict[str, float | None]:
        """Add a sample. Returns `p50_ms` and `p99_ms`, None without a request in the last LATENCY_WINDOW_MS."""
        totals: dict[float, float] = {}  # cumulative counts by upper bound, in seconds
        for service in services:
            for name, value in service.metrics.items():
                if name.startswith(LATENCY_BUCKET):
                    bound = float(name.removeprefix(LATENCY_BUCKET))
                    totals[bound] = totals.get(bound, 0.0) + value
        if self._points and any(value < self._points[-1][1].get(bound, 0.0) for bound, value in totals.items()):
            self._points.clear()  # a service was restarted
        self._points.append((monotonic_ms, totals))
        while len(self._points) > 2 and self._points[1][0] <= monotonic_ms - LATENCY_WINDOW_MS:
            self._points.popleft()
        before = self._points[0][1]
        counts = {bound: value - before.get(bound, 0.0) for bound, value in totals.items()}
        return {"p50_ms": quantile_ms(counts, 0.5), "p99_ms": quantile_ms(counts, 0.99)}


RATE_RECORDS_MIN = 10_000
"""The duration of a restore of fewer records is the fixed cost of connections, not a rate."""
RECORDS_PER_MS = 100
"""The assumed rate if no restore had RATE_RECORDS_MIN records. Disk is a little slower, memory faster."""


def quantile_ms(counts: Mapping[float, float], quantile: float) -> float | None:
    """Return a quantile in ms of cumulative counts by upper bound in seconds, interpolated between the bounds.

    >>> quantile_ms({0.01: 50, 0.1: 100, float("inf"): 100}, 0.5), quantile_ms({0.01: 50, 0.1: 100}, 0.75)
    (10.0, 55.0)
    """
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    rank = counts[bounds[-1]] * quantile
    low = 0.0
    below = 0.0
    for bound in bounds:
        if counts[bound] >= rank:
            if bound == float("inf"):
                return low * 1_000
            within = (rank - below) / (counts[bound] - below) if counts[bound] > below else 1.0
            return round((low + (bound - low) * within) * 1_000, 3)
        low = bound
        below = counts[bound]
    return None


def restore_estimate_s(tasks: Sequence[Mapping[str, Any]], services: Sequence[ServiceSample]) -> float | None:
    """Estimate the seconds that a restore would take now. None if there was no restore yet.

    A restore reads the live windows and the changelog records after the snapshot. There are two cases:

    1. Some restores read at least RATE_RECORDS_MIN records: the estimate uses their rate.
    2. No restore did: the estimate is the duration of the shortest restore plus the records at RECORDS_PER_MS.
    """
    restores = [
        (task["restore_ms"], (task.get("restored_windows") or 0) + (task.get("restored_changelog_records") or 0))
        for task in tasks
        if task.get("restore_ms") is not None
    ]
    checks = [service.checks.get("compaction") or {} for service in services]
    changelog_records = [check["changelog_records"] for check in checks if check.get("changelog_records") is not None]
    if not restores or not changelog_records:
        return None
    large = [(ms, restored) for ms, restored in restores if restored >= RATE_RECORDS_MIN]
    records = sum(task.get("open_sessions") or 0 for task in tasks) + sum(changelog_records)
    if not large:
        return float(min(ms for ms, _ in restores) + records / RECORDS_PER_MS) / 1_000
    return float(records * sum(ms for ms, _ in large) / sum(restored for _, restored in large)) / 1_000
