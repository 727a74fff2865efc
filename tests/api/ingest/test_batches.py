"""One request on its way: bounded in flight, settled by acknowledgement, stopped where it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

import pytest

from penstock.api.ingest.batches import EventSender
from penstock.api.ingest.event import RecordError
from penstock.api.ingest.ndjson import Parsed
from penstock.api.ingest.result import IngestResult
from penstock.api.ingest.turns import FREE
from penstock.api.settings import IngestSettings
from penstock.shared.common.errors import BrokerNotAvailable, BufferExhausted, IllegalState, PenstockError
from penstock.shared.common.records import ProducerRecord


def parsed(positions: list[int], bad: list[int] | None = None) -> Parsed:
    made = Parsed()
    made.positions = positions
    made.records = [ProducerRecord("t", b"%d" % p) for p in positions]
    made.errors = [RecordError(p, 400, "MALFORMED_JSON", "not JSON") for p in bad or []]
    return made


def request(producer: Any, **settings: int) -> EventSender:
    limits = IngestSettings.model_validate(settings)
    return EventSender(producer, IngestResult("line", limits.max_errors), limits)


async def test_batches_are_in_flight_up_to_the_limit(held_producer: Any) -> None:
    """The batch that goes over the limit waits for the oldest; nothing is lost by it."""
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


async def test_what_is_not_acknowledged_in_time_is_not_reported_as_stored(held_producer: Any) -> None:
    """After ack_timeout_ms the records' fate is unknown, and the answer says that they may still be stored."""
    sender = request(held_producer, ack_timeout_ms=1)
    await sender.send(parsed([1, 2]), FREE)
    await sender.finish()
    assert sender.result.status == 504
    assert [e.position for e in sender.result.errors] == [1, 2]
    assert "may still be stored" in sender.result.errors[0].message


class BrokenOffProducer:
    """Takes `takes` records, then raises `error`, or waits for ever where there is none."""

    def __init__(self, takes: int, error: PenstockError | None) -> None:
        self.takes, self.error = takes, error

    async def partitions_for(self, topic: str) -> list[int]:
        return [0]

    async def send_many(self, records: Iterable[ProducerRecord]) -> Any:
        for _ in zip(range(self.takes), records, strict=False):
            pass
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize("error", [IllegalState("the producer was closed"), None], ids=["raises", "waits"])
@pytest.mark.parametrize(("takes", "status"), [(0, 503), (2, 504)])
async def test_only_what_the_producer_took_may_be_stored(takes: int, status: int, error: Any) -> None:
    """Where the handing over ends early, by an error or by ack_timeout_ms, what was not drawn is surely not stored."""
    sender = request(BrokenOffProducer(takes, error), ack_timeout_ms=1)
    await sender.send(parsed([1, 2, 3]), FREE)
    await sender.finish()
    assert [e.outcome for e in sender.result.errors] == ["unknown"] * takes + ["not_stored"] * (3 - takes)
    assert sender.result.status == status


async def test_a_full_buffer_fails_the_batch_and_stops_the_request(producer: Any) -> None:
    """An error of send_many itself is every record's error."""
    producer.fail_all = BufferExhausted("buffer_memory is full")
    sender = request(producer)
    assert not await sender.send(parsed([1, 2]), FREE)
    await sender.finish()
    assert (sender.result.status, len(sender.result.errors)) == (429, 2)


async def test_a_lost_broker_stops_the_request(producer: Any) -> None:
    """Once a batch met an error that later ones would meet, take says so."""
    producer.refuse = {b"1": BrokerNotAvailable("no broker")}
    sender = request(producer)
    first = await sender.send(parsed([1]), FREE)
    await asyncio.sleep(0)
    assert first is False or await sender.send(parsed([2]), FREE) is False
    await sender.finish()
    assert sender.result.must_stop == "no broker"


async def test_one_error_too_many_cuts_the_batch_there(producer: Any) -> None:
    """Errors stay bounded, and nothing behind the cut is sent."""
    sender = request(producer, max_errors=2)
    assert not await sender.send(parsed([1, 4, 9], bad=[2, 3, 5, 8]), FREE)
    await sender.finish()
    assert sorted(producer.values()) == [b"1", b"4"]
    assert [e.position for e in sender.result.errors] == [2, 3]
    assert sender.result.stopped_at == 5


async def test_an_abandoned_request_leaves_its_records_to_the_producer(held_producer: Any) -> None:
    """A client that went away does not take back what was handed over."""
    sender = request(held_producer)
    await sender.send(parsed([1, 2]), FREE)
    flights = [flight.outcomes for flight in sender._flights]
    sender.abandon()
    held_producer.release.set()
    await asyncio.gather(*flights)
    assert set(held_producer.values()) == {b"1", b"2"}
    assert sender.result.stored_count == 0
