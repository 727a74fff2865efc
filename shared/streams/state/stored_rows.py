"""The interface between a store and its rows on disk, and the progress of the search in their index by end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

NEVER = -(1 << 63)


class Stored(Protocol):
    """A stored row: its end in ms and its states' bytes."""

    @property
    def end(self) -> int: ...

    @property
    def state(self) -> bytes: ...


class Rows(Protocol):
    """The rows of one store on disk."""

    @property
    def count(self) -> int: ...

    def of(self, key: bytes) -> Sequence[tuple[int, Stored]]: ...

    def of_many(self, keys: Iterable[bytes]) -> Iterator[tuple[bytes, Sequence[tuple[int, Stored]]]]: ...

    def all(self, after: tuple[bytes, int] | None = None) -> Iterator[tuple[bytes, int, Stored]]: ...

    def take_due(self, since: int, limit: int) -> tuple[set[bytes], int]: ...

    def restore(self, key: bytes, start: int, end: int, state: bytes | None) -> None: ...


class DueIndex:
    """The end up to which an index was searched, and the least end that may come after it."""

    def __init__(self) -> None:
        self.to_ms = self.upcoming_ms = NEVER

    def take(self, rows: Rows, limit: int) -> Iterable[bytes]:
        """Return the keys of the rows that end before `limit` and were not returned before."""
        since, self.to_ms = self.to_ms, max(self.to_ms, limit)
        if limit <= max(since, self.upcoming_ms):
            return ()
        keys, self.upcoming_ms = rows.take_due(since, limit)
        return keys

    def came(self, end: int) -> None:
        """Note that a row with this end is in the index now."""
        self.upcoming_ms = min(self.upcoming_ms, end)
