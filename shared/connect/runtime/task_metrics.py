"""A task's metrics. Those of Kafka Connect have its names, with underscores for hyphens.

>>> metrics = TaskMetrics("sink")
>>> metrics.add("sink_record_read_total", 5)
>>> metrics.timed("put_batch", 8.0)
>>> metrics.timed("put_batch", 4.0)
>>> values = metrics.values(1_000)
>>> values["sink_record_read_total"], values["put_batch_avg_time_ms"], values["put_batch_max_time_ms"]
(5.0, 6.0, 8.0)

A rate covers at least the last `RATE_WINDOW_MS`, or the time since the task was made if that is shorter. It covers less
if more than `SAMPLES_MAX` readings fall into this time.

>>> values["sink_record_read_rate"]
5.0
"""

from __future__ import annotations

from collections import deque

from penstock.shared.connect.runtime.states import State

RATE_WINDOW_MS = 30_000
"""The minimum window of a rate, as in Kafka."""
SAMPLES_MAX = 64
"""The maximum number of earlier readings that are kept for rates."""
RATED = (
    "sink_record_read",
    "sink_record_send",
    "offset_commit_completion",
    "offset_commit_skip",
    "source_record_poll",
    "source_record_write",
)
"""The metrics that have a rate beside their total."""
ERROR_METRICS = (
    "total_record_failures",
    "total_record_errors",
    "total_records_skipped",
    "total_retries",
    "total_errors_logged",
    "deadletterqueue_produce_requests",
    "deadletterqueue_produce_failures",
    "last_error_timestamp",
)
TASK_METRICS = ("batch_size_avg", "batch_size_max", "offset_commit_success_total", "offset_commit_failure_total")
SINK_METRICS = (
    "sink_record_read_total",
    "sink_record_send_total",
    "sink_record_active_count",
    "sink_record_active_count_avg",
    "sink_record_active_count_max",
    "sink_record_lag_max",
    "partition_count",
    "offset_commit_seq_no",
    "offset_commit_completion_total",
    "offset_commit_skip_total",
)
SOURCE_METRICS = (
    "source_record_poll_total",
    "source_record_write_total",
    "source_record_active_count",
    "source_record_active_count_avg",
    "source_record_active_count_max",
    "source_send_blocked_ms",
    "transaction_size_avg",
    "transaction_size_max",
    "transaction_size_min",
)
TIMED = {"sink": ("put_batch", "offset_commit"), "source": ("poll_batch", "offset_commit")}


class TaskMetrics:
    """Counters, gauges and durations of one task. Totals count from its start."""

    def __init__(self, kind: str, now_ms: int = 0) -> None:
        """`kind` is `sink` or `source`. `now_ms` is the time at which the task is made, by a monotonic clock."""
        self.kind = kind
        names = SINK_METRICS if kind == "sink" else SOURCE_METRICS
        self._values = dict.fromkeys((*TASK_METRICS, *names, *ERROR_METRICS), 0.0)
        self._times = {name: [0.0, 0.0, 0.0] for name in TIMED[kind]}
        self._sizes = {name: [0.0, 0.0] for name in ("batch_size", "transaction_size", f"{kind}_record_active_count")}
        self._rated = [name for name in RATED if f"{name}_total" in self._values]
        self._samples = deque([(now_ms, dict.fromkeys(self._rated, 0.0))], SAMPLES_MAX)
        self._since_ms = now_ms
        self._state = State.UNASSIGNED
        self._state_since_ms = now_ms
        self._state_ms: dict[State, int] = {}

    def __repr__(self) -> str:
        return f"<TaskMetrics { ({name: value for name, value in self._values.items() if value}) }>"

    def add(self, name: str, count: float = 1) -> None:
        self._values[name] += count

    def set(self, name: str, value: float) -> None:
        self._values[name] = value

    def timed(self, name: str, ms: float) -> None:
        """Record the duration of one call."""
        entry = self._times[name]
        entry[0] += 1
        entry[1] += ms
        entry[2] = max(entry[2], ms)

    def sized(self, name: str, count: int) -> None:
        """Record a number of records, for the average and the maximum of the metric `name`."""
        entry = self._sizes[name]
        entry[0] += 1
        entry[1] += count
        self._values[f"{name}_avg"] = entry[1] / entry[0]
        self._values[f"{name}_max"] = max(self._values[f"{name}_max"], count)
        if f"{name}_min" in self._values:
            self._values[f"{name}_min"] = count if entry[0] == 1 else min(self._values[f"{name}_min"], count)

    def active(self, count: int) -> None:
        """Set the number of records in progress: not yet acknowledged or committed (source), or not yet put (sink)."""
        self.set(f"{self.kind}_record_active_count", count)
        self.sized(f"{self.kind}_record_active_count", count)

    def moved(self, state: State, now_ms: int) -> None:
        """Record that the task enters another state."""
        self._state_ms[self._state] = self._state_ms.get(self._state, 0) + now_ms - self._state_since_ms
        self._state = state
        self._state_since_ms = now_ms

    def values(self, now_ms: int) -> dict[str, float]:
        """Return the current values of all metrics."""
        times = {}
        for name, (count, total, highest) in self._times.items():
            times[f"{name}_avg_time_ms"] = total / count if count else 0.0
            times[f"{name}_max_time_ms"] = highest
        commits = self._values["offset_commit_success_total"], self._values["offset_commit_failure_total"]
        shares = {
            "offset_commit_success_percentage": commits[0] / sum(commits) if any(commits) else 0.0,
            "offset_commit_failure_percentage": commits[1] / sum(commits) if any(commits) else 0.0,
            "running_ratio": self._fraction_of_time_in_state(State.RUNNING, now_ms),
            "pause_ratio": self._fraction_of_time_in_state(State.PAUSED, now_ms),
        }
        return {**self._values, **times, **shares, **self._rates_per_second(now_ms)}

    def _fraction_of_time_in_state(self, state: State, now_ms: int) -> float:
        """Return the fraction of its time that the task was in a state."""
        spent = self._state_ms.get(state, 0) + (now_ms - self._state_since_ms if state is self._state else 0)
        return spent / (now_ms - self._since_ms) if now_ms > self._since_ms else 0.0

    def _rates_per_second(self, now_ms: int) -> dict[str, float]:
        while len(self._samples) > 1 and self._samples[1][0] <= now_ms - RATE_WINDOW_MS:
            self._samples.popleft()
        then_ms, before = self._samples[0]
        now = {name: self._values[f"{name}_total"] for name in self._rated}
        if now_ms > self._samples[-1][0]:
            self._samples.append((now_ms, now))
        seconds = (now_ms - then_ms) / 1000
        return {f"{name}_rate": (now[name] - before[name]) / seconds if seconds else 0.0 for name in self._rated}
