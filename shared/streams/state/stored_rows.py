"""What a store on disk asks of its rows there, and how far it has looked through their index by end."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

NEVER = -(1 << 63)


class Stored(Protocol):
    """A row as it is kept: its end in ms and its states' bytes."""

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
    """Up to which end an index was looked through, and the least end that may come after that."""

    def __init__(self) -> None:
        self.to_ms = self.upcoming_ms = NEVER

    def take(self, rows: Rows, limit: int) -> Iterable[bytes]:
        """The keys of the rows that end before `limit` and that were not taken before."""
        since, self.to_ms = self.to_ms, max(self.to_ms, limit)
        if limit <= max(since, self.upcoming_ms):
            return ()
        keys, self.upcoming_ms = rows.take_due(since, limit)
        return keys

    def came(self, end: int) -> None:
        """A row with this end is in the index now."""
        self.upcoming_ms = min(self.upcoming_ms, end)
