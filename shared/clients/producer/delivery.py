"""What a send gives back: the fate of a record, or of many, to be awaited or not."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import Any

from shared.clients.producer.batch import Batch, BatchState
from shared.common.errors import PenstockError
from shared.common.records import RecordMetadata


def fresh(error: PenstockError) -> PenstockError:
    """The error again, so that many waiters do not share one traceback."""
    again = type(error)(*error.args)
    again.__cause__ = error.__cause__
    return again


class Delivery:
    """One record's fate. `await delivery` gives its RecordMetadata, or raises what ended it.

    Cancelling the wait leaves the record on its way.
    """

    __slots__ = ("_batch", "_index")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index

    def __repr__(self) -> str:
        return f"<Delivery of record {self._index} in {self._batch!r}>"

    def done(self) -> bool:
        """Whether the record's fate is known."""
        return self._batch.state is BatchState.DONE

    def __await__(self) -> Generator[Any, None, RecordMetadata]:
        yield from self._batch.wait().__await__()
        if self._batch.error is not None:
            raise fresh(self._batch.error)
        return self._batch.metadata(self._index)


class Deliveries:
    """Many records' fates. `await deliveries` gives, in the records' order, a RecordMetadata or the error for each.

    For bulk there is `first_error()`, which waits as long and makes no object a record.
    """

    __slots__ = ("_batches", "_places")

    def __init__(self, places: Sequence[tuple[Batch, int] | Exception]) -> None:
        self._places = places
        self._batches = list({id(p[0]): p[0] for p in places if isinstance(p, tuple)}.values())

    def __len__(self) -> int:
        return len(self._places)

    def __repr__(self) -> str:
        return f"<Deliveries of {len(self)} records, {'done' if self.done() else 'pending'}>"

    def done(self) -> bool:
        """Whether the fate of all is known."""
        return all(batch.state is BatchState.DONE for batch in self._batches)

    async def wait(self) -> None:
        """Until the fate of all is known."""
        for batch in self._batches:
            await batch.wait()

    async def first_error(self) -> Exception | None:
        """Wait for all; the error of the first record that has one, or None."""
        await self.wait()
        if not any(b.error for b in self._batches) and all(type(p) is tuple for p in self._places):
            return None
        return next(r for r in self._results() if isinstance(r, Exception))

    def __await__(self) -> Generator[Any, None, list[RecordMetadata | Exception]]:
        yield from self.wait().__await__()
        return self._results()

    def _results(self) -> list[RecordMetadata | Exception]:
        results: list[RecordMetadata | Exception] = []
        for place in self._places:
            if isinstance(place, Exception):
                results.append(place)
            else:
                batch, index = place
                results.append(batch.metadata(index) if batch.error is None else batch.error)
        return results
