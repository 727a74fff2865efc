"""Windows in columns, in which a store returns changed and closed windows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from penstock.shared.common.packed_bytes import PackedBytes
from penstock.shared.common.records import Int64Array
from penstock.shared.streams.windows.state_columns import Column

EMPTY: Int64Array = np.empty(0, np.int64)


@dataclass(slots=True)
class Windows:
    """Windows in columns: keys, bounds in ms, states; `closed_at` if they are closed."""

    keys: PackedBytes
    starts: Int64Array
    ends: Int64Array
    columns: list[Column]
    closed_at: Int64Array = field(default_factory=lambda: EMPTY)

    def __len__(self) -> int:
        return len(self.keys)

    def tuples(self) -> Iterator[tuple[Any, ...]]:
        """Yield key, start, end, then the values of the states' columns."""
        return zip(self.keys, *(column.tolist() for column in [self.starts, self.ends, *self.columns]), strict=True)

    def chosen(self, indexes: Any) -> Windows:
        """Return the windows at these indexes, or selected by a mask."""
        at = np.arange(len(self))[indexes]
        columns = [column[at] for column in self.columns]
        closed_at = self.closed_at[at] if len(self.closed_at) else EMPTY
        return Windows(self.keys.at(at), self.starts[at], self.ends[at], columns, closed_at)


def joined_windows(parts: Sequence[Windows], types: Sequence[str]) -> Windows:
    """Return all these windows, in order; `types` are the types of their columns."""
    if len(parts) == 1:
        return parts[0]
    if not parts:
        return Windows(PackedBytes.of([]), EMPTY, EMPTY, [np.empty(0, type_) for type_ in types])
    columns = [np.concatenate(many) for many in zip(*(part.columns for part in parts), strict=True)]
    bounds = [np.concatenate([getattr(part, name) for part in parts]) for name in ("starts", "ends", "closed_at")]
    return Windows(PackedBytes.joined([part.keys for part in parts]), bounds[0], bounds[1], columns, bounds[2])
