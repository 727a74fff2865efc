"""The log of the records that a task rejects: late records, dead letters and skipped records."""

from __future__ import annotations

from penstock.shared.common.log import get_logger
from penstock.shared.streams.task.metrics import StreamTaskMetrics

log = get_logger(__name__)


LOG_INTERVAL_MS = 10_000


class RejectionLog:
    """The log of a task's rejected records: at most one line in each interval of `LOG_INTERVAL_MS`.

    Thousands of records a second may be rejected. A line counts all records that were rejected since the previous line.
    The worker reports after a commit has succeeded, because records without a commit may be processed again. A line may
    also count records that were rejected while the commit was written.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._logged_counts = (0, 0, 0)
        self._logged_at_ms: int | None = None

    def report(self, metrics: StreamTaskMetrics, now_ms: int, *, at_once: bool = False) -> None:
        """Log the task's records rejected since the last line, if a line is due or `at_once` is set.

        `now_ms` is monotonic. The line has the coordinates of the last record of each count, such as
        `last_late="clicks-0@17"`.
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
