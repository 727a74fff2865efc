"""The outcomes of a request's events, and the response."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from penstock.api.ingest.event import RecordError
from penstock.api.ingest.result import IngestResult
from penstock.shared.common import errors
from penstock.shared.common.records import RecordMetadata


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
    result.stop(5, "something later")
    assert result.status == 207
    assert result.body()["stopped_at_line"] == 2
    assert "the service is shutting down" in result.body()["stop_reason"]
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
    assert (result.pop_details(), result.totals()) == ({}, {"stored": 0, "not_stored": 0, "unknown": 0})
    result.add_outcomes([4, 3, 2], [stored(0, 5), errors.DeliveryTimeout("late"), errors.RecordTooLarge("big")])
    assert [(error.position, error.outcome) for error in seen] == [(3, "unknown"), (2, "not_stored")]
    row = result.pop_details()
    assert [error["index"] for error in row["errors"]] == [2, 3]
    assert row["offsets"] == [{"index": 4, "partition": 0, "offset": 5}]
    assert result.pop_details() == {}
    assert result.retry_after_s == 5, "of the popped errors"
    result.add_outcomes([5], [errors.InvalidTimestamp("no time")])
    assert result.totals() == {"stored": 1, "not_stored": 2, "unknown": 1}
    assert result.pop_details().keys() == {"errors"}
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
