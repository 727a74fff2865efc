"""Dead-letter and late topics over HTTP: list them, read their newest records, and replay records.

Dead letters and late records carry the reason and the coordinates of their source record. A replay sends them unchanged
to their source topic or to a topic that the request names. A late record keeps its event time. Back in its source
topic it is late again unless the stream was reset, so another topic is usually the right target.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from penstock.api.http.problem import json_response
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

DEAD_LETTERS_MAX = 1_000
"""Dead letters in one answer."""
Stage = Literal["deserialize", "process", "produce"]
REPLAY_MAX = 100_000
"""The most dead letters that one replay sends."""


class DeadLetters(Protocol):
    """What the routes need. Every method raises UnknownTopicOrPartition if the topic does not exist."""

    async def topics(self) -> list[dict[str, Any]]:
        """Return each dead-letter and late topic: topic, kind, source and the number of `records`.

        Markers of transactions are not counted. If `exact` is false, counting has not finished and `records` is an
        upper bound.
        """
        ...

    async def look(self, topic: str, limit: int, stage: str | None) -> dict[str, Any]:
        """Return the newest `records` of a topic, newest first, and the number of records `scanned` to find them."""
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
        """Send dead letters to their sources, or to the topic `to`. Returns the numbers sent, failed and left out."""
        ...


class ReplayRequest(BaseModel):
    """Selects the dead letters to send, and the topic that receives them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"dry_run": True}, {"stage": "process", "limit": 100}, {"to": "corrections"}]},
    )
    limit: int = Field(10_000, ge=1, le=REPLAY_MAX)
    stage: Stage | None = Field(None, description="only dead letters of this stage")
    to: str | None = Field(None, description="the topic to send to, partitioned by key; default: each record's source")
    exception: str | None = Field(None, description="only those of this exception class")
    include_replayed: bool = Field(False, description="include dead letters that were replayed before")
    dry_run: bool = Field(False, description="count the dead letters that would be sent, and send none")


def dead_letters_router(letters: DeadLetters) -> APIRouter:
    """Return the routes under `/v1/dead-letters`."""
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
        summary="Send dead letters to their source topics, or to another topic",
    )
    async def replay(topic: str, wanted: ReplayRequest) -> Response:
        done = await letters.replay(topic, **wanted.model_dump())
        if not wanted.dry_run:
            log.info(
                "letters replayed", topic=topic, to=wanted.to, **{k: v for k, v in done.items() if isinstance(v, int)}
            )
        return json_response({"topic": topic, "dry_run": wanted.dry_run} | done)

    return router
