"""`GET /v1/streams`: what an aggregator's tasks are doing.

The service that runs the tasks hands a `StreamsView` in; this module knows its shape and nothing of streams.
"""

from __future__ import annotations

from typing import Protocol, TypedDict

from fastapi import APIRouter, Response

from api.problem import json_response


class TaskState(TypedDict, total=False):
    """One task; a key that is missing or None is not known (yet)."""

    partition: int
    state: str
    """created, restoring, running, suspended, closed or failed."""
    stream_time_ms: int | None
    """The highest event time the task took, in ms since the epoch."""
    open_sessions: int | None
    closed_sessions: int | None
    late_records: int | None
    dead_letters: int | None
    restore_ms: int | None
    """How long the last restore took."""


class CompactionState(TypedDict, total=False):
    """One run of the compaction job."""

    started_at_ms: int
    seconds: float | None
    status: str
    """running, done or failed."""
    rows: int | None
    """Rows that the run wrote."""
    progress: str
    """What the run said last of how far it is."""
    detail: str


class StreamsState(TypedDict, total=False):
    """Everything about one topology."""

    application_id: str
    tasks: list[TaskState]
    compactions: list[CompactionState]
    """Newest first, a bounded number of them."""


class StreamsView(Protocol):
    """What a service that runs tasks tells about them."""

    async def describe(self) -> StreamsState:
        """The state now; must not wait for the network."""
        ...


def streams_router(view: StreamsView, *more: APIRouter) -> APIRouter:
    """The route, with those of `more`, to be mounted into the app of the service that runs the tasks."""
    router = APIRouter(tags=["streams"])

    @router.get("/v1/streams", summary="Tasks with stream time, open sessions, late records and restores; compactions")
    async def streams() -> Response:
        return json_response(await view.describe())

    for one in more:
        router.include_router(one)
    return router
