"""Sends events to the ingest endpoint in NDJSON batches, in order, and counts the acknowledged ones."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import islice

import httpx

from penstock.shared.common.errors import BrokerNotAvailable, PenstockError
from penstock.shared.common.http_tls import client_tls
from penstock.shared.common.json_decoding import decode_json

BATCH_LINES = 5_000
REQUEST_TIMEOUT_MS = 60_000
ATTEMPTS_MAX = 20
ERRORS_KEPT = 5
NOTHING_STORED = (429, 503)
"""Statuses after which the same batch may be sent again, since none of it is stored."""


class IngestRejected(PenstockError):
    """The endpoint's response does not have the outcome of every event of a batch.

    The message has the response's status, and its reason or text.
    """


@dataclass(slots=True)
class ReplayCounts:
    """The outcome of the events so far. `errors` are the first few error messages, made by `name_rejection`."""

    sent: int = 0
    acknowledged: int = 0
    rejected: int = 0
    errors: list[str] = field(default_factory=list)


class EventReplay:
    """Sends the events in `lines` to the ingest endpoint. Each call of `send` sends the next part of them.

    `name_rejection` takes an event's number, from 1, and the endpoint's error. It returns an error message that names
    the event as its source does, such as by its row.
    """

    def __init__(self, url: str, topic: str, lines: Iterator[bytes], name_rejection: Callable[[int, str], str]) -> None:
        self._url = f"{url}/v1/topics/{topic}/events"
        self._lines = lines
        self._name_rejection = name_rejection
        self._client = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_MS / 1000, verify=client_tls(), trust_env=False)
        self.counts = ReplayCounts()

    async def send(self, limit: int | None = None) -> bool:
        """Send up to `limit` more events (None: all), batch by batch. Returns False if `lines` ended first."""
        left = limit
        while left is None or left > 0:
            batch = list(islice(self._lines, BATCH_LINES if left is None else min(BATCH_LINES, left)))
            if not batch:
                return False
            await self._post_events(batch)
            left = None if left is None else left - len(batch)
        return True

    async def close(self) -> None:
        """Close the connection."""
        await self._client.aclose()

    async def _post_events(self, batch: list[bytes]) -> None:
        counts = self.counts
        body = b"\n".join(batch) + b"\n"
        before = self.counts.sent
        counts.sent += len(batch)
        for attempt in range(1, ATTEMPTS_MAX + 1):
            try:
                response = await self._client.post(
                    self._url, content=body, headers={"Content-Type": "application/x-ndjson"}
                )
            except httpx.HTTPError as e:
                # A batch whose response was lost may be stored, and sending it again could store it twice. The same is
                # true after a 504, which is why NOTHING_STORED does not have it.
                raise BrokerNotAvailable(f"{self._url}: {type(e).__name__}: {e}") from e
            if response.status_code not in NOTHING_STORED or attempt == ATTEMPTS_MAX:
                break
            await asyncio.sleep(float(response.headers.get("Retry-After", "1")))
        self._count_response(response, before, len(batch))

    def _count_response(self, response: httpx.Response, before: int, lines: int) -> None:
        counts = self.counts
        try:
            body = decode_json(response.content)
            stored = int(body["stored"])
            errors = list(body.get("errors", ()))
        except (ValueError, KeyError, TypeError):
            raise IngestRejected(f"{self._url} answered {response.status_code}: {response.text[:500]}") from None
        if unknown := int(body.get("unknown", 0)):
            reason = errors[0]["message"] if errors else ""
            raise IngestRejected(
                f"{self._url} answered {response.status_code}: of {lines} events {unknown} may or may not be stored, "
                f"so they are not sent again: {reason}"
            )
        if "stopped_at_line" in body:
            raise IngestRejected(f"{self._url} answered {response.status_code}: {body.get('stop_reason')}")
        counts.acknowledged += stored
        counts.rejected += lines - stored
        for error in errors[: ERRORS_KEPT - len(counts.errors)]:
            counts.errors.append(self._name_rejection(before + int(error["line"]), str(error["message"])))
