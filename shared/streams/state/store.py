"""What a task asks of a state store, whatever is kept in it.

Every store holds rows under (key, start): a live session or window, a table's row (start 0), or what a join has to
remember of one moment. So one changelog format, one snapshot and one way to restore serve them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol


class LiveRow(Protocol):
    """One row that is alive: a key, the bounds of its window in ms, and its aggregations' states."""

    @property
    def key(self) -> Any:
        """The record key."""
        ...

    @property
    def start(self) -> int:
        """First moment."""
        ...

    @property
    def end(self) -> int:
        """Last moment, or the one after it: as the window's kind has it."""
        ...

    @property
    def states(self) -> list[Any]:
        """The aggregations' states."""
        ...


class Changes(NamedTuple):
    """What a commit writes of a table or a join, in the order in which it must be written.

    `deleted` are keys and starts of rows that are no more, `live` the rows that are new or have changed.
    """

    deleted: Sequence[tuple[Any, int]]
    live: Sequence[LiveRow]


class StateStore(Protocol):
    """A store of one task."""

    name: str
    touched: bool
    """Set by every change, for the store's owner to see and take back."""

    def __len__(self) -> int:
        """The number of live rows."""
        ...

    def rows(self) -> Iterator[LiveRow]:
        """All live rows."""
        ...

    def rows_of(self, key: Any) -> Iterable[LiveRow]:
        """The key's live rows in order of start."""
        ...

    def committed(self) -> None:
        """The changes are in the changelog now."""
        ...

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live row; one with the same key and start is replaced."""
        ...

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a row that is not there is no error, since a snapshot may be ahead of the log."""
        ...
