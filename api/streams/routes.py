"""`/v1/streams` and `/v1/compactions`: the state of an aggregator's tasks, and the content of their stores.

The service that runs the tasks passes a `StreamsView`. This module knows its shape and nothing of streams. If the
application may have several instances, the service also passes a `WholeView`. Then an answer covers all instances and
lists the partitions that it lacks (`missing`). With `?local=true` an answer covers only the requested instance. The
instances send each other such requests.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol, TypedDict, Unpack

from fastapi import APIRouter, Query, Response

from penstock.api.http.problem import ErrorKind, Problem, json_response
from penstock.api.streams.key_params import WRONG_CONTINUATION, Continuation, StoreQuestion
from penstock.shared.common.continuation import WrongContinuation


class TaskState(TypedDict, total=False):
    """One task. A key that is missing or None is not known (yet)."""

    partition: int
    state: str
    """created, restoring, running, suspended, closed or failed."""
    stream_time_ms: int | None
    """The highest event time of a record that the task processed, in ms since the epoch; dead letters do not count."""
    operator_times_ms: dict[str, int] | None
    """By store: the highest event time of a record with a key that its operator processed. It closes windows."""
    open_sessions: int | None
    closed_sessions: int | None
    late_records: int | None
    dead_letters: int | None
    restore_ms: int | None
    """The duration of the last restore."""
    remaining_records: int | None
    """During a restore: changelog records that are still to be read."""
    records_per_second: int | None
    """During a restore: changelog records read per second."""
    eta_ms: int | None
    """During a restore: the remaining time at that rate."""
    instance: str
    """The instance that runs the task, in answers about several instances."""


class CompactionState(TypedDict, total=False):
    """One compaction."""

    started_at_ms: int
    seconds: float | None
    status: str
    """running; done; failed; lost: another job was first; stopped: partition 0 moved to another instance."""
    rows: int | None
    """Rows that the compaction wrote: live windows merged and deleted, closed ones appended."""
    progress: str
    """The last progress that the compaction reported."""
    detail: str


class StreamsState(TypedDict, total=False):
    """The state of one topology."""

    application_id: str
    tasks: list[TaskState]
    compactions: list[CompactionState]
    """Newest first, a bounded number of them."""
    missing: list[MissingPart]
    """Partitions that the answer lacks; absent if an instance reports only itself."""


class MissingPart(TypedDict):
    """A partition that no instance reported, and the reason."""

    partition: int
    reason: str


class WindowRow(TypedDict):
    """One live window or session of a store; `states` are those of its aggregations, as JSON has them."""

    store: str
    partition: int
    key: str
    start_ms: int
    end_ms: int
    states: list[Any]


class LiveWindows(TypedDict):
    """Live windows, latest end first.

    `continuation` is None if these are the last ones. `unseen` counts the rows of a large store that were not read.
    """

    windows: list[WindowRow]
    continuation: str | None
    unseen: int


WINDOWS_MAX = 1_000
"""The most windows in one answer."""


class StreamsView(Protocol):
    """The state and the actions of a service that runs tasks. Nothing here waits for the network."""

    async def describe(self) -> StreamsState:
        """The state now."""
        ...

    def stores(self) -> list[dict[str, Any]]:
        """Return each store with its live rows in each partition of this instance."""
        ...

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> LiveWindows:
        """Return live windows. A `key` that is not empty is searched. Raises WrongContinuation for an invalid one."""
        ...

    def compact(self) -> str:
        """Request a compaction. Returns "" if it was started, else the reason why not."""
        ...


class WholeView(Protocol):
    """The same for all instances, which are queried over the network. Each answer has `missing`."""

    async def describe(self) -> StreamsState:
        """Return the state of every instance that answers."""
        ...

    async def stores(self) -> dict[str, Any]:
        """Return `stores`: each with its live rows in each partition."""
        ...

    async def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> dict[str, Any]:
        """Like `StreamsView.windows`, for all instances."""
        ...

    async def read_store(self, store: str, *, partial: bool, **question: Unpack[StoreQuestion]) -> dict[str, Any]:
        """Like `StoresView.read_store`. Raises Problem (503) if a partition is missing, unless `partial` is set."""
        ...

    async def compact(self) -> str:
        """Like `StreamsView.compact`, by the instance that runs compactions. Raises Problem (503) without answer."""
        ...


Local = Annotated[bool, Query(description="answer only for this instance")]


def streams_router(view: StreamsView, *more: APIRouter, whole: WholeView | None = None) -> APIRouter:
    """Return the routes, with those of `more`, for the app of the service that runs the tasks."""
    router = APIRouter(tags=["streams"])

    async def describe(local: bool) -> StreamsState:
        return await (view if local or whole is None else whole).describe()

    @router.get("/v1/streams", summary="Tasks with stream time, open sessions, late records and restores; compactions")
    async def streams(local: Local = False) -> Response:
        return json_response(await describe(local))

    @router.get("/v1/streams/topology", summary="The topology: its nodes and their connections")
    async def topology() -> Response:
        state: dict[str, Any] = {**await view.describe()}
        return json_response({key: state.get(key) for key in ("application_id", "topology", "processing_guarantee")})

    @router.get("/v1/streams/tasks", summary="Tasks with their offsets in the source topics")
    async def tasks(local: Local = False) -> Response:
        state = await describe(local)
        return json_response({"tasks": state.get("tasks", []), **_missing(state)})

    @router.get("/v1/streams/stores", summary="State stores with their live rows by partition")
    async def stores(local: Local = False) -> Response:
        if local or whole is None:
            return json_response({"stores": view.stores()})
        return json_response(await whole.stores())

    @router.get("/v1/streams/windows", summary="Live windows, latest end first; searched by key")
    async def windows(
        store: str | None = None,
        key: Annotated[str, Query(description="a part of the key, JSON, or a number")] = "",
        limit: Annotated[int, Query(ge=1, le=WINDOWS_MAX)] = 100,
        continuation: Continuation = None,
        local: Local = False,
    ) -> Response:
        wanted = (store, key, limit, continuation)
        found: Mapping[str, Any]
        try:
            found = view.windows(*wanted) if local or whole is None else await whole.windows(*wanted)
        except WrongContinuation as e:
            raise Problem(WRONG_CONTINUATION, str(e)) from None
        return json_response({**found, "is_cut": found["continuation"] is not None})

    @router.get("/v1/compactions", summary="The last compactions, newest first, and the last one that succeeded")
    async def compactions(local: Local = False) -> Response:
        runs = (await describe(local)).get("compactions", [])
        last = next((run for run in runs if run.get("status") == "done"), None)
        return json_response({"compactions": runs, "last": last})

    @router.post("/v1/compactions", summary="Start a compaction", status_code=202)
    async def compact(local: Local = False) -> Response:
        refused = view.compact() if local or whole is None else await whole.compact()
        if refused:
            raise Problem(ErrorKind(409, "NOT_STARTED", "No compaction was started"), refused)
        return json_response({"started": True}, 202)

    for one in more:
        router.include_router(one)
    return router


def _missing(state: StreamsState) -> dict[str, Any]:
    return {"missing": state["missing"]} if "missing" in state else {}
