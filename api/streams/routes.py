"""`/v1/streams` and `/v1/compactions`: what an aggregator's tasks are doing, and what is in their stores.

The service that runs the tasks hands a `StreamsView` in; this module knows its shape and nothing of streams. Where
there may be several instances of the application it hands in a `WholeView` besides: then an answer is of all of them,
and says which partitions it is without (`missing`). With `?local=true` it is of the instance that is asked alone, which
is also what the instances ask each other.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol, TypedDict, Unpack

from fastapi import APIRouter, Query, Response

from penstock.api.http.problem import ErrorKind, Problem, json_response
from penstock.api.streams.key_params import WRONG_CONTINUATION, Continuation, StoreQuestion
from penstock.shared.common.continuation import WrongContinuation


class TaskState(TypedDict, total=False):
    """One task; a key that is missing or None is not known (yet)."""

    partition: int
    state: str
    """created, restoring, running, suspended, closed or failed."""
    stream_time_ms: int | None
    """The highest event time of a record that the task took, in ms since the epoch; a dead letter is not taken."""
    operator_times_ms: dict[str, int] | None
    """By store: the highest event time of a record with a key that its operator took, which closes its windows."""
    open_sessions: int | None
    closed_sessions: int | None
    late_records: int | None
    dead_letters: int | None
    restore_ms: int | None
    """How long the last restore took."""
    remaining_records: int | None
    """While it is restored: changelog records that are to be read yet."""
    records_per_second: int | None
    """While it is restored: changelog records read per second."""
    eta_ms: int | None
    """While it is restored: how long the rest will take at that rate."""
    instance: str
    """Which instance it is of, where several are told of."""


class CompactionState(TypedDict, total=False):
    """One run of the compaction job."""

    started_at_ms: int
    seconds: float | None
    status: str
    """running; done; failed; lost: another job was first; stopped: partition 0 went to another instance."""
    rows: int | None
    """Rows that the run wrote: live windows merged and deleted, closed ones appended."""
    progress: str
    """What the run said last of how far it is."""
    detail: str


class StreamsState(TypedDict, total=False):
    """Everything about one topology."""

    application_id: str
    tasks: list[TaskState]
    compactions: list[CompactionState]
    """Newest first, a bounded number of them."""
    missing: list[MissingPart]
    """What the answer is without; not there where an instance tells of itself alone."""


class MissingPart(TypedDict):
    """A partition that no instance could tell of, and why."""

    partition: int
    reason: str


class WindowRow(TypedDict):
    """One live window or session of a store; `states` are its aggregations', as JSON has them."""

    store: str
    partition: int
    key: str
    start_ms: int
    end_ms: int
    states: list[Any]


class LiveWindows(TypedDict):
    """Live windows, those that end last first.

    `continuation` is None where these are the last ones; `unseen` are rows that were not looked at, of a large store.
    """

    windows: list[WindowRow]
    continuation: str | None
    unseen: int


WINDOWS_MAX = 1_000
"""Windows in one answer."""


class StreamsView(Protocol):
    """What a service that runs tasks tells about them, and does for them; nothing here waits for the network."""

    async def describe(self) -> StreamsState:
        """The state now."""
        ...

    def stores(self) -> list[dict[str, Any]]:
        """Each store with its live rows in each partition of this instance."""
        ...

    def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> LiveWindows:
        """Live windows; `key` is searched for where it is not empty. WrongContinuation for one that is none."""
        ...

    def compact(self) -> str:
        """Ask for a compaction; empty where it was started, or why it was not."""
        ...


class WholeView(Protocol):
    """The same of all instances, which are asked over the network; `missing` is in each answer."""

    async def describe(self) -> StreamsState:
        """The state now, of every instance that answers."""
        ...

    async def stores(self) -> dict[str, Any]:
        """`stores`: each with its live rows in each partition."""
        ...

    async def windows(self, store: str | None, key: str, limit: int, continuation: str | None) -> dict[str, Any]:
        """As `StreamsView`, of all instances."""
        ...

    async def read_store(self, store: str, *, partial: bool, **question: Unpack[StoreQuestion]) -> dict[str, Any]:
        """As `StoresView`; Problem (503) where a partition is missing, unless `partial` takes what there is."""
        ...

    async def compact(self) -> str:
        """As `StreamsView`, by the instance that does compactions; Problem (503) where it does not answer."""
        ...


Local = Annotated[bool, Query(description="only of the instance that is asked")]


def streams_router(view: StreamsView, *more: APIRouter, whole: WholeView | None = None) -> APIRouter:
    """The routes, with those of `more`, to be mounted into the app of the service that runs the tasks."""
    router = APIRouter(tags=["streams"])

    async def describe(local: bool) -> StreamsState:
        return await (view if local or whole is None else whole).describe()

    @router.get("/v1/streams", summary="Tasks with stream time, open sessions, late records and restores; compactions")
    async def streams(local: Local = False) -> Response:
        return json_response(await describe(local))

    @router.get("/v1/streams/topology", summary="The topology, as its nodes and what they are connected to")
    async def topology() -> Response:
        state: dict[str, Any] = {**await view.describe()}
        return json_response({key: state.get(key) for key in ("application_id", "topology", "processing_guarantee")})

    @router.get("/v1/streams/tasks", summary="Tasks with their positions in the source topics")
    async def tasks(local: Local = False) -> Response:
        state = await describe(local)
        return json_response({"tasks": state.get("tasks", []), **_missing(state)})

    @router.get("/v1/streams/stores", summary="State stores with their live rows by partition")
    async def stores(local: Local = False) -> Response:
        if local or whole is None:
            return json_response({"stores": view.stores()})
        return json_response(await whole.stores())

    @router.get("/v1/streams/windows", summary="Live windows, those that end last first; searched by key")
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
