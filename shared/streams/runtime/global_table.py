"""The rows of a global table: all partitions of its topic, the last value of each key.

What is handed out are copies: only the topic's records change a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.shared.common.errors import DataError
from penstock.shared.common.serialization import string_deserializer
from penstock.shared.streams.state.detached import detached
from penstock.shared.streams.state.key_value_store import Row
from penstock.shared.streams.topology import GlobalTableNode


class GlobalTableRows:
    """One instance's copy, which all its tasks look up in; `refused` counts records that cannot be read."""

    def __init__(self, node: GlobalTableNode) -> None:
        self.name, self.topic = node.name, node.topic
        self._node, self.key_type = node, node.key
        self._rows: dict[Any, Any] = {}
        self.refused = 0
        self.position: dict[int, int] = {}
        """The next offset to read, by partition."""

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"GlobalTableRows({self.name!r}, {len(self._rows)} rows, {self.refused} refused)"

    def get(self, key: Any) -> Any:
        """The row's value, None where there is none."""
        return detached(self._rows.get(key))

    def rows(self) -> Iterator[Row]:
        """All rows, by the keys that there are at the first look."""
        return (row for key in self.keys() for row in self.rows_of(key))

    def rows_of(self, key: Any) -> list[Row]:
        """The key's row, if it has one."""
        return [Row(key, self._rows[key])] if key in self._rows else []

    def keys(self) -> Iterator[Any]:
        """The keys that there are at the first look."""
        return iter(list(self._rows))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """All keys and values."""
        return ((key, detached(row)) for key, row in self._rows.items())

    def apply(self, key: bytes | None, value: bytes | None) -> DataError | None:
        """Take one record of the topic; one without a value deletes its row. What is wrong with it, if anything is."""
        try:
            if key is None:
                raise DataError(f"{self.topic}: a record without a key is no row")
            own = key if self._node.key == "bytes" else string_deserializer(self.topic, key)
            row = self._node.value(self.topic, value)
        except DataError as e:
            self.refused += 1
            return e
        if row is None:
            self._rows.pop(own, None)
        else:
            self._rows[own] = row
        return None
