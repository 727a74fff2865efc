"""The common part of the stores of rows: which rows differ from the last commit, and which of them need a tombstone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

from penstock.shared.streams.state_store import RowChanges, StateStoreRow
from penstock.shared.streams.user_code import user_copy

Check = Callable[[str | bytes, list[Any]], list[Any]]
"""Returns a row's states as a restore gives them. Raises if the changelog cannot hold them, or a restore would change
them."""


def copied_states(key: str | bytes, states: list[Any]) -> list[Any]:
    """Return copies of the states: the `Check` of a store without a changelog."""
    copies: list[Any] = user_copy(states)
    return copies


class Row(StateStoreRow, Protocol):
    """A row in memory."""

    persisted: bool
    """Whether the changelog has a live entry of the row's key and start."""


RowT = TypeVar("RowT", bound=Row)


class RowStore(Generic[RowT]):
    """Records the changes of a store's rows for the next commit.

    Each change sets `touched`, which the store's owner reads and resets.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        self.touched = False
        self.check: Check = copied_states
        """It is called before anything is changed, and the states that it returns are put."""
        self._dirty: dict[tuple[Any, int], RowT | None] = {}
        """The changed rows by key and start; None for a row that was removed, and is still in the changelog."""

    def changes(self) -> RowChanges:
        """Return all changes since the last `committed()`."""
        deleted = [at for at, row in self._dirty.items() if row is None]
        return RowChanges(deleted, [row for row in self._dirty.values() if row is not None])

    def committed(self) -> None:
        """Drop the changes, which are in the changelog or will be; after a failed commit the store is restored."""
        for row in self._dirty.values():
            if row is not None:
                row.persisted = True
        self._dirty.clear()

    def dirty_keys(self) -> set[Any]:
        """Return the keys whose rows differ from the last commit."""
        return {key for key, _ in self._dirty}

    def _mark_row_dirty(self, row: RowT) -> None:
        """Note that a row is new or has changed."""
        at = (row.key, row.start)
        # A row of this key and start was removed since the commit. If this one goes too, a tombstone is still due.
        if self._dirty.get(at, row) is None:
            row.persisted = True
        self._dirty[at] = row
        self.touched = True

    def _mark_row_removed(self, row: RowT) -> None:
        """Note that a row was removed."""
        at = (row.key, row.start)
        if row.persisted:
            self._dirty[at] = None
        else:
            # The changelog has never had the row, so it needs no tombstone.
            self._dirty.pop(at, None)
        self.touched = True
