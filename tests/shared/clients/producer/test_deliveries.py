"""Deliveries: the results of awaiting or cancelling one record or many, and where the records of a bulk are."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.shared.clients.producer.delivery import Deliveries, Delivery, DeliveryLocations, delivery_error
from penstock.shared.clients.producer.producer_batch import NO_STATE, BatchState, ProducerBatch, RecordCallback
from penstock.shared.common.errors import BufferExhausted, DeliveryTimeout, RecordTooLarge, SendCancelled
from penstock.shared.common.records import ProducerRecord, TopicPartition
from tests.shared.clients.protocol.compressions import COMPRESSION


def batch_of(count: int) -> ProducerBatch:
    batch = ProducerBatch(TopicPartition("t", 0), 16_384, COMPRESSION["none"], False, 0)
    for i in range(count):
        assert batch.append(i, i, None, b"v%d" % i, []) is not None
        batch.count += 1
    return batch


def delivery_of(batch: ProducerBatch, index: int) -> Delivery:
    return Delivery(batch, index, index, -1, 2)


def deliveries_of(*delivery_locations: tuple[ProducerBatch, int] | Exception) -> Deliveries:
    where = DeliveryLocations()
    for location in delivery_locations:
        where.add(*(location if isinstance(location, tuple) else (location, -1)))
    all_taken = not any(isinstance(location, Exception) for location in delivery_locations)
    return Deliveries(where, [ProducerRecord("t", b"v")] * len(delivery_locations), 5, {}, all_accepted=all_taken)


def drained(batch: ProducerBatch) -> ProducerBatch:
    batch.without_removed()
    batch.state = BatchState.OUT
    batch.data(NO_STATE)
    return batch


async def test_several_tasks_may_await_a_delivery() -> None:
    """Each waiter of a failed delivery gets its own error object. On success all get the record's metadata."""
    batch = batch_of(2)
    delivery = delivery_of(batch, 1)

    async def outcome() -> object:
        try:
            return await delivery
        except DeliveryTimeout as e:
            return e

    tasks = [asyncio.ensure_future(outcome()) for _ in range(2)]
    await asyncio.sleep(0)
    assert not delivery.done()
    batch.fail(DeliveryTimeout("late"))
    one, two = await asyncio.gather(*tasks)
    assert str(one) == str(two) == "late"
    assert one is not two
    assert delivery.done()
    good = batch_of(2)
    good.complete(10, -1)
    assert (await delivery_of(good, 1)).offset == 11


async def test_cancelling_a_waiter_cancels_an_unsent_record() -> None:
    """The record fails with SendCancelled for every waiter. Other records are not affected."""
    batch = batch_of(2)
    delivery, other = delivery_of(batch, 0), delivery_of(batch, 1)
    waiter = asyncio.ensure_future(delivery._wait_for_batch())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert delivery.done()
    assert not other.done()
    drained(batch).complete(7, -1)
    with pytest.raises(SendCancelled):
        await delivery
    assert (await other).offset == 7


async def test_cancelling_a_waiter_does_not_cancel_a_sent_record() -> None:
    """A sent record continues, and only the wait ends."""
    batch = drained(batch_of(1))
    delivery = delivery_of(batch, 0)
    waiter = asyncio.ensure_future(delivery._wait_for_batch())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert not delivery.cancel()
    batch.complete(5, -1)
    assert (await delivery).offset == 5


async def test_a_delivery_follows_its_record_through_splits() -> None:
    """A cancelled record, and one in a part of a part, are both found."""
    batch = batch_of(5)
    deliveries = [delivery_of(batch, i) for i in range(5)]
    assert deliveries[1].cancel()
    tasks = [asyncio.ensure_future(d._wait_for_batch()) for d in deliveries]
    await asyncio.sleep(0)
    one, two = drained(batch).split()
    two.data(NO_STATE)
    three, four = two.split()
    assert not deliveries[4].done()
    for offset, part in ((20, four), (10, three), (0, one)):
        part.complete(offset, -1)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(results[1], SendCancelled)
    found = [(await deliveries[i]).offset for i in (0, 2, 3, 4)]
    assert found == [0, 1, 10, 20]


async def test_deliveries_are_in_the_records_order() -> None:
    """Each record's result or error is at its index."""
    one, two = batch_of(2), batch_of(1)
    deliveries = deliveries_of((one, 0), (two, 0), RecordTooLarge("big"), (one, 1))
    one.complete(10, -1)
    assert not deliveries.done()
    assert repr(deliveries) == "<Deliveries of 4 records, pending>"
    two.fail(DeliveryTimeout("late"))
    assert [getattr(r, "offset", str(r)) for r in await deliveries] == [10, "late", "big", 11]
    assert str(await deliveries.first_error()) == "late"
    assert await deliveries_of((one, 0), (one, 1)).first_error() is None
    assert await deliveries_of() == []


async def test_the_first_error_is_found_wherever_it_is() -> None:
    """The first error is found among rejected records, cancelled records, and parts of a split batch."""
    good = batch_of(2)
    failed = deliveries_of((good, 0), RecordTooLarge("big"))
    cancelled_records = deliveries_of((good, 0), (good, 1))
    assert good.remove(1)
    drained(good).complete(0, -1)
    assert isinstance(await failed.first_error(), RecordTooLarge)
    assert isinstance(await cancelled_records.first_error(), SendCancelled)
    whole = drained(batch_of(2))
    one, two = whole.split()
    one.complete(0, -1)
    two.fail(DeliveryTimeout("late"))
    split = deliveries_of((whole, 0), (whole, 1))
    assert split.done()
    assert isinstance(await split.first_error(), DeliveryTimeout)


async def test_cancelling_many() -> None:
    """Unsent records are cancelled and counted."""
    sent, unsent = drained(batch_of(2)), batch_of(2)
    deliveries = deliveries_of((sent, 0), (unsent, 0), RecordTooLarge("big"), (unsent, 1))
    waiter = asyncio.ensure_future(deliveries.wait())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert deliveries.cancel() == 0, "all that could be was"
    assert unsent.removed == [0, 1]
    assert len(deliveries) == 4


class Index(int):
    """An index that counts its comparisons."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Index.compared += 1
        return int(self) == other

    def __lt__(self, other: int) -> bool:
        Index.compared += 1
        return int(self) < other

    def __gt__(self, other: int) -> bool:
        Index.compared += 1
        return int(self) > other

    __hash__ = int.__hash__


async def test_cancelling_many_records_takes_no_search_for_each() -> None:
    """The records of a large batch are cancelled and reported within a few steps for each of them."""
    count = 1_000
    batch = batch_of(count)
    errors: list[Exception | None] = []
    batch.callbacks = [RecordCallback(Index(i), 0, 1, 1, lambda _, e: errors.append(e)) for i in range(count)]
    locations = DeliveryLocations()
    locations.add_slice(count, [(batch, 0, np.arange(count))])
    locations._indices = [Index(i) for i in range(count)]
    deliveries = Deliveries(locations, [ProducerRecord("t", b"v")] * count, 5, {}, all_accepted=True)
    assert deliveries.cancel() == count
    assert len(errors) == count
    assert {type(result) for result in deliveries._results_of_records()} == {SendCancelled}
    assert Index.compared < 50 * count


def test_a_fresh_error_keeps_its_cause() -> None:
    """A copied error has the same class, message and cause."""
    error = DeliveryTimeout("late")
    error.__cause__ = OSError("gone")
    again = delivery_error(error)
    assert (type(again), again.args, again.__cause__) == (DeliveryTimeout, ("late",), error.__cause__)
    assert (
        repr(delivery_of(batch_of(1), 0)) == "<Delivery of record 0 in <ProducerBatch t-0, 1 records, OPEN, attempt 0>>"
    )


async def turn() -> None:
    """Runs the callbacks that are scheduled on the event loop."""
    await asyncio.sleep(0)


async def test_a_delivery_calls_callbacks_as_a_future_does() -> None:
    """A callback is called once in the next loop iteration, also if the result is known. A removed one is not
    called."""
    batch, called = batch_of(3), list[tuple[str, Delivery]]()
    delivery = delivery_of(batch, 1)
    with pytest.raises(asyncio.InvalidStateError):
        delivery.result()

    def other(done: Delivery) -> None:
        called.append(("other", done))

    delivery.add_done_callback(lambda done: called.append(("first", done)))
    delivery.add_done_callback(other)
    delivery.add_done_callback(other)
    assert delivery.remove_done_callback(other) == 2
    assert delivery.remove_done_callback(other) == 0
    delivery_of(batch, 0).cancel()
    drained(batch).complete(40, -1)
    for callback in batch.callbacks:
        callback.call(batch.metadata(*callback[:-1]), None)
    assert called == []
    await turn()
    assert called == [("first", delivery)]
    delivery.add_done_callback(other)
    await turn()
    assert called[1:] == [("other", delivery)]
    assert (delivery.result().offset, delivery.exception(), delivery.cancelled()) == (40, None, False)


async def test_a_delivery_has_its_error_or_cancellation() -> None:
    """`exception` returns the error, which is SendCancelled for a cancelled record. `result` raises it."""
    batch, called = batch_of(2), list[Delivery]()
    failed, cancelled = delivery_of(batch, 0), delivery_of(batch, 1)
    cancelled.add_done_callback(called.append)
    cancelled.cancel()
    await turn()
    assert called == [cancelled]
    assert cancelled.cancelled()
    assert isinstance(cancelled.exception(), SendCancelled)
    drained(batch).fail(DeliveryTimeout("late"))
    assert isinstance(failed.exception(), DeliveryTimeout)
    assert not failed.cancelled()
    with pytest.raises(DeliveryTimeout):
        failed.result()


async def test_a_callback_is_called_after_a_split() -> None:
    """A callback added while the batch was in flight is called once the part with the record is done."""
    batch, called = drained(batch_of(4)), list[Delivery]()
    delivery = delivery_of(batch, 3)
    delivery.add_done_callback(called.append)
    _, second = batch.split()
    delivery.add_done_callback(called.append)
    drained(second).complete(10, -1)
    for callback in second.callbacks:
        callback.call(None, None)
    await turn()
    assert called == [delivery, delivery]
    assert delivery.result().offset == 10 + second.count - 1


BATCHES = 3
steps = st.one_of(
    st.lists(st.integers(0, BATCHES - 1), max_size=8),  # a run into these batches
    st.integers(0, BATCHES - 1),  # one record by itself
    st.just("refused"),
    st.tuples(st.lists(st.integers(-1, BATCHES - 1), min_size=1, max_size=8)),  # a slice of columns; -1: not taken
    st.just("other"),  # somebody else appends between two runs
)


def numbered_batch(number: int) -> ProducerBatch:
    return ProducerBatch(TopicPartition("t", number), 16_384, COMPRESSION["none"], False, 0)


def fill(
    delivery_locations: DeliveryLocations, batches: list[ProducerBatch], numbers: list[int]
) -> list[tuple[ProducerBatch, int]]:
    """Appends a run as a bulk does, and returns each record's batch and index."""
    run, seen = delivery_locations.begin(), []
    for number in numbers:
        batch = batches[number]
        seen.append((batch, batch.count))
        if batch.run is not run:
            batch.run, run[batch] = run, batch.count
        batch.count += 1
        delivery_locations.of.append(batch)
    delivery_locations.end()
    return seen


def fill_slice(
    delivery_locations: DeliveryLocations, batches: list[ProducerBatch], numbers: list[int]
) -> list[tuple[object, int]]:
    """Adds a slice of columns by batch, with the rejected records at the end."""
    error, seen, spans = BufferExhausted("full"), [(None, -1)] * len(numbers), []
    for number in [*range(BATCHES), -1]:
        rows = np.flatnonzero(np.array(numbers) == number)
        location = error if number < 0 else batches[number]
        first = -1 if number < 0 else batches[number].count
        if len(rows):
            spans.append((location, first, rows))
        for i, row in enumerate(rows.tolist()):
            seen[row] = (location, -1 if number < 0 else first + i)
        if number >= 0:
            batches[number].count += len(rows)
    delivery_locations.add_slice(len(numbers), spans)
    return seen


@given(st.lists(steps, min_size=1, max_size=12))
def test_indices_are_those_of_the_appends(taken: list[list[int] | tuple[list[int]] | int | str]) -> None:
    """Through runs, slices, single records, rejections and other senders, each record has the index of its append."""
    delivery_locations, batches = DeliveryLocations(), [numbered_batch(number) for number in range(BATCHES)]
    seen: list[tuple[object, int]] = []
    for step in taken:
        if isinstance(step, list):
            seen += fill(delivery_locations, batches, step)
        elif isinstance(step, tuple):
            seen += fill_slice(delivery_locations, batches, step[0])
        elif isinstance(step, int):
            seen.append((batches[step], batches[step].count))
            delivery_locations.add(batches[step], batches[step].count)
            batches[step].count += 1
        elif step == "refused":
            error = RecordTooLarge("t")
            seen.append((error, -1))
            delivery_locations.add(error, -1)
        else:
            batches[0].count += 1
    found = delivery_locations.batches()
    assert set(found) == {location for location, _ in seen if isinstance(location, ProducerBatch)}
    assert len(set(found)) == len(found)
    assert len(delivery_locations) == len(seen)
    if seen:
        assert delivery_locations.last() == seen[-1]
    assert list(zip(delivery_locations.of, delivery_locations.indices(), strict=True)) == seen
    assert delivery_locations.batches() == found
    assert not seen or delivery_locations.last() == seen[-1]
    assert all(batch.run is None for batch in batches)


def test_an_empty_run_leaves_nothing() -> None:
    """An empty run is dropped. Batches are listed once, in the order of their first record."""
    delivery_locations, one, two = DeliveryLocations(), numbered_batch(1), numbered_batch(2)
    delivery_locations.begin()
    delivery_locations.end()
    assert repr(delivery_locations) == "<DeliveryLocations of 0 records in 0 runs>"
    for batch, index in ((two, 0), (one, 0), (two, 1)):
        delivery_locations.add(batch, index)
    assert delivery_locations.batches() == [two, one]
