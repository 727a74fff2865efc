"""The interface between a task and its state stores, whatever they hold.

Every store holds rows by key and start. A row is a window, a table's row (start 0), or the records of one side of a
join with one timestamp. A row is live as long as the store keeps it. A window is open until it closes. All open windows
are live. Of the closed windows only sliding ones are, for a while. The changelog format, the snapshot and the restore
are the same for all stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol

from penstock.shared.common.records import INT64_MIN

NEVER = INT64_MIN
"""A time in ms that is earlier than the end of any window."""


class StateStoreRow(Protocol):
    """One live row of a state store: a key, the bounds of its window in ms, and its aggregations' states."""

    @property
    def key(self) -> Any:
        """The record key under which a state store has the row."""
        ...

    @property
    def start(self) -> int:
        """The start of a window, the timestamp of a join's records, or 0 for a table's row; in ms."""
        ...

    @property
    def end(self) -> int:
        """The end of a window, inclusive or exclusive by its kind, in ms. For any other row it is `start`."""
        ...

    @property
    def states(self) -> list[Any]:
        """The states of the store's aggregations."""
        ...


def is_open(row: StateStoreRow) -> bool:
    """Return whether a live row is open. All live rows are, except closed sliding windows.

    A store keeps closed sliding windows for a while, because later windows begin with their state. Queries leave them
    out.
    """
    return not getattr(row, "closed", False)


class RowChanges(NamedTuple):
    """The changes of a table or a join for a commit.

    `deleted` are keys and starts of removed rows, `live` the rows that are new or have changed. The changelog must have
    the deleted rows before the live ones.
    """

    deleted: Sequence[tuple[Any, int]]
    live: Sequence[StateStoreRow]


class StateStore(Protocol):
    """A store of one task."""

    name: str
    touched: bool
    """Set by every change; the store's owner reads and resets it."""

    def __len__(self) -> int:
        """Return the number of live rows."""
        ...

    def rows(self) -> Iterator[StateStoreRow]:
        """Yield all live rows."""
        ...

    def rows_of(self, key: Any) -> Iterable[StateStoreRow]:
        """Return the key's live rows in order of start."""
        ...

    def committed(self) -> None:
        """Forget which rows have changed, because a prepared commit has the changes. The rows keep their values."""
        ...

    def load(self, key: Any, start: int, end: int, states: list[Any]) -> None:
        """Restore one live row; it replaces one with the same key and start."""
        ...

    def unload(self, key: Any, start: int) -> None:
        """Restore a removal; a missing row is no error, since a snapshot may be ahead of the log."""
        ...
