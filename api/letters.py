"""Dead-letter and late topics over HTTP: which there are, what is in them, and sending it back.

Dead letters carry the reason and where they came from, and are replayed to their source topic as they were. A late
record is the source's own record; it is only looked at here, since sending it again would make it late again.
"""

from __future__ import annotations

from typing import Any, Literal, Protocol

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from api.problem import json_response
from shared.common.log import get_logger

log = get_logger(__name__)

LETTERS_MAX = 1_000
"""Letters in one answer."""
REPLAY_MAX = 100_000
"""Letters that one replay sends at most."""


class Letters(Protocol):
    """What the routes need; UnknownTopicOrPartition where there is no such topic."""

    async def topics(self) -> list[dict[str, Any]]:
        """Each dead-letter and late topic: topic, kind, source, records."""
        ...

    async def look(self, topic: str, limit: int, stage: str | None) -> list[dict[str, Any]]:
        """The newest letters of a topic, newest first."""
        ...

    async def replay(
        self, topic: str, *, limit: int, stage: str | None, exception: str | None, again: bool, dry_run: bool
    ) -> dict[str, Any]:
        """Send dead letters back: how many were sent, failed, left out."""
        ...


class ReplayRequest(BaseModel):
    """Which dead letters are to be sent back."""

    model_config = ConfigDict(
        extra="forbid", json_schema_extra={"examples": [{"dry_run": True}, {"stage": "process", "limit": 100}]}
    )
    limit: int = Field(10_000, ge=1, le=REPLAY_MAX)
    stage: Literal["deserialize", "process", "produce"] | None = None
    exception: str | None = Field(None, description="only those of this exception class")
    again: bool = Field(False, description="also those that were replayed before")
    dry_run: bool = Field(False, description="answer how many would be sent, and send none")


def letters_router(letters: Letters) -> APIRouter:
    """The routes under `/v1/letters`."""
    router = APIRouter(tags=["letters"])

    @router.get("/v1/letters", summary="Dead-letter and late topics, with how many records each has")
    async def topics() -> Response:
        return json_response({"topics": await letters.topics()})

    @router.get("/v1/letters/{topic}", summary="The newest records of a dead-letter or late topic, with their reasons")
    async def look(topic: str, limit: int = Query(50, ge=1, le=LETTERS_MAX), stage: str | None = None) -> Response:
        return json_response({"topic": topic, "letters": await letters.look(topic, limit, stage)})

    @router.post("/v1/letters/{topic}/replay", summary="Send dead letters back to the topic that they came from")
    async def replay(topic: str, wanted: ReplayRequest) -> Response:
        done = await letters.replay(topic, **wanted.model_dump())
        if not wanted.dry_run:
            log.info("dead letters replayed", topic=topic, **{k: v for k, v in done.items() if isinstance(v, int)})
        return json_response({"topic": topic, "dry_run": wanted.dry_run} | done)

    return router
