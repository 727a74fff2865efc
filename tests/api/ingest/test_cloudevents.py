"""CloudEvents in their three HTTP modes, with producers in memory."""

from __future__ import annotations

import base64
import codecs
import json
from typing import Any

import msgspec
import pytest

from penstock.api.ingest.cloudevents import ATTRIBUTES_MAX, cloudevent_from_headers, cloudevent_from_json
from penstock.api.ingest.event import EventRejected
from tests.api.ingest.service import Service

EVENT = {
    "specversion": "1.0",
    "id": "1",
    "source": "/s",
    "type": "t",
    "time": "2013-01-01T05:15:00-05:00",
    "partitionkey": "ann",
    "data": {"user": "bob", "n": 1},
}
STRUCTURED = {"Content-Type": "application/cloudevents+json; charset=utf-8"}
BATCH = {"Content-Type": "application/cloudevents-batch+json"}
BINARY = {
    "ce-specversion": "1.0",
    "ce-id": "1",
    "ce-source": "/s",
    "ce-type": "t%C3%A9",
    "ce-time": "2013-01-01T10:15:00Z",
    "ce-partitionkey": "ann",
    "Content-Type": "application/json",
}
AT_MS = 1_357_035_300_000


def only(producer: Any) -> Any:
    (record,) = [record for log in producer.logs["t"] for record in log]
    return record


class Click(msgspec.Struct, forbid_unknown_fields=True):
    """The type as which a topology decodes the topic's values."""

    user: str
    n: int


def as_event(**members: Any) -> bytes:
    """The event with other members; members that are None are left out."""
    return json.dumps({name: value for name, value in (EVENT | members).items() if value is not None}).encode()


def modes(event: dict[str, Any]) -> list[tuple[bytes, dict[str, str]]]:
    """The body and headers of an event with JSON data, in each HTTP mode."""
    attributes = {f"ce-{name}": value for name, value in event.items() if name not in ("data", "datacontenttype")}
    return [
        (json.dumps(event).encode(), STRUCTURED),
        (json.dumps([event]).encode(), BATCH),
        (json.dumps(event["data"]).encode(), attributes | {"Content-Type": "application/json"}),
    ]


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["structured", "batch", "binary"])
async def test_an_event_is_stored_as_its_data_with_attributes_as_headers(producer: Any, mode: int) -> None:
    """By default an event is stored as its data with attributes as headers, in the same way in every mode."""
    body, headers = modes(EVENT)[mode]
    response = await Service(producer).post(body, headers)
    assert (response.status_code, response.json()["stored"]) == (200, 1)
    record = only(producer)
    assert msgspec.json.decode(record.value, type=Click) == Click("bob", 1)
    assert (record.value, record.key, record.timestamp) == (json.dumps(EVENT["data"]).encode(), b"ann", AT_MS)
    assert record.headers == (
        ("content-type", b"application/json"),
        ("ce_id", b"1"),
        ("ce_partitionkey", b"ann"),
        ("ce_source", b"/s"),
        ("ce_specversion", b"1.0"),
        ("ce_time", b"2013-01-01T05:15:00-05:00"),
        ("ce_type", b"t"),
    )


@pytest.mark.parametrize("mode", [0, 1, 2], ids=["structured", "batch", "binary"])
async def test_a_topic_may_store_envelopes(producer: Any, mode: int) -> None:
    """With `cloudevents = "envelope"` an event is stored as an envelope, in the same way in
    every mode; a received envelope keeps its bytes.
    """
    event = EVENT | {"datacontenttype": "application/json"}
    body, headers = modes(event)[mode]
    service = Service(producer, topics={"t": {"cloudevents": "envelope", "key": ["/user"]}})
    assert (await service.post(body, headers)).status_code == 200
    record = only(producer)
    assert (json.loads(record.value), record.key, record.timestamp) == (event, b"bob", AT_MS)
    assert record.headers == (("content-type", b"application/cloudevents+json; charset=UTF-8"),)
    if mode == 0:
        assert record.value == body


async def test_an_envelope_of_an_event_in_binary_mode_holds_any_data(producer: Any) -> None:
    """In an envelope, data that is not JSON is base64, and an event without data has none."""
    service = Service(producer, topics={"t": {"cloudevents": "envelope"}})
    assert (await service.post(b"\x89PNG", BINARY | {"Content-Type": "image/png"})).status_code == 200
    event = json.loads(only(producer).value)
    assert (event["datacontenttype"], event["data_base64"], "data" in event) == ("image/png", "iVBORw==", False)
    producer.logs["t"] = [[], []]
    assert (await service.post(b"", BINARY)).status_code == 200
    assert {"data", "data_base64"} & json.loads(only(producer).value).keys() == set()
    wrong = await service.post(b"oops", BINARY)
    assert (wrong.status_code, wrong.json()["error_code"]) == (400, "MALFORMED_JSON")


@pytest.mark.parametrize(
    ("members", "value", "content_type"),
    [
        ({"datacontenttype": "image/png", "data": None, "data_base64": "iVBORw=="}, b"\x89PNG", b"image/png"),
        ({"data": None, "data_base64": "AQI="}, b"\x01\x02", None),
        ({"datacontenttype": "application/xml", "data": "<a>\u00e9</a>"}, "<a>\u00e9</a>".encode(), b"application/xml"),
        (
            {"datacontenttype": 'text/plain; charset="iso-8859-1"', "data": "\u00e9"},
            b"\xe9",
            b'text/plain; charset="iso-8859-1"',
        ),
        ({"datacontenttype": "application/vnd.x+json", "data": "text"}, b'"text"', b"application/vnd.x+json"),
        ({"data": "text"}, b'"text"', b"application/json"),
        ({"data": [1]}, b"[1]", b"application/json"),
    ],
)
async def test_data_is_decoded_by_its_content_type(
    producer: Any, members: dict[str, Any], value: bytes, content_type: bytes | None
) -> None:
    """Base64 data is decoded, text of a non-JSON type is stored as text, and JSON stays JSON."""
    assert (await Service(producer).post(as_event(**members), STRUCTURED)).status_code == 200
    record = only(producer)
    assert (record.value, dict(record.headers).get("content-type")) == (value, content_type)
    assert "ce_datacontenttype" not in dict(record.headers)


@pytest.mark.parametrize("data", ["", " "])
async def test_blank_data_that_is_not_json_is_data(producer: Any, data: str) -> None:
    """An event whose data is not JSON and blank is stored as that data, or in an envelope that has it."""
    event = EVENT | {"datacontenttype": "text/plain", "data": data}
    for body, headers in ((json.dumps(event).encode(), STRUCTURED), (json.dumps([event]).encode(), BATCH)):
        producer.logs["t"] = [[], []]
        assert (await Service(producer).post(body, headers)).json()["stored"] == 1
        assert (only(producer).value, only(producer).key) == (data.encode(), b"ann")
        producer.logs["t"] = [[], []]
        kept = Service(producer, topics={"t": {"cloudevents": "envelope"}})
        assert (await kept.post(body, headers)).json()["stored"] == 1
        assert json.loads(only(producer).value) == event


async def test_a_blank_body_that_is_not_json_is_data(producer: Any) -> None:
    """The blank body of an event in binary mode is stored as its data, or in an envelope in base64."""
    headers = BINARY | {"Content-Type": "text/plain"}
    assert (await Service(producer).post(b" ", headers)).json()["stored"] == 1
    assert only(producer).value == b" "
    producer.logs["t"] = [[], []]
    kept = Service(producer, topics={"t": {"cloudevents": "envelope"}})
    assert (await kept.post(b" ", headers)).json()["stored"] == 1
    assert json.loads(only(producer).value)["data_base64"] == "IA=="


async def test_data_that_is_null_is_data(producer: Any) -> None:
    """An explicit null in the JSON format is stored as a value."""
    body = json.dumps(EVENT | {"data": None}).encode()
    assert (await Service(producer).post(body, STRUCTURED)).status_code == 200
    assert only(producer).value == b"null"


@pytest.mark.parametrize("mode", ["structured", "binary"])
async def test_an_event_without_data_is_rejected(producer: Any, mode: str) -> None:
    """An event without data is a 400 that names the setting that accepts it, since a null
    value would delete its key.
    """
    body, headers = (as_event(data=None), STRUCTURED) if mode == "structured" else (b"", BINARY)
    response = await Service(producer).post(body, headers)
    assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_CLOUDEVENT")
    assert "has no data" in response.json()["detail"]
    assert 'cloudevents = "envelope"' in response.json()["detail"]
    assert producer.batches == []
    kept = Service(producer, topics={"t": {"cloudevents": "envelope"}})
    assert (await kept.post(body, headers)).status_code == 200


@pytest.mark.parametrize(
    ("members", "what"),
    [
        ({"data_base64": "AQI="}, "data or data_base64, not both"),
        ({"data": None, "data_base64": "no base64!"}, "data_base64 must be a text in base64"),
        ({"data": None, "data_base64": 7}, "data_base64 must be a text in base64"),
        ({"datacontenttype": "text/plain", "data": {"a": 1}}, "data must be a text that 'text/plain' can hold"),
        ({"datacontenttype": "text/plain; charset=ascii", "data": "\u00e9"}, "data must be a text"),
        ({"datacontenttype": "text/plain; charset=klingon", "data": "a"}, "data must be a text"),
        ({"extension": 1.5}, "the attribute extension must be a text, an integer or a boolean"),
        ({"extension": {"a": 1}}, "the attribute extension must be"),
        ({"id": 7}, "the attribute id must be a text"),
        ({"source": True}, "the attribute source must be a text"),
    ],
)
async def test_an_invalid_member_of_a_structured_event_is_named(
    producer: Any, members: dict[str, Any], what: str
) -> None:
    """A structured event with an invalid member is a 400 that names it, and nothing is stored."""
    response = await Service(producer).post(as_event(**members), STRUCTURED)
    assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_CLOUDEVENT")
    assert what in response.json()["detail"]
    assert producer.batches == []


def test_an_unknown_charset_is_not_looked_up() -> None:
    """Python keeps the name of each charset that a look-up did not find, so clients could fill the memory."""
    looked_up: list[str] = []
    note = looked_up.append
    codecs.register(note)
    try:
        for charset in ("klingon", "x.y", "-"):
            with pytest.raises(EventRejected, match="data must be a text"):
                cloudevent_from_json(as_event(datacontenttype=f"text/plain; charset={charset}", data="a"))
    finally:
        codecs.unregister(note)
    assert looked_up == []


@pytest.mark.parametrize("charset", ["rot13", "hex", "zip", "undefined"])
def test_a_charset_that_does_not_encode_text_is_rejected(charset: str) -> None:
    """Python has codecs under these names, but none of them encodes a text."""
    with pytest.raises(EventRejected, match="data must be a text"):
        cloudevent_from_json(as_event(datacontenttype=f"text/plain; charset={charset}", data="a"))


@pytest.mark.parametrize("charset", ["latin1", "ISO-8859-1", "iso_8859-1:1987", "windows-1252"])
def test_a_charset_has_all_names_that_python_knows(charset: str) -> None:
    """Names differ in case and punctuation, and have aliases."""
    event = cloudevent_from_json(as_event(datacontenttype=f"text/plain; charset={charset}", data="\u00e9"))
    assert event.data == b"\xe9"


@pytest.mark.parametrize("form", ["data", "envelope"])
async def test_a_structured_event_that_is_not_utf8_is_rejected(producer: Any, form: str) -> None:
    """The error has the position of the first wrong byte, also if the topic stores the event unchanged."""
    service = Service(producer, topics={"t": {"cloudevents": form}})
    body = as_event(data={"user": "?"}).replace(b'"?"', b'"\xff"')
    response = await service.post(b"[%b]" % body, BATCH)
    (error,) = response.json()["errors"]
    assert (response.status_code, error["error_code"], "not UTF-8" in error["message"]) == (400, "MALFORMED_JSON", True)
    assert error["column"] == body.index(b"\xff") + 1
    assert producer.batches == []


def test_attributes_become_text() -> None:
    """Integers and booleans become text as in CloudEvents, and nulls are not set."""
    event = cloudevent_from_json(as_event(n=-3, yes=True, no=False).replace(b'"n": -3', b'"n": -3, "unset": null'))
    assert {name: event.attributes.get(name) for name in ("n", "yes", "no", "unset")} == {
        "n": "-3",
        "yes": "true",
        "no": "false",
        "unset": None,
    }


async def test_pointers_and_schema_read_data_in_base64(producer: Any) -> None:
    """Key pointers address the decoded data; data of a non-JSON type is a 400."""
    service = Service(producer, topics={"t": {"key": ["/user"]}})
    encoded = base64.b64encode(json.dumps(EVENT["data"]).encode()).decode()
    for content_type in ("application/json", None):
        body = as_event(data=None, data_base64=encoded, datacontenttype=content_type)
        assert (await service.post(body, STRUCTURED)).status_code == 200
    assert [record.key for log in producer.logs["t"] for record in log] == [b"bob"] * 2
    for members in ({"data": None, "data_base64": encoded}, {"data": "a"}):
        response = await service.post(as_event(datacontenttype="text/plain", **members), STRUCTURED)
        assert response.status_code == 400
        assert "'text/plain'" in response.json()["detail"]


async def test_a_binary_event_is_its_data_with_attributes_as_headers(producer: Any) -> None:
    """A binary event is stored by Kafka's protocol binding: ce_ headers, percent-decoded, and the body as value."""
    response = await Service(producer).post(b'{"n":1}', BINARY)
    assert response.status_code == 200
    record = only(producer)
    headers = dict(record.headers)
    assert (record.value, record.key, record.timestamp) == (b'{"n":1}', b"ann", AT_MS)
    assert (headers["ce_type"], headers["ce_id"], headers["content-type"]) == ("té".encode(), b"1", b"application/json")


async def test_binary_data_may_be_anything_unless_the_topic_reads_it(producer: Any) -> None:
    """Binary data is stored unchanged; a topic with a key pointer needs JSON, and data
    declared as JSON must be JSON.
    """
    headers = BINARY | {"Content-Type": "image/png"}
    assert (await Service(producer).post(b"\x89PNG", headers)).status_code == 200
    assert only(producer).value == b"\x89PNG"
    rejected = await Service(producer, topics={"t": {"key": ["/user"]}}).post(b"\x89PNG", headers)
    assert (rejected.status_code, rejected.json()["error_code"]) == (400, "INVALID_CLOUDEVENT")
    for body, code in ((b"\x89PNG", "MALFORMED_JSON"), (b" \n", "INVALID_CLOUDEVENT")):
        wrong = await Service(producer).post(body, BINARY)
        assert (wrong.status_code, wrong.json()["error_code"]) == (400, code)


@pytest.mark.parametrize("mode", [0, 1], ids=["structured", "batch"])
async def test_the_content_type_decides_the_mode_of_an_event(producer: Any, mode: int) -> None:
    """A structured event or a batch may also have the `ce-` headers of binary mode: its body is read all the same."""
    body, headers = modes(EVENT)[mode]
    response = await Service(producer).post(body, BINARY | headers)
    assert response.status_code == 200, response.text
    assert only(producer).value == json.dumps(EVENT["data"]).encode()


async def test_ce_headers_do_not_replace_an_event_format(producer: Any) -> None:
    """A structured event in a format that ingest does not read is a 415, also with `ce-` headers."""
    response = await Service(producer).post(b"", BINARY | {"Content-Type": "application/cloudevents+avro"})
    assert (response.status_code, response.json()["error_code"]) == (415, "UNSUPPORTED_MEDIA_TYPE")


async def test_a_batch_fails_by_element(producer: Any) -> None:
    """Invalid events of a batch are reported by their index, and the others are stored."""
    bad = {name: value for name, value in EVENT.items() if name != "source"}
    response = await Service(producer).post(json.dumps([EVENT, bad, 7, EVENT]).encode(), BATCH)
    assert (response.status_code, response.json()["stored"]) == (207, 2)
    assert [(e["index"], e["error_code"]) for e in response.json()["errors"]] == [
        (1, "INVALID_CLOUDEVENT"),
        (2, "INVALID_CLOUDEVENT"),
    ]


async def test_key_pointers_address_the_data(producer: Any) -> None:
    """A key pointer addresses the event's data in every mode and overrides partitionkey."""
    service = Service(producer, topics={"t": {"key": ["/user"]}})
    await service.post(json.dumps(EVENT).encode(), STRUCTURED)
    await service.post(json.dumps([EVENT]).encode(), BATCH)
    await service.post(json.dumps(EVENT["data"]).encode(), BINARY)
    assert [record.key for log in producer.logs["t"] for record in log] == [b"bob"] * 3


async def test_the_time_attribute_counts_only_without_a_pointer(producer: Any) -> None:
    """With a time pointer the attribute `time` is not read. Without one, an event before min_event_time is a 400."""
    body = as_event(time="1999-12-31T23:59:59Z", data={"at": AT_MS})
    assert (await Service(producer, topics={"t": {"time": "/at"}}).post(body, STRUCTURED)).status_code == 200
    assert only(producer).timestamp == AT_MS
    response = await Service(producer).post(body, STRUCTURED)
    assert (response.status_code, response.json()["error_code"]) == (400, "INVALID_TIMESTAMP")


@pytest.mark.parametrize("form", ["data", "envelope"])
async def test_headers_have_the_key_and_time_of_data_that_is_not_read(producer: Any, form: str) -> None:
    """`key_header` and `time_header` apply to every event without these attributes, also if its data is not JSON."""
    service = Service(producer, topics={"t": {"key_header": "X-Key", "time_header": "X-Time", "cloudevents": form}})
    own = {name: value for name, value in BINARY.items() if name not in ("ce-time", "ce-partitionkey")}
    headers = own | {"Content-Type": "image/png", "X-Key": "bob", "X-Time": str(AT_MS)}
    assert (await service.post(b"\x89PNG", headers)).status_code == 200
    assert (only(producer).key, only(producer).timestamp) == (b"bob", AT_MS)


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({"ce-id": "1"}, "specversion"),
        ({"ce-specversion": "0.3", "ce-id": "1", "ce-source": "s", "ce-type": "t"}, "0.3"),
        ({"ce-specversion": "1.0", "ce-id": "", "ce-source": "s", "ce-type": "t"}, "id is required"),
        ({f"ce-x{i}": "1" for i in range(ATTRIBUTES_MAX + 1)}, "more than"),
        ({"ce-datacontenttype": "text/plain"}, "ce-datacontenttype is not an attribute"),
    ],
)
def test_a_missing_or_invalid_attribute_is_named(headers: dict[str, str], what: str) -> None:
    """A missing or invalid attribute is an error that names it."""
    with pytest.raises(EventRejected, match=what):
        cloudevent_from_headers(headers.items())


def test_attributes_in_double_quotes_are_unquoted() -> None:
    """A quoted value is unescaped first, then percent-decoded. A quote that is part of the value is percent-encoded."""
    base = [("ce-specversion", '"1.0"'), ("ce-id", "7"), ("ce-source", "/s"), ("ce-type", "t")]
    for subject, value in (
        (r'"a \"b\" \\ %C3%AB"', r'a "b" \ ë'),
        ("%22a%22", '"a"'),
        ('"', '"'),
        ('a "b"', 'a "b"'),
    ):
        headers = dict(cloudevent_from_headers([*base, ("ce-subject", subject)]).kafka_headers)
        assert headers["ce_subject"] == value.encode()
        assert headers["ce_specversion"] == b"1.0"


def test_attributes_in_headers_are_utf8_either_way() -> None:
    """Attributes in headers are UTF-8, percent-encoded or raw; other bytes are an error."""
    base = [("ce-specversion", "1.0"), ("ce-id", "7"), ("ce-source", "/s"), ("ce-type", "t")]
    for subject in ("Zo%C3%AB", "Zoë".encode().decode("latin-1")):
        assert (
            dict(cloudevent_from_headers([*base, ("ce-subject", subject)]).kafka_headers)["ce_subject"]
            == "Zoë".encode()
        )
    with pytest.raises(EventRejected, match="ce-subject is not UTF-8"):
        cloudevent_from_headers([*base, ("ce-subject", "%FF")])
