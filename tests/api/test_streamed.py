"""Answers that come while the body does."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from tests.api.test_ingest import NDJSON, URL, Service

STREAMED = NDJSON | {"Accept": "application/x-ndjson"}


def rows(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


async def test_the_last_line_has_the_totals(producer: Any) -> None:
    """207 from the start; every bad line is named, and the end says what became of all."""
    answer = await Service(producer).post(b"1\noops\n3\n", STREAMED, URL + "?offsets=true")
    assert (answer.status_code, answer.headers["content-type"]) == (207, "application/x-ndjson")
    *_, last = said = rows(answer.text)
    assert (last["status"], last["total"]) == (207, {"stored": 2, "not_stored": 1, "unknown": 0})
    assert [e["line"] for row in said for e in row.get("errors", [])] == [2]
    assert [o["line"] for row in said for o in row.get("offsets", [])] == [1, 3]


async def test_errors_are_told_as_they_come_and_kept_no_longer(producer: Any) -> None:
    """More errors than max_errors stop nothing here: they are written, counted and forgotten."""

    async def body() -> AsyncIterator[bytes]:
        for _ in range(20):
            yield b"oops\n" * 150 + b"1\n"

    service = Service(producer, max_errors=10)
    said = rows((await service.post(body(), STREAMED)).text)
    assert len(said) >= 20
    assert sum(len(row.get("errors", [])) for row in said) == 3_000
    assert said[-1]["total"] == {"stored": 20, "not_stored": 3_000, "unknown": 0}
    assert service.metric("refused_records", error_code="MALFORMED_JSON") == 3_000


async def test_a_lasting_failure_stops_the_stream_with_its_reason(producer: Any) -> None:
    """What was not read is named by its first line, in the last row."""
    from shared.common.errors import BrokerNotAvailable

    producer.fail_all = BrokerNotAvailable("no broker")
    last = rows((await Service(producer).post(b"1\n2\n", STREAMED)).text)[-1]
    assert last["status"] == 503
    assert last["total"]["stored"] == 0
    assert last["total"]["not_stored"] == 2
