"""The log of the records that a task rejects: late records, dead letters and skipped records."""

from __future__ import annotations

from penstock.shared.common.log import get_logger
from penstock.shared.streams.task.metrics import Totals

log = get_logger(__name__)


LOG_INTERVAL_MS = 10_000
REJECTIONS = ("late", "dead_letters", "skipped")


class RejectionLog:
    """The log of a task's rejected records: at most one line in `LOG_INTERVAL_MS`, unless `report` has `at_once`.

    A line counts all records that were rejected since the previous line.
    """

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._logged = Totals()
        self._logged_at_ms: int | None = None

    def report(self, totals: Totals, now_ms: int, *, at_once: bool = False) -> None:
        """Log the records that were rejected since the last line, if a line is due or `at_once` is set.

        `now_ms` is monotonic. For each count, the line describes the last record (`Totals.rejected_at`), such as
        `last_late="clicks-0@17"`.
        """
        new = {name: getattr(totals, name) - getattr(self._logged, name) for name in REJECTIONS}
        waits = self._logged_at_ms is not None and now_ms - self._logged_at_ms < LOG_INTERVAL_MS
        if not any(new.values()) or (waits and not at_once):
            return
        coordinates = {f"last_{name}": totals.rejected_at.get(name) for name, number in new.items() if number}
        log.info("records rejected", partition=self._partition, **new, **coordinates)
        self._logged = totals
        self._logged_at_ms = now_ms
