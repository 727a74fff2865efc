"""The changes in a partition's changelog that a query for windows must keep: the newest change of each window.

A window is kept once, however often it grew, and changes outside of the queried times are dropped. So a busy key costs
memory for its windows in these times, not for their records.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.services.aggregator.found_windows import Told, told
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange
from penstock.shared.streams.changelog.format import DELETED, FINAL
from penstock.shared.streams.changelog.reader import Change

CHANGES_MAX = 200_000
"""The most windows of one partition's tail for the queried keys and times. They stay in memory until the answer."""


class Changes:
    """The confirmed changes of the keys' windows that touch `reach` (ms, both inclusive), as far as they matter.

    A window's start never changes and its end only grows. So a window that ends before the reach here ends before it in
    the lake as well. A deletion has no end and is kept, since the window that it deletes in the lake may be in reach.
    `store` is the queried store; None if it is not known yet. Iteration is in log order.
    """

    def __init__(self, keys: KeyRange, reach: tuple[int, int], store: str | None = None) -> None:
        self._keys = keys
        self._reach = reach
        self._store = store
        self._changes: dict[tuple[str, bytes, int, int | None], Told] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[Told]:
        return iter(self._changes.values())

    def keep(self, change: Change) -> None:
        """Add the next change. Raises ConfigError beyond CHANGES_MAX, CorruptRecord if it cannot be decoded."""
        low, high = self._reach
        if change.start > high or self._store not in (None, change.store) or not self._keys.has(change.key):
            return
        at = (change.store, change.key, change.start)
        # Of one start there is one open window, but several can have closed, with different ends.
        self._changes.pop((*at, None), None)
        if change.operation != DELETED and change.end < low:
            return
        if len(self._changes) == CHANGES_MAX:
            raise ConfigError(
                f"a partition's changelog has over {CHANGES_MAX} windows of these keys and times: query fewer keys "
                "or a shorter time"
            )
        self._changes[*at, change.end if change.operation == FINAL else None] = told(change)
