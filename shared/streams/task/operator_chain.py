"""What stands between a source and its window: functions of single records, called for a batch before it is taken.

Where all of them are `filter`, `filter_not`, `map_values` and `peek`, what reaches the window are the source's own
records, fewer of them and with other values. So a batch is put through them first, record by record and by the nodes
themselves, as far as there is time; what comes out is taken as columns, in the same step. Each record goes through
once: its outcome is kept until it is taken, also where that is record by record. A record at which a function raises
has its error as outcome, and is refused with it when its turn comes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from penstock.shared.common.records import Columns
from penstock.shared.streams.operators.stateless import Each
from penstock.shared.streams.processor import ProcessorContext
from penstock.shared.streams.record import Record

if TYPE_CHECKING:
    from penstock.shared.streams.task.context import TaskContext

Outcome = Record | Exception | None
"""What reaches the window, what a function raised, or None where the record was filtered out."""


class _Gate:
    """The last node's context: it hands on, or keeps what it is given while a batch goes through."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self.is_open = True
        self.given: Record | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def forward(self, record: Record, to: str | None = None) -> None:
        if self.is_open:
            self._context.forward(record, to)
        else:
            self.given = record


class OperatorChain:
    """The functions between a source and its window, in one task; `nodes` are in their order."""

    def __init__(self, task: TaskContext, nodes: Sequence[Each], key_of: Callable[[bytes], str | bytes]) -> None:
        self._task, self._entrance, self._key_of = task, nodes[0].process, key_of
        self._gate: Any = _Gate(nodes[-1].context)
        nodes[-1].context = self._gate
        self._outcomes: dict[int, Outcome] = {}
        """By offset, of records that went through and are not all taken yet."""

    def seen(self, columns: Columns) -> int:
        """Up to which of these records some went through."""
        went = [place for place, at in enumerate(columns.offsets.tolist()) if at in self._outcomes]
        return went[-1] + 1 if went else 0

    def forget(self) -> None:
        """All that went through is taken."""
        self._outcomes = {}

    def values(
        self, columns: Columns, values: Sequence[Any], odd: set[int]
    ) -> tuple[list[Any], NDArray[np.bool_], int]:
        """The values that come out, where none does, and for how many records there was time.

        Odd places stay out of it; those at which a function raises are added to them.
        """
        known, has_time, keys = self._outcomes, self._task.has_time, list(columns.keys)
        come: list[Any] = list(values)
        is_out, count = np.zeros(len(columns), np.bool_), len(columns)
        self._task.set_current_record(columns.record(0))
        self._gate.is_open = False
        try:
            for place, offset in enumerate(columns.offsets.tolist()):
                if place in odd:
                    continue
                if place and not has_time():  # so a record that takes long is the last one of its step
                    count, is_out[place:] = place, True
                    break
                outcome = known[offset] = self._outcome(columns, place, keys[place], come[place])
                if outcome is None:
                    is_out[place] = True
                elif isinstance(outcome, Exception):
                    odd.add(place)
                else:
                    come[place] = outcome.value
        finally:
            self._gate.is_open = True
        return come, is_out, count

    def forward(self, record: Record) -> None:
        """Hand the record in hand to the window, as it came out where it went through before; raises its error."""
        metadata = self._task.record_metadata
        assert metadata is not None
        if metadata.offset not in self._outcomes:
            self._entrance(record)
            return
        outcome = self._outcomes[metadata.offset]
        if isinstance(outcome, Exception):
            raise outcome
        if outcome is not None:
            self._gate.forward(outcome)

    def _outcome(self, columns: Columns, place: int, key: bytes | None, value: Any) -> Outcome:
        headers = columns.headers
        record = Record(
            None if key is None else self._key_of(key),
            value,
            int(columns.timestamps[place]),
            () if headers is None else tuple(headers[place]),
        )
        self._gate.given = None
        try:
            self._entrance(record)
        except Exception as e:  # whatever it is, it is the record's: what becomes of it is decided in its turn
            return e
        given: Record | None = self._gate.given
        return given
