"""When a topic that has gone quiet moves time on by itself.

Windows close when stream time passes them, and stream time moves with records. Where none come any more, the last
windows would stay open for ever. So once a task has read all that there is and nothing has come for `idle_advance_ms`,
its times are moved on by as much, and again after each further `idle_advance_ms`.

>>> idle = IdleAdvance(100)
>>> [idle.due_ms(now, {"in": 7}, at_end=True) for now in (1_000, 1_099, 1_100, 1_150, 1_205)]
[0, 0, 100, 0, 105]
"""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import UNSET, UnsetType

from shared.streams.changelog_format import IdleAdvanced, IdleTime


class IdleAdvance:
    """One task's patience, in ms of wall-clock time."""

    def __init__(self, idle_advance_ms: int) -> None:
        self._idle_advance_ms = idle_advance_ms
        self._positions: Mapping[str, int] = {}
        self._since_ms: int | None = None

    def due_ms(self, now_ms: int, positions: Mapping[str, int], *, at_end: bool) -> int:
        """By how much time is to be moved on now.

        `positions` are the next offsets to read by topic; `at_end` says that there is no record at or after them, not
        even one of a transaction that is still open.
        """
        if not at_end:
            self._since_ms = None
        elif self._since_ms is None or self._positions != positions:
            self._positions, self._since_ms = dict(positions), now_ms
        elif (quiet_ms := now_ms - self._since_ms) >= self._idle_advance_ms:
            self._since_ms = now_ms
            return quiet_ms
        return 0


class IdleAdvances:
    """The advances of a task: how much there was altogether, and those that no commit holds yet."""

    def __init__(self, restored: IdleTime | UnsetType = UNSET) -> None:
        self._total_ms = 0 if restored is UNSET else restored.total_ms
        self._noted: list[IdleAdvanced] = []

    def note(self, sources: Mapping[str, int], stream_time_ms: int, ms: int) -> None:
        """Time was moved on at these positions; of several at the same ones the last says it all."""
        self._total_ms += ms
        if self._noted and self._noted[-1].sources == sources:
            self._noted.pop()
        self._noted.append(IdleAdvanced(dict(sources), stream_time_ms))

    def take(self) -> IdleTime | UnsetType:
        """What the next commit writes; nothing where time was never moved on."""
        noted, self._noted = tuple(self._noted), []
        return IdleTime(self._total_ms, noted) if self._total_ms else UNSET
