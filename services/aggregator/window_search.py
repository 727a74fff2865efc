"""`GET /v1/streams/stores/{store}/windows`: windows by keys and time, open and closed, on any instance.

With a lake, windows are found in the lake and in the changelog's tail. Without a lake, only open windows are found:
those in the stores of the tasks, which are queried from all instances.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypedDict, TypeVar, cast

from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import CONFLICT, TOO_MANY_REQUESTS
from penstock.api.streams.query_params import StoreQueryParams
from penstock.api.streams.stores import FoundWindows, Status, Window
from penstock.services.aggregator.changelog_tail import ChangelogLocation
from penstock.services.aggregator.continuations import window_pages
from penstock.services.aggregator.settings import AggregatorSettings
from penstock.services.aggregator.stored_windows import StoredWindowsQuery, WindowQueryOptions
from penstock.shared.common.key_range import KeyRange
from penstock.shared.streams.changelog.store_schema import StoreSchema

T = TypeVar("T")

# Beyond this number of concurrent searches of the lake and the changelog, a search is rejected.
FINDING_MAX = 2
EVER_MS = (-(2**62), 2**62)
BUSY = ErrorKind(TOO_MANY_REQUESTS, "TOO_MANY_QUERIES", "Too many queries at once", 1)
NO_LAKE = ErrorKind(CONFLICT, "NO_LAKE", "Closed windows are in the lake, and no lake is set")
COLUMNS = ("partition", "key", "start", "end")


class OpenWindowRows(TypedDict):
    """A page of a store's rows: open windows, as `penstock.api.streams.stores.StoresView.read_store` returns them."""

    rows: list[dict[str, Any]]
    position: dict[int, dict[str, int]]
    continuation: str | None


ReadStore = Callable[[str, StoreQueryParams], Awaitable[OpenWindowRows]]


class WindowSearch:
    """Finds windows of an application. `read_store` returns open windows of all instances, or raises Problem."""

    def __init__(self, settings: AggregatorSettings, read_store: ReadStore) -> None:
        self._settings = settings
        self._read_store = read_store
        self._finding = asyncio.Semaphore(FINDING_MAX)

    async def find(self, schema: StoreSchema, status: Status, params: StoreQueryParams) -> FoundWindows:
        """Return a page of the windows of a store that has windows.

        Raises WrongContinuation for an invalid continuation. Raises Problem if too many searches run, if closed windows
        are wanted without a lake, or if `read_store` raises it. Also raises the errors of `StoredWindowsQuery.run`.
        """
        if self._settings.streams.lake is None:
            if status != "open":
                raise Problem(NO_LAKE, "streams.lake is not set: query only open windows (status=open)")
            return await self._open_windows(schema, params)
        if self._finding.locked():
            raise Problem(BUSY, f"{FINDING_MAX} such queries are running")
        async with self._finding:
            return await self._windows_of_lake_and_changelog(schema, status, params)

    async def _windows_of_lake_and_changelog(
        self, schema: StoreSchema, status: Status, params: StoreQueryParams
    ) -> FoundWindows:
        """Return windows from lake and changelog, in order of their start."""
        streams = self._settings.streams
        queries = self._settings.queries
        pages = window_pages(streams.application_id, schema.name, status, params)
        kafka = self._settings.kafka
        options = WindowQueryOptions(
            location=ChangelogLocation(kafka, streams.application_id, streams.lake, streams.lake_options),
            store=schema.name,
            keys=KeyRange.of(params["key"], params["key_from"], params["key_to"]),
            time_range=_queried_time_range(params),
            status=status,
            rows_max=params["rows_max"],
            timeout_ms=queries.changelog_timeout_ms,
            timeout_name="queries.changelog_timeout_ms",
        )
        query = StoredWindowsQuery(options, pages.decode(params["continuation"]))
        _, found = await run_search_in_thread(query.run)
        windows = [cast(Window, one._asdict()) for one in found]
        return {"windows": windows, "position": query.position, "continuation": pages.encode(query.last)}

    async def _open_windows(self, schema: StoreSchema, params: StoreQueryParams) -> FoundWindows:
        """Return open windows from the tasks."""
        found = await self._read_store(schema.name, params)
        windows = [_open_window_of_row(row) for row in found["rows"]]
        return {"windows": windows, "position": found["position"], "continuation": found["continuation"]}


def _queried_time_range(params: StoreQueryParams) -> tuple[int, int]:
    """Return the time range of the query, in ms and inclusive. A bound that is not given is no limit."""
    from_ms = params["from_ms"]
    to_ms = params["to_ms"]
    return EVER_MS[0] if from_ms is None else from_ms, EVER_MS[1] if to_ms is None else to_ms


def _open_window_of_row(row: dict[str, Any]) -> Window:
    """Return a store's row as an open window that `WindowSearch` found."""
    results = {name: value for name, value in row.items() if name not in COLUMNS}
    return {
        "partition": row["partition"],
        "start_ms": row["start"],
        "end_ms": row["end"],
        "status": "open",
        "results": results,
        "key": row["key"],
    }


async def run_search_in_thread(search: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a search in an event loop of its own in a worker thread, so that it does not block the caller's loop.

    Returns the result of `search`, or raises its error. `search` must open its own connections. If the caller is
    cancelled, `search` is cancelled too.

    >>> async def three():
    ...     return 3
    >>> asyncio.run(run_search_in_thread(three))
    3
    """
    running: list[tuple[asyncio.AbstractEventLoop, asyncio.Task[Any]]] = []
    is_cancelled = False

    async def run_cancellable() -> T:
        task = asyncio.current_task()
        assert task is not None
        running.append((asyncio.get_running_loop(), task))
        if is_cancelled:
            # The caller was cancelled before a thread was free.
            raise asyncio.CancelledError
        return await search()

    thread = asyncio.get_running_loop().run_in_executor(None, lambda: asyncio.run(run_cancellable()))
    try:
        return await asyncio.shield(thread)
    except asyncio.CancelledError:
        # This comes first, because a search that begins now adds itself to `running` before it reads `is_cancelled`.
        is_cancelled = True
        for loop, task in running:
            # The loop raises RuntimeError if the search has just ended.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(task.cancel)
        raise
