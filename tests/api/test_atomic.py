"""Requests that are stored as one, over an in-memory transactor."""

from __future__ import annotations

from typing import Any

import pytest

from api.atomic import KEY_CHARACTERS_MAX, idempotency_key
from api.problem import Problem
from tests.api.test_ingest import NDJSON, URL, Service


@pytest.mark.parametrize("text", ["", '""', "   ", "x" * (KEY_CHARACTERS_MAX + 1)])
def test_a_key_that_is_none_is_refused(text: str) -> None:
    """400 for an empty or an endless one."""
    with pytest.raises(Problem, match="Idempotency-Key has"):
        idempotency_key(text, "t", b"", atomic=False)


def test_a_key_is_of_its_topic_and_its_request() -> None:
    """The same name in another topic is another key; another body or mode is another request."""
    key = idempotency_key("k", "t", b"1", atomic=False)
    assert idempotency_key("k", "u", b"1", atomic=False).digest != key.digest
    assert idempotency_key("k", "t", b"1", atomic=True) == key._replace(
        fingerprint=idempotency_key("k", "t", b"1", atomic=True).fingerprint
    )
    assert idempotency_key("k", "t", b"1", atomic=True).fingerprint != key.fingerprint


async def test_without_transactions_nothing_is_stored_as_one(producer: Any) -> None:
    """400 that says so, and nothing is sent; ack=none promises nothing, so it cannot be atomic."""
    service = Service(producer)
    for url, headers in ((URL + "?atomic=true", NDJSON), (URL, NDJSON | {"Idempotency-Key": "k"})):
        answer = await service.post(b"1", headers, url)
        assert (answer.status_code, producer.batches) == (400, [])
    answer = await service.post(b"1", NDJSON, URL + "?atomic=true&ack=none")
    assert "promises nothing" in answer.json()["detail"]
