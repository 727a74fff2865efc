"""Dead-letter and late topics over HTTP: which there are, what is in them, and sending it back.

Dead letters and late records carry the reason and where they came from, and are replayed as they were, to their source
topic or to one that is named. A late record keeps its event time: back in its source it is late again for the stream
that refused it, unless that was reset, so another topic is mostly what is wanted.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.http.problem import json_response
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

DEAD_LETTERS_MAX = 1_000
"""Letters in one answer."""
Stage = Literal["deserialize", "process", "produce"]
REPLAY_MAX = 100_000
"""Letters that one replay sends at most."""


class DeadLetters(Protocol):
    """What the routes need; UnknownTopicOrPartition where there is no such topic."""

    async def topics(self) -> list[dict[str, Any]]:
        """Each dead-letter and late topic: topic, kind, source, and how many `records` it holds, without the markers of
        transactions. Where that is not `exact`, not all was counted yet, and there are at most so many."""
        ...

    async def look(self, topic: str, limit: int, stage: str | None) -> dict[str, Any]:
        """The newest `records` of a topic, newest first, and how many records were `scanned` for them."""
        ...

    async def replay(
        self,
        topic: str,
        *,
        limit: int,
        stage: str | None,
        exception: str | None,
        include_replayed: bool,
        dry_run: bool,
        to: str | None,
    ) -> dict[str, Any]:
        """Send letters back, or to another topic: how many were sent, failed, left out."""
        ...


class ReplayRequest(BaseModel):
    """Which letters are to be sent, and where to."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"dry_run": True}, {"stage": "process", "limit": 100}, {"to": "corrections"}]},
    )
    limit: int = Field(10_000, ge=1, le=REPLAY_MAX)
    stage: Stage | None = Field(None, description="only dead letters of this stage")
    to: str | None = Field(None, description="a topic for them, by key; default: each to the source that it came from")
    exception: str | None = Field(None, description="only those of this exception class")
    include_replayed: bool = Field(False, description="also those that were replayed before")
    dry_run: bool = Field(False, description="answer how many would be sent, and send none")


def dead_letters_router(letters: DeadLetters) -> APIRouter:
    """The routes under `/v1/dead-letters`."""
    router = APIRouter(tags=["records"])

    @router.get("/v1/dead-letters", summary="Dead-letter and late topics, with how many records each has")
    async def topics() -> Response:
        return json_response({"topics": await letters.topics()})

    @router.get(
        "/v1/dead-letters/{topic}", summary="The newest records of a dead-letter or late topic, with their reasons"
    )
    async def look(
        topic: str, limit: int = Query(50, ge=1, le=DEAD_LETTERS_MAX), stage: Stage | None = None
    ) -> Response:
        return json_response({"topic": topic} | await letters.look(topic, limit, stage))

    @router.post(
        "/v1/dead-letters/{topic}/replay",
        summary="Send letters back to where they came from, or to another topic",
    )
    async def replay(topic: str, wanted: ReplayRequest) -> Response:
        done = await letters.replay(topic, **wanted.model_dump())
        if not wanted.dry_run:
            log.info(
                "letters replayed", topic=topic, to=wanted.to, **{k: v for k, v in done.items() if isinstance(v, int)}
            )
        return json_response({"topic": topic, "dry_run": wanted.dry_run} | done)

    return router
