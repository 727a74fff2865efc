"""Dead-letter and late topics over HTTP: list them, read their newest records, and replay records.

Dead letters and late records carry the reason and the coordinates of their source record. A replay sends them to their
source topic, or to a topic that the request names. A replayed late record keeps its event time. The source topic's
aggregator therefore rejects it as late again, unless the application was reset. Usually another topic is the right
target.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Protocol, Required

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field
from typing_extensions import TypedDict

from penstock.api.http import field_types as of
from penstock.api.http.json_response import json_response
from penstock.shared.clients.dead_letters.dead_letter import DeadLetterStage
from penstock.shared.common.log import get_logger

log = get_logger(__name__)

DEAD_LETTERS_MAX = 1_000
"""The most dead letters in one response."""
REPLAY_MAX = 100_000
"""The most dead letters that one replay sends."""


class DeadLetters(Protocol):
    """The operations that the routes call.

    Methods with a `topic` raise InvalidTopic for a name that Kafka does not allow, InvalidRequest for a name that is
    not that of a dead-letter or late topic, and UnknownTopicOrPartition for a topic that does not exist.
    """

    async def topics(self) -> list[dict[str, Any]]:
        """Return a `DeadLetterTopic` for each dead-letter and late topic.

        Markers of transactions are not counted. See `DeadLetterTopic` for `exact`.
        """
        ...

    async def read_newest(self, topic: str, limit: int, stage: str | None) -> dict[str, Any]:
        """Return the newest records of a topic as `records`, and the number of records read to find them as `scanned`.

        Partitions without a leader are not read.

        Dead letters are sorted by their timestamps, newest first. A late record's timestamp is its event time. So the
        newest offsets of each partition of a late topic are taken in turn.
        """
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
        """Send dead letters to their source topics, or to the topic `to`. A dry run sends none.

        Returns `would_send` for a dry run. Otherwise returns the other counts of `ReplayResponse`, and `errors`.
        """
        ...


class ReplayRequest(BaseModel):
    """Selects the dead letters to send, and the topic that receives them."""

    model_config = ConfigDict(
        extra="forbid",
        json_schema_extra={"examples": [{"dry_run": True}, {"stage": "process", "limit": 100}, {"to": "corrections"}]},
    )
    limit: int = Field(10_000, ge=1, le=REPLAY_MAX)
    stage: DeadLetterStage | None = Field(None, description="only dead letters of this stage")
    to: str | None = Field(None, description="the topic to send to, partitioned by key; default: each record's source")
    exception: str | None = Field(None, description="only those of this exception class")
    include_replayed: bool = Field(False, description="include dead letters that were replayed before")
    dry_run: bool = Field(False, description="count the dead letters that would be sent, and send none")


DeadLetterTopicName = Annotated[str, Field(examples=["flights-dlq"])]
Headers = Annotated[list[tuple[str, str | None]], Field(examples=[[["trace", "a"]]])]


class DeadLetterTopic(TypedDict):
    """A dead-letter or late topic.

    `exact` is false in two cases:

    1. Some records are not counted yet. `records` is an upper bound, and the next request counts more of them.
    2. A partition has no leader. Its records are not in `records`.
    """

    topic: DeadLetterTopicName
    kind: Literal["dead_letters", "late"]
    source: of.Topic
    records: of.Count
    exact: bool


class DeadLetterTopics(TypedDict):
    """All dead-letter and late topics."""

    topics: list[DeadLetterTopic]


class SourceCoordinates(TypedDict):
    """The coordinates of a source record."""

    topic: of.Topic
    partition: of.Partition
    offset: of.Offset


class DeadLetterRow(TypedDict, total=False):
    """A record of a dead-letter or late topic.

    Every record of a dead-letter topic has `written_ms`, its timestamp. It is the time at which the record was written,
    or, of a dead letter of Connect, the source record's timestamp. No record of a late topic has it. A late record
    lacks `exception`, `attempts` and `group`. A record that is neither a dead letter nor a late record lacks all other
    optional fields. Missing fields are left out, not null.
    """

    partition: Required[of.Partition]
    offset: Required[of.Offset]
    written_ms: of.TimeMs
    key: Required[of.RecordKey | None]
    value: Required[Annotated[str, Field(examples=["{"])] | None]
    headers: Required[Headers]
    source: SourceCoordinates
    timestamp_ms: of.TimeMs
    stage: of.Stage
    message: Annotated[str, Field(examples=["not JSON"])]
    exception: Annotated[str, Field(examples=["ValueError"])]
    attempts: of.Count
    group: of.Group


class DeadLettersResponse(TypedDict):
    """The newest records of a topic. `scanned` counts the records that were read.

    Dead letters are sorted by `written_ms`, newest first. Of a late topic, the newest offsets of each partition are
    taken in turn.
    """

    topic: DeadLetterTopicName
    records: list[DeadLetterRow]
    scanned: of.Count


class ReplayResponse(TypedDict, total=False):
    """The counts of a replay. A dry run has only the count `would_send`."""

    topic: Required[DeadLetterTopicName]
    dry_run: Required[bool]
    would_send: of.Count
    sent: of.Count
    failed: of.Count
    skipped: of.Count
    faults: of.Count
    errors: Annotated[list[str], Field(examples=[[]])]


def dead_letters_router(dead_letters: DeadLetters) -> APIRouter:
    """Return the routes under `/v1/dead-letters`."""
    router = APIRouter(tags=["records"])

    @router.get(
        "/v1/dead-letters",
        summary="Dead-letter and late topics, with how many records each has",
        responses={200: {"model": DeadLetterTopics}},
    )
    async def list_dead_letter_topics() -> Response:
        return json_response({"topics": await dead_letters.topics()})

    @router.get(
        "/v1/dead-letters/{topic}",
        summary="The newest records of a dead-letter or late topic, with their reasons",
        responses={200: {"model": DeadLettersResponse}},
    )
    async def read_newest_dead_letters(
        topic: DeadLetterTopicName,
        limit: int = Query(50, ge=1, le=DEAD_LETTERS_MAX),
        stage: DeadLetterStage | None = None,
    ) -> Response:
        return json_response({"topic": topic} | await dead_letters.read_newest(topic, limit, stage))

    @router.post(
        "/v1/dead-letters/{topic}/replay",
        summary="Send dead letters to their source topics, or to another topic",
        responses={200: {"model": ReplayResponse}},
    )
    async def replay_dead_letters(topic: DeadLetterTopicName, request: ReplayRequest) -> Response:
        outcome = await dead_letters.replay(topic, **request.model_dump())
        if not request.dry_run:
            counts = {name: value for name, value in outcome.items() if isinstance(value, int)}
            log.info("dead letters replayed", topic=topic, to=request.to, **counts)
        return json_response({"topic": topic, "dry_run": request.dry_run} | outcome)

    return router
