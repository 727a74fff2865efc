"""`GET /v1/streams/stores/{store}`: what the stores of an aggregator's tasks hold now.

The service that runs the tasks hands a `StoresView` in; this module knows its shape and nothing of streams.
"""

from __future__ import annotations

from typing import Annotated, Any, Protocol

from fastapi import APIRouter, Query, Response

from api.problem import ErrorKind, Problem, json_response
from shared.common.errors import ConfigError

NOT_READABLE = ErrorKind(404, "STORE_NOT_READABLE", "This store cannot be read here")
ROWS_DEFAULT, ROWS_MAX = 1_000, 10_000


class StoresView(Protocol):
    """What a service that runs tasks lets read of them."""

    def read_store(
        self,
        store: str,
        *,
        key: str | None,
        key_from: str | None,
        key_to: str | None,
        from_ms: int | None,
        to_ms: int | None,
        rows_max: int,
    ) -> Any:
        """Rows and the position that they reflect; ConfigError for a store that cannot be asked for."""
        ...


def stores_router(view: StoresView) -> APIRouter:
    """The route, to be mounted into the app of the service that runs the tasks."""
    router = APIRouter(tags=["streams"])

    @router.get("/v1/streams/stores/{store}", summary="Open windows or rows of a store, with the offsets they reflect")
    async def read(
        store: str,
        key: Annotated[str | None, Query(description="only this key")] = None,
        key_from: Annotated[str | None, Query(description="only keys from here on")] = None,
        key_to: Annotated[str | None, Query(description="only keys up to here")] = None,
        from_ms: Annotated[int | None, Query(description="only windows that end at this time or later")] = None,
        to_ms: Annotated[int | None, Query(description="only windows that begin at this time or earlier")] = None,
        rows_max: Annotated[int, Query(ge=1, le=ROWS_MAX)] = ROWS_DEFAULT,
    ) -> Response:
        try:
            answer = view.read_store(
                store,
                key=key,
                key_from=key_from,
                key_to=key_to,
                from_ms=from_ms,
                to_ms=to_ms,
                rows_max=rows_max,
            )
        except ConfigError as e:
            raise Problem(NOT_READABLE, str(e)) from None
        return json_response(answer)

    return router
