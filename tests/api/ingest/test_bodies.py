"""Bodies of events: lines, arrays and objects, plain or compressed, and how they are split."""

from __future__ import annotations

import tracemalloc
from collections.abc import AsyncIterator
from itertools import pairwise
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry

from penstock.api.http.app import create_app
from penstock.api.ingest.event import EventParser, EventRejected, RecordError, topic_reader
from penstock.api.ingest.ndjson import LineSplitter
from penstock.api.ingest.request_events import ELEMENTS_MAX, array_elements
from penstock.api.ingest.routes import Ingest, plain_query
from penstock.api.settings import IngestSettings
from penstock.shared.common.records import ProducerRecord
from tests.api.conftest import MemoryProducer
from tests.api.ingest.service import COMPRESS, JSON, NDJSON, URL, Service


async def test_good_lines_are_stored_and_counted(producer: Any) -> None:
    """Valid lines are stored, and the response has their number and the last offset of each partition."""
    service = Service(producer)
    response = await service.post(b'{"a":1}\r\n\n{"a":22}')
    assert response.status_code == 200
    assert response.json() == {"stored": 2, "last_offsets": {"0": 0, "1": 0}}
    assert sorted(producer.values()) == [b'{"a":1}', b'{"a":22}']
    assert service.metric("stored_records") == 2
    assert service.metric("requests", status="200") == 1


async def test_offsets_are_returned_on_request(producer: Any) -> None:
    """`?offsets=true` returns every record's partition and offset."""
    response = await Service(producer).post(b"1\n22\n333\n", url=URL + "?offsets=true")
    assert response.json()["offsets"] == [
        {"line": 1, "partition": 1, "offset": 0},
        {"line": 2, "partition": 0, "offset": 0},
        {"line": 3, "partition": 1, "offset": 1},
    ]


async def test_a_bad_line_fails_alone(producer: Any) -> None:
    """An invalid line is reported with line and column in a 207, and the others are stored."""
    service = Service(producer)
    response = await service.post(b'{"a":1}\n{"a":oops}\n{"a":3}\n')
    assert response.status_code == 207
    assert response.json()["stored"] == 2
    assert response.json()["errors"] == [
        {
            "line": 2,
            "column": 6,
            "error_code": "MALFORMED_JSON",
            "message": "not JSON: invalid character",
            "outcome": "not_stored",
        }
    ]
    assert service.metric("rejected_records", error_code="MALFORMED_JSON") == 1


async def test_no_good_line_is_a_problem(producer: Any) -> None:
    """A body without a valid line is a 400 problem with the errors, and nothing is sent."""
    response = await Service(producer).post(b"oops\n{\n")
    assert response.status_code == 400
    assert response.headers["content-type"] == "application/problem+json"
    body = response.json()
    assert (body["status"], body["error_code"], body["stored"]) == (400, "MALFORMED_JSON", 0)
    assert body["detail"].startswith("line 1, column 1: not JSON")
    assert [e["line"] for e in body["errors"]] == [1, 2]
    assert producer.batches == []


async def test_a_json_array_is_stored_by_index(producer: Any) -> None:
    """The elements' original bytes are the values, and errors have the index."""
    service = Service(producer, topics={"t": {"key": ["/k"]}})
    response = await service.post(b'[ {"k": 1}, {"x":2} , {"k":3}]', JSON)
    assert response.status_code == 207
    assert sorted(producer.values()) == [b'{"k": 1}', b'{"k":3}']
    (error,) = response.json()["errors"]
    assert (error["index"], error["error_code"], error["message"]) == (1, "INVALID_KEY", "key: nothing at /k")


@pytest.mark.parametrize("body", [b'{"k": 1}', b' \r\n\t{"k": 1}\n'])
async def test_a_json_object_is_one_event(producer: Any, body: bytes) -> None:
    """A JSON object is one event, stored without surrounding whitespace; errors are as for an array of one."""
    service = Service(producer, topics={"t": {"key": ["/k"]}})
    response = await service.post(body, JSON)
    assert (response.status_code, response.json()["stored"]) == (200, 1)
    ((key, value),) = [(r.key, r.value) for log in producer.logs["t"] for r in log]
    assert (key, value) == (b"1", b'{"k": 1}')
    wrong = await service.post(b'{"x": 1}', JSON)
    assert (wrong.status_code, wrong.json()["errors"][0]["index"]) == (400, 0)
    assert "nothing at /k" in wrong.json()["detail"]


async def test_an_invalid_json_body_is_rejected(producer: Any) -> None:
    """Malformed JSON is a 400 with line and column, an event over the limit a 413, and a scalar a 400."""
    service = Service(producer, max_line_bytes=20)
    malformed = await service.post(b'{"a":1,\n "b":}', JSON)
    assert (malformed.status_code, malformed.json()["error_code"]) == (400, "MALFORMED_JSON")
    assert (malformed.json()["line"], malformed.json()["column"]) == (2, 6)
    assert (await service.post(b'{"a":"%s"}' % (b"x" * 20), JSON)).status_code == 413
    for body in (b"17", b'"text"', b"null"):
        response = await service.post(body, JSON)
        assert (response.status_code, response.json()["error_code"]) == (400, "NOT_AN_OBJECT_OR_ARRAY")
    assert producer.batches == []


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_compressed_body_is_stored_as_its_data(producer: Any, encoding: str) -> None:
    """Compressed lines, arrays, objects and CloudEvents are stored decompressed."""
    service, named = Service(producer), {"Content-Encoding": encoding}
    for content, headers, stored in (
        (b"1\n22\n", NDJSON, [b"1", b"22"]),
        (b"[1,22]", JSON, [b"1", b"22"]),
        (b'{"a":1}', JSON, [b'{"a":1}']),
        (b'{"a":2}', JSON | {"ce-specversion": "1.0", "ce-id": "1", "ce-source": "s", "ce-type": "t"}, [b'{"a":2}']),
    ):
        producer.logs["t"] = [[], []]
        response = await service.post(COMPRESS[encoding](content), headers | named)
        assert response.status_code == 200, response.text
        assert sorted(producer.values()) == stored


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_limits_apply_to_decompressed_data(producer: Any, encoding: str) -> None:
    """Limits apply to the decompressed data, which is not buffered beyond them.

    A body that is larger compressed than decompressed is accepted.
    """
    service, named = Service(producer, max_line_bytes=1_000), {"Content-Encoding": encoding}
    space, line = COMPRESS[encoding](b" " * 67_108_864), COMPRESS[encoding](b"x" * 67_108_864)
    tracemalloc.start()
    try:
        whole = await service.post(space, JSON | named)
        lines = await service.post(line, NDJSON | named)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert (whole.status_code, whole.json()["error_code"]) == (413, "BODY_TOO_LARGE")
    assert (lines.status_code, lines.json()["errors"][0]["error_code"]) == (413, "MESSAGE_TOO_LARGE")
    assert peak < 16_777_216
    small = Service(producer, max_body_bytes=3, max_line_bytes=3)
    assert (await small.post(COMPRESS[encoding](b"[1]"), JSON | named)).status_code == 200
    events = await Service(producer, max_body_events=2).post(COMPRESS[encoding](b"[1,2,3]"), JSON | named)
    assert (events.status_code, events.json()["error_code"]) == (413, "TOO_MANY_EVENTS")


@pytest.mark.parametrize("encoding", ["gzip", "zstd"])
async def test_a_corrupt_compressed_body_is_a_400(producer: Any, encoding: str) -> None:
    """A corrupt body is a 400 and nothing is stored; of lines those before the damage are
    stored, and the response says where reading stopped.
    """
    service, named = Service(producer), {"Content-Encoding": encoding}
    for content in (b"{}", COMPRESS[encoding](b"[1,2,3]")[:-4]):
        response = await service.post(content, JSON | named)
        assert (response.status_code, response.json()["error_code"]) == (400, "CORRUPT_BODY")
        assert "Content-Encoding" in response.json()["detail"]
        assert "retry-after" not in response.headers
    none = await service.post(b"1\n", NDJSON | named)
    assert (none.status_code, none.json()["error_code"], none.json()["stored"]) == (400, "CORRUPT_BODY", 0)
    assert "retry-after" not in none.headers
    assert producer.batches == []
    some = await service.post(COMPRESS[encoding](b"1\n2\n") + b"damage", NDJSON | named)
    assert (some.status_code, some.json()["stored"], some.json()["stopped_at_line"]) == (207, 2, 3)
    assert "Content-Encoding" in some.json()["stop_reason"]
    atomic = await service.post(b"1\n", NDJSON | named, URL + "?ack=none")
    assert (atomic.status_code, atomic.json()["error_code"]) == (400, "CORRUPT_BODY")


async def test_an_unknown_encoding_is_a_415(producer: Any) -> None:
    """An unknown encoding is a 415 with Accept-Encoding, as in RFC 9110."""
    response = await Service(producer).post(b"1\n", NDJSON | {"Content-Encoding": "br"})
    assert (response.status_code, response.headers["accept-encoding"]) == (415, "gzip, zstd")


async def test_a_malformed_array_is_located(producer: Any) -> None:
    """A malformed array is a 400 with line and column, and nothing is sent."""
    response = await Service(producer).post(b'[{"a":1},\n {"a":,}]', JSON)
    assert response.status_code == 400
    assert (response.json()["line"], response.json()["column"]) == (2, 7)
    assert producer.batches == []


async def test_an_array_over_the_limit_is_413(producer: Any) -> None:
    """An array over max_body_bytes is a 413, by its declared or its real length."""

    async def chunks() -> AsyncIterator[bytes]:
        for _ in range(5):
            yield b"[1,2,3,4,5,6,"

    service = Service(producer, max_body_bytes=50)
    for content in (b"[" + b"1," * 50 + b"1]", chunks()):
        response = await service.post(content, JSON)
        assert response.status_code == 413
        assert "max_body_bytes=50" in response.json()["detail"]


async def test_a_line_over_the_limit_fails_alone(producer: Any) -> None:
    """A line over the limit is reported and the others are stored; if no line fits, the status is 413."""
    service = Service(producer, max_line_bytes=5)
    assert (await service.post(b"123456\n1\n")).status_code == 207
    assert (await service.post(b"123456\n")).status_code == 413


@pytest.mark.parametrize(
    ("url", "headers", "status", "code"),
    [
        ("/v1/topics/none/events", NDJSON, 404, "UNKNOWN_TOPIC_OR_PARTITION"),
        ("/v1/topics/a%20b/events", NDJSON, 400, "INVALID_TOPIC"),
        ("/v1/topics/../events", NDJSON, 404, "HTTP_404"),
        ("/v1/topics/closed/events", NDJSON, 403, "TOPIC_NOT_ALLOWED"),
        ("/v1/topics/__consumer_offsets/events", NDJSON, 403, "TOPIC_NOT_ALLOWED"),
        ("/v1/topics/app-changelog/events", NDJSON, 403, "TOPIC_NOT_ALLOWED"),
        ("/v1/topics/connect-configs/events", NDJSON, 403, "TOPIC_NOT_ALLOWED"),
        (URL, {"Content-Type": "text/plain"}, 415, "UNSUPPORTED_MEDIA_TYPE"),
        (URL, {}, 415, "UNSUPPORTED_MEDIA_TYPE"),
        (URL, NDJSON | {"Content-Encoding": "br"}, 415, "UNSUPPORTED_CONTENT_ENCODING"),
        (URL, NDJSON | {"Content-Encoding": "gzip, zstd"}, 415, "UNSUPPORTED_CONTENT_ENCODING"),
        (URL + "?offsets=maybe", NDJSON, 400, "INVALID_REQUEST"),
    ],
)
async def test_an_invalid_request_is_a_4xx(
    producer: Any, url: str, headers: dict[str, str], status: int, code: str
) -> None:
    """Unknown and forbidden topics and unsupported bodies are rejected before the body is read."""
    producer.logs["__consumer_offsets"] = [[]]
    producer.logs["app-changelog"] = [[]]
    producer.logs["connect-configs"] = [[]]
    response = await Service(producer, topics={"closed": {"allowed": False}}).post(b"1\n", headers, url)
    assert (response.status_code, response.json()["error_code"]) == (status, code)
    assert producer.batches == []


async def test_an_empty_body_stores_nothing(producer: Any) -> None:
    """A body without events is a 200 with zero stored."""
    for content, headers in ((b"", NDJSON), (b"\n\r\n", NDJSON), (b"[]", JSON)):
        response = await Service(producer).post(content, headers)
        assert (response.status_code, response.json()) == (200, {"stored": 0, "last_offsets": {}})


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
    parser = EventParser("t", SETTINGS, topic_reader(SETTINGS, SETTINGS.for_topic("t")))
    splitter = LineSplitter(SETTINGS.max_line_bytes)
    parsed = parser.parse([line for chunk in chunks for line in splitter.feed(chunk)] + splitter.close(), 1, 0)
    return list(zip(parsed.positions, parsed.records, strict=True)), parsed.errors


@given(bodies, lines, st.lists(st.integers(0, 1_000), max_size=20))
def test_chunks_cut_anywhere_return_the_same_records(body: bytes, last: bytes, cuts: list[int]) -> None:
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

    def read(value: bytes, latest_ms: int, /, **_: bool) -> tuple[bytes | None, int | None]:
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
    values = values * 200
    batches = list(array_elements(msgspec.json.encode(values), 1_000_000, 1_000_000))
    assert [first for first, _ in batches] == list(range(0, len(values), ELEMENTS_MAX))
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


TEXT = {"Content-Type": "text/plain"}


@pytest.mark.parametrize("query", ["", "?offsets=true", "?atomic=true", "?ack=none", "?offsets=maybe", "?ack=x"])
@pytest.mark.parametrize("topic", ["t", "none", "a%20b", "app-changelog"])
@pytest.mark.parametrize(("content", "headers"), [(b"1\noops\n", NDJSON), (b"oops", NDJSON), (b"1", TEXT)])
async def test_both_paths_have_the_same_response(
    query: str, topic: str, content: bytes, headers: dict[str, str]
) -> None:
    """Both paths return the same status, headers and body, for accepted and rejected requests."""
    responses: list[Any] = []
    for fast_path in (True, False):
        ingest = Ingest(MemoryProducer(), IngestSettings(), CollectorRegistry())
        app = create_app(ingest=ingest.router, fast_path=ingest.fast_path if fast_path else None)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://x") as client:
            response = await client.post(f"/v1/topics/{topic}/events{query}", content=content, headers=headers)
            responses.append((response.status_code, dict(response.headers), response.json()))
    assert responses[0] == responses[1]


def test_only_plain_queries_take_the_fast_path() -> None:
    """The router handles repeated parameters, and values that must be parsed."""
    assert plain_query(b"offsets=true&offsets=true") is None
    assert plain_query(b"offsets=1") is None
    assert plain_query(b"offsets=true&ack=all") == {"offsets": True, "ack": "all"}
