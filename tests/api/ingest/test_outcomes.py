"""The outcome of each event, stored, not stored or unknown; the response to all; and when a request stops."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.api.http.health import CheckResult
from penstock.api.http.turns import FREE
from penstock.api.ingest.event import Parsed, RecordError
from penstock.api.ingest.event_sender import EventSender
from penstock.api.ingest.result import IngestResult
from penstock.api.settings import IngestSettings
from penstock.shared.common import errors
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from tests.api.conftest import MemoryProducer
from tests.api.ingest.service import URL, Service


def stored(partition: int, offset: int) -> RecordMetadata:
    return RecordMetadata("t", partition, offset, 0)


def maybe_written(error: errors.PenstockError) -> errors.PenstockError:
    error.maybe_written = True
    return error


def not_written(error: errors.PenstockError) -> errors.PenstockError:
    error.maybe_written = False
    return error


BAD_LINE = RecordError(9, 400, "MALFORMED_JSON", "not JSON", 3)


def test_all_stored_is_200_with_the_last_offset_of_each_partition() -> None:
    """Last offsets are the highest ones, in whatever order the outcomes arrive."""
    result = IngestResult("line", 10)
    result.add_outcomes([1, 2, 3], [stored(0, 8), stored(1, 3), stored(0, 7)])
    assert result.status == 200
    assert result.body() == {"stored": 3, "last_offsets": {"0": 8, "1": 3}}
    assert result.retry_after_s is None


def test_an_unexpected_error_is_logged_once() -> None:
    """The response does not have the text of a programming error, so the log does."""
    result = IngestResult("line", 10)
    with capture_logs() as logged:
        result.add_outcomes([7, 8], [TypeError("a secret"), TypeError("a secret")])
    assert (result.status, "a secret" in str(result.body())) == (500, False)
    assert [str(one["exc_info"]) for one in logged] == ["a secret"]


def test_mixed_is_207_with_the_errors_in_order() -> None:
    """Rejected and failed events are listed together, by position, with their reasons."""
    result = IngestResult("line", 10)
    result.add_errors([BAD_LINE])
    result.add_outcomes([7, 8], [stored(0, 1), errors.RecordTooLarge("1,200,000 bytes")])
    assert result.status == 207
    assert result.body()["errors"] == [
        {"line": 8, "error_code": "MESSAGE_TOO_LARGE", "message": "1,200,000 bytes", "outcome": "not_stored"},
        {"line": 9, "column": 3, "error_code": "MALFORMED_JSON", "message": "not JSON", "outcome": "not_stored"},
    ]


@pytest.mark.parametrize(
    ("outcomes", "status", "retry"),
    [
        ([errors.RecordTooLarge()], 413, None),
        ([errors.RecordTooLarge(), errors.InvalidTimestamp()], 400, None),
        ([errors.BufferExhausted()], 429, 1),
        ([errors.InvalidTimestamp(), errors.BufferExhausted()], 429, 1),
        ([errors.DeliveryTimeout(), errors.BufferExhausted()], 504, 5),
        ([errors.KafkaTimeout(), errors.NotEnoughReplicas()], 504, 5),
        ([not_written(errors.DeliveryTimeout()), errors.NotEnoughReplicas()], 503, 5),
        ([not_written(errors.DeliveryTimeout()), errors.RecordTooLarge()], 503, 5),
        ([maybe_written(errors.BrokerNotAvailable()), errors.BrokerNotAvailable()], 504, 5),
        ([maybe_written(errors.RecordTooLarge())], 504, 5),
        ([ValueError("a bug")], 500, None),
    ],
)
def test_nothing_stored_is_never_a_2xx(outcomes: list[Exception], status: int, retry: int | None) -> None:
    """Without a stored record the errors determine the status, the service's before the client's, with Retry-After."""
    result = IngestResult("line", 10)
    result.add_outcomes(list(range(len(outcomes))), outcomes)
    assert (result.status, result.retry_after_s) == (status, retry)


def test_different_errors_of_the_client_are_a_bad_request() -> None:
    """Without a stored record the status is that of all errors, or 400 if they have different ones."""
    result = IngestResult("line", 10)
    result.add_errors([BAD_LINE._replace(status=413)])
    assert result.status == 413
    result.add_errors([BAD_LINE._replace(status=404)])
    assert result.status == 400


def test_stored_not_stored_and_unknown_are_counted_apart() -> None:
    """Each event without acknowledgement is not stored or unknown, and the counts add up."""
    result = IngestResult("line", 10)
    result.add_errors([BAD_LINE])
    result.add_outcomes(
        [1, 2, 3, 4],
        [stored(0, 1), errors.DeliveryTimeout(), not_written(errors.DeliveryTimeout()), ValueError("a bug")],
    )
    body = result.body()
    assert result.status == 207
    assert (body["stored"], body["not_stored"], body["unknown"]) == (1, 2, 2)
    assert [(e["line"], e["outcome"]) for e in body["errors"]] == [
        (2, "unknown"),
        (3, "not_stored"),
        (4, "unknown"),
        (9, "not_stored"),
    ]


def test_stored_events_are_reported_as_they_are_added() -> None:
    """Each call reports its own. Every event has an outcome."""
    result, counts = IngestResult("line", 10), list[int]()
    result.on_stored = counts.append
    result.add_outcomes([1], [stored(0, 1)])
    result.add_outcomes([2, 3], [stored(0, 2), errors.RecordTooLarge()])
    assert counts == [1, 1]
    with pytest.raises(ValueError, match="shorter"):
        result.add_outcomes([4, 5], [stored(0, 3)])


def test_withheld_events_are_not_stored() -> None:
    """The valid events of an atomic request are not sent if another is invalid. They count beside it."""
    result = IngestResult("line", 10)
    result.add_errors([BAD_LINE])
    result.withheld_count = 1
    assert result.body()["not_stored"] == 2


def test_an_unexpected_error_does_not_show_its_text() -> None:
    """A foreign exception may contain anything, so the response has only its title."""
    result = IngestResult("line", 10)
    result.add_outcomes([1], [ValueError("secret")])
    assert "secret" not in str(result.body())
    assert result.must_stop, "it may be in any event"


def test_an_error_that_affects_all_events_stops_the_request() -> None:
    """An unreachable broker stops the request even if other errors follow; an invalid record does not."""
    result = IngestResult("line", 10)
    result.add_errors([BAD_LINE])
    assert not result.must_stop
    result.add_outcomes([1], [errors.BrokerNotAvailable("no broker")])
    result.add_errors([BAD_LINE])
    assert result.must_stop == "no broker"


def test_a_stopped_request_names_the_first_event_that_was_not_read() -> None:
    """Without errors it is not a success either: some events were not read."""
    result = IngestResult("line", 10)
    result.add_outcomes([1], [stored(0, 0)])
    result.stop(2, "the service is shutting down")
    result.stop(2, "something else")
    result.stop(5, "something later")
    assert result.status == 207
    assert result.body()["stopped_at_line"] == 2
    assert "the service is shutting down" in result.body()["stop_reason"]
    result.stop(1, "the batch was dropped")
    assert (result.body()["stopped_at_line"], "was dropped" in result.body()["stop_reason"]) == (1, True)
    empty = IngestResult("line", 10)
    empty.stop(1, "the service is shutting down")
    assert (empty.status, empty.retry_after_s) == (503, 1)


def test_offsets_are_returned_on_request_and_bounded() -> None:
    """At most max_offsets are listed, by position, and the others are counted."""
    result = IngestResult("index", 10, max_offsets=2)
    result.add_outcomes([1, 0, 2, 3], [stored(0, 5), stored(1, 6), stored(0, 7), stored(0, 8)])
    assert result.body()["offsets"] == [
        {"index": 0, "partition": 1, "offset": 6},
        {"index": 1, "partition": 0, "offset": 5},
    ]
    assert result.body()["offsets_omitted"] == 2
    many = IngestResult("index", 10, max_offsets=300)
    many.add_outcomes(range(301), [stored(0, offset) for offset in range(301)])
    assert many.body()["offsets_omitted"] == 1


def test_the_first_offset_of_a_partition_is_its_last_one() -> None:
    """A single offset, also 0, is the partition's last offset."""
    result = IngestResult("line", 10, max_offsets=3)
    result.add_outcomes([1, 2], [stored(0, 0), stored(12, 4)])
    assert result.body()["last_offsets"] == {"0": 0, "12": 4}
    assert result.body()["offsets_omitted"] == 0
    assert repr(result) == "IngestResult(stored=2, errors=0, stopped_at=None)"


def test_discarded_acknowledgements_are_not_stored() -> None:
    """Discarded acknowledgements, as after an aborted transaction, do not count as stored."""
    result = IngestResult("line", 10, max_offsets=5)
    result.add_outcomes([1, 2, 3], [stored(0, 7), stored(1, 8), errors.RecordTooLarge("big")])
    result.discard_acknowledgements()
    assert result.status == 413
    assert (result.body()["stored"], result.body()["last_offsets"], result.body()["offsets"]) == (0, {}, [])


def test_details_are_popped_once() -> None:
    """Popped errors and offsets are not in the response any more, but in the totals."""
    result, seen = IngestResult("index", 3, max_offsets=2), list[RecordError]()
    result.on_error = seen.append
    assert (result.pop_details(), result.totals()) == ({"stored": 0}, {"stored": 0, "not_stored": 0, "unknown": 0})
    result.add_outcomes([4, 3, 2], [stored(0, 5), errors.DeliveryTimeout("late"), errors.RecordTooLarge("big")])
    assert [(error.position, error.outcome) for error in seen] == [(3, "unknown"), (2, "not_stored")]
    row = result.pop_details()
    assert [error["index"] for error in row["errors"]] == [2, 3]
    assert row["offsets"] == [{"index": 4, "partition": 0, "offset": 5}]
    assert result.pop_details() == {"stored": 0}
    assert result.retry_after_s == 5, "of the popped errors"
    result.add_outcomes([5], [errors.InvalidTimestamp("no time")])
    assert result.totals() == {"stored": 1, "not_stored": 2, "unknown": 1}
    assert result.pop_details().keys() == {"stored", "errors"}
    result.add_outcomes([6], [errors.BufferExhausted("full")])
    assert result.totals() == {"stored": 1, "not_stored": 3, "unknown": 1}
    result.pop_details()
    result.stop(9, "too many errors", 400)
    assert result.totals() == {
        "stored": 1,
        "not_stored": 3,
        "unknown": 1,
        "stopped_at_index": 9,
        "stop_reason": "too many errors; nothing from here on was read or stored",
    }
    assert (result.status, result.retry_after_s) == (207, 5)


def test_each_pop_has_its_own_offsets_omitted() -> None:
    """At most max_offsets are popped at once, and the other events stored since the last call are counted."""
    result = IngestResult("line", 10, max_offsets=1)
    result.add_outcomes([1, 2, 3], [stored(0, 5), stored(0, 6), stored(0, 7)])
    first = {"offsets": [{"line": 1, "partition": 0, "offset": 5}], "offsets_omitted": 2}
    assert result.pop_details() == {"stored": 3} | first
    result.add_outcomes([4], [stored(0, 8)])
    assert result.pop_details()["offsets_omitted"] == 0


def test_popped_errors_decide_the_status_too() -> None:
    """Popped errors determine the status together with the others."""
    result = IngestResult("line", 10)
    result.add_outcomes([1], [errors.BufferExhausted("full")])
    result.pop_details()
    result.add_outcomes([2], [errors.InvalidTimestamp("no time")])
    assert result.status == 429
    result.add_outcomes([3], [errors.BufferExhausted("full again")])
    assert result.status == 429


def test_too_many_errors_stop_a_request() -> None:
    """max_errors errors stop a request; then, and after a bad request, the response has no Retry-After."""
    result = IngestResult("line", 2)
    result.add_errors([BAD_LINE])
    assert not result.must_stop
    result.stop(10, "the service is shutting down")
    assert result.retry_after_s == 1
    result.add_errors([BAD_LINE])
    assert result.must_stop == "there were 2 errors"
    assert result.retry_after_s is None
    result.add_errors([BAD_LINE])
    assert result.must_stop == "there were 3 errors"
    assert result.retry_after_s is None
    forbidden = IngestResult("line", 2)
    forbidden.add_outcomes([1], [errors.AuthorizationFailed("no")])
    forbidden.stop(2, forbidden.must_stop or "")
    assert (forbidden.status, forbidden.retry_after_s) == (403, None)
    bad = IngestResult("line", 2)
    bad.stop(0, "the length is wrong", 400)
    assert (bad.status, bad.retry_after_s, bad.body()["stopped_at_line"]) == (400, None, 0)


@pytest.mark.parametrize(
    ("error", "stops"),
    [
        (errors.UnknownTopicOrPartition("no topic"), True),
        (errors.BufferExhausted("no topic"), True),
        (errors.NotEnoughReplicas("no topic"), True),
        (errors.InvalidTimestamp("no topic"), False),
    ],
)
def test_the_first_lasting_failure_is_the_reason(error: errors.PenstockError, stops: bool) -> None:
    """A failure of the topic or of the service affects all later events."""
    result = IngestResult("line", 10)
    result.add_outcomes([1, 2], [error, errors.BrokerNotAvailable("no broker")])
    assert result.must_stop == ("no topic" if stops else "no broker")


def test_an_error_without_a_text_has_its_title() -> None:
    """An error without a message has its title."""
    result = IngestResult("line", 10)
    result.add_outcomes([1, 2], [errors.RecordTooLarge(), ValueError("secret")])
    assert all(row["message"] for row in result.body()["errors"])
    assert "column" not in result.body()["errors"][0]


outcomes_strategy = st.lists(
    st.one_of(
        st.builds(stored, st.integers(0, 3), st.integers(0, 100)),
        st.sampled_from([errors.BrokerNotAvailable(), errors.RecordTooLarge(), errors.KafkaTimeout(), OSError()]),
    )
)


@given(outcomes_strategy)
def test_only_acknowledged_records_are_counted_as_stored(outcomes: list[RecordMetadata | Exception]) -> None:
    """200 means that all are acknowledged, and every other record has its error."""
    result = IngestResult("line", 1_000)
    result.add_outcomes(list(range(len(outcomes))), outcomes)
    acknowledged = sum(isinstance(o, RecordMetadata) for o in outcomes)
    body = result.body()
    assert body["stored"] == acknowledged
    assert acknowledged + body.get("not_stored", 0) + body.get("unknown", 0) == len(outcomes)
    assert (result.status != 503) or not body["unknown"]
    assert (result.status == 200) == (acknowledged == len(outcomes))
    assert (result.status < 300) == (acknowledged > 0 or not outcomes)
    assert [e["line"] for e in body.get("errors", [])] == [
        i for i, o in enumerate(outcomes) if not isinstance(o, RecordMetadata)
    ]


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
    """Raises `error` for every batch, or waits forever if it is None."""

    def __init__(self, error: errors.PenstockError | None) -> None:
        self.error = error

    async def partitions_for(self, topic: str) -> list[int]:
        return [0]

    async def send_many(self, records: Iterable[ProducerRecord]) -> Any:
        if self.error is not None:
            raise self.error
        await asyncio.Event().wait()


@pytest.mark.parametrize(
    ("error", "outcome", "status"),
    [
        (not_written(errors.IllegalState("the producer is closed")), "not_stored", 503),
        (maybe_written(errors.IllegalState("the producer was closed")), "unknown", 504),
        (None, "unknown", 504),
    ],
)
async def test_a_batch_that_is_not_accepted_may_be_stored_in_part(error: Any, outcome: str, status: int) -> None:
    """If sending ends early, the error says whether records may be stored. After ack_timeout_ms they may be."""
    sender = request(InterruptedProducer(error), ack_timeout_ms=1)
    await sender.send(parsed([1, 2, 3]), FREE)
    await sender.finish()
    assert [e.outcome for e in sender.result.errors] == [outcome] * 3
    assert sender.result.status == status


async def test_a_full_buffer_fails_the_batch_and_stops_the_request(producer: Any) -> None:
    """An error of send_many itself is every record's error."""
    producer.fail_all = errors.BufferExhausted("buffer_memory is full")
    sender = request(producer)
    assert not await sender.send(parsed([1, 2]), FREE)
    await sender.finish()
    assert (sender.result.status, len(sender.result.errors)) == (429, 2)


async def test_a_lost_broker_stops_the_request(producer: Any) -> None:
    """After an error that would affect all later batches, send returns False."""
    producer.errors_by_value = {b"1": errors.BrokerNotAvailable("no broker")}
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


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (errors.BrokerNotAvailable("no broker"), 503),
        (errors.NotEnoughReplicas("1 of 2"), 503),
        (errors.KafkaTimeout("no response"), 504),
        (errors.DeliveryTimeout("25 s"), 504),
        (errors.BufferExhausted("full"), 429),
    ],
)
async def test_kafka_errors_are_never_a_2xx(producer: Any, error: Exception, status: int) -> None:
    """A Kafka error has its status with Retry-After and is never a 2xx."""
    producer.errors_by_value = {b"1": error}
    response = await Service(producer).post(b"1\n")
    assert response.status_code == status
    assert int(response.headers["retry-after"]) >= 1
    assert response.json()["stored"] == 0


async def test_during_an_outage_requests_are_a_503_immediately(producer: Any) -> None:
    """During a known outage a request is a 503 immediately, and nothing reaches the producer."""
    response = await Service(producer, kafka=lambda: CheckResult(False, "no broker")).post(b"1\n")
    assert (response.status_code, response.json()["error_code"]) == (503, "BROKER_NOT_AVAILABLE")
    assert "retry-after" in response.headers
    assert producer.batches == []


async def test_unknown_outcomes_are_a_504_during_an_outage(held_producer: Any) -> None:
    """Records that may be stored are a 504 even during an outage, since a 503 means that nothing is stored."""
    checks = [CheckResult(True), CheckResult(False, "no broker")]
    away = Service(held_producer, kafka=lambda: checks.pop(0) if checks else CheckResult(False), ack_timeout_ms=1)
    response = await away.post(b"1\noops\n")
    body = response.json()
    assert (response.status_code, body["error_code"]) == (504, "REQUEST_TIMED_OUT")
    assert body["title"] == "Events may or may not be stored"
    assert (body["stored"], body["not_stored"], body["unknown"]) == (0, 1, 1)
    assert [(e["line"], e["outcome"]) for e in body["errors"]] == [(1, "unknown"), (2, "not_stored")]
    assert away.metric("unknown_records", error_code="REQUEST_TIMED_OUT") == 1
    assert away.metric("rejected_records", error_code="MALFORMED_JSON") == 1


async def test_a_timeout_without_a_write_is_a_503(producer: Any) -> None:
    """A timeout of records that were certainly not written is a 503."""
    error = errors.DeliveryTimeout("t-0: it was not written")
    error.maybe_written = False
    producer.errors_by_value = {b"1": error}
    response = await Service(producer).post(b"1\n")
    assert (response.status_code, response.json()["title"]) == (503, "No event was stored")
    assert response.json()["unknown"] == 0


async def test_a_topic_that_cannot_be_looked_up_in_time_is_503(producer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A timeout of the topic's metadata is a 503, and nothing is sent."""

    async def late(topic: str) -> list[int]:
        raise errors.KafkaTimeout(f"{topic}: no metadata")

    monkeypatch.setattr(producer, "partitions_for", late)
    assert (await Service(producer).post(b"1\n")).status_code == 503
    assert producer.batches == []


async def test_a_lost_broker_stops_reading(producer: Any) -> None:
    """After a broker error reading stops, and the response names the first unread line."""
    read = []

    async def chunks() -> AsyncIterator[bytes]:
        for i in range(1, 101):
            read.append(i)
            yield b"%d\n" % i
            await asyncio.sleep(0)

    producer.errors_by_value = {b"10": errors.BrokerNotAvailable("no broker")}
    response = await Service(producer).post(chunks())
    body = response.json()
    assert response.status_code == 207
    assert body["stopped_at_line"] == body["stored"] + len(body["errors"]) + 1
    assert 11 <= body["stopped_at_line"] < 20
    assert response.headers["retry-after"] == "5"
    assert len(producer.values()) == body["stored"]


async def test_too_many_bad_lines_end_the_request(producer: Any) -> None:
    """max_errors invalid lines end the request, and the response names the first unread line."""
    response = await Service(producer, max_errors=3).post(b"1\n" + b"x\n" * 10 + b"2\n")
    assert response.status_code == 207
    assert len(response.json()["errors"]) == 3
    assert response.json()["stopped_at_line"] == 5
    assert producer.values() == [b"1"]


async def test_unacknowledged_events_are_answered_with_202(producer: Any, held_producer: Any) -> None:
    """With ack=none the response is a 202 that lists the invalid events, or a 429 if the producer has no room."""
    service = Service(held_producer)
    response = await service.post(b"1\noops\n2\n", url=URL + "?ack=none")
    assert (response.status_code, response.json()["accepted"]) == (202, 2)
    assert "nothing was acknowledged" in response.json()["promise"]
    assert "stored" not in response.json()
    assert [e["line"] for e in response.json()["errors"]] == [2]
    held_producer.release.set()
    producer.is_full = True
    full = await Service(producer).post(b"1\n", url=URL + "?ack=none")
    assert (full.status_code, full.headers["retry-after"], producer.batches) == (429, "1", [])


class EndingProducer(MemoryProducer):
    """Accepts `accepts` batches. Then it has no room, or its `send_many` raises `error`."""

    def __init__(self, error: errors.PenstockError | None, accepts: int = 1) -> None:
        super().__init__()
        self.error = error
        self.accepts = accepts

    def has_room(self) -> bool:
        return self.error is not None or len(self.batches) < self.accepts

    async def send_many(self, records: Iterable[ProducerRecord]) -> Awaitable[Sequence[Any]]:
        if self.error is not None and len(self.batches) >= self.accepts:
            raise self.error
        return await super().send_many(records)


async def three_batches() -> AsyncIterator[bytes]:
    yield b"1\n2\n"
    yield b"3\n4\n"
    yield b"5\n"


async def test_a_client_without_acknowledgements_learns_which_batch_was_dropped() -> None:
    """With ack=none the response names the first line of a batch that the producer had no room for, if it accepted an
    earlier one.
    """
    producer = EndingProducer(None)
    response = await Service(producer).post(three_batches(), url=URL + "?ack=none")
    assert (response.status_code, response.json()["accepted"]) == (202, 2)
    assert response.json()["stopped_at_line"] == 3
    assert sorted(producer.values()) == [b"1", b"2"]


CLOSED = [
    (not_written(errors.IllegalState("the producer is closed")), "not_stored", 503),
    (maybe_written(errors.IllegalState("the producer was closed")), "unknown", 504),
]


@pytest.mark.parametrize(("error", "outcome", "status"), CLOSED)
async def test_an_unacknowledged_batch_that_failed_may_be_stored_in_part(error: Any, outcome: str, status: int) -> None:
    """With ack=none, too, the error of a batch says whether its events may be stored. Reading stops after it."""
    first = await Service(EndingProducer(error, accepts=0)).post(three_batches(), url=URL + "?ack=none")
    assert first.status_code == status
    assert [(e["line"], e["outcome"]) for e in first.json()["errors"]] == [(1, outcome), (2, outcome)]
    assert first.json()["stopped_at_line"] == 3
    second = await Service(EndingProducer(error)).post(three_batches(), url=URL + "?ack=none")
    assert (second.status_code, second.json()["accepted"]) == (202, 2)
    assert [(e["line"], e["outcome"]) for e in second.json()["errors"]] == [(3, outcome), (4, outcome)]
    assert second.json()["stopped_at_line"] == 5
