"""Deliveries: what awaiting a record, or many, gives."""

from __future__ import annotations

import asyncio

import pytest

from shared.clients.producer.batch import Batch
from shared.clients.producer.delivery import Deliveries, Delivery
from shared.common.errors import DeliveryTimeout, RecordTooLarge
from shared.common.records import TopicPartition


def batch_of(count: int) -> Batch:
    batch = Batch(TopicPartition("t", 0), 16_384, 0, False, 0)
    for i in range(count):
        assert batch.append(None, b"v", [], i)
    return batch


async def test_a_delivery_is_awaited_by_many() -> None:
    """Everybody who awaits a failed delivery gets an error of his own; the record's place is given to all otherwise."""
    batch = batch_of(2)
    delivery = Delivery(batch, 1)

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
    good = batch_of(2)
    good.complete(10, -1)
    assert (await Delivery(good, 1)).offset == 11


async def test_cancelling_a_wait_leaves_the_record_alone() -> None:
    """A cancelled waiter does not end the delivery for others."""
    batch = batch_of(1)
    delivery = Delivery(batch, 0)

    async def wait() -> None:
        await delivery

    waiter = asyncio.ensure_future(wait())
    await asyncio.sleep(0)
    waiter.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiter
    batch.complete(5, -1)
    assert (await delivery).offset == 5


async def test_deliveries_are_in_the_records_order() -> None:
    """Each record has its result at its place, a record's own error too."""
    one, two = batch_of(2), batch_of(1)
    refused = RecordTooLarge("big")
    deliveries = Deliveries([(one, 0), (two, 0), refused, (one, 1)])
    one.complete(10, -1)
    assert not deliveries.done()
    two.fail(DeliveryTimeout("late"))
    results = await deliveries
    assert [getattr(r, "offset", str(r)) for r in results] == [10, "late", "big", 11]
    assert str(await deliveries.first_error()) == "late"
    assert await Deliveries([(one, 0), (one, 1)]).first_error() is None
    assert await Deliveries([]) == []
