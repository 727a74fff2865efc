"""What a task counts, under the names of Kafka Connect's metrics with underscores for hyphens.

>>> metrics = TaskMetrics("sink")
>>> metrics.add("sink_record_read_total", 5)
>>> metrics.timed("put_batch", 8.0)
>>> metrics.timed("put_batch", 4.0)
>>> values = metrics.values()
>>> values["sink_record_read_total"], values["put_batch_avg_time_ms"], values["put_batch_max_time_ms"]
(5.0, 6.0, 8.0)
"""

from __future__ import annotations

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
    "partition_count",
    "offset_commit_seq_no",
    "offset_commit_completion_total",
    "offset_commit_skip_total",
)
SOURCE_METRICS = (
    "source_record_poll_total",
    "source_record_write_total",
    "source_record_active_count",
    "source_send_blocked_ms",
    "transaction_size_avg",
    "transaction_size_max",
)
TIMED = {"sink": ("put_batch", "offset_commit"), "source": ("poll_batch", "offset_commit")}


class TaskMetrics:
    """Counters, gauges and durations of one task; totals are since its start."""

    def __init__(self, kind: str) -> None:
        """`kind` is `sink` or `source`."""
        self.kind = kind
        names = SINK_METRICS if kind == "sink" else SOURCE_METRICS
        self._values = dict.fromkeys((*TASK_METRICS, *names, *ERROR_METRICS), 0.0)
        self._times = {what: [0.0, 0.0, 0.0] for what in TIMED[kind]}
        self._sizes = {"batch_size": [0.0, 0.0], "transaction_size": [0.0, 0.0]}

    def __repr__(self) -> str:
        return f"<TaskMetrics { ({name: value for name, value in self.values().items() if value}) }>"

    def add(self, name: str, count: float = 1) -> None:
        self._values[name] += count

    def set(self, name: str, value: float) -> None:
        self._values[name] = value

    def timed(self, what: str, ms: float) -> None:
        """One call took so long."""
        entry = self._times[what]
        entry[0] += 1
        entry[1] += ms
        entry[2] = max(entry[2], ms)

    def sized(self, what: str, count: int) -> None:
        """One batch or transaction had so many records."""
        entry = self._sizes[what]
        entry[0] += 1
        entry[1] += count
        self._values[f"{what}_avg"] = entry[1] / entry[0]
        self._values[f"{what}_max"] = max(self._values[f"{what}_max"], count)

    def values(self) -> dict[str, float]:
        """All of them as they are now."""
        times = {}
        for what, (count, total, highest) in self._times.items():
            times[f"{what}_avg_time_ms"] = total / count if count else 0.0
            times[f"{what}_max_time_ms"] = highest
        return {**self._values, **times}
