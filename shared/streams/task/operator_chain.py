"""An operator chain: `filter`, `filter_not`, `map_values` and `peek` nodes between a source and its aggregation.

Such nodes may drop records and change values, but not keys, timestamps or the order of records. So the chain can
process a whole batch before the aggregation takes it: the nodes are called record by record, as far as there is time,
and the aggregation takes the results as columns. Each record passes the functions only once. Its outcome is kept until
the aggregation has taken the record, even if it takes it as a single record. If a function raises, the error is kept as
the outcome. The record is rejected with that error when its turn comes.
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
from penstock.shared.streams.topology import SourceNode

if TYPE_CHECKING:
    from penstock.shared.streams.task.processor_nodes import ProcessorNodes
    from penstock.shared.streams.task.task_context import TaskContext

Outcome = Record | Exception | None
"""The record that reaches the aggregation, the error that a function raised, or None if the record was filtered out."""


class _Gate:
    """The last node's context: forwards records, or keeps them while a batch passes the chain."""

    def __init__(self, context: ProcessorContext) -> None:
        self._context = context
        self.is_open = True
        self.output: Record | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    def forward(self, record: Record, to: str | None = None) -> None:
        if self.is_open:
            self._context.forward(record, to)
        else:
            self.output = record


class OperatorChain:
    """The functions between a source and its aggregation in one task; `nodes` are in order."""

    def __init__(self, task: TaskContext, nodes: Sequence[Each], key_of: Callable[[bytes], str | bytes]) -> None:
        self._task = task
        self._entrance = nodes[0].process
        self._key_of = key_of
        self._gate: Any = _Gate(nodes[-1].context)
        nodes[-1].context = self._gate
        self._outcomes: dict[int, Outcome] = {}
        """Outcomes by offset, of the records that have passed the chain since the last `forget`."""

    def seen(self, columns: Columns) -> int:
        """Return the number of records up to the last one that has passed the chain."""
        passed = [index for index, at in enumerate(columns.offsets.tolist()) if at in self._outcomes]
        return passed[-1] + 1 if passed else 0

    def forget(self) -> None:
        """Drop the outcomes, because all records are taken."""
        self._outcomes = {}

    def values(
        self, columns: Columns, values: Sequence[Any], exceptional: set[int]
    ) -> tuple[list[Any], NDArray[np.bool_], int]:
        """Return the chain's values, a mask of dropped records, and the number of records that there was time for.

        The mask has the records that were filtered out, and those that there was no time for. Records whose indexes are
        in `exceptional` are skipped. If a function raises, the record's index is added to `exceptional`, and not to the
        mask.
        """
        known = self._outcomes
        has_time = self._task.has_time
        keys = list(columns.keys)
        results: list[Any] = list(values)
        is_out = np.zeros(len(columns), np.bool_)
        count = len(columns)
        self._task.set_current_record(columns.record(0))
        self._gate.is_open = False
        try:
            for index, offset in enumerate(columns.offsets.tolist()):
                if index in exceptional:
                    continue
                # At least one record passes, or a slow function would stop the partition for ever.
                if index and not has_time():
                    count = index
                    is_out[index:] = True
                    break
                outcome = self._process_ahead(columns, index, keys[index], results[index])
                known[offset] = outcome
                if outcome is None:
                    is_out[index] = True
                elif isinstance(outcome, Exception):
                    exceptional.add(index)
                else:
                    results[index] = outcome.value
        finally:
            self._gate.is_open = True
        return results, is_out, count

    def forward(self, record: Record) -> None:
        """Pass the current record through the chain to the aggregation. If it has an outcome already, use that one.

        An outcome that is an error is raised.
        """
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

    def _process_ahead(self, columns: Columns, index: int, key: bytes | None, value: Any) -> Outcome:
        headers = columns.headers
        record = Record(
            None if key is None else self._key_of(key),
            value,
            int(columns.timestamps[index]),
            () if headers is None else tuple(headers[index]),
        )
        self._gate.output = None
        try:
            self._entrance(record)
        except Exception as e:
            # The error is kept as the record's outcome, and handled when the record's turn comes.
            return e
        output: Record | None = self._gate.output
        return output


def functions_before_operator(
    task: TaskContext, processor_nodes: ProcessorNodes, source: SourceNode
) -> tuple[list[Each], str | None]:
    """Return the nodes of the operator chain that directly follows a source, and the name of the node after the chain.

    The name is None if several nodes or none follow the chain. Behind a repartition topic the chain is always empty.
    """
    nodes: list[Each] = []
    below = task.topology.children[source.name]
    while len(below) == 1:
        node = processor_nodes.processors.get(below[0])
        # Functions behind a repartition topic would see its internal headers, which are removed only from single
        # records.
        if not (isinstance(node, Each) and node.at_most_once and not source.is_internal):
            return nodes, below[0]
        nodes.append(node)
        below = task.topology.children[below[0]]
    return nodes, None
