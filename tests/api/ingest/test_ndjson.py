"""Splitting of bodies into lines and array elements, and of lines into records."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.api.ingest.event import EventParser, EventRejected, RecordError, topic_reader
from penstock.api.ingest.ndjson import LineSplitter, NdjsonReader
from penstock.api.ingest.request_events import array_elements
from penstock.api.settings import IngestSettings
from penstock.shared.common.records import ProducerRecord

SETTINGS = IngestSettings(topics={"t": {"key": ["/k"]}}, max_line_bytes=20)

lines = st.one_of(
    st.just(b""),
    st.just(b" \t"),
    st.binary(max_size=30).filter(lambda line: b"\n" not in line),
    st.integers(0, 10**12).map(lambda k: b'{"k":%d}' % k),
)
bodies = st.lists(st.tuples(lines, st.sampled_from([b"\n", b"\r\n"])), max_size=12).map(
    lambda rows: b"".join(line + end for line, end in rows)
)


def cut(body: bytes, cuts: list[int]) -> list[bytes]:
    edges = [0, *sorted(at % (len(body) + 1) for at in cuts), len(body)]
    return [body[a:b] for a, b in pairwise(edges)]


def parse(chunks: list[bytes]) -> tuple[list[tuple[int, ProducerRecord]], list[RecordError]]:
    reader = NdjsonReader(EventParser("t", SETTINGS), SETTINGS.max_line_bytes)
    parts = [reader.feed(chunk, 0) for chunk in chunks] + [reader.close(0)]
    records = [pair for p in parts for pair in zip(p.positions, p.records, strict=True)]
    return records, [e for p in parts for e in p.errors]


@given(bodies, lines, st.lists(st.integers(0, 1_000), max_size=20))
def test_chunks_cut_anywhere_give_the_same_records(body: bytes, last: bytes, cuts: list[int]) -> None:
    """The records do not depend on how a body is split into chunks."""
    whole = body + last
    assert parse(cut(whole, cuts)) == parse([whole])


@given(bodies, lines)
def test_every_line_is_a_record_or_an_error_or_blank(body: bytes, last: bytes) -> None:
    """Each non-blank line is a record or an error, once, with its number and bytes."""
    whole = body + last
    records, errors = parse([whole])
    expected = {n: line.removesuffix(b"\r") for n, line in enumerate(whole.split(b"\n"), 1) if line.strip(b" \t\r")}
    assert sorted([n for n, _ in records] + [e.position for e in errors]) == sorted(expected)
    assert all(record.value == expected[n] for n, record in records)


def test_blank_lines_are_not_read_as_events() -> None:
    """Blank lines are skipped without parsing, since a small compressed body may hold millions of them."""
    seen: list[bytes] = []

    def read(value: bytes, latest_ms: int) -> tuple[bytes | None, int | None]:
        seen.append(value)
        return None, None

    reader = topic_reader(SETTINGS, SETTINGS.for_topic("t"))._replace(event=read)
    parsed = EventParser("t", SETTINGS, reader).parse([b"", b" \t", b"\r", b" {}"], 1, 0)

    assert (seen, parsed.positions, parsed.errors) == ([b" {}"], [4], [])


def test_the_value_is_the_unchanged_line() -> None:
    """The value is the unchanged line without its line end."""
    records, errors = parse([b' { "b":1,"k":"x" } \r\n'])
    assert errors == []
    assert records == [(1, ProducerRecord("t", b' { "b":1,"k":"x" } ', b"x"))]


def test_a_bad_line_fails_alone_with_its_number_and_column() -> None:
    """An invalid line is an error with its 1-based number and column; the others are records."""
    records, errors = parse([b'{"k":1}\n\n{"k":oops}\n{"k":2}'])
    assert [n for n, _ in records] == [1, 4]
    assert [(e.position, e.column, e.error_code) for e in errors] == [(3, 6, "MALFORMED_JSON")]


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b""])
def test_the_limit_of_a_line_is_without_its_line_end(end: bytes) -> None:
    """A line of exactly max_line_bytes is accepted and one byte more is a 413, with any line end."""
    fits = b'{"k":"' + b"x" * 12 + b'"}'
    assert len(fits) == SETTINGS.max_line_bytes
    assert len(parse([fits + end])[0]) == 1
    records, errors = parse([b" " + fits + end])
    assert records == []
    assert [(e.status, e.error_code) for e in errors] == [(413, "MESSAGE_TOO_LARGE")]


def test_a_line_over_the_limit_is_not_buffered() -> None:
    """A line over its limit is not buffered."""
    splitter = LineSplitter(max_line_bytes=100)
    for _ in range(1_000):
        assert splitter.feed(b"x" * 64) == []
    assert repr(splitter) == "LineSplitter(rest=0 bytes, skipping=True)"
    assert splitter.feed(b'\n{"a":1}\n') == [None, b'{"a":1}']


@given(st.lists(st.recursive(st.none() | st.integers() | st.text(), st.lists, max_leaves=4), max_size=25))
def test_array_elements_are_their_own_bytes(values: list[object]) -> None:
    """Batches contain every element of an array once, in order, as its original bytes."""
    batches = list(array_elements(msgspec.json.encode(values), 1_000_000, 1_000_000, batch=4))
    assert [first for first, _ in batches] == list(range(0, len(values), 4))
    assert [msgspec.json.decode(e) for _, part in batches for e in part if e is not None] == values


def test_an_element_over_the_limit_fails_alone() -> None:
    """An element over the limit is None at its index."""
    assert list(array_elements(b'[1,"xxxxxxxx",2]', 5, 10)) == [(0, [b"1", None, b"2"])]


@pytest.mark.parametrize(
    ("body", "code", "coordinates"),
    [
        (b"17", "NOT_AN_OBJECT_OR_ARRAY", (None, None)),
        (b"[1,\n 2,]", "MALFORMED_JSON", (2, 4)),
        (b"[1,2", "MALFORMED_JSON", (1, 5)),
        (b"", "MALFORMED_JSON", (1, 1)),
    ],
)
def test_a_malformed_array_is_rejected_completely(
    body: bytes, code: str, coordinates: tuple[int | None, int | None]
) -> None:
    """A malformed array is rejected completely, with line and column."""
    with pytest.raises(EventRejected) as e:
        array_elements(body, 100, 100)
    assert e.value.error_code == code
    assert (e.value.line, e.value.column) == coordinates
