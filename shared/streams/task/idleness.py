"""Idleness: a task whose topics have no new records advances its times by the clock.

Windows close when stream time passes them, and stream time moves with records. If no more records come, the last
windows would stay open forever. So if a task has read everything and nothing has come for `idle_timeout_ms`, its times
advance by the time that has passed, and again after each further `idle_timeout_ms`. A monotonic clock measures this
time, because a step of the wall clock is no idleness.

>>> idle = Idleness(100)
>>> [idle.due_ms(now, {"in": 7}, at_end=True) for now in (1_000, 1_099, 1_100, 1_150, 1_205)]
[0, 0, 100, 0, 105]
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from penstock.shared.streams.task.watermarks import Watermark, watermark_record

if TYPE_CHECKING:
    from penstock.shared.streams.task.task_context import TaskContext


class Idleness:
    """The idle timer of one task, in ms of a monotonic clock."""

    def __init__(self, idle_timeout_ms: int) -> None:
        self._timeout_ms = idle_timeout_ms
        self._positions: Mapping[str, int] = {}
        self._since_ms: int | None = None
        self._watermark_sent_ms: int | None = None

    def is_watermark_due(self, monotonic_ms: int, *, at_end: bool) -> bool:
        """Return whether watermarks are due. If so, they count as sent now.

        They are due if everything was read, at most once in `idle_timeout_ms`.
        """
        is_due = at_end and (
            self._watermark_sent_ms is None or monotonic_ms - self._watermark_sent_ms >= self._timeout_ms
        )
        if is_due:
            self._watermark_sent_ms = monotonic_ms
        return is_due

    def due_ms(self, monotonic_ms: int, positions: Mapping[str, int], *, at_end: bool, age_ms: int = 0) -> int:
        """Return the ms by which time advances now: the ms since the last record or advance, or 0.

        The result is 0 if these ms are fewer than `idle_timeout_ms`. `positions` are the next offsets by topic.
        `at_end` means that no record follows these positions, not even one of an open transaction. If `at_end` is False
        or a position has changed, the result is 0 and the count of ms starts again. `at_end` was known `age_ms` ago,
        and the ms since then do not count yet.
        """
        if not at_end:
            self._since_ms = None
        elif self._since_ms is None or self._positions != positions:
            self._positions = dict(positions)
            self._since_ms = monotonic_ms
        elif (quiet_ms := monotonic_ms - age_ms - self._since_ms) >= self._timeout_ms:
            self._since_ms += quiet_ms
            return quiet_ms
        return 0


def advance_idle_time(
    idle: Idleness, task: TaskContext, monotonic_ms: int, *, at_end: bool, tasks: int, age_ms: int = 0
) -> None:
    """Advance a task's time if that is due, and send watermarks, if they are due, to its repartition topics.

    `at_end`, known `age_ms` ago, is only about source topics that are not repartition topics. `tasks` is the number of
    the application's tasks; each of them gets the watermarks.
    """
    # Repartition topics do not count, because behind them time follows watermarks.
    own = {source.topic for source in task.topology.sources() if source.is_internal}
    positions = {topic: at for topic, at in task.sources.items() if topic not in own}
    if by_ms := idle.due_ms(monotonic_ms, positions, at_end=at_end, age_ms=age_ms):
        task.advance_time(by_ms)
    if own and (idle.is_watermark_due(monotonic_ms, at_end=at_end) or by_ms) and task.failed is None:
        for topic, time_ms in task.times.watermarks().items():
            for to_partition in range(tasks):
                task.outputs.add(watermark_record(topic, to_partition, Watermark(task.partition, tasks, time_ms)))
            task.needs_commit = True
