"""`/v1/streams` and `/v1/compactions`: the state of an aggregator's tasks, and the content of their stores.

The service that runs the tasks passes a `StreamsView` of its own tasks. If the application may have several instances,
the service also passes an `InstancesView`. Responses then cover all instances. In responses about tasks, stores and
windows, `missing` lists the partitions that the response lacks, each with the reason: for example, no instance has it,
it is being restored, or its instance does not answer. With `?local=true` a response covers only the requested instance.
To respond for all, an instance sends the others requests with `?local=true`. This module does not import
`penstock.shared.streams`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

from fastapi import APIRouter, Query, Response

from penstock.api.http import field_types as of
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import ErrorKind, Problem
from penstock.api.http.status_codes import ACCEPTED, CONFLICT, NOT_FOUND
from penstock.api.streams.query_params import Continuation
from penstock.api.streams.task_views import (
    CompactionsResponse,
    CompactionStarted,
    InstancesView,
    StoresResponse,
    StreamsState,
    StreamsView,
    TasksResponse,
    TopologyResponse,
    WindowsResponse,
)
from penstock.shared.common.errors import ConfigError

NOT_READABLE = ErrorKind(NOT_FOUND, "STORE_NOT_READABLE", "This store cannot be read here")
WINDOWS_MAX = 1_000
"""The most windows in one response."""


Local = Annotated[bool, Query(description="answer only for this instance")]


def streams_router(view: StreamsView, *more: APIRouter, instances: InstancesView | None = None) -> APIRouter:
    """Return the routes of streams and those of `more`. Without `instances`, responses cover only this instance."""
    router = APIRouter(tags=["streams"])

    async def describe_streams(local: bool) -> StreamsState:
        return await (view if local or instances is None else instances).describe()

    @router.get(
        "/v1/streams",
        summary="Tasks with stream time, rows of state, late records and restores; compactions",
        responses={200: {"model": StreamsState}},
    )
    async def get_streams_state(local: Local = False) -> Response:
        return json_response(await describe_streams(local))

    @router.get(
        "/v1/streams/topology",
        summary="The topology: its nodes and their connections",
        responses={200: {"model": TopologyResponse}},
    )
    async def get_topology() -> Response:
        state = await view.describe()
        response: TopologyResponse = {
            "application_id": state["application_id"],
            "topology": state["topology"],
            "processing_guarantee": state["processing_guarantee"],
        }
        return json_response(response)

    @router.get(
        "/v1/streams/tasks",
        summary="Tasks with their offsets in the source topics",
        responses={200: {"model": TasksResponse}},
    )
    async def list_tasks(local: Local = False) -> Response:
        state = await describe_streams(local)
        response: TasksResponse = {"tasks": state["tasks"]}
        if "missing" in state:
            response["missing"] = state["missing"]
        return json_response(response)

    @router.get(
        "/v1/streams/stores",
        summary="State stores with their live rows by partition",
        responses={200: {"model": StoresResponse}},
    )
    async def list_stores(local: Local = False) -> Response:
        if local or instances is None:
            return json_response({"stores": view.stores()})
        return json_response(await instances.stores())

    @router.get(
        "/v1/streams/windows",
        summary="Open windows, latest end first; searched by key",
        responses={200: {"model": WindowsResponse}},
    )
    async def search_open_windows(
        store: of.Store | None = None,
        key: Annotated[str, Query(examples=["UA"], description="a part of the key, JSON, or a number")] = "",
        limit: Annotated[int, Query(ge=1, le=WINDOWS_MAX)] = 100,
        continuation: Continuation = None,
        local: Local = False,
    ) -> Response:
        response: Mapping[str, Any]
        try:
            if local or instances is None:
                response = view.windows(store, key, limit, continuation)
            else:
                response = await instances.windows(store, key, limit, continuation)
        except ConfigError as e:
            raise Problem(NOT_READABLE, str(e)) from None
        return json_response({**response, "is_cut": response["continuation"] is not None})

    @router.get(
        "/v1/compactions",
        summary="The last compactions, newest first, and the last one that succeeded",
        responses={200: {"model": CompactionsResponse}},
    )
    async def list_compactions(local: Local = False) -> Response:
        rows = (await describe_streams(local))["compactions"]
        last = next((row for row in rows if row.get("status") == "done"), None)
        response: CompactionsResponse = {"compactions": rows, "last": last}
        return json_response(response)

    @router.post(
        "/v1/compactions",
        summary="Start a compaction",
        responses={202: {"model": CompactionStarted}},
        status_code=ACCEPTED,
    )
    async def start_compaction(local: Local = False) -> Response:
        reason = view.compact() if local or instances is None else await instances.compact()
        if reason:
            raise Problem(ErrorKind(CONFLICT, "NOT_STARTED", "No compaction was started"), reason)
        return json_response({"started": True}, ACCEPTED)

    for other in more:
        router.include_router(other)
    return router
