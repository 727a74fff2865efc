"""Requests that are stored atomically: `?atomic=true` and `Idempotency-Key`.

The body is buffered (up to `max_body_bytes`) before anything is sent. Then its events, and the key if there is one, are
written in one transaction. The transaction contains the response too, if there is a key. The response is sent after the
commit. If a request with the same key and fingerprint arrives again within `idempotency_ttl_ms`, it is answered with
the stored response, and its events are not stored again. The fingerprint is made from the topic, `?atomic`, the body
and the headers that determine the records. A key belongs to one principal and one topic.

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
from penstock.api.http.status_codes import BAD_REQUEST, UNPROCESSABLE_CONTENT
from penstock.api.ingest.result import Outcome
from penstock.shared.common.errors import DataError
from penstock.shared.common.records import ProducerRecord

KEY_HEADER = "idempotency-key"
KEY_CHARACTERS_MAX = 255

REUSED = ErrorKind(UNPROCESSABLE_CONTENT, "IDEMPOTENCY_KEY_REUSED", "The key belongs to another request")


class KeyReused(DataError):
    """The Idempotency-Key was used for a request with another body, `?atomic` or headers that make its records."""


class IdempotencyKey(NamedTuple):
    """A key with its topic and principal, and a fingerprint of its request, both as digests of 32 bytes."""

    digest: bytes
    fingerprint: bytes


class StoredResponse(NamedTuple):
    """The response to the request that was stored with a key."""

    status: int
    body: bytes


MakeResponse = Callable[[Sequence[Outcome]], StoredResponse]
"""Returns the response for the outcomes of a request's records, in order."""


class Transactor(Protocol):
    """Stores requests atomically.

    Methods raise PenstockError if the transaction is not known to be committed. The error's `maybe_written` is true if
    the records may be stored nevertheless.
    """

    async def send_atomic(self, records: Sequence[ProducerRecord]) -> Sequence[Outcome]:
        """Send all records in one transaction. Returns their outcomes after the commit."""
        ...

    async def send_keyed(
        self, key: IdempotencyKey, records: Sequence[ProducerRecord], make_response: MakeResponse
    ) -> tuple[StoredResponse, bool]:
        """Send like `send_atomic`, with the key and its response in the same transaction.

        Returns the response, and whether the key was already known. If it was, nothing is sent and the response is the
        stored one. Raises KeyReused if the key is known with another fingerprint.
        """
        ...


def fingerprint_headers(
    headers: Iterable[tuple[str, str]], key_header: str | None, time_header: str | None
) -> list[tuple[str, str]]:
    """Return the headers of a request that determine its records, sorted. Names in `headers` are lower-case.

    >>> fingerprint_headers([("host", "a"), ("x-key", "ann"), ("ce-id", "7")], "X-Key", None)
    [('ce-id', '7'), ('x-key', 'ann')]
    """
    names = {"content-type", (key_header or "").lower(), (time_header or "").lower()}
    return sorted((name, value) for name, value in headers if name in names or name.startswith("ce-"))


def idempotency_key(
    text: str, topic: str, body: bytes, headers: Sequence[tuple[str, str]], *, atomic: bool, principal: str
) -> IdempotencyKey:
    """Return the key of a request; `text` is the value of its Idempotency-Key header.

    `headers` is the result of `fingerprint_headers`. Raises Problem (400) if the key is empty or too long.
    """
    name = text.strip()
    if len(name) > 1 and name[0] == name[-1] == '"':
        name = name[1:-1]
    if not 0 < len(name) <= KEY_CHARACTERS_MAX:
        kind = ErrorKind(BAD_REQUEST, "INVALID_IDEMPOTENCY_KEY", "Invalid Idempotency-Key")
        raise Problem(kind, f"an Idempotency-Key has 1 to {KEY_CHARACTERS_MAX} characters")
    fingerprint = hashlib.sha256(msgspec.json.encode([atomic, topic, headers]))
    fingerprint.update(body)
    digest = hashlib.sha256(msgspec.json.encode([principal, topic, name])).digest()
    return IdempotencyKey(digest, fingerprint.digest())
