"""Says what a task left out: at most once in an interval, and nothing for good.

Refusals come one by one or a thousand a second. A line holds all since the last one; what comes within the interval
waits for its end, or for the task's. Only what is committed is said: the rest may be done again.
"""

from __future__ import annotations

from penstock.shared.common.log import get_logger
from penstock.shared.streams.task.metrics import TaskMetrics

log = get_logger(__name__)

REFUSED_LOG_MS = 10_000


class RefusalLog:
    """What was said of one task."""

    def __init__(self, partition: int) -> None:
        self._partition = partition
        self._said = (0, 0, 0)
        self._said_ms: int | None = None

    def say(self, metrics: TaskMetrics, now_ms: int, *, at_once: bool = False) -> bool:
        """Log what came since the last line, if it is time or must be `at_once`; True if there was a line.

        `now_ms` is monotonic. Each count comes with the place of its last record: `last_late="clicks-0@17"`.
        """
        counts = (metrics.late_total, metrics.dead_letters_total, metrics.skipped_total)
        waits = self._said_ms is not None and now_ms - self._said_ms < REFUSED_LOG_MS
        if counts == self._said or (waits and not at_once):
            return False
        names = ("late", "dead_letters", "skipped")
        new = {name: now - before for name, now, before in zip(names, counts, self._said, strict=True)}
        places = {f"last_{name}": metrics.refused_at.get(name) for name, number in new.items() if number}
        log.info("records refused", partition=self._partition, **new, **places)
        self._said, self._said_ms = counts, now_ms
        return True
