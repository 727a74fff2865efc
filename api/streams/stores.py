"""`GET /v1/streams/stores/{store}`: the current rows of a store. `…/{store}/windows`: its open and closed windows.

The service that runs the tasks passes a `StoresView`. If there may be several instances, it also passes an
`InstancesStoresView`. The status is 503 if the rows of a partition cannot be read from any instance. With
`?partial=true` the response has the available rows and lists the missing partitions.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Protocol, Unpack

from fastapi import APIRouter, Depends, Query, Response
from pydantic import Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.json_response import json_response
from penstock.api.http.problem import Problem
from penstock.api.streams.query_params import (
    Continuation,
    ContinuationOf,
    Keys,
    StoreQueryParams,
    requested_keys,
)
from penstock.api.streams.routes import NOT_READABLE, Local
from penstock.api.streams.task_views import MissingPartition
from penstock.shared.common.errors import ConfigError
from penstock.shared.common.time_text import TIME_MS_MAX, TIME_MS_MIN

ROWS_DEFAULT = 1_000
ROWS_MAX = 10_000
RowsMax = Annotated[int, Query(ge=1, le=ROWS_MAX, examples=[100])]
FromMs = Annotated[
    of.TimeMs | None, Query(ge=TIME_MS_MIN, le=TIME_MS_MAX, description="only windows that end at this time or later")
]
ToMs = Annotated[
    of.TimeMs | None,
    Query(ge=TIME_MS_MIN, le=TIME_MS_MAX, description="only windows that begin at this time or earlier"),
]
Status = Literal["open", "closed", "all"]


class StoresView(Protocol):
    """The stores of a service that runs tasks."""

    async def read_store(self, store: str, **query: Unpack[StoreQueryParams]) -> Any:
        """Return the rows of this instance, as `StoreRows`. The `continuation` is None after the last row.

        The rows reflect all records before the source offsets in `position`.

        Raises ConfigError if there is no such store or it does not support the query, WrongContinuation for an invalid
        continuation.
        """
        ...

    async def find_windows(self, store: str, *, status: Status, **query: Unpack[StoreQueryParams]) -> FoundWindows:
        """Return the windows of the queried keys with this `status`, of all instances.

        Raises ConfigError if the store has no windows, WrongContinuation for an invalid continuation. Raises Problem if
        too many such queries run. Without a lake, raises Problem also if `status` is not `open`, or if a partition is
        missing.
        """
        ...


class InstancesStoresView(Protocol):
    """The stores of all instances, which are queried over the network."""

    async def read_store(self, store: str, *, partial: bool, **query: Unpack[StoreQueryParams]) -> dict[str, Any]:
        """Return the rows of a store of all instances, like `StoresView.read_store`, and the `missing` partitions.

        Raises Problem (503) if a partition is missing and `partial` is false, or if the source topics are unknown.
        """
        ...


Position = Annotated[dict[int, dict[str, int]], Field(examples=[{"0": {"flights": 17}}])]
"""By partition: the next offset of each source topic."""
ROW = {"partition": 0, "key": "UA", "start": 1357016400000, "end": 1357020000000, "events": 3}


class Window(TypedDict):
    """A window of a key, with the named results of its aggregations."""

    partition: of.Partition
    key: of.RecordKey
    start_ms: of.TimeMs
    end_ms: of.TimeMs
    status: Literal["open", "closed"]
    results: Annotated[dict[str, Any], Field(examples=[{"events": 3}])]


class FoundWindows(TypedDict):
    """Windows in order of their start. They reflect all records before the source offsets in `position`.

    `continuation` is None on the last page. Without a lake the response has only open windows, in the order of the
    store's rows.
    """

    windows: list[Window]
    position: Position
    continuation: ContinuationOf | None


class WindowsOfStore(FoundWindows):
    """The response with the windows of one store. `is_cut` is true if more windows may follow."""

    store: of.Store
    is_cut: bool


class StoreRows(TypedDict):
    """Rows of a store. The fields of a row depend on the store's kind. `is_cut` is true if more rows follow."""

    store: of.Store
    kind: Annotated[str, Field(examples=["session"])]
    key_type: Literal["string", "bytes"]
    rows: Annotated[list[dict[str, Any]], Field(examples=[[ROW]])]
    position: Position
    continuation: ContinuationOf | None
    is_cut: bool
    missing: NotRequired[list[MissingPartition]]


def stores_router(view: StoresView, instances: InstancesStoresView | None = None) -> APIRouter:
    """Return the routes of stores. Without `instances`, the rows of a store are only those of this instance."""
    router = APIRouter(tags=["streams"])

    @router.get(
        "/v1/streams/stores/{store}",
        summary="Open windows or rows of a store, with the offsets they reflect",
        responses={200: {"model": StoreRows}},
    )
    async def read_store(
        store: of.Store,
        keys: Annotated[Keys, Depends(requested_keys)],
        from_ms: FromMs = None,
        to_ms: ToMs = None,
        rows_max: RowsMax = ROWS_DEFAULT,
        continuation: Continuation = None,
        local: Local = False,
        partial: Annotated[bool, Query(description="answer even if partitions are missing")] = False,
    ) -> Response:
        query = StoreQueryParams(**keys, from_ms=from_ms, to_ms=to_ms, rows_max=rows_max, continuation=continuation)
        try:
            if local or instances is None:
                response = await view.read_store(store, **query)
            else:
                response = await instances.read_store(store, partial=partial, **query)
        except ConfigError as e:
            raise Problem(NOT_READABLE, str(e)) from None
        return json_response(response)

    @router.get(
        "/v1/streams/stores/{store}/windows",
        summary="Windows by keys and time, open and closed",
        responses={200: {"model": WindowsOfStore}},
    )
    async def read_store_windows(
        store: of.Store,
        keys: Annotated[Keys, Depends(requested_keys)],
        from_ms: FromMs = None,
        to_ms: ToMs = None,
        status: Annotated[Status, Query(description="only these")] = "all",
        rows_max: RowsMax = ROWS_DEFAULT,
        continuation: Continuation = None,
    ) -> Response:
        query = StoreQueryParams(**keys, from_ms=from_ms, to_ms=to_ms, rows_max=rows_max, continuation=continuation)
        try:
            response = await view.find_windows(store, status=status, **query)
        except ConfigError as e:
            raise Problem(NOT_READABLE, str(e)) from None
        return json_response({"store": store, **response, "is_cut": response["continuation"] is not None})

    return router
