"""Dead letters as records, and back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.clients.consumer.dead_letters import (
    ATTEMPTS,
    HEADERS,
    MESSAGE_BYTES_MAX,
    OFFSET,
    DeadLetter,
    dead_letter_record,
    parse_dead_letter,
    replay_record,
)
from shared.common.errors import DataError
from shared.common.records import ConsumerRecord, Headers, ProducerRecord

headers = st.lists(
    st.tuples(st.text(max_size=8) | st.sampled_from(HEADERS), st.none() | st.binary(max_size=8)), max_size=6
)
sources = st.builds(
    ConsumerRecord,
    topic=st.text("abc.-", min_size=1, max_size=9),
    partition=st.integers(0, 10_000),
    offset=st.integers(0, 2**62),
    timestamp=st.integers(-1, 2**50),
    key=st.none() | st.binary(max_size=20),
    value=st.none() | st.binary(max_size=20),
    headers=headers.map(tuple),
)
letters = st.builds(
    DeadLetter, sources, st.sampled_from(["deserialize", "process"]), st.text(max_size=30), st.text(max_size=30),
    st.integers(1, 99), st.text("abc", max_size=5),
)  # fmt: skip


def stored(record: ProducerRecord) -> ConsumerRecord:
    return ConsumerRecord(record.topic, 0, 123, 999, record.key, record.value, record.headers)


@given(letters)
def test_a_dead_letter_is_read_back_as_it_was(letter: DeadLetter) -> None:
    """Place, bytes, original headers (even ones named like ours) and reason survive the topic."""
    assert parse_dead_letter(stored(dead_letter_record("any-dlq", letter))) == letter


@given(letters)
def test_original_headers_come_first(letter: DeadLetter) -> None:
    """Ours are appended, in their fixed order, and numbers are decimal text."""
    written = dead_letter_record("any-dlq", letter).headers
    count = len(letter.record.headers)
    assert written[:count] == letter.record.headers
    assert [name for name, _ in written[count:]] == list(HEADERS)
    assert dict(written[count:])[OFFSET] == str(letter.record.offset).encode()


@given(letters)
def test_a_replay_is_the_record_that_was(letter: DeadLetter) -> None:
    """Replay gives the source topic the same key, value, headers and timestamp."""
    again = replay_record(letter, 3)
    source = letter.record
    assert (again.topic, again.key, again.value, again.headers) == (
        source.topic,
        source.key,
        source.value,
        source.headers,
    )
    assert again.timestamp == (None if source.timestamp == -1 else source.timestamp)
    assert again.partition == 3


def test_an_exception_is_named_in_full() -> None:
    """The class is named with its module, a builtin without."""
    record = ConsumerRecord("t", 0, 0, 0, None, None)
    assert DeadLetter.of(record, "process", DataError("no"), 1, "g").exception == "shared.common.errors.DataError"
    assert DeadLetter.of(record, "process", KeyError("no"), 1, "g").exception == "KeyError"


@pytest.mark.parametrize("message", ["é" * MESSAGE_BYTES_MAX, "\ud800", ""])
def test_any_message_can_be_written(message: str) -> None:
    """Long and unencodable messages become bounded UTF-8."""
    letter = DeadLetter(ConsumerRecord("t", 0, 0, 0, None, None), "process", "E", message, 1, "g")
    text = dict(dead_letter_record("t-dlq", letter).headers)["penstock.dlq.message"]
    assert text is not None
    assert len(text) <= MESSAGE_BYTES_MAX
    text.decode()


def without(name: str, instead: Headers = ()) -> ConsumerRecord:
    letter = DeadLetter(ConsumerRecord("t", 0, 0, 0, None, None), "process", "E", "m", 1, "g")
    written = stored(dead_letter_record("t-dlq", letter))
    kept = tuple(header for header in written.headers if header[0] != name)
    return ConsumerRecord("t-dlq", 0, 5, 0, None, None, kept + instead)


@pytest.mark.parametrize("name", HEADERS)
def test_a_missing_header_is_named(name: str) -> None:
    """A record that is no dead letter says which header it lacks."""
    with pytest.raises(DataError, match=f"t-dlq-0@5 is no dead letter: without {name}"):
        parse_dead_letter(without(name))


@pytest.mark.parametrize("value", [b"", b"one", None, b"\xff"])
def test_a_number_that_is_none_is_refused(value: bytes | None) -> None:
    """A number header must hold a number."""
    with pytest.raises(DataError, match=f"{ATTEMPTS} is .*, not a number"):
        parse_dead_letter(without(ATTEMPTS, ((ATTEMPTS, value),)))
