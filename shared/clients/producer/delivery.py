"""Deliveries: the fate of one sent record, or of many. A caller may await a delivery or ignore it.

If a waiter is cancelled, its record is cancelled too, unless a request has contained it. In that case only the wait
ends, and callbacks, interceptors and metrics still get the record's fate. After a cancelled record its transaction can
only be aborted, since a commit would leave out the record. Cancelling `asyncio.shield(delivery)` does not cancel the
record.

A `Delivery` is not an `asyncio.Future`, since one future for each record costs too much. It has a future's methods:
`asyncio.wait`, `gather`, `wait_for` and `as_completed` accept it.

`DeliveryLocations` stores the batch of each record of a bulk, as one reference. A run is a sequence of appends without
an await, so no other send appends in between. The index of a record in its batch is computed only when its fate is
requested. It is the index of the run's first record in that batch, plus the number of the run's earlier records in it.
A slice of columns has one span for each batch instead. `DeliveryLocations.of` spreads the spans over the records.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Iterable, Sequence
from contextvars import Context, copy_context
from itertools import chain
from typing import Any

import msgspec
import numpy as np

from penstock.shared.clients.producer.producer_batch import BatchState, ProducerBatch, RecordCallback
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.records import Int64Array, ProducerRecord, RecordMetadata

Span = tuple[ProducerBatch | Exception, int, Int64Array]
"""A batch, the index of the span's first record in it, and the rows of a slice, ascending, that were appended in turn.

Rows that failed have their error in place of the batch, and the index -1.
"""

Run = dict[ProducerBatch, int]
"""The batches that a run of appends filled, each with the index of the run's first record in it."""


class DeliveryLocations:
    """Where the records of a bulk send are: `of` has each record's batch, or the error that kept it out of one, in
    order.

    Records are added in runs (`begin`, `end`), alone (`add`), or as a slice of columns (`add_slice`). During a run the
    caller appends each record's batch to `of`. For the run's first record in a batch, it also sets the record's index
    there, in the dict that `begin` returned. Nothing else may be appended to any batch meanwhile.
    """

    __slots__ = ("_indices", "_of", "_runs", "_sliced", "_slices")

    def __init__(self) -> None:
        self._of: list[ProducerBatch | Exception] = []
        self._slices: list[tuple[int, list[Span]]] = []
        """The records after those in `_of`: their number, and their spans."""
        self._sliced = 0
        self._runs: list[tuple[int, Run]] = []
        self._indices: list[int] | None = None

    def __repr__(self) -> str:
        return f"<DeliveryLocations of {len(self)} records in {len(self._runs) + len(self._slices)} runs>"

    def __len__(self) -> int:
        return len(self._of) + self._sliced

    @property
    def of(self) -> list[ProducerBatch | Exception]:
        """The batch or error of each record."""
        # Spread the slices over their records: each slice becomes a run.
        for count, spans in self._slices:
            batches = np.empty(count, object)
            for batch_or_error, _, rows in spans:
                batches[rows] = batch_or_error
            self._runs.append(
                (
                    len(self._of),
                    {
                        batch_or_error: index
                        for batch_or_error, index, _ in spans
                        if isinstance(batch_or_error, ProducerBatch)
                    },
                )
            )
            self._of += batches.tolist()
        self._slices = []
        self._sliced = 0
        return self._of

    def add_slice(self, count: int, spans: list[Span]) -> None:
        """Add the next `count` records. Each of them is in one of the spans, and each batch has one span."""
        self._slices.append((count, spans))
        self._sliced += count

    def begin(self) -> Run:
        """Begin a run: nothing else is appended to any batch until `end`."""
        run: Run = {}
        self._runs.append((len(self.of), run))
        return run

    def end(self) -> None:
        """End the run."""
        start, run = self._runs[-1]
        for batch in run:
            batch.run = None
        # A run that appended nothing has no record to belong to.
        if start == len(self.of):
            self._runs.pop()

    def add(self, batch_or_error: ProducerBatch | Exception, index: int) -> None:
        """Add the next record, which was appended outside a run, or has failed (`index` -1)."""
        self._runs.append((len(self.of), {batch_or_error: index} if isinstance(batch_or_error, ProducerBatch) else {}))
        self.of.append(batch_or_error)

    def batches(self) -> list[ProducerBatch]:
        """Return every batch that has one of the records, once."""
        spans = chain.from_iterable(spans for _, spans in self._slices)
        sliced = (batch for batch, _, _ in spans if isinstance(batch, ProducerBatch))
        return list(dict.fromkeys(chain(chain.from_iterable(run for _, run in self._runs), sliced)))

    def last(self) -> tuple[ProducerBatch | Exception, int]:
        """Return the last record's batch and its index there; its error and -1 if it has no batch."""
        # Read the last span as it is: spreading the slices would make an entry for every record.
        if self._slices:
            count, spans = self._slices[-1]
            batch_or_error, index, rows = next(span for span in spans if span[2][-1] == count - 1)
            return batch_or_error, index + len(rows) - 1 if isinstance(batch_or_error, ProducerBatch) else -1
        start, run = self._runs[-1]
        last = self._of[-1]
        return last, run[last] + self._of[start:].count(last) - 1 if isinstance(last, ProducerBatch) else -1

    def indices(self) -> list[int]:
        """Return the index of each record in its batch, -1 for a record that an error kept out of a batch."""
        if self._indices is None:
            of = self.of
            ends = [*(start for start, _ in self._runs), len(of)][1:]
            runs = zip(self._runs, ends, strict=True)
            self._indices = [index for (start, run), end in runs for index in _record_indices(of[start:end], run)]
        return self._indices


def _record_indices(batches: Iterable[ProducerBatch | Exception], run: Run) -> Iterable[int]:
    following = dict(run)
    for batch_or_error in batches:
        if isinstance(batch_or_error, ProducerBatch):
            index = following[batch_or_error]
            following[batch_or_error] = index + 1
            yield index
        else:
            yield -1


def delivery_error(error: PenstockError) -> PenstockError:
    """Return a copy of a batch's error for one delivery, so that many waiters do not share one traceback."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    again.maybe_written = error.maybe_written
    again.abortable = error.abortable
    return again


DoneCallback = Callable[["Delivery"], object]


class Delivery(msgspec.Struct, eq=False, gc=False):
    """One record's fate. `await delivery` returns its RecordMetadata, or raises the record's error."""

    _batch: ProducerBatch
    _index: int
    _timestamp: int
    _key_size: int
    _value_size: int

    def __repr__(self) -> str:
        return f"<Delivery of record {self._index} in {self._batch!r}>"

    def done(self) -> bool:
        """Whether the record has its result: it was acknowledged, was cancelled or has failed."""
        batch, index = self._batch.locate(self._index)
        return index < 0 or batch.state is BatchState.DONE

    def cancel(self) -> bool:
        """Cancel the record. Returns False if a request contains it or contained it, or if it is done.

        A cancelled record has the result SendCancelled. Its transaction can only be aborted.
        """
        removed = bool(self._batch.remove(self._index))
        if removed:
            self._batch.cancelled_records()
        return removed

    def cancelled(self) -> bool:
        """Whether the record was cancelled."""
        return self._batch.locate(self._index)[1] < 0

    def result(self) -> RecordMetadata:
        """Return or raise the result without waiting. Raises asyncio.InvalidStateError while it is not done."""
        if (error := self.exception()) is not None:
            raise error
        batch, index = self._batch.locate(self._index)
        return batch.metadata(index, self._timestamp, self._key_size, self._value_size)

    def exception(self) -> PenstockError | None:
        """Return the record's error: SendCancelled if it was cancelled, None if it was stored.

        Raises asyncio.InvalidStateError while it is not done.
        """
        batch, index = self._batch.locate(self._index)
        if index < 0:
            return batch.cancelled_error()
        if batch.state is not BatchState.DONE:
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        return None if batch.error is None else delivery_error(batch.error)

    def add_done_callback(self, call: DoneCallback, *, context: Context | None = None) -> None:
        """Have the producer's event loop call `call(delivery)` once the record is done.

        Raises IllegalState in another event loop if the record is not done.
        """
        loop = asyncio.get_running_loop()
        context = context or copy_context()
        if self.done():
            loop.call_soon(call, self, context=context)
            return
        if self._batch.check_waiter is not None:
            self._batch.check_waiter()
        known = self._batch.done_callbacks.get(self._index)
        if known is None:
            known = []
            self._batch.done_callbacks[self._index] = known
            # An open batch knows a record by the index it was appended with, a sealed one by its position.
            is_open = self._batch.state is BatchState.OPEN
            batch, index = (self._batch, self._index) if is_open else self._batch.locate(self._index)
            batch.callbacks.append(
                RecordCallback(index, self._timestamp, self._key_size, self._value_size, self._run_done_callbacks)
            )
        known.append((call, context))

    def remove_done_callback(self, call: DoneCallback) -> int:
        """Remove a callback. Returns how often it had been added."""
        known = self._batch.done_callbacks.get(self._index, [])
        left = [each for each in known if each[0] != call]
        removed = len(known) - len(left)
        known[:] = left
        return removed

    def _run_done_callbacks(self, *_: object) -> None:
        for call, context in self._batch.done_callbacks.pop(self._index):
            asyncio.get_running_loop().call_soon(call, self, context=context)

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        batch = self._batch
        index = self._index
        # The short way: in a batch that is done, was not split and has no cancelled record, the index is the position.
        if batch.state is not BatchState.DONE or batch.removed:
            batch, index = yield from self._wait_for_batch().__await__()
        if batch.error is not None:
            raise delivery_error(batch.error)
        return batch.metadata(index, self._timestamp, self._key_size, self._value_size)

    async def _wait_for_batch(self) -> tuple[ProducerBatch, int]:
        try:
            while True:
                batch, index = self._batch.locate(self._index)
                if index < 0:
                    raise batch.cancelled_error()
                if batch.state is BatchState.DONE:
                    return batch, index
                # The wait may end in a split: then the record is in a part, which `locate` finds.
                await batch.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise


class Deliveries:
    """The fates of many records. `await deliveries` returns a RecordMetadata or an error for each record, in order.

    `first_error()` waits as long, but makes no object for each record unless a record failed or a batch was split. Use
    it for large bulks.
    """

    __slots__ = ("_all_accepted", "_batches", "_locations", "_records", "_sent_alone", "_timestamp")

    def __init__(
        self,
        delivery_locations: DeliveryLocations,
        records: Sequence[ProducerRecord],
        timestamp: int,
        sent_alone: dict[int, Delivery],
        *,
        all_accepted: bool,
    ) -> None:
        """`timestamp` is that of records without one. `sent_alone` has the deliveries of records that were not appended
        together with others, by index. `all_accepted` means that every record has a batch."""
        self._locations = delivery_locations
        self._records = records
        self._timestamp = timestamp
        self._sent_alone = sent_alone
        self._batches = delivery_locations.batches()
        self._all_accepted = all_accepted

    def __len__(self) -> int:
        return len(self._locations)

    def __repr__(self) -> str:
        return f"<Deliveries of {len(self)} records, {'done' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether every batch that has one of the records is done."""
        return all(_is_batch_done(batch) for batch in self._batches)

    def cancel(self) -> int:
        """Cancel all records that no request has contained. Returns their number.

        Their transaction can then only be aborted.
        """
        indices: dict[ProducerBatch, list[int]] = {batch: [] for batch in self._batches}
        for batch_or_error, index in zip(self._locations.of, self._locations.indices(), strict=True):
            if isinstance(batch_or_error, ProducerBatch):
                indices[batch_or_error].append(index)
        removed = [batch.remove(*own) for batch, own in indices.items()]
        # Once for all batches: it fails the transaction, which they share.
        if any(removed):
            self._batches[0].cancelled_records()
        return sum(removed)

    async def wait(self) -> None:
        """Wait until all records are done. If the wait is cancelled, `cancel` is called."""
        try:
            for batch in self._batches:
                await batch.wait_all()
        except asyncio.CancelledError:
            self.cancel()
            raise

    async def first_error(self) -> Exception | None:
        """Wait for all records. Returns the error of the first record that has one, or None."""
        await self.wait()
        # The short way for the common case, without a look at each record.
        whole = all(b.error is None and not b.parts and not b.removed for b in self._batches)
        if whole and self._all_accepted:
            return None
        return next((r for r in self._results_of_records() if isinstance(r, Exception)), None)

    def last(self) -> RecordMetadata | Exception:
        """Return the last record's metadata or error. All records must be done. Raises IndexError if there are none."""
        return self._result_of_record(len(self) - 1, *self._locations.last())

    def __await__(self) -> Generator[Any, None, list[RecordMetadata | Exception]]:
        yield from self.wait().__await__()
        return self._results_of_records()

    def _results_of_records(self) -> list[RecordMetadata | Exception]:
        delivery_locations = self._locations
        pairs = zip(delivery_locations.of, delivery_locations.indices(), strict=True)
        return [self._result_of_record(i, batch_or_error, index) for i, (batch_or_error, index) in enumerate(pairs)]

    def _result_of_record(
        self, i: int, batch_or_error: ProducerBatch | Exception, index: int
    ) -> RecordMetadata | Exception:
        if isinstance(batch_or_error, Exception):
            return batch_or_error
        batch, index = batch_or_error.locate(index)
        if index < 0:
            return batch.cancelled_error()
        if batch.error is not None:
            return batch.error
        if (own := self._sent_alone.get(i)) is not None:
            return batch.metadata(index, own._timestamp, own._key_size, own._value_size)
        record = self._records[i]
        timestamp = self._timestamp if record.timestamp is None else record.timestamp
        return batch.metadata(index, timestamp, serialized_size(record.key), serialized_size(record.value))


def serialized_size(data: bytes | None) -> int:
    """Return the serialized size of a key or value for a delivery's metadata, in bytes; -1 for None.

    >>> serialized_size(b"ab"), serialized_size(memoryview(b"abcd").cast("i")), serialized_size(None)
    (2, 4, -1)
    """
    if data is None:
        return -1
    return data.nbytes if isinstance(data, memoryview) else len(data)


def _is_batch_done(batch: ProducerBatch) -> bool:
    if batch.state is BatchState.SPLIT:
        return all(_is_batch_done(part) for _, part in batch.parts)
    return batch.state is BatchState.DONE
