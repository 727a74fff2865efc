"""The rows of a global table: the last value of each key, over all partitions of its topic.

Readers get copies, so only the topic's records change a row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from penstock.shared.common.errors import DataError
from penstock.shared.common.serialization import string_deserializer
from penstock.shared.streams.state.key_value_store import Row
from penstock.shared.streams.topology import GlobalTableNode
from penstock.shared.streams.user_code import detached


class GlobalTableRows:
    """One instance's copy, shared by its tasks; `invalid_records` counts records that cannot be read."""

    def __init__(self, node: GlobalTableNode) -> None:
        self.name = node.name
        self.topic = node.topic
        self._node = node
        self.key_type = node.key
        self._rows: dict[Any, Any] = {}
        self.invalid_records = 0
        self.position: dict[int, int] = {}
        """The next offset to read, by partition."""

    def __len__(self) -> int:
        return len(self._rows)

    def __repr__(self) -> str:
        return f"GlobalTableRows({self.name!r}, {len(self._rows)} rows, {self.invalid_records} invalid)"

    def get(self, key: Any) -> Any:
        """Return the value of the key's row, or None."""
        return detached(self._rows.get(key))

    def rows(self) -> Iterator[Row]:
        """Yield all rows, for the keys that exist at the first call."""
        return (row for key in self.keys() for row in self.rows_of(key))

    def rows_of(self, key: Any) -> list[Row]:
        """Return the key's row in a list, or an empty list."""
        return [Row(key, self._rows[key])] if key in self._rows else []

    def keys(self) -> Iterator[Any]:
        """Yield the keys that exist at the first call."""
        return iter(list(self._rows))

    def items(self) -> Iterator[tuple[Any, Any]]:
        """Yield all keys and values."""
        return ((key, detached(row)) for key, row in self._rows.items())

    def apply(self, key: bytes | None, value: bytes | None) -> DataError | None:
        """Apply one record of the topic; one without a value deletes its row. Return the error of an invalid record."""
        try:
            if key is None:
                raise DataError(f"{self.topic}: a record without a key cannot be a row")
            own = key if self._node.key == "bytes" else string_deserializer(self.topic, key)
            row = self._node.value(self.topic, value)
        except DataError as e:
            # The row keeps its last valid value, and the other rows stay current.
            self.invalid_records += 1
            return e
        if row is None:
            self._rows.pop(own, None)
        else:
            self._rows[own] = row
        return None
