"""Sends records for the v2 and v3 routes of REST Proxy, with ingest's limits, pointers and JSON Schemas."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import NamedTuple

from penstock.api.http.body import BodyReader, too_many_events
from penstock.api.http.problem import failed_outcome, kind_of_record_error
from penstock.api.http.turns import Turn
from penstock.api.ingest.event import EventRejected, RecordError
from penstock.api.ingest.event_sender import IngestProducer
from penstock.api.ingest.result import Outcome, log_unexpected_outcome
from penstock.api.ingest.routes import Ingest
from penstock.api.settings import IngestSettings
from penstock.shared.common.errors import (
    DataError,
    KafkaTimeout,
    PenstockError,
    UnknownTopicOrPartition,
)
from penstock.shared.common.records import ProducerRecord, RecordMetadata


class SentRecords(NamedTuple):
    """The records of one call of `RestProducer.send`. Some may have failed, and some may not be acknowledged yet.

    `outcomes` has one entry for each record, in order. An entry is None if the record's outcome is not known yet.
    `indexes` has the positions of these records, and the result of `deliveries` has their outcomes.
    `RestProducer.settle` waits for `deliveries` until `deadline`, a time of the event loop's clock.
    """

    outcomes: list[Outcome | None]
    indexes: list[int]
    deadline: float
    deliveries: asyncio.Future[Sequence[Outcome]] | None


class RestProducer:
    """Sends the records that REST Proxy's routes decoded, under the rules of ingest."""

    def __init__(self, ingest: Ingest, producer: IngestProducer, settings: IngestSettings) -> None:
        self.ingest = ingest
        self._producer = producer
        self.settings = settings

    def check_count(self, records: int) -> None:
        """Raise Problem (413) if a buffered body has more records than `max_body_events`."""
        if records > self.settings.max_body_events:
            raise too_many_events(self.settings.max_body_events)

    def answered(self, topic: str, status: int, body: BodyReader) -> None:
        """Count an answered request in the metrics, and measure the time since the last byte of its body."""
        self.ingest.metrics.answered(topic, status, body.since_last_byte_s)

    async def check(self, topic: str, client: str) -> list[int]:
        """Accept a request of the client for the topic, and return the topic's partitions.

        Raises what `Admission.check` raises if the request is rejected.
        """
        await self.ingest.admission.check(topic, client)
        return list(await self._producer.partitions_for(topic))

    def read(self, record: ProducerRecord, latest_ms: int) -> ProducerRecord:
        """Return the record, with a missing key or time filled in from its value by the topic's JSON pointers.

        The value is read only if the topic has a JSON Schema, or a pointer to the missing key or time. A null value is
        never read. Raises EventRejected if the value that is read, or the time in it, is not accepted.
        """
        own = self.settings.for_topic(record.topic)
        has_key = record.key is not None
        has_time = record.timestamp is not None
        is_read = own.json_schema or (own.key and not has_key) or (own.time and not has_time)
        if record.value is None or not is_read:
            return record
        read_event = self.ingest.reader(record.topic).event
        key, timestamp = read_event(record.value, latest_ms, has_key=has_key, has_time=has_time)
        key = record.key if has_key else key
        timestamp = record.timestamp if has_time else timestamp
        return ProducerRecord(record.topic, record.value, key, record.headers, record.partition, timestamp)

    async def send(
        self, decoded: Sequence[ProducerRecord | EventRejected], partitions: Sequence[int], turn: Turn
    ) -> SentRecords:
        """Send the records to Kafka. The outcome of a record that could not be decoded is its error."""
        outcomes: list[Outcome | None] = [None] * len(decoded)
        indexes: list[int] = []
        records: list[ProducerRecord] = []
        latest_ms = self.ingest.latest_ms()
        for i, record in enumerate(decoded):
            if isinstance(record, EventRejected):
                outcomes[i] = record
                continue
            try:
                if record.partition is not None and record.partition not in partitions:
                    raise UnknownTopicOrPartition(f"{record.topic}-{record.partition}: no such partition")
                records.append(self.read(record, latest_ms))
                indexes.append(i)
            except (EventRejected, DataError, UnknownTopicOrPartition) as e:
                outcomes[i] = e
        deadline = asyncio.get_running_loop().time() + self.settings.ack_timeout_ms / 1000
        if not records:
            return SentRecords(outcomes, indexes, deadline, None)
        try:
            async with asyncio.timeout_at(deadline):
                deliveries = await self._producer.send_many(records)
        except (TimeoutError, PenstockError) as e:
            error = self._outcome_of_error(e)
            for i in indexes:
                outcomes[i] = error
            return SentRecords(outcomes, [], deadline, None)
        pending = asyncio.ensure_future(deliveries)
        turn.count_in_flight(len(records), pending)
        return SentRecords(outcomes, indexes, deadline, pending)

    async def settle(self, topic: str, sent: SentRecords, client: str) -> list[Outcome]:
        """Return each record's metadata or error, in order."""
        outcomes = sent.outcomes
        if sent.deliveries is not None:
            try:
                async with asyncio.timeout_at(sent.deadline):
                    delivered: Sequence[Outcome] = await sent.deliveries
            except TimeoutError as e:
                delivered = [self._outcome_of_error(e)] * len(sent.indexes)
            for i, outcome in zip(sent.indexes, delivered, strict=True):
                outcomes[i] = outcome
        settled = [outcome for outcome in outcomes if outcome is not None]
        self._count_outcomes(topic, settled, client)
        return settled

    def _outcome_of_error(self, error: TimeoutError | PenstockError) -> PenstockError:
        """Return the outcome of records whose sending failed with the error."""
        if isinstance(error, PenstockError):
            return error
        return KafkaTimeout(f"not acknowledged within ack_timeout_ms={self.settings.ack_timeout_ms}")

    def _count_outcomes(self, topic: str, outcomes: Sequence[Outcome], client: str) -> None:
        """Count the outcomes in the metrics, and charge the client for stored records."""
        stored = 0
        metrics = self.ingest.metrics
        for i, outcome in enumerate(outcomes):
            if isinstance(outcome, RecordMetadata):
                stored += 1
                continue
            kind = kind_of_record_error(outcome)
            error = RecordError(i, kind.status, kind.error_code, "", outcome=failed_outcome(kind))
            metrics.failed_record(topic, error)
        metrics.stored(topic, stored)
        # Only the first: all records may have the same error.
        if unexpected := [one for one in outcomes if not isinstance(one, RecordMetadata | PenstockError)]:
            log_unexpected_outcome(unexpected[0])
        self.ingest.admission.charge(client, stored)
