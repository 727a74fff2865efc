"""Sending the events of one request: batches in flight, their outcomes, and when it stops."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.api.http.turns import FREE
from penstock.api.ingest.event import Parsed, RecordError
from penstock.api.ingest.event_sender import EventSender
from penstock.api.ingest.result import IngestResult
from penstock.api.settings import IngestSettings
from penstock.shared.common.errors import BrokerNotAvailable, BufferExhausted, IllegalState, PenstockError
from penstock.shared.common.records import ProducerRecord


def parsed(positions: list[int], bad: list[int] | None = None) -> Parsed:
    batch = Parsed()
    batch.positions = positions
    batch.records = [ProducerRecord("t", b"%d" % p) for p in positions]
    batch.errors = [RecordError(p, 400, "MALFORMED_JSON", "not JSON") for p in bad or []]
    return batch


def request(producer: Any, **settings: int) -> EventSender:
    limits = IngestSettings.model_validate(settings)
    return EventSender(producer, IngestResult("line", limits.max_errors), limits)


async def test_batches_are_in_flight_up_to_the_limit(held_producer: Any) -> None:
    """The batch that exceeds the limit waits for the oldest one."""
    sender = request(held_producer, max_in_flight_records=20)
    for i in range(2):
        assert await sender.send(parsed(list(range(i * 10, i * 10 + 10))), FREE)
    third = asyncio.ensure_future(sender.send(parsed(list(range(20, 30))), FREE))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not third.done()
    assert held_producer.most == 30
    held_producer.release.set()
    assert await third
    await sender.finish()
    assert sender.result.stored_count == 30
    assert repr(sender) == "EventSender(in_flight=0, IngestResult(stored=30, errors=0, stopped_at=None))"


async def test_a_record_without_acknowledgement_in_time_is_unknown(held_producer: Any) -> None:
    """After ack_timeout_ms the outcome is unknown, and the response says that the records may still be stored."""
    sender = request(held_producer, ack_timeout_ms=1)
    await sender.send(parsed([1, 2]), FREE)
    await sender.finish()
    assert sender.result.status == 504
    assert [e.position for e in sender.result.errors] == [1, 2]
    assert "may still be stored" in sender.result.errors[0].message


class InterruptedProducer:
    """Accepts `accepts` records, then raises `error`, or waits forever if it is None."""

    def __init__(self, accepts: int, error: PenstockError | None) -> None:
        self.accepts = accepts
        self.error = error

    async def partitions_for(self, topic: str) -> list[int]:
        return [0]

    async def send_many(self, records: Iterable[ProducerRecord]) -> Any:
        for _ in zip(range(self.accepts), records, strict=False):
            pass
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize("error", [IllegalState("the producer was closed"), None], ids=["raises", "waits"])
@pytest.mark.parametrize(("accepts", "status"), [(0, 503), (2, 504)])
async def test_records_that_the_producer_did_not_accept_are_not_stored(accepts: int, status: int, error: Any) -> None:
    """If sending ends early, by an error or by ack_timeout_ms, only the records that were drawn may be stored."""
    sender = request(InterruptedProducer(accepts, error), ack_timeout_ms=1)
    await sender.send(parsed([1, 2, 3]), FREE)
    await sender.finish()
    assert [e.outcome for e in sender.result.errors] == ["unknown"] * accepts + ["not_stored"] * (3 - accepts)
    assert sender.result.status == status


async def test_a_full_buffer_fails_the_batch_and_stops_the_request(producer: Any) -> None:
    """An error of send_many itself is every record's error."""
    producer.fail_all = BufferExhausted("buffer_memory is full")
    sender = request(producer)
    assert not await sender.send(parsed([1, 2]), FREE)
    await sender.finish()
    assert (sender.result.status, len(sender.result.errors)) == (429, 2)


async def test_a_lost_broker_stops_the_request(producer: Any) -> None:
    """After an error that would affect all later batches, send returns False."""
    producer.errors_by_value = {b"1": BrokerNotAvailable("no broker")}
    sender = request(producer)
    first = await sender.send(parsed([1]), FREE)
    await asyncio.sleep(0)
    assert first is False or await sender.send(parsed([2]), FREE) is False
    await sender.finish()
    assert sender.result.must_stop == "no broker"


async def test_a_batch_is_cut_at_the_first_error_beyond_the_limit(producer: Any) -> None:
    """The number of errors is bounded, and no record after the cut is sent."""
    sender = request(producer, max_errors=2)
    assert not await sender.send(parsed([1, 4, 9], bad=[2, 3, 5, 8]), FREE)
    await sender.finish()
    assert sorted(producer.values()) == [b"1", b"4"]
    assert [e.position for e in sender.result.errors] == [2, 3]
    assert sender.result.stopped_at == 5


async def test_the_records_of_an_abandoned_request_are_still_sent(held_producer: Any) -> None:
    """A disconnect of the client does not cancel the producer's batches."""
    sender = request(held_producer)
    await sender.send(parsed([1, 2]), FREE)
    flights = [flight.outcomes for flight in sender._flights]
    sender.abandon()
    held_producer.release.set()
    await asyncio.gather(*flights)
    assert set(held_producer.values()) == {b"1", b"2"}
    assert sender.result.stored_count == 0
