"""CloudEvents in their three modes over HTTP, with producers in memory."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api.cloudevents import ATTRIBUTES_MAX, binary_event
from api.event import EventRefused
from tests.api.test_ingest import Service

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


async def test_a_structured_event_is_stored_as_it_came(producer: Any) -> None:
    """Its bytes are the value, under Kafka's content-type header; partitionkey and time are key and event time."""
    body = json.dumps(EVENT).encode()
    answer = await Service(producer).post(body, STRUCTURED)
    assert (answer.status_code, answer.json()["stored"]) == (200, 1)
    record = only(producer)
    assert (record.value, record.key, record.timestamp) == (body, b"ann", AT_MS)
    assert record.headers == (("content-type", b"application/cloudevents+json; charset=UTF-8"),)


async def test_a_binary_event_is_its_data_with_attributes_as_headers(producer: Any) -> None:
    """Kafka's binding: ce_ headers, percent-encoding undone; the value is the body."""
    answer = await Service(producer).post(b'{"n":1}', BINARY)
    assert answer.status_code == 200
    record = only(producer)
    headers = dict(record.headers)
    assert (record.value, record.key, record.timestamp) == (b'{"n":1}', b"ann", AT_MS)
    assert (headers["ce_type"], headers["ce_id"], headers["content-type"]) == ("té".encode(), b"1", b"application/json")


async def test_binary_data_may_be_anything_unless_the_topic_reads_it(producer: Any) -> None:
    """An image is stored as it is; a topic with a key pointer needs JSON."""
    headers = BINARY | {"Content-Type": "image/png"}
    assert (await Service(producer).post(b"\x89PNG", headers)).status_code == 200
    assert only(producer).value == b"\x89PNG"
    refused = await Service(producer, topics={"t": {"key": ["/user"]}}).post(b"\x89PNG", headers)
    assert (refused.status_code, refused.json()["error_code"]) == (400, "INVALID_CLOUDEVENT")


async def test_a_batch_fails_by_element(producer: Any) -> None:
    """207: the bad one is named by its index."""
    bad = {name: value for name, value in EVENT.items() if name != "source"}
    answer = await Service(producer).post(json.dumps([EVENT, bad, 7, EVENT]).encode(), BATCH)
    assert (answer.status_code, answer.json()["stored"]) == (207, 2)
    assert [(e["index"], e["error_code"]) for e in answer.json()["errors"]] == [
        (1, "INVALID_CLOUDEVENT"),
        (2, "INVALID_CLOUDEVENT"),
    ]


async def test_the_topics_settings_speak_of_the_data(producer: Any) -> None:
    """A key pointer reads the same event alike in every mode, and goes before partitionkey."""
    service = Service(producer, topics={"t": {"key": ["/user"]}})
    await service.post(json.dumps(EVENT).encode(), STRUCTURED)
    await service.post(json.dumps([EVENT]).encode(), BATCH)
    await service.post(json.dumps(EVENT["data"]).encode(), BINARY)
    assert [record.key for log in producer.logs["t"] for record in log] == [b"bob"] * 3


@pytest.mark.parametrize(
    ("headers", "what"),
    [
        ({"ce-id": "1"}, "specversion"),
        ({"ce-specversion": "0.3", "ce-id": "1", "ce-source": "s", "ce-type": "t"}, "0.3"),
        ({"ce-specversion": "1.0", "ce-id": "", "ce-source": "s", "ce-type": "t"}, "id is required"),
        ({f"ce-x{i}": "1" for i in range(ATTRIBUTES_MAX + 1)}, "more than"),
    ],
)
def test_what_is_no_event_is_refused_by_the_attribute(headers: dict[str, str], what: str) -> None:
    """The attribute that is missing or wrong is named."""
    with pytest.raises(EventRefused, match=what):
        binary_event(headers.items())


def test_attributes_in_headers_are_utf8_either_way() -> None:
    """Percent-encoded or as bytes, a text is the same; what is no UTF-8 is refused and named."""
    base = [("ce-specversion", "1.0"), ("ce-id", "7"), ("ce-source", "/s"), ("ce-type", "t")]
    for subject in ("Zo%C3%AB", "Zoë".encode().decode("latin-1")):
        assert dict(binary_event([*base, ("ce-subject", subject)]).headers)["ce_subject"] == "Zoë".encode()
    with pytest.raises(EventRefused, match="ce-subject is not UTF-8"):
        binary_event([*base, ("ce-subject", "%FF")])
