"""The operators of aggregations. They pass batches to their store's kernel, and the results to their task.

`WindowAggregate` is the operator of all windows, `KeyAggregate` that of aggregations without windows.

An operator has its own stream time: the highest timestamp of a record that it did not skip. A record that an
aggregation rejects does not advance this time, but idleness does (`advance_time`). The time decides when windows close.
Progress records contain it under the store's name.

With `on_close` a window's result is forwarded when the window closes. With `on_update` a commit forwards the last
result of each changed window. It retracts a window (value None) only if an earlier commit had forwarded it. Without
`deduplicate_updates` each result and retraction is forwarded at once.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.shared.common.errors import DataError
from penstock.shared.common.records import Columns, Int64Array
from penstock.shared.streams.aggregations.aggregation import Aggregation
from penstock.shared.streams.processor import NO_TIME, ProcessorContext, TimedProcessor
from penstock.shared.streams.record import Record
from penstock.shared.streams.windows.kernels import LATE_ACCEPTED
from penstock.shared.streams.windows.key_index import Int32Array
from penstock.shared.streams.windows.late_changelog_entries import LateRows
from penstock.shared.streams.windows.result_batch import ResultBatch
from penstock.shared.streams.windows.size_limits import check_key, check_state_size
from penstock.shared.streams.windows.state_columns import RecordNumbers, StateColumns
from penstock.shared.streams.windows.window_rule import Emit, WindowRule
from penstock.shared.streams.windows.window_store import BatchOutcome, WindowStore


class WindowAggregate(TimedProcessor):
    """Aggregates the records of each key into windows."""

    store: WindowStore

    def __init__(
        self,
        store_name: str,
        rule: WindowRule,
        aggregations: Mapping[str, Aggregation[Any]],
        emit: Emit,
    ) -> None:
        self.store_name = store_name
        self.rule = rule
        self.emit = emit
        self.names = tuple(aggregations)
        self.stream_time_ms = NO_TIME

    def init(self, context: ProcessorContext) -> None:
        super().init(context)
        self.store = context.store(self.store_name).windows
        self._columns: StateColumns = self.store.columns
        self._state_bytes_max = context.state_bytes_max
        self._key_bytes_max = context.key_bytes_max
        self._emits_each_update = self.emit == "on_update" and not context.deduplicate_updates
        self._emits_at_commit = self.emit == "on_update" and context.deduplicate_updates
        self.store.begin(self.stream_time_ms, self.close_time_ms)
        self._one_time = np.zeros(1, np.int64)
        self._one = self._columns.no_values(1)
        self.takes_one_by_one = self._columns.calls_users

    # --- records ---

    def process(self, record: Record) -> None:
        key = record.key
        if key is None:
            self.context.count_skipped("null key")
            return
        if record.value is None and self.rule.skips_null_values:
            self.context.count_skipped("null value")
            return
        if not self.context.takes_time(record.timestamp, self.rule.reach_ms):
            return
        # All checks that can reject the record come before the kernel, which cannot undo what it wrote. Only a sum's
        # overflow is left to the kernel, which checks it before it writes.
        check_key(key, self.store_name, self._key_bytes_max)
        raw = key if isinstance(key, bytes) else key.encode()
        value = record.value
        self._columns.take_one(value, self._one)
        inputs = [states.take_one(value) for states in self._columns.objects]
        self._one_time[0] = record.timestamp
        self.store.prepare((raw,), record.timestamp)
        codes = self.store.index.codes_of((raw,))
        # A user's aggregation, or a state that may be too large, is only known after the record was added.
        if self.takes_one_by_one or self.in_doubt(codes, inputs):
            check = functools.partial(
                check_state_size, self.store_name, self._columns.aggregations, key, bytes_max=self._state_bytes_max
            )
            outcome = self.store.take_one(
                self._one_time, codes, self._one, inputs, check, updates=self._emits_each_update
            )
        else:
            outcome = self.store.take(self._one_time, codes, self._one, inputs, updates=self._emits_each_update)
        if outcome.rejected_by is not None:
            raise self.overflow(outcome.rejected_by)
        for _, close_time_ms, stream_time_ms, is_accepted in outcome.late.tolist():
            # A record can be too late for some of its windows and count in others. It is late only if no window took
            # it. Kafka Streams counts a dropped record for each closed window.
            if not is_accepted:
                self.context.emit_late(record, close_time_ms, stream_time_ms)
        # The lake also gets records that missed only some of their hopping windows.
        self._keep_late(outcome.late, self._one_time, codes, self._one, inputs)
        self._forward_outcome(outcome)

    def take(
        self, columns: Columns, indexes: Int64Array, codes: Int32Array, values: RecordNumbers, inputs: list[list[Any]]
    ) -> int:
        """Take the records of `columns` at `indexes`, all of which have a key; return how many were taken.

        If not all were taken, an aggregation rejects the next one.
        """
        times = columns.timestamps[indexes]
        outcome = self.store.take(times, codes, values, inputs)
        if len(late := outcome.late[outcome.late[:, LATE_ACCEPTED] == 0]):
            # `copy` makes the rows contiguous. Kernels would be compiled again for other arrays.
            own, close_times_ms, stream_times_ms, _ = late.T.copy()
            self.context.emit_late_columns(columns, indexes[own], close_times_ms, stream_times_ms)
        self._keep_late(outcome.late, times, codes, values, inputs, columns, indexes)
        self._forward_outcome(outcome, columns, indexes)
        return outcome.count

    def _keep_late(
        self,
        late: Int64Array,
        times: Int64Array,
        codes: Int32Array,
        values: RecordNumbers,
        inputs: Sequence[Sequence[Any]],
        source: Columns | None = None,
        indexes: Int64Array | None = None,
    ) -> None:
        """Keep for the lake each record that missed windows, with these windows and the state of this record alone."""
        if not len(late) or not self.context.keeps_late:
            return
        at = late[:, 0]
        close_times_ms = late[:, 1]
        late_times = times[at]
        own = RecordNumbers(np.ascontiguousarray(values.cells[:, at]), np.ascontiguousarray(values.has[:, at]))
        late_inputs = [[one[i] for i in at.tolist()] for one in inputs]
        first, count = self.rule.missed_windows(late_times, close_times_ms)
        offsets = None if source is None or indexes is None else source.offsets[indexes[at]]
        advance = self.rule.advance_ms or 1
        states, has_state = self._columns.of_each(own, late_inputs, late_times)
        keys = self.store.index.keys(codes[at])
        self.context.keep_late(
            LateRows(
                store=self.store_name,
                keys=keys,
                times=late_times,
                offsets=self.context.late_offsets(source, offsets, len(at)),
                first_missed=first,
                missed=count,
                advance_ms=advance,
                states=states,
                has_state=has_state,
            )
        )

    def in_doubt(self, codes: Int32Array, inputs: list[list[Any]]) -> list[int]:
        """Return the indexes of records with which a state may become too large for a changelog entry.

        Each of these records must be processed alone, so that the state is measured and the record rejected if
        necessary. If a value cannot be encoded as JSON, return all indexes.
        """
        if not self._columns.objects:
            return []
        try:
            return self.store.sizes.in_doubt(codes, inputs, self._state_bytes_max)
        except Exception:
            # A value cannot be encoded as JSON. Processing the records one by one finds it.
            return list(range(len(codes)))

    def overflow(self, rejected_by: int) -> DataError:
        """Return the error of a record whose value is valid, but with which a sum would not fit into 64 bits."""
        aggregation: Any = self._columns.aggregations[rejected_by]
        return DataError(f"{aggregation.function}({aggregation.field!r}): the sum does not fit into 64 bits")

    def _forward_outcome(
        self, outcome: BatchOutcome, source: Columns | None = None, indexes: Int64Array | None = None
    ) -> None:
        """Copy the store's times, and forward the outcome of records."""
        self._keep_time()
        if outcome.missed:
            self.context.count_missed(outcome.missed)
        # As EmitStrategy.onWindowClose (KIP-825), but with the record that closes the window. Kafka Streams emits at
        # most once a second.
        if self.emit == "on_close" and len(outcome.closed):
            by = None if indexes is None else indexes[outcome.closed_by]
            self.context.forward_results(self._make_result_batch(outcome.closed), source, by)
        if len(outcome.updates):
            self.context.forward_results(self._make_result_batch(outcome.updates, is_retracted=outcome.is_retracted))

    def _keep_time(self) -> None:
        self.stream_time_ms = self.store.stream_time_ms
        self.close_time_ms = self.store.close_time_ms

    def _make_result_batch(self, windows: Any, **options: Any) -> ResultBatch:
        store = self.store
        return ResultBatch(self.store_name, self.names, store.columns, store.keys_of, windows, **options)

    # --- time and commits ---

    def advance_time(self, stream_time_ms: int) -> None:
        if stream_time_ms > self.stream_time_ms:
            self.store.prepare((), stream_time_ms)
            self._forward_outcome(self.store.advance(stream_time_ms))

    def results_from_ms(self) -> int:
        if self.close_time_ms is None:
            return NO_TIME
        from_ms = self.close_time_ms - self.rule.results_before_ms
        if not self._emits_at_commit:
            return from_ms
        # The next commit also forwards windows that have closed or were retracted since the last one, however far the
        # close time is ahead of them by now.
        windows, is_retracted = self.store.updated_not_live()
        times = self._make_result_batch(windows, is_retracted=is_retracted).timestamps()
        return int(times.min(initial=from_ms))

    def commit(self) -> None:
        # Kafka Streams' record cache also forwards the last update of a key at the commit, but earlier ones as well if
        # the cache is full.
        if self._emits_at_commit:
            windows, is_retracted = self.store.updated()
            if len(windows):
                self.context.forward_results(self._make_result_batch(windows, is_retracted=is_retracted, by_time=True))


class KeyAggregate(WindowAggregate):
    """Aggregates the records of each key into one row without windows, which is forwarded on update.

    Rows never close, and no record is late. A row is forwarded with the highest timestamp of its key's records, as in
    Kafka Streams' `KStreamAggregate`.
    """

    def __init__(self, store_name: str, aggregations: Mapping[str, Aggregation[Any]]) -> None:
        super().__init__(store_name, WindowRule("table"), aggregations, "on_update")

    def results_from_ms(self) -> int:
        """Return the lowest timestamp of the changed rows that the next commit forwards; stream time if there are none.

        There are none if each update is forwarded at once. A record that arrives out of order may still cause a result
        with a lower timestamp.
        """
        if self._emits_each_update:
            return self.stream_time_ms
        table = self.store.table
        latest = table.cells[table.changed_rows(), table.base + self._columns.program[0][1]]
        return int(latest.min(initial=self.stream_time_ms))

    def _make_result_batch(self, windows: Any, *, by_time: bool = False, **options: Any) -> ResultBatch:
        return super()._make_result_batch(windows, by_time=by_time, has_bounds=False)
