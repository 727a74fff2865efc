"""Requests that are stored as one, over an in-memory transactor."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from penstock.api.http.app import create_app
from penstock.api.http.problem import Problem
from penstock.api.ingest.atomic import KEY_CHARACTERS_MAX, IdempotencyKey, fingerprint_headers, idempotency_key
from penstock.api.ingest.routes import Ingest
from penstock.api.settings import IngestSettings
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from tests.api.ingest.test_routes import NDJSON, URL, Service


def key_of(
    text: str = "k",
    topic: str = "t",
    body: bytes = b"1",
    headers: Any = (),
    atomic: bool = False,
    principal: str = "ann",
) -> IdempotencyKey:
    return idempotency_key(text, topic, body, headers, atomic=atomic, principal=principal)


@pytest.mark.parametrize("text", ["", '""', "   ", "x" * (KEY_CHARACTERS_MAX + 1)])
def test_a_key_that_is_none_is_refused(text: str) -> None:
    """400 for an empty or an endless one."""
    with pytest.raises(Problem, match="Idempotency-Key has"):
        idempotency_key(text, "t", b"", [], atomic=False, principal="")


def test_a_key_is_its_senders_own_in_its_topic() -> None:
    """The same name of another sender, or in another topic, is another key."""
    key = key_of()
    assert key_of(topic="u").digest != key.digest
    assert key_of(principal="bob").digest != key.digest
    # A name cannot reach into the topic's or the principal's part.
    assert key_of(topic="t\\0k", text="k").digest != key_of(topic="t", text="k\\0k").digest


@pytest.mark.parametrize(
    "other",
    [{"body": b"2"}, {"atomic": True}, {"headers": [("x-key", "ann")]}, {"headers": [("content-type", "text/plain")]}],
)
def test_what_makes_other_records_is_another_request(other: dict[str, Any]) -> None:
    """Under the same key: the body, the mode, and the headers that go into records."""
    assert key_of(**other).digest == key_of().digest
    assert key_of(**other).fingerprint != key_of().fingerprint


def test_headers_that_make_the_records_count_in_any_order() -> None:
    """CloudEvents' attributes, the content type, and the topic's key and time headers; no other."""
    sent = [("x-time", "5"), ("user-agent", "a"), ("ce-id", "1"), ("content-type", "application/json"), ("x-key", "k")]
    told = fingerprint_headers(sent, "X-Key", "X-Time")
    assert [name for name, _ in told] == ["ce-id", "content-type", "x-key", "x-time"]
    assert fingerprint_headers(reversed(sent), "X-Key", "X-Time") == told
    assert fingerprint_headers([("x-key", "k")], None, None) == []


async def test_without_transactions_nothing_is_stored_as_one(producer: Any) -> None:
    """400 that says so, and nothing is sent; ack=none promises nothing, so it cannot be atomic."""
    service = Service(producer)
    for url, headers in ((URL + "?atomic=true", NDJSON), (URL, NDJSON | {"Idempotency-Key": "k"})):
        answer = await service.post(b"1", headers, url)
        assert (answer.status_code, producer.batches) == (400, [])
    answer = await service.post(b"1", NDJSON, URL + "?atomic=true&ack=none")
    assert "promises nothing" in answer.json()["detail"]


class Transactor:
    """Keeps what is stored as one."""

    def __init__(self) -> None:
        self.sent: list[list[ProducerRecord]] = []

    async def send_atomic(self, records: Sequence[ProducerRecord]) -> list[RecordMetadata]:
        self.sent.append(list(records))
        return [RecordMetadata("t", 0, i, 0) for i in range(len(records))]

    async def send_keyed(self, key: IdempotencyKey, records: Any, answer: Any) -> tuple[Any, bool]:
        return answer(await self.send_atomic(records)), False


class Transactional(Service):
    """An ingest app whose transactions are kept in memory."""

    def __init__(self, producer: Any, **settings: Any) -> None:
        super().__init__(producer, **settings)
        self.transactor = Transactor()
        taken = IngestSettings.model_validate(settings)
        ingest = Ingest(producer, taken, self.registry, transactor=self.transactor)
        transport = httpx.ASGITransport(create_app(ingest=ingest.router))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(("url", "headers"), [(URL + "?atomic=true", NDJSON), (URL, NDJSON | {"Idempotency-Key": "k"})])
async def test_a_body_of_bad_lines_is_bounded_when_stored_as_one(
    producer: Any, url: str, headers: dict[str, str]
) -> None:
    """Reading stops at the error that is one too many, and the answer names no more than max_errors."""
    service = Transactional(producer, max_errors=5)
    answer = await service.post(b"1\n" + b"x\n" * 200_000, headers, url)
    assert len(answer.json()["errors"]) == 5
    assert answer.json()["stopped_at_line"] == 7
    if "atomic" in url:
        assert (answer.status_code, service.transactor.sent) == (400, [])
    else:
        assert (answer.status_code, answer.json()["stored"]) == (207, 1)
        assert [[r.value for r in sent] for sent in service.transactor.sent] == [[b"1"]]


async def test_others_get_on_while_a_long_body_is_read(producer: Any) -> None:
    """However many lines came at once, the loop is given back between some of them."""
    service, turns, done = Transactional(producer, max_body_events=100_000), 0, False

    async def count() -> None:
        nonlocal turns
        while not done:
            turns += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    answer = await service.post(b"1\n" * 60_000, NDJSON, URL + "?atomic=true")
    done = True
    await counting
    assert answer.json()["stored"] == 60_000
    assert turns >= 10


@pytest.mark.parametrize(
    ("content", "headers", "url"),
    [
        (b"1\n" * 11, NDJSON, URL + "?atomic=true"),
        (b"[" + b"1," * 10 + b"1]", {"Content-Type": "application/json"}, URL),
    ],
)
async def test_a_body_read_whole_has_so_many_events_at_most(
    producer: Any, content: bytes, headers: dict[str, str], url: str
) -> None:
    """413 that names the setting, and nothing is stored; one event fewer is taken."""
    service = Transactional(producer, max_body_events=10)
    answer = await service.post(content, headers, url)
    assert (answer.status_code, answer.json()["error_code"]) == (413, "TOO_MANY_EVENTS")
    assert "max_body_events=10" in answer.json()["detail"]
    assert (producer.batches, service.transactor.sent) == ([], [])
    assert (await service.post(content.replace(b"1\n", b"", 1).replace(b"1,", b"", 1), headers, url)).status_code == 200
