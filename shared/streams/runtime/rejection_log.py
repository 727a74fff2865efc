"""The log of the records that a task rejects: late records, dead letters and skipped records."""

from __future__ import annotations

from penstock.shared.common.log import get_logger
from penstock.shared.streams.task.metrics import StreamTaskMetrics

log = get_logger(__name__)


LOG_INTERVAL_MS = 10_000


class RejectionLog:
    """The log of a task's rejected records: at most one line in an interval, and nothing is lost.

    Records may be rejected one by one or by the thousand a second. A line covers all since the previous one. Records
    rejected within the interval wait for its end, or for the task's. Only committed ones are logged, because others may
    be processed again.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._logged_counts = (0, 0, 0)
        self._logged_at_ms: int | None = None

    def report(self, metrics: StreamTaskMetrics, now_ms: int, *, at_once: bool = False) -> None:
        """Log the task's records rejected since the last line, if that is due or `at_once`.

        `now_ms` is monotonic. Each count has the coordinates of its last record: `last_late="clicks-0@17"`.
        """
        counts = (metrics.late_total, metrics.dead_letters_total, metrics.skipped_total)
        waits = self._logged_at_ms is not None and now_ms - self._logged_at_ms < LOG_INTERVAL_MS
        if counts == self._logged_counts or (waits and not at_once):
            return
        names = ("late", "dead_letters", "skipped")
        new = {name: now - before for name, now, before in zip(names, counts, self._logged_counts, strict=True)}
        coordinates = {f"last_{name}": metrics.rejected_at.get(name) for name, number in new.items() if number}
        log.info("records rejected", partition=self._partition, **new, **coordinates)
        self._logged_counts = counts
        self._logged_at_ms = now_ms
