"""Requests that are stored atomically, with a transactor in memory."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import httpx
import pytest

from penstock.api.http.app import create_app
from penstock.api.http.problem import Problem
from penstock.api.ingest.atomic import (
    KEY_CHARACTERS_MAX,
    IdempotencyKey,
    StoredResponse,
    fingerprint_headers,
    idempotency_key,
)
from penstock.api.ingest.routes import Ingest
from penstock.api.settings import IngestSettings
from penstock.shared.common import errors
from penstock.shared.common.records import ProducerRecord, RecordMetadata
from tests.api.ingest.service import NDJSON, URL, Service


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
def test_an_invalid_key_is_rejected(text: str) -> None:
    """An empty key or one that is too long is a 400."""
    with pytest.raises(Problem, match="Idempotency-Key has"):
        idempotency_key(text, "t", b"", [], atomic=False, principal="")


def test_a_key_belongs_to_its_principal_and_topic() -> None:
    """The same key of another principal or in another topic is a different key."""
    key = key_of()
    assert key_of(topic="u").digest != key.digest
    assert key_of(principal="bob").digest != key.digest
    # A name cannot reach into the topic's or the principal's part.
    assert key_of(topic="t\\0k", text="k").digest != key_of(topic="t", text="k\\0k").digest


@pytest.mark.parametrize(
    "other",
    [{"body": b"2"}, {"atomic": True}, {"headers": [("x-key", "ann")]}, {"headers": [("content-type", "text/plain")]}],
)
def test_different_records_are_another_request(other: dict[str, Any]) -> None:
    """The same key with another body, mode, or header that determines the records has another fingerprint."""
    assert key_of(**other).digest == key_of().digest
    assert key_of(**other).fingerprint != key_of().fingerprint


def test_the_order_of_headers_does_not_change_the_fingerprint() -> None:
    """Only CloudEvents' attributes, the content type, and the topic's key and time headers count."""
    sent = [("x-time", "5"), ("user-agent", "a"), ("ce-id", "1"), ("content-type", "application/json"), ("x-key", "k")]
    headers = fingerprint_headers(sent, "X-Key", "X-Time")
    assert [name for name, _ in headers] == ["ce-id", "content-type", "x-key", "x-time"]
    assert fingerprint_headers(reversed(sent), "X-Key", "X-Time") == headers
    assert fingerprint_headers([("x-key", "k")], None, None) == []


async def test_without_a_transactor_atomic_requests_are_rejected(producer: Any) -> None:
    """Without a transactor an atomic request is a 400 and nothing is sent; ack=none cannot be atomic."""
    service = Service(producer)
    for url, headers in ((URL + "?atomic=true", NDJSON), (URL, NDJSON | {"Idempotency-Key": "k"})):
        response = await service.post(b"1", headers, url)
        assert (response.status_code, producer.batches) == (400, [])
    response = await service.post(b"1", NDJSON, URL + "?atomic=true&ack=none")
    assert "promises nothing" in response.json()["detail"]


class Transactor:
    """Implements `Transactor`; `sent` has the records of each transaction."""

    def __init__(self) -> None:
        self.sent: list[list[ProducerRecord]] = []

    async def send_atomic(self, records: Sequence[ProducerRecord]) -> list[RecordMetadata]:
        self.sent.append(list(records))
        return [RecordMetadata("t", 0, i, 0) for i in range(len(records))]

    async def send_keyed(self, key: IdempotencyKey, records: Any, make_response: Any) -> tuple[Any, bool]:
        return make_response(await self.send_atomic(records)), False


class Transactional(Service):
    """An ingest app with transactions in memory."""

    def __init__(self, producer: Any, transactor: Transactor | None = None, **settings: Any) -> None:
        super().__init__(producer, **settings)
        self.transactor = Transactor() if transactor is None else transactor
        ingest = Ingest(producer, IngestSettings.model_validate(settings), self.registry, transactor=self.transactor)
        transport = httpx.ASGITransport(create_app(ingest=ingest.router))
        self.client = httpx.AsyncClient(transport=transport, base_url="http://localhost")


@pytest.mark.parametrize(("url", "headers"), [(URL + "?atomic=true", NDJSON), (URL, NDJSON | {"Idempotency-Key": "k"})])
async def test_the_errors_of_an_atomic_request_are_bounded(producer: Any, url: str, headers: dict[str, str]) -> None:
    """Reading stops after max_errors, and the response lists no more."""
    service = Transactional(producer, max_errors=5)
    response = await service.post(b"1\n" + b"x\n" * 200_000, headers, url)
    assert len(response.json()["errors"]) == 5
    assert response.json()["stopped_at_line"] == 7
    if "atomic" in url:
        assert (response.status_code, service.transactor.sent) == (400, [])
    else:
        assert (response.status_code, response.json()["stored"]) == (207, 1)
        assert [[r.value for r in sent] for sent in service.transactor.sent] == [[b"1"]]


async def test_no_event_beside_an_invalid_one_is_stored(producer: Any) -> None:
    """The response counts the valid events as not stored too."""
    service = Transactional(producer)
    response = await service.post(b"1\n2\nx\n4\n", NDJSON, URL + "?atomic=true")
    body = response.json()
    assert (response.status_code, body["stored"], body["not_stored"], body["unknown"]) == (400, 0, 4, 0)
    assert [error["line"] for error in body["errors"]] == [3]
    assert service.transactor.sent == []


class FencedTransactor(Transactor):
    """A transactor whose first transaction with a key is fenced before its commit."""

    def __init__(self, *, replayed: StoredResponse | None = None) -> None:
        super().__init__()
        self._replayed = replayed

    async def send_keyed(self, key: IdempotencyKey, records: Any, make_response: Any) -> tuple[Any, bool]:
        make_response(await self.send_atomic(records))
        if self._replayed is not None:
            return self._replayed, True
        return await super().send_keyed(key, records, make_response)


async def test_a_transaction_that_is_sent_again_is_counted_once(producer: Any) -> None:
    """If another service fences a transaction with a key, the response has only the outcomes of the next one."""
    service = Transactional(producer, FencedTransactor())
    response = await service.post(b"1\n2\n", NDJSON | {"Idempotency-Key": "k"}, URL + "?offsets=true")
    body = response.json()
    assert (body["stored"], [row["line"] for row in body["offsets"]]) == (2, [1, 2])
    assert service.metric("stored_records") == 2


async def test_a_fenced_transaction_before_a_replay_is_not_counted(producer: Any) -> None:
    """If the other service has stored the key meanwhile, nothing of the fenced transaction is counted."""
    service = Transactional(producer, FencedTransactor(replayed=StoredResponse(200, b'{"stored":2}')))
    response = await service.post(b"1\n2\n", NDJSON | {"Idempotency-Key": "k"})
    assert response.json() == {"stored": 2}
    assert not service.metric("stored_records")


class FailingTransactor(Transactor):
    """A transactor whose transactions fail with `error`."""

    def __init__(self, error: errors.PenstockError) -> None:
        super().__init__()
        self.error = error

    async def send_atomic(self, records: Sequence[ProducerRecord]) -> list[RecordMetadata]:
        raise self.error


@pytest.mark.parametrize(
    ("error", "status", "outcome"),
    [
        (errors.TransactionAborted("fenced"), 503, "not_stored"),
        (errors.KafkaTimeout("no response to the commit"), 504, "unknown"),
        (errors.SendCancelled("cancelled"), 500, "unknown"),
    ],
)
async def test_the_outcome_of_a_failed_transaction_is_that_of_its_status(
    producer: Any, error: errors.PenstockError, status: int, outcome: str
) -> None:
    """As for a single event, the outcome is unknown with the statuses 500 and 504."""
    service = Transactional(producer, FailingTransactor(error))
    response = await service.post(b"1\n", NDJSON, URL + "?atomic=true")
    assert (response.status_code, response.json()["outcome"]) == (status, outcome)


async def test_other_tasks_run_while_a_long_body_is_parsed(producer: Any) -> None:
    """The event loop runs between batches of lines."""
    service = Transactional(producer, max_body_events=100_000)
    iterations = 0
    is_answered = False

    async def count() -> None:
        nonlocal iterations
        while not is_answered:
            iterations += 1
            await asyncio.sleep(0)

    counting = asyncio.ensure_future(count())
    response = await service.post(b"1\n" * 60_000, NDJSON, URL + "?atomic=true")
    is_answered = True
    await counting
    assert response.json()["stored"] == 60_000
    assert iterations >= 10


@pytest.mark.parametrize(
    ("content", "headers", "url"),
    [
        (b"1\n" * 11, NDJSON, URL + "?atomic=true"),
        (b"[" + b"1," * 10 + b"1]", {"Content-Type": "application/json"}, URL),
    ],
)
async def test_the_events_of_a_buffered_body_are_limited(
    producer: Any, content: bytes, headers: dict[str, str], url: str
) -> None:
    """More than max_body_events events are a 413 with the setting's name, and nothing is
    stored; exactly the limit is accepted.
    """
    service = Transactional(producer, max_body_events=10)
    response = await service.post(content, headers, url)
    assert (response.status_code, response.json()["error_code"]) == (413, "TOO_MANY_EVENTS")
    assert "max_body_events=10" in response.json()["detail"]
    assert (producer.batches, service.transactor.sent) == ([], [])
    assert (await service.post(content.replace(b"1\n", b"", 1).replace(b"1,", b"", 1), headers, url)).status_code == 200
