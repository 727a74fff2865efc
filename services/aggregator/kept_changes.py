"""What of a partition's changelog a question about windows has to remember: of each window the newest change.

However often a window grew, it is one; and what lies beyond the times that are asked for is forgotten. So a busy key
costs the windows that it has there, and not the records that made them.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.services.aggregator.found_windows import Told, told
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange
from penstock.shared.streams.changelog.format import DELETED, FINAL
from penstock.shared.streams.changelog.reader import Change

CHANGES_MAX = 200_000
"""Windows of one partition's tail, of the keys and times that are asked for: they are kept until the answer is made."""


class Changes:
    """The confirmed changes of the keys' windows that touch `reach` (ms, both inclusive), as far as they matter.

    A window's start never changes and its end only grows: one that ends before the reach here does so in the lake as
    well. A deletion has no end, and is kept: what it takes out of the lake may be in reach. `store` is the one that is
    asked, None where nobody knows yet. Iterated over, they come in the order of the log.
    """

    def __init__(self, keys: KeyRange, reach: tuple[int, int], store: str | None = None) -> None:
        self._keys, self._reach, self._store = keys, reach, store
        self._changes: dict[tuple[str, bytes, int, int | None], Told] = {}

    def __len__(self) -> int:
        return len(self._changes)

    def __iter__(self) -> Iterator[Told]:
        return iter(self._changes.values())

    def keep(self, change: Change) -> None:
        """Take the next change. ConfigError where that is one too many, CorruptRecord where it cannot be read."""
        low, high = self._reach
        if change.start > high or self._store not in (None, change.store) or not self._keys.has(change.key):
            return
        at = (change.store, change.key, change.start)
        # It is open once; of one start several can have been closed, each with an end of its own.
        self._changes.pop((*at, None), None)
        if change.operation != DELETED and change.end < low:
            return
        if len(self._changes) == CHANGES_MAX:
            raise ConfigError(
                f"a partition's changelog has over {CHANGES_MAX} windows of these keys and times: ask for fewer keys "
                "or for a shorter time"
            )
        self._changes[*at, change.end if change.operation == FINAL else None] = told(change)
