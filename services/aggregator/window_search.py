"""`GET /v1/streams/stores/{store}/windows`: windows by keys and time, open and closed, whoever has their partitions.

With a lake they are found there and in the changelog past it, and so they are without one while the changelog is short.
A long one is not read for every question: then open windows are what the tasks hold, asked from all instances, and
come first; closed ones follow as the log has them, a stretch of it a page. What an answer's `continuation` goes on with
is said by how it begins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any, TypedDict

from penstock.api.keys import StoreQuestion
from penstock.api.problem import ErrorKind, Problem
from penstock.api.stores import FoundWindows, Status
from penstock.services.aggregator.closed_pages import ClosedPages, Limits
from penstock.services.aggregator.closed_scan import Wanted
from penstock.services.aggregator.kept_changes import CHANGES_MAX
from penstock.services.aggregator.own_loop import in_own_loop
from penstock.services.aggregator.pages import closed_pages, window_pages
from penstock.services.aggregator.questions import Asked
from penstock.services.aggregator.sessions import Query, TailTooLong
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.shared.common.continuation import ChangelogPlace
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.key_range import KeyRange
from penstock.shared.streams.changelog.format import WINDOWED, StoreSchema

FINDING_MAX = 2  # questions that read the changelog at once
EVER_MS = (-(2**62), 2**62)
BUSY = ErrorKind(429, "TOO_MANY_QUESTIONS", "Too many questions at once", 1)
OPEN, CLOSED = "open.", "closed."
"""How a continuation begins that goes on with the tasks' open windows, or with the changelog's closed ones."""
COLUMNS = ("partition", "key", "start", "end")


class Rows(TypedDict):
    """A page of a store's rows: open windows, as `penstock.api.stores.StoresView.read_store` gives them."""

    rows: list[dict[str, Any]]
    position: dict[int, dict[str, int]]
    continuation: str | None


ReadStore = Callable[[str, StoreQuestion], Awaitable[Rows]]


class WindowSearch:
    """Answers for an application's stores; `read_store` has the open windows of all instances, or Problem."""

    def __init__(self, settings: AggregatorSettings, read_store: ReadStore) -> None:
        self._settings, self._read_store = settings, read_store
        self._finding = asyncio.Semaphore(FINDING_MAX)

    async def find(self, schema: StoreSchema, status: Status, question: StoreQuestion) -> FoundWindows:
        """A page of a store's windows; ConfigError, WrongContinuation, or Problem where it is busy."""
        if schema.kind not in WINDOWED:
            raise ConfigError(f"no store with windows {schema.name!r}")
        text = question["continuation"] or ""
        if text.startswith(OPEN):
            return await self._open(schema, status, question, text.removeprefix(OPEN))
        if self._finding.locked():
            raise Problem(BUSY, f"{FINDING_MAX} such questions are being answered")
        async with self._finding:
            if text.startswith(CLOSED):
                return await self._closed(schema, status, question, text.removeprefix(CLOSED))
            try:
                return await self._whole(schema, status, question)
            except TailTooLong:
                if status == "closed":
                    return await self._closed(schema, status, question, None)
        return await self._open(schema, status, question, None)

    async def _whole(self, schema: StoreSchema, status: Status, question: StoreQuestion) -> FoundWindows:
        """From lake and changelog, in order of their start."""
        streams, queries = self._settings.streams, self._settings.queries
        pages = window_pages(streams.application_id, schema.name, status, question)
        where = (self._settings.kafka, streams.application_id, streams.lake, streams.lake_options)
        from_ms, to_ms = map(str, _reach(question))
        limits = (queries.changelog_timeout_ms, question["rows_max"])
        most = min(CHANGES_MAX, queries.changelog_records_max)
        asked = Asked(*where, schema.name, _keys(question), from_ms, to_ms, *limits, status, tail_records_max=most)
        query = Query(asked, pages.place(question["continuation"]))
        _, found = await in_own_loop(query.run)
        windows = [one._asdict() for one in found]
        return {"windows": windows, "position": query.position, "continuation": pages.text(query.last)}

    async def _open(
        self, schema: StoreSchema, status: Status, question: StoreQuestion, continuation: str | None
    ) -> FoundWindows:
        """What the tasks hold; after the last of it the closed windows."""
        found = await self._read_store(schema.name, StoreQuestion(**{**question, "continuation": continuation}))
        windows = [_window(row) for row in found["rows"]]
        more = found["continuation"]
        text = None if more is None else OPEN + more
        if more is None and status == "all":
            text = self._closed_text(schema, status, question, ChangelogPlace(0))
        return {"windows": windows, "position": found["position"], "continuation": text}

    async def _closed(
        self, schema: StoreSchema, status: Status, question: StoreQuestion, continuation: str | None
    ) -> FoundWindows:
        """What a stretch of the changelog tells of."""
        streams, queries = self._settings.streams, self._settings.queries
        pages = closed_pages(streams.application_id, schema.name, status, question)
        place = pages.place(continuation) or ChangelogPlace(0)
        limits = Limits(question["rows_max"], queries.changelog_records_max, queries.changelog_timeout_ms)
        wanted = Wanted(schema, _keys(question), _reach(question))
        where = (self._settings.kafka, streams.changelog_topic)
        reading = ClosedPages(*where, wanted, limits)
        page = await in_own_loop(lambda: reading.read(place))
        text = self._closed_text(schema, status, question, page.last)
        return {"windows": [one._asdict() for one in page.rows], "position": page.position, "continuation": text}

    def _closed_text(
        self, schema: StoreSchema, status: Status, question: StoreQuestion, place: ChangelogPlace | None
    ) -> str | None:
        pages = closed_pages(self._settings.streams.application_id, schema.name, status, question)
        return None if place is None else f"{CLOSED}{pages.text(place)}"


def _keys(question: StoreQuestion) -> KeyRange:
    return KeyRange.of(question["key"], question["key_from"], question["key_to"])


def _reach(question: StoreQuestion) -> tuple[int, int]:
    from_ms, to_ms = question["from_ms"], question["to_ms"]
    return EVER_MS[0] if from_ms is None else from_ms, EVER_MS[1] if to_ms is None else to_ms


def _window(row: dict[str, Any]) -> dict[str, Any]:
    """A store's row as an open window."""
    results = {name: value for name, value in row.items() if name not in COLUMNS}
    times = {"start_ms": row["start"], "end_ms": row["end"]}
    told = {"status": "open", "revision": 0, "results": results}
    return {"partition": row["partition"], **times, **told, "key": row["key"]}
