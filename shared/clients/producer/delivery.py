"""Deliveries: the fate of a sent record, or of many. A caller may await a delivery or ignore it.

Cancelling a waiter cancels the record if it is not in a request yet. Afterwards it ends only the wait, and the
record's fate still reaches callbacks, interceptors and metrics. A transaction that a record was cancelled from can only
be aborted: a commit would leave out that record. Cancelling `asyncio.shield(delivery)` does not cancel the record.

A `Delivery` is not an `asyncio.Future`, since one future a record costs too much. It has a future's methods:
`asyncio.wait`, `gather`, `wait_for` and `as_completed` accept it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from contextvars import Context, copy_context
from typing import Any

import msgspec

from penstock.shared.clients.producer.producer_batch import Batch, BatchState, Callback, located
from penstock.shared.clients.producer.record_locations import RecordLocations
from penstock.shared.common.errors import PenstockError
from penstock.shared.common.records import ProducerRecord, RecordMetadata


def fresh(error: PenstockError) -> PenstockError:
    """Return a copy of the error, so that many waiters do not share one traceback."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    again.maybe_written = error.maybe_written
    again.abortable = error.abortable
    return again


DoneCallback = Callable[["Delivery"], object]


class Delivery(msgspec.Struct, eq=False, gc=False):
    """One record's fate. `await delivery` returns its RecordMetadata, or raises the record's error."""

    _batch: Batch
    _index: int
    _timestamp: int
    _key_size: int
    _value_size: int

    def __repr__(self) -> str:
        return f"<Delivery of record {self._index} in {self._batch!r}>"

    def done(self) -> bool:
        """Whether the record was stored or has failed."""
        batch, index = located(self._batch, self._index)
        return index < 0 or batch.state is BatchState.DONE

    def cancel(self) -> bool:
        """Cancel the record. Returns False if it is in a request or done. Its result is then SendCancelled.

        Its transaction can then only be aborted.
        """
        removed = self._batch.remove(self._index)
        if removed:
            self._batch.cancelled_records()
        return removed

    def cancelled(self) -> bool:
        """Whether the record was cancelled."""
        return located(self._batch, self._index)[1] < 0

    def result(self) -> RecordMetadata:
        """Return or raise the result without waiting. Raises asyncio.InvalidStateError while it is not done."""
        if (error := self.exception()) is not None:
            raise error
        batch, index = located(self._batch, self._index)
        return batch.metadata(index, self._timestamp, self._key_size, self._value_size)

    def exception(self) -> PenstockError | None:
        """Return the record's error, SendCancelled if it was cancelled, None if it was stored.

        Raises asyncio.InvalidStateError while it is not done.
        """
        batch, index = located(self._batch, self._index)
        if index < 0:
            return batch.cancelled_error()
        if batch.state is not BatchState.DONE:
            raise asyncio.InvalidStateError(f"{self!r} is not done")
        return None if batch.error is None else fresh(batch.error)

    def add_done_callback(self, call: DoneCallback, *, context: Context | None = None) -> None:
        """Have the event loop call `call(delivery)` once the record is done."""
        loop = asyncio.get_running_loop()
        context = context or copy_context()
        if self.done():
            loop.call_soon(call, self, context=context)
            return
        known = self._batch.done_callbacks.get(self._index)
        if known is None:
            known = self._batch.done_callbacks[self._index] = []
            # An open batch knows a record by the index it was appended with, a sealed one by its position.
            is_open = self._batch.state is BatchState.OPEN
            batch, index = (self._batch, self._index) if is_open else located(self._batch, self._index)
            batch.callbacks.append(
                Callback(index, self._timestamp, self._key_size, self._value_size, self._run_done_callbacks)
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
            raise fresh(batch.error)
        return batch.metadata(index, self._timestamp, self._key_size, self._value_size)

    async def _wait_for_batch(self) -> tuple[Batch, int]:
        try:
            while True:
                batch, index = located(self._batch, self._index)
                if index < 0:
                    raise batch.cancelled_error()
                if batch.state is BatchState.DONE:
                    return batch, index
                # The wait may end in a split: then the record is in a part, which `located` finds.
                await batch.wait()
        except asyncio.CancelledError:
            self.cancel()
            raise


class Deliveries:
    """The fates of many records. `await deliveries` returns a RecordMetadata or an error for each, in order.

    `first_error()` waits as long and makes no object for each record, which suits bulks.
    """

    __slots__ = ("_all_accepted", "_batches", "_locations", "_records", "_sizes", "_timestamp")

    def __init__(
        self,
        record_locations: RecordLocations,
        records: Sequence[ProducerRecord],
        timestamp: int,
        sizes: dict[int, tuple[int, int]],
        *,
        all_accepted: bool,
    ) -> None:
        """`timestamp` is used for records without one. `sizes` (key, value) has entries where serializers changed them.
        `all_accepted` means that every record has a batch."""
        self._locations = record_locations
        self._records = records
        self._timestamp = timestamp
        self._sizes = sizes
        self._batches = record_locations.batches()
        self._all_accepted = all_accepted

    def __len__(self) -> int:
        return len(self._locations)

    def __repr__(self) -> str:
        return f"<Deliveries of {len(self)} records, {'done' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether all records are done."""
        return all(_is_batch_done(batch) for batch in self._batches)

    def cancel(self) -> int:
        """Cancel the records that are not in a request. Returns their number.

        Their transaction can then only be aborted.
        """
        pairs = zip(self._locations.of, self._locations.indices(), strict=True)
        batches = [batch for batch, index in pairs if isinstance(batch, Batch) and batch.remove(index)]
        # Once for all batches: it fails the transaction, which they share.
        if batches:
            batches[0].cancelled_records()
        return len(batches)

    async def wait(self) -> None:
        """Wait until all records are done."""
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
        """Return the last record's metadata or error. All records must be done."""
        return self._result_of_record(len(self) - 1, *self._locations.last())

    def __await__(self) -> Generator[Any, None, list[RecordMetadata | Exception]]:
        yield from self.wait().__await__()
        return self._results_of_records()

    def _results_of_records(self) -> list[RecordMetadata | Exception]:
        record_locations = self._locations
        pairs = zip(record_locations.of, record_locations.indices(), strict=True)
        return [self._result_of_record(i, batch_or_error, index) for i, (batch_or_error, index) in enumerate(pairs)]

    def _result_of_record(self, i: int, batch_or_error: Batch | Exception, index: int) -> RecordMetadata | Exception:
        if isinstance(batch_or_error, Exception):
            return batch_or_error
        batch, index = located(batch_or_error, index)
        if index < 0:
            return batch.cancelled_error()
        if batch.error is not None:
            return batch.error
        record = self._records[i]
        key_size, value_size = self._sizes.get(i) or (size_of(record.key), size_of(record.value))
        timestamp = self._timestamp if record.timestamp is None else record.timestamp
        return batch.metadata(index, timestamp, key_size, value_size)


def size_of(data: bytes | None) -> int:
    """Return the size in bytes, -1 for None.

    >>> size_of(b"ab"), size_of(memoryview(b"abcd").cast("i")), size_of(None)
    (2, 4, -1)
    """
    if data is None:
        return -1
    return data.nbytes if isinstance(data, memoryview) else len(data)


def _is_batch_done(batch: Batch) -> bool:
    if batch.state is BatchState.SPLIT:
        return all(_is_batch_done(part) for _, part in batch.parts)
    return batch.state is BatchState.DONE
