"""Requests that are stored atomically: `?atomic=true` and `Idempotency-Key`.

The body is read whole (up to `max_body_bytes`) before anything is sent. Then its events, and the key if there is one,
are written in one transaction. The answer is sent after the commit. A key is kept with its answer. The same request
again gets the same answer, and nothing is stored a second time. Two requests are the same if their topic, their body
and the headers that make their records are equal. A key belongs to one principal and one topic.

>>> first = idempotency_key('"order-7"', "orders", b"[1]", [], atomic=False, principal="ann")
>>> again = idempotency_key("order-7", "orders", b"[1]", [], atomic=False, principal="ann")
>>> other = idempotency_key("order-7", "orders", b"[1]", [("x-key", "b")], atomic=False, principal="ann")
>>> first == again, first.digest == other.digest, first == other
(True, True, False)
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Protocol

import msgspec

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.ingest.result import Outcome
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import ProducerRecord

KEY_HEADER = "idempotency-key"
KEY_CHARACTERS_MAX = 255

REUSED = ErrorKind(422, "IDEMPOTENCY_KEY_REUSED", "The key belongs to another request")


class KeyReused(DataError):
    """The Idempotency-Key was used for a request with another body, or other headers that make its records."""


class IdempotencyKey(NamedTuple):
    """A key with its topic and principal, and a fingerprint of its request, both as digests of 32 bytes."""

    digest: bytes
    fingerprint: bytes


class StoredResponse(NamedTuple):
    """The answer to the first request with this key."""

    status: int
    body: bytes


MakeAnswer = Callable[[Sequence[Outcome]], StoredResponse]


class Transactor(Protocol):
    """What ingest needs to store requests atomically.

    Methods raise PenstockError if no record is known to be stored; its `maybe_written` tells whether some may be.
    """

    async def send_atomic(self, records: Sequence[ProducerRecord]) -> Sequence[Outcome]:
        """Send all records in one transaction. Returns their outcomes after the commit."""
        ...

    async def send_keyed(
        self, key: IdempotencyKey, records: Sequence[ProducerRecord], answer: MakeAnswer
    ) -> tuple[StoredResponse, bool]:
        """Send like `send_atomic`, with the key and its answer in the same transaction.

        Returns the answer, and whether the key was already known. Raises KeyReused if the key is known with another
        fingerprint.
        """
        ...


def told_by_headers(
    headers: Iterable[tuple[str, str]], key_header: str | None, time_header: str | None
) -> list[tuple[str, str]]:
    """Return the headers of a request that make its records, sorted. Names in `headers` are lower-case.

    >>> told_by_headers([("host", "a"), ("x-key", "ann"), ("ce-id", "7")], "X-Key", None)
    [('ce-id', '7'), ('x-key', 'ann')]
    """
    named = {"content-type", (key_header or "").lower(), (time_header or "").lower()}
    return sorted((name, value) for name, value in headers if name in named or name.startswith("ce-"))


def idempotency_key(
    text: str, topic: str, body: bytes, telling: Sequence[tuple[str, str]], *, atomic: bool, principal: str
) -> IdempotencyKey:
    """Return the key of a request. Raises Problem (400) if the header is empty or too long."""
    name = text.strip()
    if len(name) > 1 and name[0] == name[-1] == '"':
        name = name[1:-1]
    if not 0 < len(name) <= KEY_CHARACTERS_MAX:
        kind = ErrorKind(400, "INVALID_IDEMPOTENCY_KEY", "Wrong Idempotency-Key")
        raise Problem(kind, f"an Idempotency-Key has 1 to {KEY_CHARACTERS_MAX} characters")
    request = hashlib.sha256(msgspec.json.encode([atomic, topic, telling]))
    request.update(body)
    digest = hashlib.sha256(msgspec.json.encode([principal, topic, name])).digest()
    return IdempotencyKey(digest, request.digest())
