"""The part that REST Proxy's v2 and v3 share: access to topics, and records to outcomes, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import NamedTuple

from fastapi import Request

from penstock.api.http.body import BodyReader
from penstock.api.http.problem import UNEXPECTED, ErrorKind, Problem, kind_of_record
from penstock.api.ingest.batches import IngestProducer, outcomes_of
from penstock.api.ingest.bodies import whole_body
from penstock.api.ingest.event import EventRejected, Read, ReadTime, RecordError, topic_reader
from penstock.api.ingest.ndjson import TooManyEvents
from penstock.api.ingest.result import Outcome
from penstock.api.ingest.routes import Ingest
from penstock.api.ingest.turns import Turn
from penstock.api.settings import IngestSettings
from penstock.shared.common.errors import (
    DataError,
    KafkaTimeout,
    PenstockError,
    RetriableError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import ProducerRecord, RecordMetadata

NON_RETRIABLE, RETRIABLE = 50002, 50003
UNKNOWN_PARTITION = 40402


class Handed(NamedTuple):
    """Records that were sent: known outcomes, and the `deliveries` that the records at `places` wait for."""

    outcomes: list[Outcome | None]
    places: list[int]
    deadline: float
    deliveries: asyncio.Future[Sequence[Outcome]] | None


class RestProducer:
    """Sends the records that REST Proxy's routes decoded, under the rules of ingest."""

    def __init__(self, ingest: Ingest, producer: IngestProducer, settings: IngestSettings) -> None:
        self._ingest = ingest
        self._producer = producer
        self.settings = settings
        self._readers: dict[tuple[str, frozenset[str]], Read] = {}
        """Keyed by topic ("" if it has no settings) and by what the record has itself: at most four of each topic."""

    def latest_ms(self) -> int:
        """Return the latest event time that is accepted now, in ms since the epoch."""
        return self._ingest.latest_ms()

    def read_time(self, topic: str) -> ReadTime:
        """Return the function that reads an event time for the topic."""
        return self._ingest.reader(topic).time

    def working_for(self, topic: str, client: str) -> AbstractContextManager[None]:
        """See `Ingest.working_for`."""
        return self._ingest.working_for(topic, client)

    def still_working_for(self, client: str) -> AbstractContextManager[None]:
        """See `Admission.still_working_for`."""
        return self._ingest.admission.still_working_for(client)

    def body(self, request: Request) -> BodyReader:
        """Return a reader of the request's body, within the limits of ingest."""
        return self._ingest.admission.body(request)

    async def whole(self, body: BodyReader) -> bytes:
        """Return the whole body. Raises Problem if it is too long, too slow, corrupt, or the service shuts down."""
        return await whole_body(body, self.settings.max_body_bytes)

    def check_count(self, records: int) -> None:
        """Raise Problem (413) if a body that is read whole has more records than allowed."""
        if records > self.settings.max_body_events:
            too_many = TooManyEvents(self.settings.max_body_events)
            raise Problem(ErrorKind(413, too_many.error_code, "Too many records"), str(too_many))

    def answered(self, topic: str, status: int, body: BodyReader) -> None:
        """Count an answered request."""
        self._ingest.metrics.answered(topic, status, body.since_last_byte_s)

    async def check(self, topic: str, client: str) -> list[int]:
        """Return the topic's partitions. Raises what `Admission.check` raises."""
        await self._ingest.admission.check(topic, client)
        return list(await self._producer.partitions_for(topic))

    def read(self, record: ProducerRecord, latest_ms: int) -> ProducerRecord:
        """Return the record with the key and the time that the topic's settings take from its value.

        A key or time of the record itself wins, and the value need not have one. Raises EventRejected if the value is
        invalid.
        """
        own = self.settings.for_topic(record.topic)
        given = {name for name, value in (("key", record.key), ("time", record.timestamp)) if value is not None}
        wanted = {name for name in ("key", "time") if getattr(own, name)} - given
        if record.value is None or not (wanted or own.json_schema):
            return record
        key, timestamp = self._reader(record.topic, frozenset(given))(record.value, latest_ms)
        key = key if record.key is None else record.key
        timestamp = timestamp if record.timestamp is None else record.timestamp
        return ProducerRecord(record.topic, record.value, key, record.headers, record.partition, timestamp)

    def _reader(self, topic: str, given: frozenset[str]) -> Read:
        """Return the reader of values for records that have a key, a time or both themselves."""
        if not given:
            return self._ingest.reader(topic).event
        own = topic if topic in self.settings.topics else ""
        if (own, given) not in self._readers:
            less: dict[str, object] = {"key": (), "time": None}
            settings = self.settings.for_topic(topic).model_copy(update={name: less[name] for name in given})
            self._readers[own, given] = topic_reader(self.settings, settings).event
        return self._readers[own, given]

    async def hand_over(self, given: Sequence[ProducerRecord | str], partitions: Sequence[int], turn: Turn) -> Handed:
        """Send the records. A string in `given` is the error of a record that could not be decoded."""
        outcomes: list[Outcome | None] = [None] * len(given)
        places: list[int] = []
        records: list[ProducerRecord] = []
        latest_ms = self.latest_ms()
        for i, one in enumerate(given):
            try:
                if isinstance(one, str):
                    raise DataError(one)
                if one.partition is not None and one.partition not in partitions:
                    raise UnknownTopicOrPartition(f"{one.topic}-{one.partition}: no such partition")
                records.append(self.read(one, latest_ms))
                places.append(i)
            except (EventRejected, DataError, UnknownTopicOrPartition) as e:
                outcomes[i] = e
        deadline = asyncio.get_running_loop().time() + self.settings.ack_timeout_ms / 1000
        if not records:
            return Handed(outcomes, places, deadline, None)
        try:
            async with asyncio.timeout_at(deadline):
                deliveries = await self._producer.send_many(records)
        except (TimeoutError, PenstockError) as e:
            return Handed(_filled(outcomes, places, [self._failed(e)] * len(places)), [], deadline, None)
        settling = asyncio.ensure_future(outcomes_of(deliveries))
        turn.handed(len(records), settling)
        return Handed(outcomes, places, deadline, settling)

    async def settle(self, topic: str, handed: Handed, client: str) -> list[Outcome]:
        """Return each record's metadata or error, in order."""
        outcomes, places, deadline, deliveries = handed
        if deliveries is not None:
            try:
                async with asyncio.timeout_at(deadline):
                    settled: Sequence[Outcome] = await deliveries
            except (TimeoutError, PenstockError) as e:
                settled = [self._failed(e)] * len(places)
            outcomes = _filled(outcomes, places, settled)
        done = [outcome for outcome in outcomes if outcome is not None]
        self._count(topic, done, client)
        return done

    def _failed(self, error: TimeoutError | PenstockError) -> PenstockError:
        if isinstance(error, PenstockError):
            return error
        late = KafkaTimeout(f"not acknowledged within ack_timeout_ms={self.settings.ack_timeout_ms}")
        late.maybe_written = True
        return late

    def _count(self, topic: str, outcomes: Sequence[Outcome], client: str) -> None:
        stored, metrics = 0, self._ingest.metrics
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, RecordMetadata):
                stored += 1
                continue
            kind = kind_of_record(outcome)
            unknown = kind.status == 504 or kind is UNEXPECTED
            said = RecordError(i, kind.status, kind.error_code, "", outcome="unknown" if unknown else "not_stored")
            metrics.failed_record(topic, said)
        metrics.stored(topic, stored)
        self._ingest.admission.pay(client, stored)


def _filled(
    outcomes: Sequence[Outcome | None], places: Sequence[int], found: Sequence[Outcome]
) -> list[Outcome | None]:
    filled = list(outcomes)
    for i, outcome in zip(places, found, strict=True):
        filled[i] = outcome
    return filled


def error_code_of(error: BaseException) -> int:
    """Return REST Proxy's number for a record's error.

    >>> error_code_of(UnknownTopicOrPartition()), error_code_of(DataError()), error_code_of(KafkaTimeout())
    (40402, 422, 50003)
    """
    if isinstance(error, UnknownTopicOrPartition):
        return UNKNOWN_PARTITION
    kind = kind_of_record(error)
    if kind.status < 500:
        return 422 if isinstance(error, DataError) and kind.status == 400 else kind.status
    return RETRIABLE if isinstance(error, RetriableError) or kind.retry_after_s is not None else NON_RETRIABLE


def status_of(error: BaseException) -> tuple[int, dict[str, str]]:
    """Return the status and headers of an answer that reports only this error.

    >>> status_of(UnknownTopicOrPartition()), status_of(DataError()), status_of(KafkaTimeout())
    ((404, {}), (422, {}), (504, {'Retry-After': '5'}))
    """
    kind, code = kind_of_record(error), error_code_of(error)
    status = kind.status if kind.status >= 500 else code if code < 1_000 else code // 100
    return status, {} if kind.retry_after_s is None else {"Retry-After": str(kind.retry_after_s)}


def message_of(error: BaseException) -> str:
    """Return an error's message. That of a programming error appears only in the log."""
    return str(error) if isinstance(error, PenstockError) and str(error) else "unexpected error"
