"""Values that need earlier samples: recent latency, the change of lag, and rebalances.

Sans-IO. A group catches up at the rate at which its lag fell over the last seconds:

>>> watch = GroupWatch()
>>> banks = {"group": "banks", "state": "Stable", "members": 1, "lag": 100}
>>> watch.see([banks], now_ms=0, monotonic_ms=0)[0]["catch_up_s"]
>>> watch.see([banks | {"lag": 80}], now_ms=2_000, monotonic_ms=2_000)[0]["catch_up_s"]
8.0
>>> _ = watch.see([banks | {"lag": 80, "members": 2}], now_ms=3_000, monotonic_ms=3_000)
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
"""Groups whose lag is kept."""

LATENCY_BUCKET = "penstock_ingest_request_seconds_bucket|"


class GroupWatch:
    """Watches the groups over time. `events` are their rebalances, newest first."""

    def __init__(self) -> None:
        self.events: deque[dict[str, Any]] = deque(maxlen=EVENTS_MAX)
        self._lags: dict[str, deque[tuple[int, int]]] = {}
        self._last: dict[str, Mapping[str, Any]] = {}

    def see(self, groups: Sequence[Mapping[str, Any]], *, now_ms: int, monotonic_ms: int) -> list[dict[str, Any]]:
        """Return the groups with `lag_per_second` (negative: catching up) and `catch_up_s`; None if unknown."""
        rows = []
        for group in groups[:GROUPS_MAX]:
            name = str(group["group"])
            self._note(name, group, now_ms)
            rate = self._rate(name, int(group["lag"]), monotonic_ms)
            falling = rate is not None and rate < 0
            catch_up_s = 0.0 if group["lag"] == 0 else -group["lag"] / rate if falling and rate else None
            rows.append({**group, "lag_per_second": rate, "catch_up_s": catch_up_s})
        gone = self._last.keys() - {str(group["group"]) for group in groups}
        for name in gone if groups else ():
            del self._last[name]
            self._lags.pop(name, None)
        return rows

    def _note(self, name: str, group: Mapping[str, Any], now_ms: int) -> None:
        before, self._last[name] = self._last.get(name), group
        if before is None:
            return
        changes = [
            f"{what} {before.get(what)} to {group.get(what)}"
            for what in ("state", "members")
            if before.get(what) != group.get(what)
        ]
        if changes:
            self.events.appendleft({"at_ms": now_ms, "group": name, "what": ", ".join(changes)})

    def _rate(self, name: str, lag: int, monotonic_ms: int) -> float | None:
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

    def see(self, services: Sequence[ServiceSample], monotonic_ms: int) -> dict[str, float | None]:
        """Return `p50_ms` and `p99_ms`; None if no request was answered lately."""
        now: dict[float, float] = {}
        for service in services:
            for name, value in service.metrics.items():
                if name.startswith(LATENCY_BUCKET):
                    bound = float(name.removeprefix(LATENCY_BUCKET))
                    now[bound] = now.get(bound, 0.0) + value
        if self._points and any(value < self._points[-1][1].get(bound, 0.0) for bound, value in now.items()):
            self._points.clear()  # a service was restarted
        self._points.append((monotonic_ms, now))
        while len(self._points) > 2 and self._points[1][0] <= monotonic_ms - LATENCY_WINDOW_MS:
            self._points.popleft()
        before = self._points[0][1]
        counts = {bound: value - before.get(bound, 0.0) for bound, value in now.items()}
        return {"p50_ms": quantile_ms(counts, 0.5), "p99_ms": quantile_ms(counts, 0.99)}


RATE_RECORDS_MIN = 10_000
"""A restore of fewer records shows the fixed cost of a restore, not its rate."""
RECORDS_A_MS = 100
"""The assumed rate if no restore was large enough. Windows on disk are a little slower, windows in memory faster."""


def quantile_ms(counts: Mapping[float, float], share: float) -> float | None:
    """Return a quantile in ms of cumulative counts by upper bound in seconds, interpolated between the bounds.

    >>> quantile_ms({0.01: 50, 0.1: 100, float("inf"): 100}, 0.5), quantile_ms({0.01: 50, 0.1: 100}, 0.75)
    (10.0, 55.0)
    """
    bounds = sorted(counts)
    if not bounds or counts[bounds[-1]] <= 0:
        return None
    wanted, low, below = counts[bounds[-1]] * share, 0.0, 0.0
    for bound in bounds:
        if counts[bound] >= wanted:
            if bound == float("inf"):
                return low * 1_000
            within = (wanted - below) / (counts[bound] - below) if counts[bound] > below else 1.0
            return round((low + (bound - low) * within) * 1_000, 3)
        low, below = bound, counts[bound]
    return None


def restore_estimate_s(tasks: Sequence[Mapping[str, Any]], services: Sequence[ServiceSample]) -> float | None:
    """Estimate the seconds that a restore would take now, of the live windows and the changelog behind them.

    The rate is that of the last restores that read many records. If there are none, the estimate is the shortest
    restore, which shows the fixed cost of connections, plus the records at RECORDS_A_MS.
    """
    restores = [
        (task["restore_ms"], (task.get("restored_windows") or 0) + (task.get("restored_changelog_records") or 0))
        for task in tasks
        if task.get("restore_ms") is not None
    ]
    checks = [service.checks.get("compaction") or {} for service in services]
    behind = [check["changelog_records"] for check in checks if check.get("changelog_records") is not None]
    if not restores or not behind:
        return None
    large = [(took_ms, restored) for took_ms, restored in restores if restored >= RATE_RECORDS_MIN]
    records = sum(task.get("open_sessions") or 0 for task in tasks) + sum(behind)
    if not large:
        return float(min(took_ms for took_ms, _ in restores) + records / RECORDS_A_MS) / 1_000
    return float(records * sum(ms for ms, _ in large) / sum(restored for _, restored in large)) / 1_000
